"""Node facts, attestation and the doctor on a real GPU, under a real Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

import roost
from roost.cluster.doctor import examine


class Looker(roost.Worker):
    def sees(self) -> list[str]:
        import torch

        return [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]

    def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def machine() -> Iterator[roost.Cluster]:
    os.environ.pop("RAY_ADDRESS", None)
    with roost.Cluster(num_nodes=1) as cluster:
        yield cluster


def test_node_facts(machine: roost.Cluster) -> None:
    info = machine.get_node_info(0)
    print(info)
    assert info.accelerators_are_real
    assert info.num_accelerators == info.num_detected >= 1
    for device in info.accelerators:
        assert device.uuid.startswith("GPU-")
        assert device.model
        assert device.memory_gib
    assert machine.topology.nodes[0].accelerator_model == info.accelerators[0].model


def test_a_worker_sees_what_its_attestation_says(machine: roost.Cluster) -> None:
    with Looker.create_group().launch(machine, roost.PackedPlacementStrategy(0, 0)) as group:
        expected = [machine.get_node_info(0).accelerators[0].uuid]
        attestation = group.binding.attestations[0]
        assert list(attestation.uuids) == expected
        assert group.sees().wait() == [expected]
        assert group.visible().wait() == ["0"]
        assert group.binding.uuids == (tuple(expected),)


def test_two_groups_share_the_gpu(machine: roost.Cluster) -> None:
    one = roost.PackedPlacementStrategy(0, 0)
    with Looker.create_group().launch(machine, one) as first, Looker.create_group().launch(machine, one) as second:
        assert first.sees().wait() == second.sees().wait()


def test_another_uuid_than_planned_is_refused(machine: roost.Cluster) -> None:
    from dataclasses import replace

    honest = machine._nodes[0]
    device = replace(honest.accelerators[0], uuid="GPU-00000000-0000-0000-0000-000000000000")
    machine._nodes[0] = replace(honest, accelerators=(device, *honest.accelerators[1:]))
    try:
        with pytest.raises(roost.AttestationError, match="accelerators is not as planned"):
            Looker.create_group().launch(machine, roost.PackedPlacementStrategy(0, 0))
    finally:
        machine._nodes[0] = honest


def test_the_doctor_names_who_uses_a_gpu(machine: roost.Cluster) -> None:
    code = "import torch, sys; x = torch.ones(2**28, device='cuda'); print('up', flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        from roost.cluster.connect import alive_nodes
        from roost.cluster.nodes import measure_nodes, order_nodes

        checks = {check.question: check for check in examine(order_nodes(measure_nodes(alive_nodes(), 60)))}
        print(checks)
        assert checks["accelerators"].is_well
        card = machine.get_node_info(0).accelerators[0]
        assert card.model in checks["GPU 0"].finding
        assert card.uuid in checks["GPU 0"].finding
        assert f"of {card.memory_gib:.1f} GiB used" in checks["GPU 0"].finding
        assert ("% busy" in checks["GPU 0"].finding) == (card.busy is not None)
        assert not checks["busy"].is_well
    finally:
        holder.communicate("")

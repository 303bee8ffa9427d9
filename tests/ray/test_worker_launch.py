"""Launching groups: where they go, what they find there, and what is left when it fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from processes import alive, ray_state, wait_for, wardens_of

import roost
from roost.testing import LocalRay

ENVIRONMENT_AT_IMPORT = dict(os.environ)
"""In a worker: what it found when this module, which is the user's, was loaded there."""

NAMES = [
    "RANK",
    "WORLD_SIZE",
    "NODE_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_LOCAL_RANK",
    "NODE_LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_NAME",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
]


class Probe(roost.Worker):
    def __init__(self) -> None:
        super().__init__()
        self.in_constructor = dict(os.environ)

    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def environment_before(self, *names: str) -> tuple[dict[str, str | None], dict[str, str | None]]:
        first, second = ENVIRONMENT_AT_IMPORT, self.in_constructor
        return {name: first.get(name) for name in names}, {name: second.get(name) for name in names}

    def place(self) -> tuple[int, int, str, str]:
        return self.rank, self.cluster_node_rank, os.environ["CUDA_VISIBLE_DEVICES"], ray.util.get_node_ip_address()

    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def pid(self) -> int:
        return os.getpid()

    def interpreter(self) -> tuple[str, str]:
        return sys.executable, sys.prefix

    def search_path(self) -> list[str]:
        return list(sys.path)

    def robots(self) -> tuple[dict[str, Any], ...]:
        return tuple(dict(fields) for fields in self.hardware)

    def serve(self) -> str:
        """As torch's store does: binds the master port with SO_REUSEADDR."""
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.settimeout(60)
            server.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
            server.listen()
            connection, _ = server.accept()
            with connection:
                return connection.recv(100).decode()

    def visit(self) -> str:
        deadline = time.monotonic() + 60
        while True:
            try:
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                with socket.create_connection(address, timeout=60) as connection:
                    connection.sendall(f"rank {self.rank}".encode())
                return "sent"
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


class Broken(roost.Worker):
    """Fails on one rank, when the other has started a child."""

    def __init__(self, folder: Path, on: int) -> None:
        super().__init__()
        if self.rank != on:
            child = subprocess.Popen(["sleep", "300"])
            (folder / "pids.tmp").write_text(f"{os.getpid()} {child.pid}")
            (folder / "pids.tmp").rename(folder / "pids")
            time.sleep(600)
        wait_for((folder / "pids").exists, "the other rank")
        a_helper_of_the_constructor()


def a_helper_of_the_constructor() -> None:
    raise ValueError("a wheel came off")


class Leaving(roost.Worker):
    def __init__(self) -> None:
        super().__init__()
        sys.exit(5)


@pytest.fixture(scope="module")
def cluster(four_nodes: LocalRay) -> Iterator[roost.Cluster]:
    """One job for the whole file."""
    with roost.Cluster(num_nodes=4) as job:
        yield job


@pytest.fixture(autouse=True)
def _nothing_is_left(cluster: roost.Cluster, eventually: Callable[..., None]) -> Iterator[None]:
    before = ray_state()
    yield
    eventually(lambda: ray_state() == before)


def plan_of(cluster: roost.Cluster, placement: dict[str, Any], *node_groups: dict[str, Any]) -> roost.Plan:
    section = {"num_nodes": 4, "component_placement": placement, "node_groups": list(node_groups)}
    return roost.Plan.resolve({"cluster": section}, cluster)


# Where they go -----------------------------------------------------------------------------


def test_without_a_strategy_there_is_one_per_accelerator(four_nodes: LocalRay, tmp_path: Path) -> None:
    from processes import run_driver

    script = """
import os, roost
class W(roost.Worker):
    def place(self):
        return self.rank, self.cluster_node_rank, os.environ["CUDA_VISIBLE_DEVICES"]
with roost.Cluster(num_nodes=1) as cluster, W.create_group().launch(cluster) as group:
    print(group.name, group.world_size, group.place().wait())
"""
    done = run_driver(script, tmp_path, "default-strategy")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "W 4 [(0, 0, '0'), (1, 0, '1'), (2, 0, '2'), (3, 0, '3')]\n"


def test_packed(cluster: roost.Cluster) -> None:
    with Probe.create_group().launch(cluster, roost.PackedPlacementStrategy(4, 7, 2, 2)) as group:
        address = cluster.get_node_ip(1)
        assert group.place().wait() == [(0, 1, "0,2", address), (1, 1, "1,3", address)]


def test_flexible_over_nodes(cluster: roost.Cluster) -> None:
    with Probe.create_group().launch(cluster, roost.FlexiblePlacementStrategy([[13], [2, 3], [3]])) as group:
        assert [place[:3] for place in group.place().wait()] == [(0, 0, "2,3"), (1, 0, "3"), (2, 3, "1")]
        assert group.node_id().wait() == [cluster.get_node_info(rank).ray_id for rank in (0, 0, 3)]


def test_node_strategy_reserves_nothing(cluster: roost.Cluster, free_gpus: Callable[[], float]) -> None:
    before = free_gpus()
    with Probe.create_group().launch(cluster, roost.NodePlacementStrategy([2, 1])) as group:
        assert [place[:2] for place in group.place().wait()] == [(0, 1), (1, 2)]
        assert free_gpus() == before
        assert group.binding is not None
        assert group.binding.reservation == 0
        assert group.robots().wait() == [(), ()]


def test_a_component_of_a_plan(cluster: roost.Cluster, free_gpus: Callable[[], float]) -> None:
    before = free_gpus()
    plan = plan_of(cluster, {"actor": "8-9", "rollout": "9-10:0"})
    with (
        Probe.create_group().launch(cluster, plan=plan, component="actor") as actor,
        Probe.create_group().launch(cluster, plan=plan, component="rollout", name="engines") as rollout,
    ):
        assert (actor.name, rollout.name) == ("actor", "engines")
        assert [place[:3] for place in actor.place().wait()] == [(0, 2, "0"), (1, 2, "1")]
        assert [place[:3] for place in rollout.place().wait()] == [(0, 2, "1,2")]
        assert before - free_gpus() == 3, "they share one, and only what they use is held"
        assert actor.binding is not None
        assert actor.binding.plan is plan


@pytest.mark.parametrize(
    "arguments",
    [
        {"component": "actor"},
        {"plan": roost.Plan(roost.Topology.parse("1x1"), ())},
        {
            "plan": roost.Plan(roost.Topology.parse("1x1"), ()),
            "component": "actor",
            "placement_strategy": roost.NodePlacementStrategy([0]),
        },
    ],
)
def test_half_a_request_is_refused(cluster: roost.Cluster, arguments: dict[str, Any]) -> None:
    with pytest.raises(roost.LaunchError, match="a plan and a component"):
        Probe.create_group().launch(cluster, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"isolate_accelerator": 4}, "isolate_accelerator is True or False, not 4"),
        ({"max_concurrency": "4"}, "max_concurrency is a whole number from 1 up, not '4'"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"name": 4}, "name is a text, not 4"),
        ({"placement_strategy": "0-3"}, "placement_strategy is a strategy, not '0-3'"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused(cluster: roost.Cluster, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(roost.LaunchError, match=words):
        Probe.create_group().launch(cluster, **arguments)


def test_options_of_a_launch_are_given_by_name(cluster: roost.Cluster) -> None:
    with pytest.raises(TypeError, match="positional"):
        Probe.create_group().launch(cluster, roost.NodePlacementStrategy([0]), "by-place", 4)


def test_a_plan_for_other_machines_is_refused(cluster: roost.Cluster) -> None:
    plan = roost.Plan.resolve(
        {"cluster": {"num_nodes": 1, "component_placement": {"actor": 0}}}, roost.Topology.parse("1x8")
    )
    with pytest.raises(roost.LaunchError, match="needs 8 accelerators on node 0, which has 4"):
        Probe.create_group().launch(cluster, plan=plan, component="actor")


# What they find ----------------------------------------------------------------------------


def test_the_environment_of_each_rank(cluster: roost.Cluster) -> None:
    strategy = roost.FlexiblePlacementStrategy([[3], [4, 5], [7]])
    with Probe.create_group().launch(cluster, strategy, name="env") as group:
        assert group.binding is not None
        port = group.binding.master_port
        first = {
            "RANK": "0",
            "WORLD_SIZE": "3",
            "NODE_RANK": "0",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NODE_LOCAL_RANK": "0",
            "NODE_LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": cluster.get_node_ip(0),
            "MASTER_PORT": str(port),
            "GROUP_NAME": "env",
            "CUDA_VISIBLE_DEVICES": "3",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        }
        second = first | {"RANK": "1", "NODE_RANK": "1", "NODE_LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "0,1"}
        third = second | {"RANK": "2", "NODE_LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "3"}
        assert group.environment(*NAMES).wait() == [first, second, third]
        at_import, in_constructor = zip(*group.environment_before(*NAMES).wait(), strict=True)
        assert list(at_import) == [first, second, third], "it is there before anything of the user's is loaded"
        assert list(in_constructor) == [first, second, third]
        meeting = [group.execute_on(0).serve(), group.execute_on(2).visit()]
        assert [call.wait(timeout_s=90) for call in meeting] == [["rank 2"], ["sent"]], "the port is really free"


def test_groups_do_not_share_a_master_port(cluster: roost.Cluster) -> None:
    strategy = roost.NodePlacementStrategy([0])
    with Probe.create_group().launch(cluster, strategy) as one, Probe.create_group().launch(cluster, strategy) as two:
        ports = [group.environment("MASTER_PORT").wait()[0]["MASTER_PORT"] for group in (one, two)]
        assert len({*ports, str(cluster.master_port)}) == 3


def test_without_isolation_all_of_the_node_are_seen(cluster: roost.Cluster) -> None:
    strategy = roost.PackedPlacementStrategy(10, 11)
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_LOCAL_RANK", "NODE_LOCAL_WORLD_SIZE")
    with Probe.create_group().launch(cluster, strategy, isolate_accelerator=False) as group:
        found = [tuple(each.values()) for each in group.environment(*names).wait()]
    assert found == [("0,1,2,3", "2", "2", "0", "2"), ("0,1,2,3", "3", "2", "1", "2")]


def test_variables_of_a_node_group(cluster: roost.Cluster) -> None:
    variables = [
        {"COLOUR": "blue"},
        {"PATH": "/opt/of/the/group/bin"},
        {"LD_LIBRARY_PATH": "/opt/of/the/group/lib:/opt/lib"},
        {"PYTHONPATH": "/opt/of/the/group/python"},
    ]
    group_of_two = {
        "label": "blue",
        "node_ranks": "2-3",
        "env_configs": [{"node_ranks": "2", "env_vars": variables}],
    }
    plan = plan_of(cluster, {"painter": {"node_group": "blue", "placement": "0,4"}}, group_of_two)
    with Probe.create_group().launch(cluster, plan=plan, component="painter") as group:
        there, beside = group.environment("COLOUR", "PATH", "LD_LIBRARY_PATH", "PYTHONPATH").wait()
        assert there["COLOUR"] == "blue"
        for name, own in [(key, value) for variable in variables[1:] for key, value in variable.items()]:
            before = [part for part in (beside[name] or "").split(":") if part]
            assert there[name].split(":") == [*own.split(":"), *before], "merged, not overwritten"
        assert "/opt/of/the/group/python" in group.search_path().wait()[0], "it was there when Python started"
        assert beside["COLOUR"] is None, "only the nodes that the group names"


def test_the_interpreter_of_a_node_group(cluster: roost.Cluster, tmp_path: Path) -> None:
    home = tmp_path / "other python"
    venv.EnvBuilder(symlinks=True, with_pip=False).create(home)
    packages = sysconfig.get_paths()["purelib"]
    [own] = home.glob("lib/python*/site-packages")
    (own / "ours.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    python = str(home / "bin" / "python")
    own_python = {
        "label": "own",
        "node_ranks": "1",
        "env_configs": [{"node_ranks": "1", "python_interpreter_path": python}],
    }
    plan = plan_of(cluster, {"w": {"node_group": "own", "placement": "0"}}, own_python)
    with Probe.create_group().launch(cluster, plan=plan, component="w", timeout_s=240) as group:
        assert group.interpreter().wait() == [(python, str(home))]
        assert group.binding is not None
        assert group.binding.attestations[0].interpreter == python
        assert sys.executable != python


def test_an_interpreter_that_is_not_there(cluster: roost.Cluster, tmp_path: Path) -> None:
    missing = str(tmp_path / "bin" / "python")
    own_python = {
        "label": "own",
        "node_ranks": "1-2",
        "env_configs": [{"node_ranks": "2", "python_interpreter_path": missing}],
    }
    plan = plan_of(cluster, {"w": {"node_group": "own", "placement": "0,4"}}, own_python)
    started = time.monotonic()
    with pytest.raises(roost.LaunchError) as caught:
        Probe.create_group().launch(cluster, plan=plan, component="w")
    assert f"node 2: the interpreter {missing} does not exist" in str(caught.value)
    assert time.monotonic() - started < 90
    assert "w" not in roost.WorkerManager.get_proxy().get_groups()


def test_a_robot_reaches_its_worker(cluster: roost.Cluster) -> None:
    @roost.register_hardware("Arm")
    @dataclass
    class Arm:
        node_rank: int
        robot_ip: str
        camera: str = "front"

    configs = [{"node_rank": 1, "robot_ip": "10.9.0.1"}, {"node_rank": 1, "robot_ip": "10.9.0.2", "camera": "top"}]
    arms = {"label": "arms", "node_ranks": "1", "hardware": {"type": "Arm", "configs": configs}}
    plan = plan_of(cluster, {"env": {"node_group": "arms", "placement": "0-1"}}, arms)
    with Probe.create_group().launch(cluster, plan=plan, component="env") as group:
        first, second = group.robots().wait()
        assert len(first) == len(second) == 1
        assert Arm(**first[0]) == Arm(1, "10.9.0.1")
        assert (first[0]["robot_ip"], second[0]["robot_ip"], second[0]["camera"]) == ("10.9.0.1", "10.9.0.2", "top")
        assert [place[2] for place in group.place().wait()] == ["0,1,2,3"] * 2, "the resource is no accelerator"


# What it leaves behind ---------------------------------------------------------------------


def test_the_binding_and_the_managers(cluster: roost.Cluster) -> None:
    strategy = roost.FlexiblePlacementStrategy([[1, 2], [9]])
    with Probe.create_group().launch(cluster, strategy, name="bound") as group:
        binding = group.binding
        assert binding is not None
        pids = group.pid().wait()
        addresses = [cluster.get_node_ip(0), cluster.get_node_ip(2)]
        assert (binding.component, binding.epoch) == ("bound", 1)
        assert binding.plan.component("bound").world_size == 2
        assert binding.node_ids == tuple(cluster.get_node_info(rank).ray_id for rank in (0, 2))
        assert binding.uuids == ((), ()), "made-up accelerators have none"
        assert (binding.master_address, binding.reservation > 0) == (addresses[0], True)
        found = [(a.rank, a.ray_node_id, a.address, a.pid, a.visible, a.uuids) for a in binding.attestations]
        assert found == [
            (0, binding.node_ids[0], addresses[0], pids[0], "1,2", None),
            (1, binding.node_ids[1], addresses[1], pids[1], "1", None),
        ]
        worker = roost.WorkerManager.get_proxy().get_worker("bound", 1)
        assert worker is not None
        assert (worker["node_rank"], worker["address"], worker["pid"]) == (2, addresses[1], pids[1])
        assert worker["accelerators"] == [1]
        assert roost.CollectiveManager.get_proxy().get("bound") == {
            "address": addresses[0],
            "port": binding.master_port,
            "world_size": 2,
        }
        assert cluster.get_group("bound") is group
    assert roost.WorkerManager.get_proxy().get_group("bound") is None
    assert roost.CollectiveManager.get_proxy().get("bound") is None
    assert cluster.get_group("bound") is None
    wait_for(lambda: not alive(pids), "their end")


def test_names_are_unique(cluster: roost.Cluster) -> None:
    strategy = roost.NodePlacementStrategy([0])
    with Probe.create_group().launch(cluster, strategy, name="one") as group:
        with pytest.raises(roost.LaunchError) as caught:
            Probe.create_group().launch(cluster, strategy, name="one")
        text = str(caught.value)
        assert "the group name 'one' is taken by" in text
        assert f"process {os.getpid()}" in text
        assert "since 20" in text
        assert len(group.pid().wait()) == 1, "the first is not harmed"
        assert roost.WorkerGroup.attach("one", cluster).pid().wait() == group.pid().wait()


def test_groups_without_a_name_get_one_each(cluster: roost.Cluster) -> None:
    strategy = roost.NodePlacementStrategy([0])
    with Probe.create_group().launch(cluster, strategy) as one, Probe.create_group().launch(cluster, strategy) as two:
        assert (one.name, two.name) == ("Probe", "Probe-2")
        assert two.environment("GROUP_NAME").wait() == [{"GROUP_NAME": "Probe-2"}]


@pytest.mark.parametrize(
    "name", ["close", "execute_on", "states", "stacks", "attach", "node_rank_of", "name", "world_size", "binding"]
)
def test_names_that_the_group_has_itself_are_refused_when_it_is_made(cluster: roost.Cluster, name: str) -> None:
    clashing = type("Clashing", (roost.Worker,), {name: lambda self: None, "fine": lambda self: None})
    with pytest.raises(roost.LaunchError) as caught:
        clashing.create_group()
    assert f"Clashing has methods with names that a worker group uses itself: {name}" in str(caught.value)


# When it fails -----------------------------------------------------------------------------


def test_a_constructor_that_raises_tears_the_group_down(
    cluster: roost.Cluster, free_gpus: Callable[[], float], tmp_path: Path
) -> None:
    before = free_gpus()
    started = time.monotonic()
    with pytest.raises(roost.LaunchError) as caught:
        Broken.create_group(tmp_path, on=1).launch(cluster, roost.FlexiblePlacementStrategy([[0], [4]]), name="broken")
    assert time.monotonic() - started < 240, "the rank that is still at it is not waited for"
    text = str(caught.value)
    assert "broken[1] on node 1: its constructor raised ValueError: a wheel came off" in text
    assert "in a_helper_of_the_constructor" in text
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    wait_for(lambda: not alive(pids) and not wardens_of(pids), "the end of the worker and its child")
    wait_for(lambda: free_gpus() == before, "the reservation's end")
    assert roost.WorkerManager.get_proxy().get_group("broken") is None
    with Probe.create_group().launch(cluster, roost.NodePlacementStrategy([1]), name="broken") as group:
        assert len(group.pid().wait()) == 1, "name and driver are as good as new"


def test_a_constructor_that_exits(cluster: roost.Cluster) -> None:
    with pytest.raises(roost.LaunchError, match=r"the constructor called sys\.exit\(5\)"):
        Leaving.create_group().launch(cluster, roost.NodePlacementStrategy([0]))


def test_a_constructor_that_takes_too_long(cluster: roost.Cluster) -> None:
    class Slow(roost.Worker):
        def __init__(self) -> None:
            super().__init__()
            time.sleep(600)

    started = time.monotonic()
    with pytest.raises(roost.LaunchError) as caught:
        Slow.create_group().launch(cluster, roost.NodePlacementStrategy([1]), timeout_s=4)
    assert "1 of 1 workers were still" in str(caught.value)
    assert "nodes [1]" in str(caught.value)
    assert time.monotonic() - started < 240


def test_what_a_worker_finds_must_be_what_was_planned(cluster: roost.Cluster, free_gpus: Callable[[], float]) -> None:
    before = free_gpus()
    node = cluster._nodes[1]
    real = tuple(replace(device, uuid=f"GPU-{device.id}{device.id}") for device in node.accelerators)
    cluster._nodes[1] = replace(node, accelerators=real, accelerators_are_real=True)
    try:
        with pytest.raises(roost.AttestationError) as caught:
            Probe.create_group().launch(cluster, roost.FlexiblePlacementStrategy([[0], [6]]), name="attested")
    finally:
        cluster._nodes[1] = node
    text = str(caught.value)
    assert "attested[1] on node 1: accelerators is not as planned" in text
    assert "attested[0]" not in text
    assert f"planned:  node {node.ray_id}, accelerators ('GPU-22',)" in text
    assert f"measured: node {node.ray_id}, accelerators not known (NVIDIA's driver does not tell" in text
    assert isinstance(caught.value, roost.LaunchError)
    wait_for(lambda: free_gpus() == before, "the reservation's end")


def test_a_worker_lives_in_a_group_only() -> None:
    with pytest.raises(roost.LaunchError, match="not a worker process"):
        _ = Probe().rank

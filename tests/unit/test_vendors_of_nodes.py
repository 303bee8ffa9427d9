"""Whose accelerators a node has: from Ray's resources and labels, and from what is found on the node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray._private.accelerators as ray_accelerators

from roost.cluster.accelerators import AcceleratorFacts, accelerators_of, look_at_accelerators
from roost.hardware import AcceleratorType, accelerators
from roost.hardware.accelerators import Device


@pytest.mark.parametrize(
    ("model", "vendor"),
    [
        # as Ray 2.60 spells them: ray.util.accelerators
        ("AMD-Instinct-MI300X-OAM", "AMD"),
        ("AMD-Instinct-MI250X-MI250", "AMD"),
        ("Intel-GPU-Max-1550", "Intel"),
        ("H100", "NVIDIA"),
        ("A100-80G", "NVIDIA"),
        ("RTX-PRO-6000", "NVIDIA"),
        # as users spell those that Ray does not know
        ("MTT-S5000", "MUSA"),
        ("P800", "Kunlun"),
    ],
)
def test_the_accelerator_type_of_ray_says_the_vendor(model: str, vendor: str) -> None:
    kind, devices, is_real = accelerators_of({"GPU": 8.0, f"accelerator_type:{model}": 1.0}, {}, AcceleratorFacts())
    assert (kind.name, len(devices), devices[0].model, is_real) == (vendor, 8, model, False)
    kind, devices, _ = accelerators_of({"GPU": 8.0}, {"ray.io/accelerator-type": model}, AcceleratorFacts())
    assert (kind.name, devices[0].model) == (vendor, model)


def test_a_resource_name_of_its_own_says_the_vendor() -> None:
    assert accelerators_of({"NPU": 8.0}, {}, AcceleratorFacts())[0] is AcceleratorType.ASCEND


def test_what_the_driver_knows_comes_first() -> None:
    facts = AcceleratorFacts((Device("0", "GPU-a", "H200"),), "NVIDIA")
    assert accelerators_of({"GPU": 1.0, "accelerator_type:AMD-Instinct-MI210": 1.0}, {}, facts)[0].name == "NVIDIA"
    assert accelerators_of({"GPU": 1.0, "NPU": 8.0}, {}, facts)[0].name == "NVIDIA"


def test_a_node_without_accelerators_has_none_of_a_vendor() -> None:
    facts = AcceleratorFacts(likely_vendor="AMD")
    assert accelerators_of({"CPU": 8.0}, {}, facts) == (AcceleratorType.NO_ACCEL, (), False)


@pytest.mark.parametrize(
    ("environment", "vendor"),
    [
        ({"HIP_VISIBLE_DEVICES": "4,5"}, "AMD"),
        ({"ZE_AFFINITY_MASK": "4,5"}, "Intel"),
        ({"MUSA_VISIBLE_DEVICES": "4,5"}, "MUSA"),
    ],
)
def test_the_variable_of_the_raylet_says_the_vendor_and_the_ids(environment: dict[str, str], vendor: str) -> None:
    kind, devices, _ = accelerators_of({"GPU": 2.0}, {}, look_at_accelerators(environment))
    assert (kind.name, [device.id for device in devices]) == (vendor, ["4", "5"])


def test_of_more_visible_ids_than_ray_counts_it_uses_the_first() -> None:
    facts = look_at_accelerators({"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert [device.id for device in accelerators_of({"GPU": 2.0}, {}, facts)[1]] == ["4", "5"]
    assert [device.id for device in accelerators_of({"GPU": 5.0}, {}, facts)[1]] == ["0", "1", "2", "3", "4"]


def test_variables_of_several_vendors_say_nothing() -> None:
    """Slurm sets all of them."""
    environment = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "4,5")
    kind, devices, _ = accelerators_of({"GPU": 2.0}, {}, look_at_accelerators(environment))
    assert (kind.name, [device.id for device in devices]) == ("NVIDIA", ["4", "5"])


@pytest.mark.parametrize("vendor", ["AMD", "Kunlun", "MUSA"])
def test_device_files_say_the_vendor(vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = AcceleratorType.get(vendor)
    assert kind is not None
    assert all(pattern.startswith("/dev/") for pattern in kind.device_files)
    here = {
        name: replace(kind, device_files=tuple(f"{tmp_path}{pattern}" for pattern in kind.device_files))
        for name, kind in accelerators._types.items()
    }
    monkeypatch.setattr(accelerators, "_types", here)
    made = tmp_path / kind.device_files[0].lstrip("/").replace("*", ".0")
    made.parent.mkdir()
    made.touch()
    assert accelerators_of({"GPU": 2.0}, {}, look_at_accelerators({}))[0].name == vendor


@pytest.fixture
def forgetful_ray() -> Iterator[None]:
    """Ray remembers in the process which vendor it has found."""
    remembered = vars(ray_accelerators.get_accelerator_manager_for_resource)
    remembered.pop("_resource_name_to_accelerator_manager", None)
    yield
    remembered.pop("_resource_name_to_accelerator_manager", None)


@pytest.mark.usefixtures("forgetful_ray")
@pytest.mark.parametrize(("manager", "vendor"), [("AMDGPU", "AMD"), ("IntelGPU", "Intel"), ("MetaxGPU", "NVIDIA")])
def test_what_ray_finds_says_the_vendor(manager: str, vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own detection, told that the vendor's library knows eight GPUs. MetaX reads CUDA's variable."""
    found = getattr(ray_accelerators, f"{manager}AcceleratorManager", None)
    if found is None:
        pytest.skip("this Ray does not know the vendor")
    monkeypatch.setattr(found, "get_current_node_num_accelerators", staticmethod(lambda: 8))
    assert accelerators_of({"GPU": 8.0}, {}, look_at_accelerators({}))[0].name == vendor

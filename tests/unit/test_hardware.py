"""Vendors as data, and the registry of other hardware."""

import pickle
import sys
import types
from dataclasses import dataclass, field
from typing import Optional

import pytest

from roost import AcceleratorType, ConfigError, Plan, RoostError, Topology, register_accelerator, register_hardware
from roost.hardware import accelerators, hardware_types, values_for_worker
from roost.hardware.accelerators import Device
from roost.hardware.vendors import nvidia


@pytest.mark.parametrize(
    ("vendor", "variable"),
    [
        ("NVIDIA", "CUDA_VISIBLE_DEVICES"),
        ("AMD", "HIP_VISIBLE_DEVICES"),
        ("ASCEND", "ASCEND_RT_VISIBLE_DEVICES"),
        ("MUSA", "MUSA_VISIBLE_DEVICES"),
    ],
)
def test_vendors(vendor, variable):
    kind = getattr(AcceleratorType, vendor)
    assert kind.visible_devices_variable == variable
    assert kind.noset_variable == f"RAY_EXPERIMENTAL_NOSET_{variable}"
    assert AcceleratorType.get(kind.name.lower()) is kind


@pytest.mark.parametrize("vendor", ["NVIDIA", "AMD", "ASCEND", "INTEL", "KUNLUN", "MUSA"])
def test_every_vendor_has_its_variables(vendor):
    kind = getattr(AcceleratorType, vendor)
    assert kind.visible_devices_variable
    assert kind.noset_variable.startswith("RAY_EXPERIMENTAL_NOSET_")
    environment = kind.worker_environment(("2", "3"))
    assert environment[kind.visible_devices_variable] == "2,3"
    assert environment[kind.noset_variable] == "1"
    assert kind.name in AcceleratorType.names()


def test_a_gpu_that_does_not_answer_every_question_is_known(monkeypatch):
    library = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def refused(handle):
        raise NVMLError("not supported")

    vars(library).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=refused,
        nvmlDeviceGetComputeRunningProcesses=refused,
        nvmlDeviceGetUtilizationRates=refused,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert nvidia._detect() == [Device("0", "GPU-0", "H200")]


def test_no_accelerator_has_no_variables():
    assert AcceleratorType.NO_ACCEL.worker_environment(()) == {}
    assert AcceleratorType.NO_ACCEL.name not in AcceleratorType.names()
    assert AcceleratorType.get("nobody") is None


@pytest.mark.parametrize("name", ["NVIDIA", "NO_ACCEL", "ASCEND"])
def test_types_keep_their_identity(name):
    kind = getattr(AcceleratorType, name)
    assert pickle.loads(pickle.dumps(kind)) is kind  # noqa: S301


def test_a_vendor_of_ones_own(job, monkeypatch):
    monkeypatch.setattr("roost.hardware.accelerators._types", dict(accelerators._types))
    kind = register_accelerator(
        AcceleratorType("UnitVendor", "UNIT_VISIBLE_DEVICES", ("RAY_EXPERIMENTAL_NOSET_UNIT_VISIBLE_DEVICES",))
    )
    assert kind is AcceleratorType.UNITVENDOR
    plan = Plan.resolve(job({"actor": "2"}), Topology.parse("1x4:unitvendor/X1"))
    assert plan.environment("actor", 0)["UNIT_VISIBLE_DEVICES"] == "2"
    assert Plan.from_json(plan.to_json()) == plan


def test_a_vendor_is_frozen():
    with pytest.raises(AttributeError):
        AcceleratorType.NVIDIA.name = "x"


# Other hardware ---------------------------------------------------------------------------


def with_robot(type_name, **fields):
    configs = [{"node_rank": 0, **fields}]
    return Topology.parse("1x0").with_groups(
        {"node_groups": [{"label": "r", "node_ranks": 0, "hardware": {"type": type_name, "configs": configs}}]}
    )


def test_the_decorator_gives_the_class_back():
    @register_hardware("UnitFranka")
    @dataclass
    class Franka:
        robot_ip: str
        camera: str = ""

    assert Franka("10.0.0.1").camera == ""
    assert "UnitFranka" in hardware_types()
    assert with_robot("UnitFranka", robot_ip="a").group("r").hardware[0][1].fields == {"robot_ip": "a"}


def test_a_type_without_fields():
    @register_hardware("UnitBell")
    @dataclass
    class Bell:
        pass

    assert len(with_robot("UnitBell").group("r").hardware) == 1
    with pytest.raises(ConfigError, match="tone"):
        with_robot("UnitBell", tone=1)


def test_defaults_and_factories_are_optional_and_simple_types_are_checked():
    @register_hardware("UnitArm")
    @dataclass
    class Arm:
        joints: int
        rate_hz: float
        name: str = "arm"
        enabled: bool = True
        cameras: list[str] = field(default_factory=list)
        serial: Optional[str] = None  # noqa: UP045
        made: str = field(default="here", init=False)

    assert with_robot("UnitArm", joints=7, rate_hz=30, cameras=["a"], serial=None, enabled=False)
    for wrong in (
        {"joints": 7.5, "rate_hz": 1},
        {"joints": "7", "rate_hz": 1},
        {"joints": True, "rate_hz": 1},
        {"joints": 7, "rate_hz": "fast"},
        {"joints": 7, "rate_hz": 1, "name": 3},
        {"joints": 7, "rate_hz": 1, "enabled": 1},
        {"joints": 7, "rate_hz": 1, "made": "there"},
        {"joints": 7},
        {"rate_hz": 1},
        {"joints": 7, "rate_hz": float("nan")},
    ):
        with pytest.raises(ConfigError):
            with_robot("UnitArm", **wrong)


def test_registering_again_replaces():
    @register_hardware("UnitTwice")
    @dataclass
    class First:
        a: str

    @register_hardware("UnitTwice")
    @dataclass
    class Second:
        b: str

    assert with_robot("UnitTwice", b="x")
    with pytest.raises(ConfigError):
        with_robot("UnitTwice", a="x")


@pytest.mark.parametrize("name", ["", " ", None, 3])
def test_a_type_needs_a_name(name):
    with pytest.raises(RoostError):
        register_hardware(name)


def test_the_decorator_without_a_name_is_refused():
    with pytest.raises(RoostError):

        @register_hardware
        @dataclass
        class Robot:
            robot_ip: str


def test_only_dataclasses():
    with pytest.raises(RoostError, match="dataclass"):

        @register_hardware("UnitPlain")
        class Plain:
            robot_ip: str

    assert "UnitPlain" not in hardware_types()


def test_a_name_that_the_job_file_needs_is_taken():
    with pytest.raises(RoostError, match="a field 'type'"):
        register_hardware("UnitTaken")(dataclass(type("Taken", (), {"__annotations__": {"type": str}})))


def test_a_class_may_have_the_rank_of_its_node():
    @register_hardware("UnitRanked")
    @dataclass
    class Ranked:
        node_rank: int
        robot_ip: str

    topology = with_robot("UnitRanked", robot_ip="a")
    ((rank, item),) = topology.group("r").hardware
    assert (rank, item.fields) == (0, {"robot_ip": "a"})
    assert Topology.from_dict(topology.to_dict()) == topology
    assert Ranked(**values_for_worker(item.type, item.fields, 3)) == Ranked(3, "a")
    assert values_for_worker("UnitBell", {"tone": 1}, 3) == {"tone": 1}
    with pytest.raises(ConfigError, match="robot_ip"):
        with_robot("UnitRanked")

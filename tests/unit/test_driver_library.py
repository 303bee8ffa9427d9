"""What is said of a node whose GPUs, or whose driver, are sick.

There is no NVIDIA GPU here: the driver library is a stand-in in C, below NVIDIA's own Python package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nvidia_driver import DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LOST, VERSION_MISMATCH, NvidiaDriver

from roost.cluster.accelerators import AcceleratorFacts, accelerators_of
from roost.cluster.doctor import _accelerators, _devices
from roost.cluster.nodes import NodeInfo
from roost.errors import AttestationError, LaunchError
from roost.hardware import AcceleratorType
from roost.hardware.accelerators import Device
from roost.placement import NodePlacementStrategy, PackedPlacementStrategy
from roost.plan import ComponentPlan, Plan, Process
from roost.topology import Topology
from roost.worker.binding import Attestation, asks_driver, check_faults, compare


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaDriver:
    made = NvidiaDriver(tmp_path)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


def ask(code: str) -> Any:
    """Evaluate in a process that finds the stand-in, with ``nvidia`` and ``set_status`` at hand."""
    script = f"""
import json, os, dataclasses
from roost.cluster.accelerators import look_at_accelerators
from roost.errors import RoostError
from roost.hardware.vendors import nvidia
def set_status(name, text):
    with open(os.environ["NVIDIA_STAND_IN"] + "/" + name, "w") as file:
        file.write(text)
def found(question):
    try:
        return [dataclasses.asdict(one) for one in question()]
    except RoostError as error:
        return str(error.findings[0])
print(json.dumps({code}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_lost_gpu_leaves_the_others_known(driver: NvidiaDriver) -> None:
    driver.set_gpus([0, LOST, 0])
    found = ask("found(nvidia._detect)")
    assert [(one["id"], one["uuid"], one["fault"]) for one in found] == [
        ("0", driver.uuid(0), ""),
        ("1", "", "GPU is lost"),
        ("2", driver.uuid(2), ""),
    ]


def test_a_lost_gpu_hides_no_usage_and_no_holders_of_others(driver: NvidiaDriver) -> None:
    driver.set_gpus([0, LOST, 0])
    assert [one["id"] for one in ask("found(nvidia._usage)")] == ["0", "2"]
    assert ask("found(nvidia._holders)") == []


@pytest.mark.parametrize("question", ["_usage", "_holders"])
def test_a_failure_is_not_remembered(driver: NvidiaDriver, question: str) -> None:
    driver.set_gpus([0, 0])
    driver.set_nvml(999)
    code = f"[found(nvidia.{question}), set_status('nvml', '0'), len(found(nvidia._usage))]"
    first, _, second = ask(code)
    assert first in ([], "NVIDIA's driver does not tell which GPUs there are: nvmlInit: Unknown Error")
    assert second == 2


def test_a_gpu_that_comes_back_is_found_again(driver: NvidiaDriver) -> None:
    driver.set_gpus([0, LOST])
    assert ask("[len(found(nvidia._usage)), set_status('gpus', '0 0'), len(found(nvidia._usage))]") == [1, None, 2]


def test_a_driver_that_was_loaded_again_is_found_again(driver: NvidiaDriver) -> None:
    driver.set_gpus([0, 0])
    usage = "len(found(nvidia._usage))"
    assert ask(f"[{usage}, set_status('loads', '1'), {usage}, {usage}]") == [2, None, 0, 2]
    assert ask(f"[{usage}, set_status('loads', '2'), found(nvidia._holders), {usage}]") == [
        2, None, "NVIDIA's driver does not tell which GPUs there are: nvmlDeviceGetCount: Unknown Error", 2
    ]  # fmt: skip


def test_a_driver_that_fails_is_no_node_without_gpus(driver: NvidiaDriver) -> None:
    driver.set_gpus([0, 0])
    driver.set_nvml(VERSION_MISMATCH)
    assert "version mismatch" in ask("found(nvidia._detect)")
    facts = ask("dataclasses.asdict(look_at_accelerators({}))")
    assert (facts["vendor"], facts["devices"]) == ("NVIDIA", [])
    assert "version mismatch" in facts["driver_error"]


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize(
    ("code", "text"),
    [
        (DRIVER_NOT_LOADED, "Driver Not Loaded, and a GPU is on the PCI bus"),
        (LIBRARY_NOT_FOUND, "Shared Library Not Found, and a GPU is on the PCI bus"),
        (None, "a GPU is on the PCI bus, and the Python package nvidia-ml-py is not installed"),
    ],
)
def test_a_driver_that_is_not_there_is_missed_where_there_is_a_gpu(
    driver: NvidiaDriver, tmp_path: Path, code: int | None, text: str, has_gpu: bool
) -> None:
    device = tmp_path / "pci" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n" if has_gpu else "0x1002\n")
    (device / "class").write_text("0x030200\n")
    driver.set_nvml(code or 0)
    hide = "__import__('sys').modules.update(pynvml=None)" if code is None else "None"
    found = ask(f"[setattr(nvidia, 'PCI_DEVICES', {str(tmp_path / 'pci')!r}), {hide}, found(nvidia._detect)]")[2]
    assert found.endswith(text) if has_gpu else found == []


def test_a_partitioned_gpu_is_listed_by_its_instances(driver: NvidiaDriver) -> None:
    driver.set_gpus([0])
    driver.set_instances(2)
    found = ask("found(nvidia._detect)")
    first, second = (f"MIG-00000000-0000-0000-0000-{instance:010d}00" for instance in (1, 2))
    assert [(one["id"], one["uuid"]) for one in found] == [("0", first), (second, second)]


# What Ray counts, against that -------------------------------------------------------------

CARDS = (
    Device("0", "GPU-aa11", "H200", 141.0),
    Device("1", fault="GPU is lost"),
    Device("2", "GPU-ab22", "H200", 141.0),
)


def node(count: int, facts: AcceleratorFacts) -> NodeInfo:
    kind, devices, is_real = accelerators_of({"GPU": float(count), "CPU": 8.0}, {}, facts)
    return NodeInfo(
        "id", "10.0.0.2", 0, accelerators=devices, accelerator_type=kind, accelerators_are_real=is_real,
        num_detected=len(facts.devices), driver_error=facts.driver_error,
    )  # fmt: skip


def seen(visible: str = "", devices: tuple[Device, ...] = CARDS) -> AcceleratorFacts:
    return AcceleratorFacts(devices, "NVIDIA", raylet_environment={"CUDA_VISIBLE_DEVICES": visible} if visible else {})


def test_a_lost_gpu_leaves_the_node_real() -> None:
    found = node(3, seen())
    assert found.accelerators_are_real
    assert [device.fault for device in found.accelerators] == ["", "GPU is lost", ""]
    assert found.as_node().accelerator_model == "H200"


@pytest.mark.parametrize(
    ("visible", "uuids"), [("2,0", ["GPU-ab22", "GPU-aa11"]), ("GPU-ab22", ["GPU-ab22"]), ("GPU-ab,GPU-aa", ["GPU-ab22", "GPU-aa11"])]
)  # fmt: skip
def test_gpus_are_known_by_number_uuid_and_the_beginning_of_one(visible: str, uuids: list[str]) -> None:
    found = node(len(uuids), seen(visible))
    assert [device.uuid for device in found.accelerators] == uuids
    assert [device.id for device in found.accelerators] == visible.split(",")


@pytest.mark.parametrize("visible", ["0,1,2,7", "0,1,2,GPU-a"])
def test_a_gpu_that_the_driver_does_not_list_is_a_fault(visible: str) -> None:
    found = node(4, seen(visible))
    assert found.accelerators_are_real
    assert found.accelerators[3].fault == "Ray counts it, and the driver lists 0, 1, 2"


def test_without_a_driver_accelerators_are_made_up() -> None:
    found = node(3, AcceleratorFacts())
    assert not found.accelerators_are_real
    assert [device.fault for device in found.accelerators] == ["", "", ""]


def test_made_up_accelerators_stay_made_up_on_a_computer_with_a_gpu() -> None:
    found = node(8, AcceleratorFacts(vendor="AMD", is_made_up=True))
    assert (found.accelerator_type, found.accelerators_are_real) == (AcceleratorType.AMD, False)


def test_the_doctor_names_a_sick_gpu_by_its_index() -> None:
    found = node(3, seen())
    rows = [(check.question, check.is_well) for check in _devices(found)]
    assert rows == [("GPU 0", True), ("GPU 1", False), ("GPU 2", True)]
    sick = _devices(found)[1]
    assert sick.finding == "GPU is lost"
    assert sick.fix == "restart Ray there without it: CUDA_VISIBLE_DEVICES=0,2 ray start …"


def test_the_doctor_names_a_driver_that_fails() -> None:
    check = _accelerators(node(2, AcceleratorFacts(vendor="NVIDIA", driver_error="nvmlInit: Unknown Error")))
    assert not check.is_well
    assert check.finding == "Ray counts 2 GPUs; nvmlInit: Unknown Error"


def processes_of(strategy: NodePlacementStrategy | PackedPlacementStrategy, isolate: bool = True) -> list[Process]:
    """The processes of a strategy on one node with three GPUs."""
    topology = Topology.parse("1x3")
    placements = tuple(strategy.get_placement(topology, isolate))
    plan = Plan(topology, (ComponentPlan("actor", "actor", placements),))
    return [plan.process("actor", rank) for rank in range(len(placements))]


@pytest.mark.parametrize(
    ("first", "last", "isolate", "is_refused"),
    [(0, 0, True, False), (1, 1, True, True), (0, 2, True, True), (0, 0, False, True)],
)
def test_a_launch_that_would_use_or_see_a_sick_gpu_is_refused(
    first: int, last: int, isolate: bool, is_refused: bool
) -> None:
    processes = processes_of(PackedPlacementStrategy(first, last), isolate)
    if not is_refused:
        check_faults([node(3, seen())], processes)
        return
    with pytest.raises(LaunchError) as caught:
        check_faults([node(3, seen())], processes)
    assert caught.value.codes == ("W114",)
    assert caught.value.findings[0].message == "node 0 (10.0.0.2), GPU 1 cannot be used: GPU is lost"


def measured() -> NodeInfo:
    """A node whose three GPUs Ray counts, as the stand-in lists them now."""
    facts = ask("dataclasses.asdict(look_at_accelerators({}))")
    return node(3, AcceleratorFacts(tuple(Device(**one) for one in facts["devices"]), facts["vendor"]))


def attested(process: Process, found: NodeInfo, visible: str) -> Attestation:
    """What a worker reports that has this visible-devices variable."""
    uuids = tuple(ask("nvidia._visible_uuids()")) if asks_driver(process, found) else None
    return Attestation(0, found.ray_id, found.address, 1, sys.executable, visible, uuids)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_process_without_gpus_of_its_own_starts_beside_a_lost_one(driver: NvidiaDriver, is_known: bool) -> None:
    driver.set_gpus([0, LOST if is_known else 0, 0])
    there = measured()
    assert there.accelerators_are_real
    assert bool(there.accelerators[1].fault) == is_known
    driver.set_gpus([0, LOST, 0])
    processes = processes_of(NodePlacementStrategy([0]))
    check_faults([there], processes)
    compare("hub", processes, [there], [attested(processes[0], there, "0,1,2")])
    with pytest.raises(AttestationError, match="visible devices is not as planned"):
        compare("hub", processes, [there], [attested(processes[0], there, "0,2")])


def test_a_process_that_uses_a_gpu_and_sees_one_that_was_lost_since_is_refused(driver: NvidiaDriver) -> None:
    driver.set_gpus([0, 0, 0])
    there = measured()
    driver.set_gpus([0, LOST, 0])
    processes = processes_of(PackedPlacementStrategy(0, 0), isolate=False)
    with pytest.raises(AttestationError, match="accelerators is not as planned"):
        compare("actor", processes, [there], [attested(processes[0], there, "0,1,2")])

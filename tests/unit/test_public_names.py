"""What ``import roost`` gives, and what it does not load."""

import importlib
import subprocess
import sys

import pytest

import roost

PLANNING = [
    "AcceleratorType", "ComponentPlacement", "FlexiblePlacementStrategy", "HybridComponentPlacement",
    "ModelParallelComponentPlacement", "Node", "NodeGroup", "NodePlacementStrategy", "PackedPlacementStrategy",
    "Placement", "PlacementError", "PlacementMode", "PlacementStrategy", "Plan", "RoostError", "Topology",
    "load_config", "register_hardware",
]  # fmt: skip
BESIDE_THEM = [
    "AttestationError", "CallTimeoutError", "CheckpointError", "ClusterError", "ComponentPlan", "Config", "ConfigError", "EngineShare", "Finding", "GenerationError", "Hardware", "LaunchError",
    "Layout", "LockFile", "PlanDiff", "Process", "ReservationError", "Sharding", "TensorShards", "TopologyError", "TransferPlan",
    "WeightTransport", "WorkerDiedError", "WorkerError", "__version__", "diff_plans", "plan_transfer", "register_accelerator",
    "draw_image", "draw_page", "resolve_layout", "stable_order_key",
]  # fmt: skip
FOR_LEARNING = [
    "DataBuffer",
    "Engine",
    "EngineOutput",
    "EnginePlace",
    "LeaseLock",
    "RolloutError",
    "Sample",
    "SampleGroup",
]
ON_RAY = [
    "Binding", "BufferClient", "Cluster", "CollectiveManager", "GroupResult", "LockClient", "NodeInfo", "NodeManager", "PerRank", "PortLease", "Router",
    "RunningJob", "Worker", "WorkerGroup", "WorkerManager", "create_placement_groups", "launch", "lease_ports",
]  # fmt: skip
WITH_TORCH = ["RolloutManager", "SglangEngine", "SyncReport", "TorchEngine", "TrainGroup", "TrainWorker", "VllmEngine"]

HEAVY = ("ray", "torch", "transformers", "omegaconf", "hydra", "numpy", "rich", "yaml")


def in_a_fresh_interpreter(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def loaded_by(code):
    found = in_a_fresh_interpreter(f"import sys\n{code}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])")
    return set(found)


def test_import_loads_nothing_heavy():
    assert loaded_by("import roost") == set()


def test_names_of_planning_load_neither_ray_torch_nor_omegaconf():
    loaded = loaded_by(f"import roost\nfor name in {PLANNING + BESIDE_THEM + FOR_LEARNING!r}: getattr(roost, name)")
    assert not loaded & {"ray", "torch", "omegaconf", "hydra", "numpy"}


def test_names_of_the_cluster_load_ray_and_no_torch():
    loaded = loaded_by(f"import roost\nfor name in {ON_RAY!r}: getattr(roost, name)")
    assert "ray" in loaded
    assert not loaded & {"torch", "omegaconf", "hydra"}


def test_planning_needs_neither_ray_torch_nor_omegaconf():
    loaded = loaded_by(
        "import roost\n"
        "plan = roost.Plan.resolve({'cluster': {'component_placement': {'actor': '0-7'}}}, roost.Topology.parse('1x8'))\n"
        "plan.check(); roost.Plan.from_json(plan.to_json())"
    )
    assert not loaded & {"ray", "torch", "omegaconf", "hydra", "numpy", "rich"}


@pytest.mark.parametrize("name", PLANNING)
def test_every_name_of_planning(name):
    assert name in roost.__all__
    assert getattr(roost, name).__name__ == name


def test_public_names_are_exactly_these():
    assert sorted(roost.__all__) == sorted(PLANNING + BESIDE_THEM + FOR_LEARNING + ON_RAY + WITH_TORCH)
    assert len(set(roost.__all__)) == len(roost.__all__)
    assert set(dir(roost)) >= set(roost.__all__)


@pytest.mark.parametrize("name", roost.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    value = getattr(roost, name)
    assert value is getattr(roost, name)
    if not isinstance(value, str):
        assert value.__doc__
        home = importlib.import_module(value.__module__)
        assert getattr(home, name) is value


def test_star_import():
    names = in_a_fresh_interpreter("from roost import *\nprint(*sorted(n for n in dir() if n[0] != '_'))")
    assert set(names) == {name for name in roost.__all__ if not name.startswith("_")}


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = roost.no_such_name
    with pytest.raises(ImportError):
        from roost import no_such_name  # noqa: F401


def test_version():
    assert roost.__version__.count(".") == 2


def test_names_of_the_engines_load_their_modules_on_first_use():
    assert not loaded_by("import roost.engines") & set(HEAVY)
    assert loaded_by("from roost.engines import sample_seed") == set()
    engines = importlib.import_module("roost.engines")
    for name in engines.__all__:
        assert getattr(engines, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = engines.no_such_name

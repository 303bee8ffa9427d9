"""``Plan.resolve``: who shares what, environments, transports, and the JSON form."""

import dataclasses
import json
import pickle
import random

import pytest
from omegaconf import OmegaConf

from roost import (
    AcceleratorType,
    ConfigError,
    PackedPlacementStrategy,
    PlacementError,
    PlacementMode,
    Plan,
    RoostError,
    Topology,
    TopologyError,
    WeightTransport,
    load_config,
)
from roost.plan.environment import worker_environment

ONE = Topology.parse("1x8")
TWO = Topology.parse("2x8")


def resolve(job, placements, cluster=None, topology=ONE, **sections):
    return Plan.resolve(job(placements, cluster, **sections), topology)


# Who is where -----------------------------------------------------------------------------


def test_sharing_and_idle(job):
    plan = resolve(job, {"actor": "0-3", "rollout": "2-5:0-1", "agent": {"node_group": "node", "placement": "0"}})
    assert plan.shared_accelerators == [(0, 2), (0, 3)]
    assert plan.idle_accelerators == [(0, 6), (0, 7)]
    assert plan.on_accelerator(0, 2) == [("actor", 2), ("rollout", 0)]
    assert plan.on_accelerator(0, 0) == [("actor", 0)]
    assert plan.on_accelerator(0, 7) == []


def test_processes_of_one_component_share_too(job):
    plan = resolve(job, {"env": "0:0-2"})
    assert plan.shared_accelerators == [(0, 0)]
    assert plan.on_accelerator(0, 0) == [("env", 0), ("env", 1), ("env", 2)]


def test_robots_and_nodes_use_no_accelerator(job, robot):
    hardware = {"type": robot, "configs": [{"node_rank": 0, "robot_ip": "a"}]}
    cluster = {"node_groups": [{"label": "r", "node_ranks": 0, "hardware": hardware}]}
    plan = resolve(
        job, {"env": {"node_group": "r", "placement": "0"}, "agent": {"node_group": "node", "placement": "0"}}, cluster
    )
    assert plan.idle_accelerators == [(0, i) for i in range(8)]
    assert plan.shared_accelerators == []


def test_components_are_known_by_name(job):
    plan = resolve(job, {"rollout": "4-7:0-1", "actor": "0-3"})
    assert [component.name for component in plan.components] == ["actor", "rollout"]
    assert plan.component("rollout").world_size == 2
    assert plan.component("rollout").role == "rollout"
    with pytest.raises(PlacementError, match="rollout"):
        plan.component("rolout")


def test_one_process(job):
    plan = resolve(job, {"actor": "0-3"})
    assert plan.process("actor[3]") == plan.process("actor", 3)
    assert plan.process("actor[3]").placement.local_hardware_ranks == (3,)
    assert str(plan.process("actor[3]")) == "actor[3]"


@pytest.mark.parametrize(
    "address",
    ["actor", "actor[]", "actor[-1]", "actor[x]", "actor[4]", "actr[0]", "", "actor[0", "[0]", "actor[99999999999]"],
)
def test_processes_that_there_are_not(job, address):
    with pytest.raises(PlacementError):
        resolve(job, {"actor": "0-3"}).process(address)


@pytest.mark.parametrize("rank", [-1, 4, "0", 1.0])
def test_ranks_that_there_are_not(job, rank):
    with pytest.raises(PlacementError):
        resolve(job, {"actor": "0-3"}).process("actor", rank)


def test_roles_and_what_else_a_component_declares(job):
    component = {"placement": "0-3", "role": "actor", "gpu_share": 0.5, "cpus": 4, "memory_gib": 60}
    (found,) = resolve(job, {"policy": component}).components
    assert (found.name, found.role) == ("policy", "actor")
    assert (found.gpu_share, found.cpus, found.memory_gib) == (0.5, 4, 60)
    (bare,) = resolve(job, {"policy": "0-3"}).components
    assert (bare.role, bare.gpu_share, bare.cpus, bare.memory_gib) == ("policy", None, None, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("gpu_share", 0), ("gpu_share", -0.5), ("gpu_share", 1.5), ("gpu_share", "half"), ("gpu_share", True),
        ("gpu_share", float("nan")), ("gpu_share", float("inf")), ("gpu_share", [0.5]),
        ("cpus", 0), ("cpus", -1), ("cpus", "four"), ("cpus", float("nan")), ("cpus", True), ("cpus", 10**400),
        ("memory_gib", 0), ("memory_gib", -1), ("memory_gib", "80GiB"), ("memory_gib", float("nan")), ("memory_gib", {}),
        ("role", ""), ("role", True), ("role", ["actor"]),
    ],
)  # fmt: skip
def test_declarations_that_are_refused(job, key, value):
    with pytest.raises(ConfigError, match=key):
        resolve(job, {"actor": {"placement": "0", key: value}})


def test_num_nodes_leaves_the_rest_out_and_says_so(job):
    plan = resolve(job, {"actor": "all"}, {"num_nodes": 1}, TWO)
    assert plan.topology.num_nodes == 1
    assert any("1" in str(note) and "2" in str(note) for note in plan.notes)


def test_uneven_nodes_are_noted(job):
    plan = resolve(job, {"agent": {"node_group": "node", "placement": "0-1:0-200"}}, None, TWO)
    assert any("201" in str(note) for note in plan.notes)
    assert any("201" in str(finding) and not finding.is_problem for finding in plan.check())


@pytest.mark.parametrize(
    ("placements", "cluster", "mode"),
    [
        ({"actor,rollout": "0-7"}, {"placement_mode": "collocated"}, PlacementMode.COLLOCATED),
        ({"actor": "0-3", "rollout": "4-7"}, {"placement_mode": "disaggregated"}, PlacementMode.DISAGGREGATED),
        ({"actor": "0-3", "rollout": "4-7"}, {"auto_scheduler": True}, PlacementMode.AUTO),
        ({"actor": "0-3", "rollout": "4-7"}, {"placement_mode": "hybrid"}, PlacementMode.HYBRID),
        ({"actor": "0-5", "rollout": "4-7"}, {}, PlacementMode.HYBRID),
    ],
)
def test_modes(job, placements, cluster, mode):
    assert resolve(job, placements, cluster).mode is mode


def test_a_model_parallel_plan_places_engines(job):
    plan = resolve(job, {"actor,rollout": "0-7"}, {"placement_mode": "collocated"}, rollout={"tensor_parallel_size": 2},
                   actor={"model": {"tensor_model_parallel_size": 4}})  # fmt: skip
    assert [p.local_hardware_ranks for p in plan.component("rollout").placements] == [(0, 2), (1, 3), (4, 6), (5, 7)]


@pytest.mark.parametrize("mode", ["colocated", 3, True, ["auto"], {"a": 1}])
def test_modes_that_there_are_not(job, mode):
    with pytest.raises(ConfigError, match="placement_mode"):
        resolve(job, {"actor,rollout": "0-7"}, {"placement_mode": mode})


def test_everything_that_cannot_be_resolved_is_raised_at_once(job):
    placements = {"actor": "0-3:0-2", "rollout": {"placement": "0-99", "gpu_share": 3}, "x y": "0"}
    with pytest.raises(PlacementError) as caught:
        resolve(job, placements, {"num_node": 1})
    assert len(caught.value.findings) == 5


def test_what_is_no_cluster(job):
    with pytest.raises(TopologyError):
        resolve(job, {"actor": "0"}, topology="1x8")


@pytest.mark.parametrize("size", [0, -1, "two", 1.5, True])
def test_a_parallel_size_that_is_none_is_refused_in_every_mode(job, size):
    with pytest.raises(RoostError, match="tensor_parallel_size"):
        resolve(job, {"actor": "0-3", "rollout": "4-7"}, rollout={"tensor_parallel_size": size})


# Environment ------------------------------------------------------------------------------


def test_environment_of_isolated_processes(job):
    plan = resolve(job, {"actor": "6-9:0-1"}, None, TWO)
    assert plan.environment("actor", 1) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_LOCAL_RANK": "0",
        "NODE_LOCAL_WORLD_SIZE": "1",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_local_rank_is_not_the_device_that_only_others_see(job):
    """CUDA_VISIBLE_DEVICES=3 with LOCAL_RANK=3 is the classic crash."""
    environment = resolve(job, {"actor": "0-7"}).environment("actor", 3)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["LOCAL_RANK"] == "0"
    assert environment["LOCAL_WORLD_SIZE"] == "1"
    assert environment["NODE_LOCAL_RANK"] == "3"
    assert environment["NODE_LOCAL_WORLD_SIZE"] == "8"


def test_local_rank_of_processes_that_see_everything():
    """Index of the first accelerator among those it can see, not the index of the process."""
    placements = PackedPlacementStrategy(4, 7, 2).get_placement(ONE, isolate_accelerator=False)
    environments = [worker_environment(p, 2, ONE.group()) for p in placements]
    assert [e["LOCAL_RANK"] for e in environments] == ["4", "6"]
    assert [e["LOCAL_WORLD_SIZE"] for e in environments] == ["2", "2"]
    assert [e["NODE_LOCAL_RANK"] for e in environments] == ["0", "1"]
    assert {e["CUDA_VISIBLE_DEVICES"] for e in environments} == {"0,1,2,3,4,5,6,7"}


@pytest.mark.parametrize(
    ("topology", "variable"),
    [
        ("1x4:AMD/MI300X", "HIP_VISIBLE_DEVICES"),
        ("1x4:Ascend/910B", "ASCEND_RT_VISIBLE_DEVICES"),
        ("1x4:MUSA", "MUSA_VISIBLE_DEVICES"),
        ("1x4", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_the_vendors_variable(job, topology, variable):
    environment = resolve(job, {"actor": "2"}, topology=Topology.parse(topology)).environment("actor", 0)
    assert environment[variable] == "2"
    assert environment[f"RAY_EXPERIMENTAL_NOSET_{variable}"] == "1"
    others = {k.visible_devices_variable for k in map(AcceleratorType.get, AcceleratorType.names())} - {variable}
    assert not others & set(environment)


def test_a_node_without_accelerators_sets_no_vendors_variable(job):
    environment = resolve(job, {"env": "0"}, topology=Topology.parse("1x0")).environment("env", 0)
    assert not [name for name in environment if "VISIBLE" in name]
    assert environment["RANK"] == "0"


def test_a_node_level_process_sees_every_accelerator(job):
    plan = resolve(job, {"agent": {"node_group": "node", "placement": "0:0-1"}})
    environment = plan.environment("agent", 1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert environment["NODE_LOCAL_RANK"] == "1"


def test_ids_of_the_driver_go_into_the_variable(job, write):
    topology = Topology.load(write("nodes: [{accelerators: {ids: [GPU-a, GPU-b, GPU-c]}}]", "cluster.yaml"))
    assert (
        resolve(job, {"actor": "1-2:0"}, topology=topology).environment("actor", 0)["CUDA_VISIBLE_DEVICES"]
        == "GPU-b,GPU-c"
    )


# Transports -------------------------------------------------------------------------------

IPC, BROADCAST, FILE = WeightTransport.IPC, WeightTransport.BROADCAST, WeightTransport.FILE


@pytest.mark.parametrize(
    ("placements", "expected"),
    [
        ({"actor,rollout": "0-3"}, [IPC] * 4),
        ({"actor": "0-3", "rollout": "0-3:0-1"}, [IPC] * 2),
        ({"actor": "0-3", "rollout": "4-7"}, [BROADCAST] * 4),
        ({"actor": "0-3", "rollout": "8-11"}, [BROADCAST] * 4),  # the same local ranks, of another node
        ({"actor": "0-3", "rollout": "2-5"}, [IPC, IPC, BROADCAST, BROADCAST]),
        ({"actor": "0-3:0", "rollout": "2-5:0-1"}, [IPC, BROADCAST]),
    ],
)
def test_transport_by_physical_overlap(job, placements, expected):
    plan = resolve(job, placements, topology=TWO)
    assert list(plan.component("rollout").transports) == expected
    assert [plan.process("rollout", r).transport for r in range(len(expected))] == expected
    assert plan.process("actor", 0).transport is None


def test_an_engine_that_overlaps_in_part_is_not_handed_everything_in_place(job):
    plan = resolve(job, {"actor": "0-3", "rollout": "2-5:0"})
    assert plan.component("rollout").transports == (BROADCAST,)


def test_other_vendors_go_through_files(job):
    topology = Topology.parse("1x4+1x4:Ascend")
    plan = resolve(job, {"actor": "0-3", "rollout": "4-7:0-1"}, topology=topology)
    assert plan.component("rollout").transports == (FILE, FILE)


def test_the_role_decides_not_the_name(job):
    placements = {"policy": {"placement": "0-3", "role": "actor"}, "engine": {"placement": "0-3", "role": "rollout"}}
    assert resolve(job, placements).component("engine").transports == (IPC,) * 4


def test_without_a_trainer_there_is_no_transport(job):
    plan = resolve(job, {"rollout": "0-3"})
    assert plan.component("rollout").transports == ()
    assert plan.process("rollout", 0).transport is None


# JSON -------------------------------------------------------------------------------------

ROBOTS = [
    {"node_rank": 2, "robot_ip": "10.0.0.1", "camera": "left", "speed": 2},
    {"node_rank": 3, "robot_ip": "10.0.0.2", "speed": 1.5, "camera": "right"},
]


def everything(robot):
    return {
        "cluster": {
            "num_nodes": 4,
            "node_groups": [
                {"label": "a800", "node_ranks": "0-1", "env_configs": [
                    {"node_ranks": 0, "env_vars": [{"B": 1}, {"A": "ü"}], "python_interpreter_path": "/opt/python"}]},
                {"label": 4090, "node_ranks": [2, 3]},
                {"label": "robot", "node_ranks": "2-3", "hardware": {"type": robot, "configs": ROBOTS}},
            ],
            "component_placement": {
                "actor": {"node_group": "a800", "placement": "0-8", "gpu_share": 0.8, "memory_gib": 60},
                "rollout": {"node_group": "4090, a800", "placement": "0-8,16-19:9-10", "gpu_share": 0.2, "cpus": 4},
                "env": {"node_group": "robot", "placement": "0-1:0-3"},
                "agent": {"node_group": "node", "placement": "0-1:0-200,2-3:201-511"},
            },
        },
        "rollout": {"tensor_parallel_size": 2},
    }  # fmt: skip


HETERO = Topology.parse("2x8:A800+2x8:4090+1x0")


def test_json_is_an_exact_inverse(robot):
    plan = Plan.resolve(everything(robot), HETERO)
    text = plan.to_json()
    again = Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert [str(f) for f in again.check()] == [str(f) for f in plan.check()]
    assert again.environment("actor", 0) == plan.environment("actor", 0)
    assert again.process("actor", 0).interpreter == "/opt/python"
    assert json.loads(text)["format"].startswith("roost.plan/")


def test_json_of_a_plan_from_a_file_is_an_exact_inverse(write):
    """Places in the file are not part of a plan, nor of its notes."""
    path = write("""\
        cluster:
          num_nodes: 2
          component_placement:
            actor,rollout: {placement: 0-7, gpu_share: 0.5}
            agent: {node_group: node, placement: 0-1:0-200}
    """)
    plan = Plan.resolve(load_config(path), Topology.parse("3x8"))
    assert Plan.from_json(plan.to_json()) == plan


def shuffled(value, rng):
    if isinstance(value, dict):
        items = [(key, shuffled(child, rng)) for key, child in value.items()]
        rng.shuffle(items)
        return dict(items)
    return [shuffled(child, rng) for child in value] if isinstance(value, list) else value


def test_output_is_byte_identical_whatever_the_order_of_keys(robot):
    config = everything(robot)
    plan = Plan.resolve(config, HETERO)
    findings = [finding.render() for finding in plan.check()]
    for seed in range(10):
        other = Plan.resolve(shuffled(config, random.Random(seed)), HETERO)  # noqa: S311
        assert other.to_json() == plan.to_json()
        assert [finding.render() for finding in other.check()] == findings


def test_output_is_byte_identical_for_each_form_of_a_job(job):
    config = job({"actor": "0-3", "rollout": {"placement": "4-7", "cpus": 1.5}})
    assert Plan.resolve(config, ONE).to_json() == Plan.resolve(OmegaConf.create(config), ONE).to_json()


def test_the_order_of_keys_does_not_decide_the_mode(job):
    placements = {
        "actor": "0-3",
        "here": {"placement": "0-3", "role": "rollout"},
        "there": {"placement": "4-7", "role": "rollout"},
    }
    one = resolve(job, placements)
    other = resolve(job, dict(reversed(placements.items())))
    assert one.to_json() == other.to_json()


def broken(change):
    """A plan's JSON with one thing changed."""
    config = {"cluster": {"component_placement": {"actor": "0-1", "rollout": "2-3"}}}
    plain = json.loads(Plan.resolve(config, ONE).to_json())
    change(plain)
    return json.dumps(plain)


def test_the_json_that_is_broken_below_is_sound_before():
    assert Plan.from_json(broken(lambda plain: None)).component("actor").world_size == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '"x"', "{}", '{"format": "roost.plan/1"}', "[" * 100_000, None, 7]
)
def test_texts_that_are_no_plan(text):
    with pytest.raises(ConfigError):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.update(format="roost.plan/0"),
        lambda p: p.update(mode="colocated"),
        lambda p: p.pop("mode"),
        lambda p: p.pop("topology"),
        lambda p: p.pop("components"),
        lambda p: p.update(components=3),
        lambda p: p.update(topology={}),
        lambda p: p["topology"].update(nodes=[]),
        lambda p: p["components"][0].pop("name"),
        lambda p: p["components"][0].pop("processes"),
        lambda p: p["components"][0]["processes"][0].pop("rank"),
        lambda p: p["components"][0]["processes"].pop(0),
        lambda p: p["components"][0]["processes"].reverse(),
        lambda p: p["components"][0]["processes"][0].update(cluster_node_rank=1),
        lambda p: p["components"][0]["processes"][0].update(cluster_node_rank=-1),
        lambda p: p["components"][0]["processes"][0].update(cluster_node_rank="0"),
        lambda p: p["components"][0]["processes"][0].update(local_hardware_ranks=[8]),
        lambda p: p["components"][0]["processes"][0].update(local_hardware_ranks=[-1]),
        lambda p: p["components"][0]["processes"][0].update(accelerator_type="Nobody"),
        lambda p: p["components"][0]["processes"][0].update(node_group_label="nowhere"),
        lambda p: p["components"][1]["processes"][0].pop("transport"),
        lambda p: p["components"][1]["processes"][0].update(transport="pigeon"),
        lambda p: p["components"].append(p["components"][0]),
    ],
)  # fmt: skip
def test_json_that_is_no_plan(change):
    with pytest.raises(RoostError):
        Plan.from_json(broken(change))


def test_plans_are_frozen_values_that_pickle(job):
    plan = resolve(job, {"actor": "0-3", "rollout": "4-7"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.mode = PlacementMode.AUTO
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301
    assert resolve(job, {"rollout": "4-7", "actor": "0-3"}) == plan

"""Weight transfer: who sends what to whom, at which distance."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest

import roost
from roost import (
    ModelParallelComponentPlacement,
    PlacementError,
    Plan,
    Sharding,
    TensorShards,
    Topology,
    WeightTransport,
    plan_transfer,
)
from roost.plan.planned_schedules import plan_schedules
from roost.report.weights import weight_lines

ONE = Topology.parse("1x8")


def weights(extent=8, dim: int | None = 0):
    return (TensorShards("w", (extent,), "uint8", dim),)


def trainer(tp, gpus=8, tensors=None, **sizes):
    locations = tuple((gpu // 8, gpu % 8) for gpu in range(gpus))
    return Sharding(tensors or weights(), tp=tp, dp=gpus // tp, locations=locations, **sizes)


def engines(tp, stride, gpus=8, tensors=None):
    """Engines of a block of ``tp * stride`` GPUs take every ``stride``-th of them."""
    blocks = [range(first, first + tp * stride) for first in range(0, gpus, tp * stride)]
    locations = tuple((gpu // 8, gpu % 8) for block in blocks for k in range(stride) for gpu in block[k::stride])
    return Sharding(tensors or weights(), tp=tp, dp=gpus // tp, order="tp-pp-dp", locations=locations)


# Collocated: strided and not --------------------------------------------------------------

SIZES = [(4, 2), (8, 2), (8, 4), (4, 1)]


@pytest.mark.parametrize(("actor_tp", "rollout_tp"), SIZES)
def test_strided_engines_reach_the_smallest_share(actor_tp, rollout_tp):
    s = actor_tp // rollout_tp
    plan = plan_transfer(trainer(actor_tp), engines(rollout_tp, s))
    assert plan.cross_accelerator_share == (s - 1) / s
    assert plan.bytes_by_distance["network"] == 0


@pytest.mark.parametrize(("sizes", "share"), [((4, 2), 3 / 4), ((8, 2), 7 / 8), ((8, 4), 7 / 8)])
def test_without_a_stride_more_goes_between_accelerators(sizes, share):
    assert plan_transfer(trainer(sizes[0]), engines(sizes[1], 1)).cross_accelerator_share == share


@pytest.mark.parametrize(("actor_tp", "rollout_tp"), SIZES)
def test_after_a_gather_strided_engines_have_everything_on_their_own_accelerators(actor_tp, rollout_tp):
    s = actor_tp // rollout_tp
    strided = plan_transfer(trainer(actor_tp).gathered(s), engines(rollout_tp, s))
    assert strided.cross_accelerator_share == 0
    assert strided.bytes_by_distance == {"same": strided.total_bytes, "node": 0, "network": 0}
    plain = plan_transfer(trainer(actor_tp).gathered(s), engines(rollout_tp, 1))
    assert (plain.cross_accelerator_share > 0) == (rollout_tp > 1)


@pytest.mark.parametrize(("actor_tp", "rollout_tp"), SIZES)
def test_the_real_placement_is_the_strided_one(job, actor_tp, rollout_tp):
    sizes = {
        "actor": {"model": {"tensor_model_parallel_size": actor_tp}},
        "rollout": {"tensor_parallel_size": rollout_tp},
    }
    config = job({"actor,rollout": "0-7"}, {"placement_mode": "collocated"}, **sizes)
    placed = ModelParallelComponentPlacement(config, ONE)
    sides = {}
    for name, tp, order in (("actor", actor_tp, "tp-dp-pp"), ("rollout", rollout_tp, "tp-pp-dp")):
        placements = placed.get_strategy(name).get_placement(ONE)
        locations = tuple((p.cluster_node_rank, local) for p in placements for local in p.accelerators)
        sides[name] = Sharding(weights(), tp=tp, dp=8 // tp, order=order, locations=locations)
    s = actor_tp // rollout_tp
    assert sides["rollout"].locations == engines(rollout_tp, s).locations
    assert plan_transfer(sides["actor"], sides["rollout"]).cross_accelerator_share == (s - 1) / s
    assert plan_transfer(sides["actor"].gathered(s), sides["rollout"]).cross_accelerator_share == 0
    (planned,) = plan_schedules(Plan.resolve(config, ONE))
    assert planned.schedule.transfer.cross_accelerator_share == (s - 1) / s


def test_who_sends_what_in_detail():
    plan = plan_transfer(trainer(4), engines(2, 2))
    assert plan.for_target(0) == [("w", 0, ((0, 2),), "same"), ("w", 1, ((2, 4),), "node")]
    assert plan.for_target(2) == [("w", 0, ((0, 2),), "node"), ("w", 1, ((2, 4),), "same")]
    move = plan.for_source(1)[0]
    assert (move.tensor, move.rank, move.box, move.distance) == ("w", 2, ((2, 4),), "same")
    assert {move.rank for rank in range(8) for move in plan.for_source(rank)} == set(range(8))


# Cuts -------------------------------------------------------------------------------------


def side(*tensors, **sizes):
    return Sharding(tensors, **sizes)


def boxes(plan, rank):
    return [(move.rank, move.box) for move in plan.for_target(rank)]


def test_other_dimensions_on_both_sides_make_boxes():
    plan = plan_transfer(
        side(TensorShards("w", (4, 6), "float32", 0), tp=2), side(TensorShards("w", (4, 6), "float32", 1), tp=3)
    )
    assert boxes(plan, 1) == [(0, ((0, 2), (2, 4))), (1, ((2, 4), (2, 4)))]
    assert plan.total_bytes == 4 * 6 * 4


def test_replicated_on_either_side():
    whole, cut = TensorShards("w", (4,), "int64"), TensorShards("w", (4,), "int64", 0)
    assert boxes(plan_transfer(side(whole, tp=2), side(cut, tp=2)), 1) == [(1, ((2, 4),))]
    assert boxes(plan_transfer(side(cut, tp=2), side(whole, tp=2)), 1) == [(0, ((0, 2),)), (1, ((2, 4),))]


def test_a_scalar_and_a_tensor_without_elements():
    tensors = TensorShards("scale", (), "float32"), TensorShards("none", (0, 4), "float32", 1)
    plan = plan_transfer(side(*tensors), side(*tensors, tp=2))
    assert [move.tensor for move in plan.for_target(1)] == ["scale"]
    assert plan.for_target(1)[0].box == ()
    assert plan.total_bytes == 8
    nothing = plan_transfer(side(), side())
    assert (nothing.total_bytes, nothing.cross_accelerator_share, nothing.parts) == (0, 0.0, ())
    assert nothing.summary() == ["0 tensors, 0 B to 1 rank"]


def test_uneven_slices():
    have = TensorShards("w", (10,), "uint8", 0, ((0, 7), (7, 10)))
    want = TensorShards("w", (10,), "uint8", 0, ((0, 4), (4, 8), (8, 10)))
    plan = plan_transfer(side(have, tp=2), side(want, tp=3))
    assert [boxes(plan, rank) for rank in range(3)] == [
        [(0, ((0, 4),))],
        [(0, ((4, 7),)), (1, ((7, 8),))],
        [(1, ((8, 10),))],
    ]


def test_overlapping_slices_come_from_the_nearest_of_those_that_have_them():
    have = TensorShards("w", (6,), "uint8", 0, ((0, 4), (2, 6)))
    source = side(have, tp=2, locations=[(0, 0), (1, 0)])
    plan = plan_transfer(source, side(TensorShards("w", (6,), "uint8"), locations=[(1, 0)]))
    assert plan.for_target(0) == [
        ("w", 0, ((0, 2),), "network"),
        ("w", 1, ((2, 4),), "same"),
        ("w", 1, ((4, 6),), "same"),
    ]


def test_only_the_ranks_of_a_stage_send_and_get_its_tensors():
    names = ("first", "last")
    source = side(*(TensorShards(name, (2,), "uint8", stage=i) for i, name in enumerate(names)), pp=2, dp=2)
    target = side(*(TensorShards(name, (2,), "uint8", stage=i) for i, name in enumerate(names)), pp=2, order="tp-pp-dp")
    plan = plan_transfer(source, target)
    assert [move.tensor for move in plan.for_target(0)] == ["first"]
    assert [(move.tensor, move.rank) for move in plan.for_target(1)] == [("last", source.rank_of(pp=1))]
    assert source.rank_of(pp=1) == 2


def test_axes_in_a_rank():
    megatron, engine = Sharding((), 2, 3, 4), Sharding((), 2, 3, 4, "tp-pp-dp")
    assert megatron.rank_of(tp=1, pp=2, dp=3) == 1 + 2 * 3 + 8 * 2
    assert engine.rank_of(tp=1, pp=2, dp=3) == 1 + 2 * 2 + 6 * 3
    assert engine.coordinates(23) == (1, 2, 3)
    for call in (lambda: engine.rank_of(tp=2), lambda: engine.coordinates(24), lambda: engine.coordinates(-1)):
        with pytest.raises(PlacementError) as caught:
            call()
        assert caught.value.codes == ("S109",)


# Links and load ---------------------------------------------------------------------------


def test_processes_without_accelerators_are_near_on_a_node_only():
    source = side(*weights(), locations=[(0, -1)])
    target = side(*weights(), dp=2, locations=[(0, -1), (1, -1)])
    assert plan_transfer(source, target).bytes_by_distance == {"same": 0, "node": 8, "network": 8}


def test_unknown_locations_are_network():
    assert plan_transfer(trainer(2), side(*weights())).cross_accelerator_share == 1


def test_replicas_take_turns():
    source, target = Sharding(weights(), dp=4), Sharding(weights(), tp=2, dp=6)
    plan = plan_transfer(source, target)
    senders = Counter(move.rank for rank in range(12) for move in plan.for_target(rank))
    assert senders == {0: 3, 1: 3, 2: 3, 3: 3}


def test_those_on_the_node_take_turns_before_any_other():
    source = Sharding(weights(), dp=4, locations=((0, 0), (0, 1), (1, 0), (1, 1)))
    target = Sharding(weights(), dp=4, locations=((0, 2), (0, 3), (0, 4), (0, 5)))
    plan = plan_transfer(source, target)
    assert [plan.for_target(rank)[0].rank for rank in range(4)] == [0, 1, 0, 1]
    assert plan.bytes_by_distance == {"same": 0, "node": 32, "network": 0}


# Size -------------------------------------------------------------------------------------


def model(stages, count=1000):
    return tuple(
        TensorShards(f"layer.{i}", (1024, 1024), "bfloat16", (None, 0, 1, 0)[i % 4], (), i * stages // count)
        for i in range(count)
    )


def test_a_large_plan_holds_few_objects():
    source = Sharding(model(8), tp=8, pp=8, dp=16, locations=[(rank // 8, rank % 8) for rank in range(1024)])
    target = Sharding(model(1), tp=4, dp=256, order="tp-pp-dp", locations=source.locations)
    plan = plan_transfer(source, target)
    routes = {id(part.routes): part.routes for part in plan.parts}
    assert len(plan.parts) < 20_000  # 1,024 ranks get two million parts and more
    assert sum(len(way) for way in routes.values()) < 4_000
    assert len({id(part.box) for part in plan.parts}) < 200
    assert plan.total_bytes == 256 * (750 + 250 * 4) * 1024 * 1024 * 2
    for rank in (0, 513, 1023):
        moves = plan.for_target(rank)
        assert {move.tensor for move in moves} == {tensor.name for tensor in source.tensors}
    assert sum(len(plan.for_source(rank)) for rank in range(0, 1024, 128)) > 0


def test_tensors_that_go_the_same_way_share_their_routes():
    tensors = tuple(TensorShards(name, (8, 4), "float32", 0) for name in ("q", "k", "v"))
    plan = plan_transfer(trainer(4, tensors=tensors), engines(2, 2, tensors=tensors))
    by_class = {}
    for part in plan.parts:
        by_class.setdefault((part.source_tp, part.target_tp), set()).add(id(part.routes))
    assert len(plan.parts) == 3 * 4
    assert all(len(objects) == 1 for objects in by_class.values())


def test_regular_placements_need_a_route_or_two():
    plan = plan_transfer(trainer(8, gpus=512), engines(2, 4, gpus=512))
    assert max(len(part.routes) for part in plan.parts) <= 4


def test_summary():
    plan = plan_transfer(trainer(4), engines(2, 1))
    assert plan.summary() == [
        "1 tensor, 32 B to 8 ranks",
        "on the same accelerator: 8 B (25.0%)",
        "inside a node: 24 B (75.0%)",
        "between accelerators: 75.0%",
        "busiest sender: rank 1, 4 B (1.3 x the mean)",
    ]
    big = plan_transfer(side(*weights(3 * 2**40)), side(*weights(3 * 2**40)))
    assert big.summary()[0] == "1 tensor, 3.0 TiB to 1 rank"


# Errors -----------------------------------------------------------------------------------


def refused(call, *codes):
    with pytest.raises(PlacementError) as caught:
        call()
    assert sorted(caught.value.codes) == sorted(codes), str(caught.value)
    return str(caught.value)


def T(name="w", shape=(8, 8), dtype="float32", dim: int | None = None, **more):  # noqa: N802
    return TensorShards(name, shape, dtype, dim, **more)


@pytest.mark.parametrize(
    ("source", "target", "code", "text"),
    [
        (side(), side(T("a.weight")), "S101", "a.weight: the target has this tensor, and the source does not"),
        (side(T("b")), side(), "S101", "b: the source has this tensor, and the target does not"),
        (side(T()), side(T(shape=(8, 4))), "S102", "w: its shape is (8, 8) in the source and (8, 4) in the target"),
        (side(T()), side(T(dtype="bfloat16")), "S103", "float32 in the source and bfloat16 in the target"),
        (side(T(dim=0, slices=((0, 3), (4, 7))), tp=2), side(T()), "S105", "no rank holds 3 to 4, 7 to 8 of dimension 0"),
        (side(T(dim=0), tp=3), side(T()), "S106", "source: w: dimension 0 of (8, 8) cannot be cut into 3 equal parts"),
        (side(T()), side(T(dim=1), tp=5), "S106", "target: w: dimension 1 of (8, 8) cannot be cut into 5"),
        (side(T()), side(T(dim=0, slices=((0, 9),))), "S107", "(0, 9) of tp 0"),
        (side(T()), side(T(dim=0, slices=((4, 2),))), "S107", "reversed: (4, 2) of tp 0"),
        (side(T()), side(T(dim=0, slices=((0, 8),)), tp=2), "S107", "1 slice for 2 tensor-parallel ranks"),
        (side(T()), side(T(dim=2)), "S107", "(8, 8) has no dimension 2"),
        (side(T()), side(T(dim=-1)), "S107", "no dimension -1"),
        (side(T()), side(T(slices=((0, 8),))), "S107", "it has slices, but no dimension"),
        (side(T(), dp=2, locations=[(0, 0)]), side(T()), "S108", "source: 1 location for 2 ranks"),
        (side(T()), side(T(), tp=0), "S109", "target: tp is 0"),
        (side(T()), side(T(), dp=True), "S109", "target: dp is True"),
        (side(T(), order="tp-dp"), side(T()), "S109", "'tp-dp' is not an order of tp, pp and dp"),
        (side(T(stage=2), pp=2), side(T()), "S109", "stage 2 of 2 pipeline stages"),
        (side(T(), T()), side(T()), "S110", "source: there are two tensors 'w'"),
    ],
)  # fmt: skip
def test_refused(source, target, code, text):
    assert text in refused(lambda: plan_transfer(source, target), code)


def test_an_unknown_dtype_is_refused_on_both_sides():
    text = refused(lambda: plan_transfer(side(T(dtype="fp8")), side(T(dtype="fp8"))), "S104", "S104")
    assert "float8_e4m3fn" in text


def test_a_negative_shape_is_refused():
    assert "not a shape" in refused(lambda: plan_transfer(side(T(shape=(-1,))), side(T(shape=(-1,)))), "S107", "S107")


def test_all_problems_at_once():
    source = side(T("a"), T("b", dim=0), T("c", dtype="int8"), tp=3, locations=[(0, 0)])
    target = side(T("aa"), T("b", shape=(4, 4), dim=1, slices=((0, 5),)), T("c"))
    text = refused(
        lambda: plan_transfer(source, target), "S101", "S101", "S102", "S103", "S106", "S107", "S108"
    )  # fmt: skip
    assert "help: did you mean    a" in text


def test_gathers_that_cannot_be():
    assert "groups of 3" in refused(lambda: side(T(dim=0), tp=4).gathered(3), "S109")
    refused(lambda: side(T(dim=0), tp=4).gathered(0), "S109")
    apart = T(dim=0, slices=((0, 2), (4, 6), (2, 4), (6, 8)))
    assert "are not contiguous" in refused(lambda: side(apart, tp=4).gathered(2), "S109")
    refused(lambda: side(T(dim=0), tp=3).gathered(3), "S106")


def test_gathered_slices():
    gathered = side(T(dim=0), T("r"), tp=4).gathered(2)
    assert gathered.tensors[0].slices == ((0, 4), (0, 4), (4, 8), (4, 8))
    assert gathered.tensors[1] == T("r")
    assert side(T(dim=0), tp=4).gathered(4).tensors[0].slices == ((0, 8),) * 4


# The schedules of a plan ------------------------------------------------------------------


def resolve(placements, cluster=None, topology="1x8", **sections):
    job = {"cluster": {"component_placement": placements, **(cluster or {})}, **sections}
    return Plan.resolve(job, Topology.parse(topology))


def sizes(actor_tp=1, rollout_tp=1, actor_pp=1, rollout_pp=1):
    return {
        "actor": {"model": {"tensor_model_parallel_size": actor_tp, "pipeline_model_parallel_size": actor_pp}},
        "rollout": {"tensor_parallel_size": rollout_tp, "pipeline_parallel_size": rollout_pp},
    }


def schedule_of(plan):
    (planned,) = plan.weight_schedules
    return planned.schedule


def share_of(schedule, receiver, distance):
    found = [entry for entry in schedule.entries if entry.receiver == receiver]
    return Fraction(sum(e.nbytes for e in found if e.distance == distance), sum(e.nbytes for e in found))


def test_schedule_with_pipeline_stages():
    plan = resolve({"actor,rollout": "0-7"}, {"placement_mode": "collocated"}, **sizes(2, 2, actor_pp=2))
    schedule = schedule_of(plan)
    assert (schedule.source.tp, schedule.source.pp, schedule.source.dp) == (2, 2, 2)
    assert [tensor.name for tensor in schedule.source.tensors] == ["stage 0", "stage 1"]
    # Megatron's order: the first stage is on GPUs 0-3, the second on 4-7.
    assert [share_of(schedule, receiver, "same") for receiver in range(4)] == [Fraction(1, 2)] * 4
    assert roost.Plan.from_json(plan.to_json()) == plan


def test_engines_with_pipeline_stages_receive_everything_in_their_first_process():
    plan = resolve({"actor": "0-3", "rollout": "4-7"}, {"placement_mode": "disaggregated"}, **sizes(2, 2, 1, 2))
    (planned,) = plan.weight_schedules
    transfer = planned.schedule.transfer
    assert planned.receivers == (("rollout", 0),)
    assert transfer.bytes_by_distance["node"] == transfer.total_bytes
    assert {entry.transport for entry in planned.schedule.entries} == {WeightTransport.BROADCAST}


def test_an_engine_takes_a_whole_tensor_from_one_of_several_trainers_on_its_accelerators():
    plan = resolve({"actor": "0-3", "rollout": "0-3:0-1"})
    assert [(e.sender, e.receiver, e.distance) for e in schedule_of(plan).entries] == [(0, 0, "same"), (2, 1, "same")]
    assert weight_lines(plan, plan.process("actor[0]")) == ["to rollout[0] on the same GPU"]
    assert weight_lines(plan, plan.process("actor[1]")) == ["none to rollout: other ranks are as near"]


def test_an_engine_of_several_processes_receives_in_its_first_one():
    plan = resolve({"actor": "0-15", "rollout": "0-15:0-1"}, topology="2x8", **sizes(8, 16))
    actor, rollout = plan.components
    plan = replace(plan, components=(actor, replace(rollout, processes_per_engine=2)))
    (planned,) = plan.weight_schedules
    assert planned.receivers == (("rollout", 0),)
    assert weight_lines(plan, plan.process("actor[1]")) == ["to rollout[0] on the same GPU"]
    assert weight_lines(plan, plan.process("actor[15]")) == ["none to rollout: other ranks are as near"]
    assert weight_lines(plan, plan.process("rollout[1]")) == [
        "rollout[0] receives for the engine: all from the same GPU"
    ]


def test_engines_that_join_broadcasts_have_a_schedule_of_their_own():
    plan = resolve({"actor": "0-3", "rollout": "2-5:0-1"}, topology="1x6")
    near, far = plan.weight_schedules
    assert (near.receivers, far.receivers) == ((("rollout", 0),), (("rollout", 1),))
    assert plan.transport_shares("rollout", 0) == {WeightTransport.IPC: 1}
    assert plan.transport_shares("rollout", 1) == {WeightTransport.BROADCAST: 1}
    assert weight_lines(plan, plan.process("actor[0]")) == ["to rollout[1] on other GPUs of the node"]


@pytest.mark.parametrize(
    "plan",
    [
        resolve({"rollout": "0-7"}),
        resolve({"actor": "0-7"}),
        resolve({"actor": "0-4", "rollout": "5-7"}, **sizes(2)),  # 5 ranks, tp 2
        resolve({"actor": "0-3", "rollout": "4-7"}, {"auto_scheduler": True}, **sizes(2, 2)),
        resolve({"actor": "0-3", "a2": {"placement": "4-5", "role": "actor"}, "rollout": "6-7"}),
    ],
)
def test_what_a_plan_does_not_say_is_not_made_up(plan):
    assert plan.weight_schedules == ()
    for component in plan.components:
        assert weight_lines(plan, plan.process(component.name, 0)) == []


def test_lines_of_a_collocated_job():
    plan = resolve({"actor,rollout": "0-7"}, {"placement_mode": "collocated"}, **sizes(4, 2))
    assert weight_lines(plan, plan.process("rollout[1]")) == ["1/2 from the same GPU, 1/2 from other GPUs of the node"]
    assert weight_lines(plan, plan.process("actor[1]")) == [
        "to rollout[1] on the same GPU, to rollout[0] on other GPUs of the node"
    ]


def test_lines_of_an_unstrided_job():
    plan = resolve({"actor": "0-7", "rollout": "0-7:0-3"}, **sizes(4, 2))
    assert weight_lines(plan, plan.process("rollout[0]")) == ["1/2 from the same GPU, 1/2 from other GPUs of the node"]


def test_lines_for_several_rollouts_and_for_processes_without_accelerators():
    job = {"actor": "0-1", "fast": {"placement": "8-9", "role": "rollout"}}
    job["slow"] = {"node_group": "node", "placement": "0:0", "role": "rollout"}
    plan = resolve(job, topology="2x8")
    assert weight_lines(plan, plan.process("actor[0]")) == [
        "to fast[0] on other nodes",
        "to slow[0] on the same node",
    ]
    assert weight_lines(plan, plan.process("actor[1]"))[1] == "none to slow: other ranks are as near"
    assert weight_lines(plan, plan.process("fast[1]")) == ["all from other nodes"]
    assert weight_lines(plan, plan.process("slow[0]")) == ["all from the same node"]


def test_a_rank_that_reads_several_accelerators_gets_what_is_there_from_there() -> None:
    tensor = TensorShards("t", (8,), "float32", dim=0)
    whole = TensorShards("t", (8,), "float32")
    source = Sharding([tensor], tp=2, dp=2, locations=[(0, 0), (0, 1), (0, 2), (0, 3)])
    at = {"dp": 2, "locations": [(0, 0), (0, 2)]}
    assert plan_transfer(source, Sharding([whole], **at)).bytes_by_distance == {"same": 32, "node": 32, "network": 0}
    both = plan_transfer(source, Sharding([whole], **at, reachable=[(0, 1), (2, 3)]))
    assert both.bytes_by_distance == {"same": 64, "node": 0, "network": 0}
    assert [move.rank for move in both.for_target(1)] == [2, 3]
    with pytest.raises(PlacementError, match="1 entry of reachable for 2 ranks") as caught:
        plan_transfer(source, Sharding([whole], **at, reachable=[(0,)]))
    assert caught.value.codes == ("S108",)

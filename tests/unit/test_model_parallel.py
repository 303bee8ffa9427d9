"""``ModelParallelComponentPlacement``: collocated, disaggregated and auto."""

import pytest
from omegaconf import OmegaConf

from roost import (
    ComponentPlacement,
    ConfigError,
    ModelParallelComponentPlacement,
    PlacementError,
    PlacementMode,
    RoostError,
    Topology,
)

ONE = Topology.parse("1x8")
TWO = Topology.parse("2x8")


def sizes(actor_tp=1, rollout_tp=1, actor_pp=1, actor_cp=1, rollout_pp=1):
    return {
        "actor": {
            "model": {
                "tensor_model_parallel_size": actor_tp,
                "pipeline_model_parallel_size": actor_pp,
                "context_parallel_size": actor_cp,
            }
        },
        "rollout": {"tensor_parallel_size": rollout_tp, "pipeline_parallel_size": rollout_pp},
    }


def where(placed, name):
    placements = placed.get_strategy(name).get_placement(placed.topology)
    assert [p.rank for p in placements] == list(range(len(placements)))
    assert len(placements) == placed.get_world_size(name)
    return [(p.cluster_node_rank, *p.local_hardware_ranks) for p in placements]


# Collocated -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actor_tp", "rollout_tp", "expected"),
    [
        (1, 1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (2, 2, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (4, 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),  # stride 2
        (8, 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),  # stride 4
        (8, 4, [[0, 2, 4, 6], [1, 3, 5, 7]]),  # stride 2
        (4, 1, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        (2, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),  # the rollout's is larger: no stride
        (1, 8, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_collocated_rollout_is_strided(job, actor_tp, rollout_tp, expected):
    placed = ModelParallelComponentPlacement(job({"actor,rollout,reward": "0-7"}, **sizes(actor_tp, rollout_tp)), ONE)
    assert where(placed, "actor") == [(0, i) for i in range(8)]
    assert where(placed, "rollout") == [(0, *own) for own in expected]
    assert placed.get_world_size("rollout") == 8 // rollout_tp
    assert placed.rollout_world_size == 8
    assert placed.placement_mode is PlacementMode.COLLOCATED
    assert (placed.is_collocated, placed.is_disaggregated, placed.is_auto) == (True, False, False)
    assert placed.has_dedicated_inference is False


@pytest.mark.parametrize(("actor_tp", "rollout_tp"), [(4, 2), (8, 2), (8, 4)])
def test_every_rollout_shard_has_one_of_its_sources_on_its_own_accelerator(job, actor_tp, rollout_tp):
    """Shard k of an engine is made of the actor's tp ranks k*s … k*s+s-1."""
    placed = ModelParallelComponentPlacement(job({"actor,rollout": "0-7"}, **sizes(actor_tp, rollout_tp)), ONE)
    s = actor_tp // rollout_tp
    for engine in placed.get_strategy("rollout").get_placement(ONE):
        for shard, accelerator in enumerate(engine.local_hardware_ranks):
            assert accelerator % actor_tp // s == shard


def test_collocated_over_nodes(job):
    placed = ModelParallelComponentPlacement(job({"actor,rollout": "0-15"}, **sizes(8, 4)), TWO)
    assert where(placed, "rollout") == [(n, *own) for n in (0, 1) for own in ((0, 2, 4, 6), (1, 3, 5, 7))]


def test_collocated_written_in_different_ways(job):
    placed = ModelParallelComponentPlacement(job({"actor": "0-3,4-7", "rollout": "all"}, **sizes(2, 2)), ONE)
    assert placed.is_collocated
    assert placed.get_world_size("rollout") == 4


def test_explicit_processes_that_agree_with_the_sizes(job):
    placed = ModelParallelComponentPlacement(job({"actor": "0-7", "rollout": "0-7:0-3"}, **sizes(1, 2)), ONE)
    assert placed.get_world_size("rollout") == 4
    with pytest.raises(PlacementError, match="8 processes"):
        ModelParallelComponentPlacement(job({"actor": "0-7", "rollout": "0-7:0-7"}, **sizes(1, 2)), ONE)


@pytest.mark.parametrize(("actor_tp", "rollout_tp"), [(3, 2), (4, 3)])
def test_collocated_sizes_must_divide(job, actor_tp, rollout_tp):
    with pytest.raises(PlacementError, match=f"rollout tp {rollout_tp} does not divide actor tp {actor_tp}"):
        ModelParallelComponentPlacement(
            job({"actor,rollout": "0-11"}, **sizes(actor_tp, rollout_tp)), Topology.parse("1x12")
        )


def test_collocated_has_no_inference(job):
    config = job({"actor,rollout,inference": "0-7"}, algorithm={"recompute_logprobs": True})
    with pytest.raises(PlacementError, match="inference"):
        ModelParallelComponentPlacement(config, ONE)


def test_collocated_beside_inference_of_its_own_is_refused_with_both_sets(job):
    config = job({"actor,rollout": "0-3", "inference": "4-7"}, algorithm={"recompute_logprobs": True})
    with pytest.raises(PlacementError) as caught:
        ModelParallelComponentPlacement(config, ONE)
    assert "0-3" in str(caught.value)
    assert "4-7" in str(caught.value)


# Disaggregated ----------------------------------------------------------------------------


def test_disaggregated(job):
    config = job(
        {"actor": "0-7", "rollout": "8-11", "inference": "12-15", "reward": "0-3"},
        algorithm={"recompute_logprobs": True},
        **sizes(actor_tp=4, rollout_tp=2, rollout_pp=2),
    )
    placed = ModelParallelComponentPlacement(config, TWO)
    assert placed.placement_mode is PlacementMode.DISAGGREGATED
    assert (placed.is_collocated, placed.is_disaggregated, placed.is_auto) == (False, True, False)
    assert placed.has_dedicated_inference is True
    assert where(placed, "actor") == [(0, i) for i in range(8)]
    assert where(placed, "rollout") == [(1, 0, 1, 2, 3)]  # tp * pp in one process
    assert where(placed, "inference") == [(1, i) for i in range(4, 8)]
    assert where(placed, "reward") == [(0, i) for i in range(4)]


def test_disaggregated_rollout_is_not_strided(job):
    placed = ModelParallelComponentPlacement(job({"actor": "0-3", "rollout": "4-7"}, **sizes(4, 2)), ONE)
    assert where(placed, "rollout") == [(0, 4, 5), (0, 6, 7)]
    assert placed.has_dedicated_inference is False


def test_disaggregated_with_critics(job):
    placements = {"actor": "0-1", "rollout": "2-3", "inference": "4", "critic": "5-6", "critic_inference": "7"}
    placed = ModelParallelComponentPlacement(job(placements, algorithm={"recompute_logprobs": True}), ONE)
    assert placed.is_disaggregated
    assert placed.critic_world_size == 2
    assert where(placed, "critic_inference") == [(0, 7)]


@pytest.mark.parametrize("algorithm", [{}, {"recompute_logprobs": False}, {"recompute_logprobs": None}])
def test_inference_needs_recomputed_logprobs(job, algorithm):
    placements = {"actor": "0-3", "rollout": "4-5", "inference": "6-7"}
    with pytest.raises(PlacementError, match="recompute_logprobs"):
        ModelParallelComponentPlacement(job(placements, algorithm=algorithm), ONE)


def test_the_switch_is_true_or_false(job):
    placements = {"actor": "0-3", "rollout": "4-5", "inference": "6-7"}
    with pytest.raises(RoostError, match="true or false"):
        ModelParallelComponentPlacement(job(placements, algorithm={"recompute_logprobs": "maybe"}), ONE)


@pytest.mark.parametrize("given", [{}, {"inference": {"model": {"tensor_model_parallel_size": 4}}}])
def test_inference_tp_must_fit_its_accelerators(job, given):
    placements = {"actor": "0-3", "rollout": "4-5", "inference": "6-7"}
    config = job(placements, algorithm={"recompute_logprobs": True}, **sizes(actor_tp=4), **given)
    with pytest.raises(PlacementError, match="inference"):
        ModelParallelComponentPlacement(config, ONE)


@pytest.mark.parametrize(
    ("placements", "shown"),
    [
        ({"actor": "0-5", "rollout": "2-7"}, ["0-5", "2-7"]),
        ({"actor": "0-7", "rollout": "0-3"}, ["0-7", "0-3"]),
        ({"actor": "0-3", "rollout": "0-7"}, ["0-3", "0-7"]),
        ({"actor": "0-3", "rollout": "4-7", "inference": "3"}, ["0-3", "3"]),
        ({"actor": "0-1", "rollout": "2-5", "inference": "5-7"}, ["2-5", "5-7"]),
        ({"actor": "0-1", "rollout": "2-3", "critic": "1"}, ["0-1"]),
        ({"actor": "0-1", "rollout": "2-3", "critic": "4-5", "critic_inference": "5"}, ["4-5"]),
    ],
)
def test_anything_else_is_refused_with_both_sets_shown(job, placements, shown):
    config = job(placements, algorithm={"recompute_logprobs": True})
    with pytest.raises(PlacementError) as caught:
        ModelParallelComponentPlacement(config, ONE)
    for text in shown:
        assert text in str(caught.value.findings[0])


# Auto -------------------------------------------------------------------------------------

AUTO = {"auto_scheduler": True}


def test_auto_places_the_actor_on_everything(job):
    placements = {"actor": "0-7", "rollout": "8-13", "inference": "14-15"}
    config = job(placements, AUTO, algorithm={"recompute_logprobs": True}, **sizes(rollout_tp=2))
    placed = ModelParallelComponentPlacement(config, TWO)
    assert placed.placement_mode is PlacementMode.AUTO
    assert (placed.is_collocated, placed.is_disaggregated, placed.is_auto) == (False, False, True)
    assert where(placed, "actor") == [(n, i) for n in (0, 1) for i in range(8)]
    assert where(placed, "rollout") == [(1, 0, 1), (1, 2, 3), (1, 4, 5)]
    assert where(placed, "inference") == [(1, 6), (1, 7)]


@pytest.mark.parametrize(
    "placements",
    [
        {"rollout": "0-7", "actor": "8-15"},  # the wrong order
        {"actor": "0-7", "inference": "8-11", "rollout": "12-15"},
        {"actor": "0-7", "rollout": "8-14"},  # does not cover
        {"actor": "0-6", "rollout": "8-15"},  # a hole
        {"actor": "1-7", "rollout": "8-15"},
        {"actor": "0-15", "rollout": "0-15"},  # collocated
        {"actor": "0-9", "rollout": "8-15"},
    ],
)
def test_auto_refuses_other_orders_and_holes(job, placements):
    config = job(placements, AUTO, algorithm={"recompute_logprobs": True})
    with pytest.raises(PlacementError):
        ModelParallelComponentPlacement(config, TWO)


@pytest.mark.parametrize("value", ["true", 1, "yes", [True]])
def test_auto_scheduler_is_true_or_false(job, value):
    with pytest.raises(ConfigError, match="true or false"):
        ModelParallelComponentPlacement(job({"actor": "0-7", "rollout": "8-15"}, {"auto_scheduler": value}), TWO)


# Node groups ------------------------------------------------------------------------------

GROUPS = {"node_groups": [{"label": "train", "node_ranks": 1}, {"label": "gen", "node_ranks": 0}]}


def test_node_groups_are_honoured(job):
    placements = {
        "actor": {"node_group": "train", "placement": "0-7"},
        "rollout": {"node_group": "gen", "placement": "0-7"},
    }
    placed = ModelParallelComponentPlacement(job(placements, GROUPS, **sizes(2, 4)), TWO)
    assert placed.is_disaggregated  # the same ranks, of different groups
    assert where(placed, "actor") == [(1, i) for i in range(8)]
    assert where(placed, "rollout") == [(0, 0, 1, 2, 3), (0, 4, 5, 6, 7)]
    labels = {p.node_group_label for p in placed.get_strategy("rollout").get_placement(TWO)}
    assert labels == {"gen"}


def test_collocated_in_a_group_against_the_whole_cluster(job):
    placements = {"actor": {"node_group": "train", "placement": "all"}, "rollout": "8-15"}
    assert ModelParallelComponentPlacement(job(placements, GROUPS), TWO).is_collocated


def test_collocated_over_groups_out_of_node_order(job):
    placements = {"actor,rollout": {"node_group": ["train", "gen"], "placement": "all"}}
    placed = ModelParallelComponentPlacement(job(placements, GROUPS, **sizes(4, 2)), TWO)
    assert where(placed, "actor") == [(n, i) for n in (1, 0) for i in range(8)]
    assert where(placed, "rollout") == [(n, *own) for n in (1, 0) for own in ((0, 2), (1, 3), (4, 6), (5, 7))]


def test_model_parallel_components_need_accelerators(job):
    placements = {"actor": "0-7", "rollout": {"node_group": "node", "placement": "0-1"}}
    with pytest.raises(PlacementError, match="accelerators"):
        ModelParallelComponentPlacement(job(placements), TWO)


def test_other_components_go_anywhere(job):
    placements = {"actor,rollout": "0-7", "agent": {"node_group": "node", "placement": "0-1:0-7"}, "env": "9,11:1-4"}
    placed = ModelParallelComponentPlacement(job(placements), TWO)
    assert where(placed, "agent") == [(0,)] * 4 + [(1,)] * 4
    assert where(placed, "env") == [(1, 1)] + [(1, 3)] * 4


# Sizes ------------------------------------------------------------------------------------


def test_sizes(job):
    config = job(
        {"actor": "0-7", "rollout": "8-11", "inference": "12-15"},
        algorithm={"recompute_logprobs": True},
        **sizes(actor_tp=2, actor_pp=2, rollout_tp=2),
        inference={"model": {"pipeline_model_parallel_size": 1}},
    )
    placed = ModelParallelComponentPlacement(config, TWO)
    assert (placed.actor_tp, placed.actor_pp, placed.actor_dp, placed.actor_world_size) == (2, 2, 2, 8)
    assert (placed.rollout_tp, placed.rollout_dp, placed.rollout_world_size) == (2, 2, 4)
    assert placed.get_world_size("rollout") == 2
    assert (placed.inference_tp, placed.inference_pp, placed.inference_dp) == (2, 1, 2)  # tp falls back to the actor's
    assert placed.inference_world_size == 4


def test_context_parallelism_counts(job):
    placed = ModelParallelComponentPlacement(job({"actor,rollout": "0-7"}, **sizes(actor_tp=2, actor_cp=2)), ONE)
    assert placed.actor_dp == 2


def test_sizes_default_to_1(job):
    placed = ModelParallelComponentPlacement(job({"actor,rollout": "0-7"}), ONE)
    assert (placed.actor_tp, placed.actor_pp, placed.actor_dp, placed.actor_world_size) == (1, 1, 8, 8)
    assert (placed.rollout_tp, placed.rollout_dp, placed.rollout_world_size) == (1, 8, 8)


def test_critic_sizes(job):
    config = job(
        {"actor": "0-1", "rollout": "2-3", "critic": "4-7"}, critic={"model": {"tensor_model_parallel_size": 2}}
    )
    placed = ModelParallelComponentPlacement(config, ONE)
    assert (placed.critic_tp, placed.critic_pp, placed.critic_dp, placed.critic_world_size) == (2, 1, 2, 4)


def test_an_attribute_that_there_is_not(job):
    placed = ModelParallelComponentPlacement(job({"actor,rollout": "0-7"}), ONE)
    with pytest.raises(AttributeError):
        _ = placed.actor_xp
    with pytest.raises(AttributeError):
        _ = placed.trainer_tp


@pytest.mark.parametrize(
    "given",
    [
        {"actor_tp": 3},
        {"actor_tp": 16},
        {"actor_tp": 4, "actor_pp": 4},
        {"rollout_tp": 3},
        {"rollout_tp": 16},
        {"rollout_tp": 4, "rollout_pp": 4},
    ],
)
def test_sizes_must_fit_the_accelerators(job, given):
    with pytest.raises(PlacementError, match="multiple"):
        ModelParallelComponentPlacement(job({"actor,rollout": "0-7"}, **sizes(**given)), ONE)


@pytest.mark.parametrize("size", [0, -2, 1.5, "two", True, [2], {"a": 1}])
@pytest.mark.parametrize("which", ["actor_tp", "actor_pp", "actor_cp", "rollout_tp", "rollout_pp"])
def test_sizes_are_whole_numbers_from_1_up(job, which, size):
    with pytest.raises(ConfigError, match="whole number"):
        ModelParallelComponentPlacement(job({"actor,rollout": "0-7"}, **sizes(**{which: size})), ONE)


def test_sizes_of_a_dictconfig(job):
    config = OmegaConf.create({**job({"actor,rollout": "0-7"}, **sizes(4, 2)), "tp": 2})
    config.rollout.tensor_parallel_size = "${tp}"
    assert ModelParallelComponentPlacement(config, ONE).get_world_size("rollout") == 4


# Refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "word"),
    [
        ({"actor": "0-7"}, "rollout"),
        ({"rollout": "0-7"}, "actor"),
        ({"env": "0-7"}, "actor"),
        ({"actor": "0-2,4-7", "rollout": "0-2,4-7"}, "contiguous"),
        ({"actor": "0-3", "rollout": "4,6"}, "contiguous"),
        ({"actor": "0-3", "rollout": "4-7", "inference": "8,10"}, "contiguous"),
        ({"actor": "0-3", "policy": {"placement": "4-7", "role": "actor"}, "rollout": "8-15"}, "role 'actor'"),
        ({"actor": "0-3:0-7", "rollout": "4-7"}, "8 processes"),
    ],
)
def test_refusals(job, placements, word):
    with pytest.raises(PlacementError, match=word):
        ModelParallelComponentPlacement(job(placements, algorithm={"recompute_logprobs": True}), TWO)


@pytest.mark.parametrize(
    ("topology", "placements", "given"),
    [
        ("2x8", {"actor": "0-3", "rollout": "4-11"}, {"rollout_tp": 8}),
        ("2x8", {"actor,rollout": "0-15"}, {"actor_tp": 16, "rollout_tp": 4}),
        ("2x4", {"actor,rollout": "0-7"}, {"rollout_tp": 8}),
        ("2x5", {"actor": "0-1", "rollout": "2-9"}, {"rollout_tp": 2}),
    ],
)
def test_an_engine_spans_no_nodes(job, topology, placements, given):
    with pytest.raises(PlacementError, match="would span nodes"):
        ModelParallelComponentPlacement(job(placements, **sizes(**given)), Topology.parse(topology))


@pytest.mark.parametrize(
    ("mode", "placements"),
    [
        ("collocated", {"actor": "0-3", "rollout": "4-7"}),
        ("disaggregated", {"actor,rollout": "0-7"}),
        ("auto", {"actor,rollout": "0-7"}),
    ],
)
def test_a_mode_that_the_sets_are_not(job, mode, placements):
    with pytest.raises(PlacementError, match=mode):
        ModelParallelComponentPlacement(job(placements, {"placement_mode": mode}), ONE)


@pytest.mark.parametrize("mode", ["colocated", "COLLOCATED", "", 3, True, ["auto"], {"a": 1}])
def test_a_mode_that_there_is_not(job, mode):
    with pytest.raises(ConfigError, match="placement_mode"):
        ModelParallelComponentPlacement(job({"actor,rollout": "0-7"}, {"placement_mode": mode}), ONE)


def test_it_is_a_component_placement(job):
    placed = ModelParallelComponentPlacement(job({"actor,rollout": "0-7"}), ONE)
    assert isinstance(placed, ComponentPlacement)
    assert placed.components == ["actor", "rollout"]
    assert placed.get_hardware_ranks("rollout") == list(range(8))
    with pytest.raises(PlacementError):
        placed.get_world_size("critic")

"""``plan.check()``: what can be resolved but should not be launched, and what is worth knowing."""

import pytest

from roost import Finding, Plan, Topology, load_config

ONE = Topology.parse("1x8")


@pytest.fixture
def check(job):
    def run(placements, topology=ONE, cluster=None, **sections):
        if isinstance(topology, str):
            topology = Topology.parse(topology)
        return Plan.resolve(job(placements, cluster, **sections), topology).check()

    return run


@pytest.fixture
def machine(write):
    """A cluster of like nodes with CPUs and card memory."""

    def make(count=1, cpus=64, cards=8, card_gib=80):
        text = f"nodes: [{{count: {count}, cpus: {cpus}, accelerators: {{count: {cards}, memory_gib: {card_gib}}}}}]"
        return Topology.load(write(text, "cluster.yaml"))

    return make


def problems(findings):
    return [finding for finding in findings if finding.is_problem]


def notes(findings, code):
    return [str(finding) for finding in findings if finding.code == code]


def share(placement, **more):
    return {"placement": placement, **more}


def test_a_sound_job_has_no_findings(check):
    assert check({"actor": "all"}) == []


def test_findings_say_their_message(check):
    (finding,) = check({"actor": "0-6"})
    assert isinstance(finding, Finding)
    assert str(finding) == finding.message
    assert not finding.is_problem


# Shares -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "placements",
    [
        {"actor": share("0-7", gpu_share=0.8), "rollout": share("0-7", gpu_share=0.2)},
        {
            "actor": share("0-7", gpu_share=0.4),
            "critic": share("0-7", gpu_share=0.4),
            "rollout": share("0-7", gpu_share=0.2),
        },
        {"env": share("0-7:0-79", gpu_share=0.1)},
        {  # 1, of which floats make a little more
            "a": share("0-7", gpu_share=0.33),
            "b": share("0-7", gpu_share=0.56),
            "c": share("0-7", gpu_share=0.11),
        },
        {"actor": share("0-3", gpu_share=1.0), "rollout": share("4-7", gpu_share=1.0)},
        {"actor": share("0-7", gpu_share=1.0), "rollout": "0-7"},  # undeclared counts nothing
    ],
)
def test_shares_that_fit(check, placements):
    assert problems(check(placements)) == []


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ({"actor": share("0-7", gpu_share=0.9), "rollout": share("0-7", gpu_share=0.2)}, ["1.1", "GPU 0-7"]),
        ({"actor": share("0-3", gpu_share=0.9), "rollout": share("3-6", gpu_share=0.2)}, ["1.1", "GPU 3:"]),
        ({"env": share("0-7:0-15", gpu_share=0.6)}, ["1.2", "2 x 0.6"]),
        ({"rollout": share("0-7:0-1", gpu_share=0.6), "actor": share("4-7", gpu_share=0.5)}, ["1.1", "GPU 4-7"]),
    ],
)
def test_shares_above_1_are_problems(check, placements, words):
    (problem,) = problems(check(placements))
    for word in words:
        assert word in str(problem)


def test_shares_of_different_nodes_are_not_added_up(check):
    placements = {"actor": share("0-7", gpu_share=0.9), "rollout": share("8-15", gpu_share=0.9)}
    assert problems(check(placements, "2x8")) == []


def test_undeclared_shares_are_noted_only_where_accelerators_are_shared(check):
    (note,) = notes(check({"actor,rollout": "0-7"}), "N103")
    assert "actor" in note
    assert "rollout" in note
    assert notes(check({"actor": "0-3", "rollout": "4-7"}), "N103") == []
    (note,) = notes(check({"actor": share("0-7", gpu_share=0.5), "rollout": "0-7"}), "N103")
    assert "actor" not in note
    shares = {"actor": share("0-7", gpu_share=0.5), "rollout": share("0-7", gpu_share=0.5)}
    assert notes(check(shares), "N103") == []


def test_a_problem_points_into_the_file(write):
    path = write("""\
        cluster:
          component_placement:
            actor,rollout: {placement: 0-7, gpu_share: 0.7}
    """)
    (problem,) = problems(Plan.resolve(load_config(path), ONE).check())
    assert (problem.place.file, problem.place.line) == (str(path), 3)


# Memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "fits"),
    [
        ({"actor": share("0-7", memory_gib=80)}, True),
        ({"actor": share("0-7", memory_gib=81)}, False),
        ({"actor": share("0-7", memory_gib=50), "rollout": share("0-7", memory_gib=30)}, True),
        ({"actor": share("0-7", memory_gib=50), "rollout": share("0-7", memory_gib=40)}, False),
        ({"actor": share("0-3", memory_gib=50), "rollout": share("4-7", memory_gib=40)}, True),
        ({"env": share("0:0-3", memory_gib=20)}, True),
        ({"env": share("0:0-4", memory_gib=20)}, False),
        ({"rollout": share("0-7:0", memory_gib=70)}, True),  # per accelerator, not per process
        ({"actor": share("0-7", memory_gib=80), "rollout": "0-7"}, True),
    ],
)
def test_memory_per_accelerator(check, machine, placements, fits):
    found = problems(check(placements, machine()))
    assert (found == []) is fits
    if not fits:
        assert "80 GiB" in str(found[0])


def test_memory_of_the_card_that_it_is_on(check, write):
    topology = Topology.load(
        write(
            "nodes: [{accelerators: {count: 2, memory_gib: 80}}, {accelerators: {count: 2, memory_gib: 24}}]", "c.yaml"
        )
    )
    (problem,) = problems(check({"actor": share("0-3", memory_gib=60)}, topology))
    assert "node 1" in str(problem)
    assert "24" in str(problem)


def test_memory_that_cannot_be_checked_is_noted(check):
    findings = check({"actor": share("0-7", memory_gib=10_000)})
    assert problems(findings) == []
    assert len(notes(findings, "N107")) == 1
    assert notes(check({"actor": "0-7"}), "N107") == []


# CPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("placements", "fits"),
    [
        ({"actor": share("0-7", cpus=8)}, True),
        ({"actor": share("0-7", cpus=8.5)}, False),
        ({"actor": share("0-7", cpus=4), "env": share("0:0-7", cpus=4)}, True),
        ({"actor": share("0-7", cpus=4), "env": share("0:0-8", cpus=4)}, False),
        ({"agent": {"node_group": "node", "placement": "0:0-63", "cpus": 1}}, True),
        ({"agent": {"node_group": "node", "placement": "0:0-64", "cpus": 1}}, False),
        ({"actor": share("0-7", cpus=8), "agent": {"node_group": "node", "placement": "0:0-999"}}, True),
        ({"rollout": share("0-7:0", cpus=64)}, True),  # per process, not per accelerator
    ],
)
def test_cpus_per_node(check, machine, placements, fits):
    found = problems(check(placements, machine()))
    assert (found == []) is fits
    if not fits:
        assert "64" in str(found[0])


def test_cpus_are_counted_node_by_node(check, machine):
    placements = {"actor": share("0-15", cpus=8), "env": {"node_group": "node", "placement": "1", "cpus": 1}}
    (problem,) = problems(check(placements, machine(2)))
    assert "node 1" in str(problem)
    assert "65" in str(problem)


def test_like_nodes_are_one_finding(check, machine):
    (problem,) = problems(check({"actor": share("all", cpus=9)}, machine(50)))
    assert "nodes 0-49" in str(problem)


def test_unknown_cpus_are_no_problem(check):
    assert problems(check({"actor": share("0-7", cpus=10_000)})) == []


def test_problems_come_before_notes(check, machine):
    findings = check({"actor": share("0-3", cpus=99, gpu_share=0.9), "env": share("0-3", gpu_share=0.9)}, machine())
    flags = [finding.is_problem for finding in findings]
    assert flags == sorted(flags, reverse=True)
    assert flags.count(True) == 2
    assert False in flags


# Notes ------------------------------------------------------------------------------------


def test_idle_accelerators(check):
    (note,) = notes(check({"actor": "0-3,6"}), "N101")
    assert "3 of 8" in note
    assert "4-5,7" in note
    assert notes(check({"actor": "all"}), "N101") == []


def test_mixed_transports(check):
    (note,) = notes(check({"actor": "0-3", "rollout": "2-7"}), "N104")
    assert "2 by ipc" in note
    assert "4 by broadcast" in note
    assert notes(check({"actor": "0-3", "rollout": "4-7"}), "N104") == []


def test_weights_through_files(check):
    assert notes(check({"actor": "0-3", "rollout": "4-7"}, "1x4+1x4:AMD"), "N110")


def test_different_models_in_one_component(check):
    (note,) = notes(check({"actor": "0-7"}, "1x4:A800+1x4:4090"), "N106")
    assert "A800" in note
    assert "4090" in note
    assert notes(check({"actor": "0-3", "rollout": "4-7"}, "1x4:A800+1x4:4090"), "N106") == []


def test_tensor_parallel_groups_over_nodes(check):
    sizes = {"actor": {"model": {"tensor_model_parallel_size": 4}}}
    (note,) = notes(check({"actor": "2-13"}, "2x8", **sizes), "N105")
    assert "4-7" in note  # ranks 4-7 are accelerators 6-9
    assert notes(check({"actor": "0-15"}, "2x8", **sizes), "N105") == []


def test_several_trainer_ranks_on_one_accelerator(check):
    assert notes(check({"actor": "0-7:0-15"}), "N111")
    assert notes(check({"env": "0-7:0-15"}), "N111") == []


def test_engines_that_are_too_small_for_their_size(check):
    sizes = {"rollout": {"tensor_parallel_size": 2}}
    assert notes(check({"actor": "0-3", "rollout": "4-7"}, **sizes), "N109")
    assert notes(check({"actor": "0-3", "rollout": "4-7:0-1"}, **sizes), "N109") == []


def test_a_large_cluster_gets_short_findings(check):
    findings = check({"actor": share("0-4095", gpu_share=0.9), "rollout": share("0-4095", gpu_share=0.9)}, "1024x8")
    assert all(len(str(finding)) < 400 for finding in findings)
    assert len(findings) < 10

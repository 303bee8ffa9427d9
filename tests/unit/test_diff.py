"""What changes from one plan to another, in data, in words and at the command line."""

import json
from dataclasses import replace

import pytest

from roost import LockFile, Node, NodeGroup, Plan, Topology, diff_plans
from roost.cli import main
from roost.report.diff import draw_diff
from roost.topology import NodeEnvironment

TP4 = {"actor": {"model": {"tensor_model_parallel_size": 4}}}


@pytest.fixture
def plan(job):
    """``plan("2x8", {"actor": "0-7"}, …)`` → a resolved job."""

    def resolve(machines, placements, **sections):
        topology = Topology.parse(machines) if isinstance(machines, str) else machines
        return Plan.resolve(job(placements, **sections), topology)

    return resolve


def signs(diff):
    return [(change.sign, change.component, change.rank) for change in diff.processes]


def table(diff):
    """The rows of the drawing that are about processes, columns joined by one space."""
    lines = draw_diff(diff).plain.splitlines()
    return [" ".join(line.split()) for line in lines if line[:2] in ("+ ", "~ ", "- ", "… ")]


def test_a_plan_and_itself(plan):
    one = plan("2x8", {"actor": "0-7", "rollout": "8-15:0-3"})
    diff = diff_plans(one, one)
    assert diff.is_empty
    assert not diff
    assert diff.summary == "no differences"
    assert draw_diff(diff, "a", "b").plain == "a → b\n\nno differences"
    assert json.loads(diff.to_json())["same"] is True


def test_moved_added_removed_and_groups_that_now_cross_nodes(plan):
    before = plan("2x8", {"actor": "0-7", "rollout": "8-15:0-3"}, **TP4)
    after = plan("2x8", {"actor": "2-9", "rollout": "10-15:0-2", "reward": "0-1"}, **TP4)
    diff = diff_plans(before, after)
    assert diff.summary == "11 moved, 2 added, 1 removed; 1 tensor-parallel group now crosses nodes"
    assert diff.now_cross == (("actor", 4, 7),)
    assert table(diff) == [
        "~ actor[0-5] node 0 GPU 0-5 → node 0 GPU 2-7",
        "~ actor[6-7] node 0 GPU 6-7 → node 1 GPU 0-1",
        "+ reward[0-1] node 0 GPU 0-1",
        "~ rollout[0-2] node 1 GPU 0-1 · 2-3 · 4-5 → node 1 GPU 2-3 · 4-5 · 6-7",
        "- rollout[3] node 1 GPU 6-7",
    ]
    back = diff_plans(after, before)
    assert back.summary == "11 moved, 1 added, 2 removed; 1 tensor-parallel group no longer crosses nodes"


def test_several_groups_cross(plan):
    before = plan("4x8", {"actor": "0-23"}, **TP4)
    after = plan("4x8", {"actor": "2-25"}, **TP4)
    summary = "24 moved, 0 added, 0 removed; 3 tensor-parallel groups now cross nodes"
    assert diff_plans(before, after).summary == summary


def test_engines_over_nodes_cross_and_engines_that_are_too_small_do_not(plan):
    small = plan("2x8", {"rollout": "0-15"}, rollout={"tensor_parallel_size": 16})
    wide = {"rollout": {"placement": "0-15:0-1", "processes_per_engine": 2}}
    large = plan("2x8", wide, rollout={"tensor_parallel_size": 16})
    assert diff_plans(small, large).now_cross == (("rollout", 0, 1),)


def test_what_is_declared_changes_in_place(plan):
    before = plan("1x8", {"actor": {"placement": "0-7", "gpu_share": 0.4}})
    after = plan("1x8", {"actor": {"placement": "0-7", "gpu_share": 0.8, "cpus": 2, "memory_gib": 10}})
    diff = diff_plans(before, after)
    assert diff.summary == "0 moved, 8 changed in place, 0 added, 0 removed"
    assert table(diff) == ["~ actor[0-7] node 0 GPU 0-7; share 0.4 → 0.8; cpus not set → 2; memory_gib not set → 10"]


def test_transports_and_what_follows_from_a_move(plan):
    before = plan("2x4", {"actor": "0-3", "rollout": "0-3"})
    after = plan("2x4", {"actor": "0-3", "rollout": "4-7"})
    diff = diff_plans(before, after)
    assert table(diff) == ["~ rollout[0-3] node 0 GPU 0-3 → node 1 GPU 0-3; transport ipc → broadcast"]
    assert diff.mode == ("collocated", "disaggregated")
    assert diff.processes[0].details["node"] == (0, 1)


def test_variables_and_interpreters_of_node_groups(plan):
    def machines(variables, interpreter):
        environment = NodeEnvironment((1,), variables, interpreter)
        return Topology(Topology.parse("2x2").nodes, (NodeGroup("b", (1,), environments=(environment,)),))

    where = {"actor": {"node_group": "b", "placement": "0-1"}, "env": "0-1"}
    before = plan(machines({"A": "1", "B": "2"}, ""), where)
    after = plan(machines({"B": "3"}, "/opt/python"), where)
    assert table(diff_plans(before, after)) == [
        "~ actor[0-1] node 1 GPU 0-1; environment A 1 → not set; environment B 2 → 3; interpreter not set → /opt/python"
    ]


def test_sizes_and_roles_are_said_once_for_a_component(plan):
    before = plan("1x4", {"actor": "0-3"})
    after = plan("1x4", {"actor": {"placement": "0-3", "role": "rollout"}}, **TP4)
    diff = diff_plans(before, after)
    assert diff.components["actor"] == {"role": ("actor", "rollout"), "tensor_parallel": (1, 4)}
    assert "  actor: role actor → rollout; tensor_parallel 1 → 4" in draw_diff(diff).plain
    assert diff.processes == ()
    assert diff


def test_other_words_for_the_same_places_are_no_difference(plan):
    assert not diff_plans(plan("1x4", {"actor": "all"}), plan("1x4", {"actor": "0-1,2-3"}))


def test_machines_that_differ(plan):
    diff = diff_plans(plan("2x4:H100", {"actor": "0-3"}), plan("3x4:H200", {"actor": "0-3"}))
    assert draw_diff(diff).plain.splitlines()[:2] == [
        "  nodes 0-1: GPU model: H100 → H200",
        "  node 2: machine: none → one with 4 GPUs (H200)",
    ]
    assert not diff_plans(plan("2x4", {"actor": "0-3"}), plan("2x4:H200", {"actor": "0-3"}))


def test_processes_without_accelerators_and_shared_ones(plan):
    before = plan("2x2", {"agent": {"node_group": "node", "placement": "0"}, "env": "0-1:0-3"})
    after = plan("2x2", {"agent": {"node_group": "node", "placement": "1"}, "env": "2-3:0-3"})
    assert table(diff_plans(before, after)) == [
        "~ agent[0] node 0 → node 1",
        "~ env[0-3] node 0 GPU 0 x2 · 1 x2 → node 1 GPU 0 x2 · 1 x2",
    ]


# Large jobs ----------------------------------------------------------------------------------


def test_like_nodes_share_a_row(plan):
    before = plan("1024x8", {"actor": "0-4095", "rollout": "4096-8191"})
    after = plan("1024x8", {"actor": "4096-8191", "rollout": "0-4095:0-1023"})
    assert table(diff_plans(before, after)) == [
        "~ actor[0-4095] nodes 0-511 GPU 0-7 → nodes 512-1023 GPU 0-7",
        "~ rollout[0-1023] nodes 512-639 GPU 0-7 → nodes 0-511 GPU 0-7, 4 each",
        "- rollout[1024-4095] nodes 640-1023 GPU 0-7",
    ]


def test_a_shift_out_of_step_with_the_nodes_is_one_row(plan):
    before = plan("1024x8", {"actor": "0-4095"})
    after = plan("1024x8", {"actor": "4-4099"})
    assert table(diff_plans(before, after)) == [
        "~ actor[0-4095] nodes 0-511 GPU 0-7 → node 0 GPU 4 … node 512 GPU 3 (0-7 of each)"
    ]


def test_half_nodes_are_not_called_whole(plan):
    halves = ",".join(f"{8 * node}-{8 * node + 3}" for node in range(64))
    before, after = plan("128x8", {"actor": halves}), plan("128x8", {"actor": "512-767"})
    assert table(diff_plans(before, after)) == ["~ actor[0-255] nodes 0-63 GPU 0-3 → nodes 64-95 GPU 0-7"]
    after = plan("128x8", {"actor": halves.replace("0-3", "2-3", 1)})
    assert table(diff_plans(before, after)) == [
        "~ actor[0-253] node 0 GPU 0 … node 63 GPU 1 (0-3 of each) → node 0 GPU 2 … node 63 GPU 3 (0-3 of each)",
        "- actor[254-255] node 63 GPU 2-3",
    ]


def test_what_is_still_too_long_is_cut_in_the_middle(plan):
    before = plan("512x8", {"actor": "0-2047:0-511"})
    after = plan("512x8", {"actor": "1-2048"})
    rows = table(diff_plans(before, after))
    assert len(rows) <= 47
    mixed = [f"{16 * i}-{16 * i + i % 7}" for i in range(200)]
    rows = table(diff_plans(plan("512x8", {"actor": ",".join(mixed)}), plan("512x8", {"env": "0"})))
    assert any("more rows" in row for row in rows)
    assert len(rows) == 46


def test_a_hundred_thousand_processes(plan):
    before = plan("12500x8", {"actor": "0-49999", "rollout": "50000-99999"})
    after = plan("12500x8", {"actor": "50000-99999", "rollout": "0-49999"})
    diff = diff_plans(before, after)
    assert diff.summary == "100,000 moved, 0 added, 0 removed"
    assert len(table(diff)) == 2


# The command line ----------------------------------------------------------------------------

JOB = "cluster:\n  component_placement:\n    actor: 0-3\n    rollout: 4-7\n"


def test_two_job_files(write, capsys):
    one, two = write(JOB), write(JOB.replace("4-7", "4-5"), "two.yaml")
    assert main(["diff", str(one), str(two), "--cluster", "1x8"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"{one} → {two}\n")
    assert "- rollout[2-3]   node 0 GPU 6-7" in printed
    assert printed.endswith("0 moved, 2 changed in place, 0 added, 2 removed\n")
    assert main(["diff", str(one), str(one), "--cluster", "1x8"]) == 0
    assert capsys.readouterr().out.endswith("no differences\n")


def test_a_job_file_on_other_machines_or_with_other_values(write, capsys):
    job = str(write(JOB))
    assert main(["diff", job, job, "--cluster", "1x8", "--cluster", "2x4"]) == 1
    printed = capsys.readouterr().out
    assert f"{job} on 1x8 → {job} on 2x4" in printed
    assert "~ rollout[0-3]   node 0 GPU 4-7 → node 1 GPU 0-3" in printed
    value = "cluster.component_placement.rollout=0-3"
    assert main(["diff", job, job, "--cluster", "1x8", "--set", value]) == 1
    assert "transport broadcast → ipc" in capsys.readouterr().out


def test_a_lock_a_plan_and_a_job_file(write, tmp_path, capsys):
    job, lock, kept = str(write(JOB)), str(tmp_path / "job.lock.json"), tmp_path / "plan.json"
    assert main(["plan", job, "--cluster", "1x8", "--lock", lock]) == 0
    kept.write_text(LockFile.load(lock).plan.to_json())
    for one in (job, lock, str(kept)):
        for two in (lock, str(kept)):
            assert main(["diff", one, two]) == 0
            assert main(["diff", two, one]) == 0
    assert main(["diff", lock, job, "--cluster", "2x4"]) == 1


def test_json(write, capsys):
    one, two = write(JOB), write(JOB.replace("4-7", "5-7"), "two.yaml")
    assert main(["diff", str(one), str(two), "--cluster", "1x8", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["same"]) == ("roost.diff/1", False)
    assert (found["moved"], found["changed"], found["added"], found["removed"]) == (3, 3, 0, 1)
    first, *_, last = found["processes"]
    assert (first["sign"], first["component"], first["rank"]) == ("~", "rollout", 0)
    assert first["before"] == {"node": 0, "accelerators": [4]}
    assert first["changes"]["accelerators"] == {"before": [4], "after": [5]}
    assert (last["sign"], last["rank"]) == ("-", 3)
    assert found["components"] == {"rollout": {"processes": {"before": 4, "after": 3}}}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["job.yaml", "job.yaml"], "U133"),
        (["job.yaml", "job.yaml", *["--cluster", "1x8"] * 3], "U133"),
        (["job.yaml", "no.yaml", "--cluster", "1x8"], "C101"),
        (["job.yaml", "job.yaml", "--cluster", "1x1"], "P105"),
        (["job.yaml", "job.yaml", "--cluster", "nonsense"], "T101"),
        (["job.yaml", "cut.json", "--cluster", "1x8"], "C403"),
        (["job.yaml", "foreign.json", "--cluster", "1x8"], "C402"),
        (["job.yaml", "plan.json", "--set", "a=1"], "U133"),
    ],
)
def test_trouble_is_2(arguments, code, write, tmp_path, capsys, monkeypatch, plan):
    write(JOB)
    one = plan("1x8", {"actor": "0-3"})
    write(LockFile.of(one).to_json()[:300].encode(), "cut.json")
    write(b'{"format": "somebody.else/1"}', "foreign.json")
    write(one.to_json().encode(), "plan.json")
    monkeypatch.chdir(tmp_path)
    assert main(["diff", *arguments]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


def test_live_needs_a_ray(write, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # jobs of others leave no notes here
    assert main(["diff", str(write(JOB)), "live"]) == 2
    assert "error[U105]" in capsys.readouterr().err


def test_uuids_are_compared_where_both_sides_know_them(plan):
    one = plan("1x2", {"actor": "0-1"})
    assert not diff_plans(one, one, (("a", "b"),), ())
    diff = diff_plans(one, one, (("a", "b"),), (("a", "c"),))
    assert [str(change) for change in diff.nodes] == ["node 0: GPU 1: planned b, found c"]


def test_names_with_markup_are_text(plan):
    one = plan("1x1", {"actor": "0"})
    named = replace(one, topology=Topology((replace(one.topology.nodes[0], name="[red]x"), Node(1, "[/]"))))
    assert "machine: none → [/]" in draw_diff(diff_plans(one, named)).plain

"""Locks of plans: kept, read back, and compared with the machines that are there."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import roost
from roost import LockFile, Node, Plan, Topology
from roost.cli import main
from roost.plan.lock_file import text_hash

NVIDIA = roost.AcceleratorType.NVIDIA


def machine(rank, letter, **facts):
    """``machine(1, "b")``: node 1 is gpu-b at 10.0.0.98."""
    usual = {
        "name": f"gpu-{letter}",
        "address": f"10.0.0.{ord(letter)}",
        "accelerator_ids": ("0", "1"),
        "accelerator_type": NVIDIA,
        "accelerator_model": "H200",
        "accelerator_memory_gib": 140.4,
    }
    return Node(rank, **{**usual, **facts})


def machines(letters, **facts):
    return Topology(tuple(machine(rank, letter, **facts) for rank, letter in enumerate(letters)))


def live(topology, uuids):
    """As much of a live cluster as a lock looks at."""

    def get_node_info(rank):
        return SimpleNamespace(accelerators=[SimpleNamespace(uuid=uuid) for uuid in uuids[rank]])

    return SimpleNamespace(topology=topology, get_node_info=get_node_info)


def lock_on(machines, job=None):
    job = job or {"cluster": {"component_placement": {"actor": "all"}}}
    return LockFile.of(Plan.resolve(job, machines), machines, "job.yaml", text_hash("text"))


def lines(lock, machines):
    return [str(difference) for difference in lock.differences(machines)]


# Keeping -------------------------------------------------------------------------------------


def test_a_lock_comes_back_as_it_was():
    lock = LockFile(lock_on(machines("ab")).plan, "../job.yaml", "00ff", ("a.b=1", 'c="ü"'), (("GPU-1", "GPU-2"), ()))
    text = lock.to_json()
    assert LockFile.from_json(text) == lock
    assert LockFile.from_json(text).to_json() == text


def test_a_lock_says_what_it_was_made_on_in_a_line_per_node():
    lock = lock_on(live(machines("ab"), [("GPU-1", "GPU-2"), ("GPU-3", "GPU-4")]))
    text = lock.to_json()
    row = '{"nodes": "1", "name": "gpu-b", "address": "10.0.0.98", "accelerators": "2 x NVIDIA H200 140.4 GiB", "uuids": ["GPU-3", "GPU-4"]}'
    assert f"  {row}]," in text.splitlines()
    assert json.loads(text)["fingerprint"] == lock.fingerprint
    assert json.loads(text)["plan"] == json.loads(lock.plan.to_json())


def test_like_nodes_that_nobody_named_share_a_line():
    text = lock_on(Topology.parse("1000x8:H200")).to_json()
    assert json.loads(text)["machines"] == [{"nodes": "0-999", "accelerators": "8 x NVIDIA H200"}]


def test_the_fingerprint_is_of_the_machines_alone():
    one = lock_on(machines("ab"))
    assert lock_on(machines("ab"), {"cluster": {"component_placement": {"env": "0"}}}).fingerprint == one.fingerprint
    assert lock_on(machines("ba")).fingerprint != one.fingerprint
    assert replace(one, uuids=(("GPU-1",), ())).fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("C402", lambda text: ""),
        ("C402", lambda text: "cluster: {}\n"),
        ("C402", lambda text: "[1]"),
        ("C402", lambda text: "{}"),
        ("C402", lambda text: '{"format": "roost.plan/1"}'),
        ("C405", lambda text: '{"format": "roost.lock/2"}'),
        ("C402", lambda text: resealed({"format": "roost.lock/2"})),
        ("C402", lambda text: resealed({**json.loads(text), "job": {"file": 7, "sha256": ""}})),
        ("C405", lambda text: resealed({**json.loads(text), "fingerprint": "00"})),
        ("C401", lambda text: resealed({**json.loads(text), "plan": {}})),
        ("C405", lambda text: text.replace('"machines"', '"engines"')),
        ("C402", lambda text: "<<<<<<< mine\n" + text),
        ("C402", lambda text: "[" * 100_000),
        ("C403", lambda text: text[: len(text) // 2]),
        ("C403", lambda text: text.rstrip()[:-1]),
        ("C404", lambda text: text.replace("roost.lock/2", "roost.lock/3")),
        ("C406", lambda text: text.replace("roost.lock/2", "roost.lock/1")),
        ("C402", lambda text: text.replace("roost.lock/2", "roost.lock/0")),
        ("C405", lambda text: text.replace('"nodes": "1", "name": "gpu-b"', '"nodes": "1", "name": "gpu-x"')),
        ("C405", lambda text: text.replace('"fingerprint": "', '"fingerprint": "0')),
        ("C405", lambda text: text.replace('"rank": 1', '"rank": 7')),
    ],
)
def test_what_is_no_sound_lock_is_refused(code, change, write):
    text = lock_on(machines("ab")).to_json()
    with pytest.raises(roost.ConfigError) as raised:
        LockFile.from_json(change(text))
    assert raised.value.codes == (code,)
    path = write(change(text).encode(), "job.lock.json")
    with pytest.raises(roost.ConfigError, match=r"job\.lock\.json: ") as raised:
        LockFile.load(path)
    assert raised.value.codes == (code,)


def resealed(plain):
    """The text of a lock that was changed on purpose, together with its checksum."""
    plain = {key: value for key, value in plain.items() if key != "checksum"}
    return json.dumps({**plain, "checksum": text_hash(json.dumps(plain, separators=(",", ":")))})


def mutations(value):
    """Copies of a JSON value in each of which one thing is different."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield {other: kept for other, kept in value.items() if other != key}
            yield from ({**value, key: changed} for changed in mutations(item))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield value[:index] + value[index + 1 :]
            yield from ([*value[:index], changed, *value[index + 1 :]] for changed in mutations(item))
        yield from ([*value, value[-1]] if value else [0], value[::-1] if value != value[::-1] else [None])
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value - 1, -1 if value >= 0 else 0, str(value), None)
    elif isinstance(value, str):
        yield from (f"{value}1", value[1:] if value else "0", None, [value])
    else:
        yield from (0, "")


def test_a_lock_in_which_anything_was_changed_is_refused_with_the_command_that_writes_it(write):
    uuids = [("GPU-1", "GPU-2"), ("GPU-3", "GPU-4")]
    job = {"cluster": {"component_placement": {"actor": "0-1", "rollout": "2-3"}}}
    sound = json.loads(lock_on(live(machines("ab"), uuids), job).to_json())
    count = 0
    for changed in mutations(sound):
        count += 1
        with pytest.raises(roost.ConfigError):
            LockFile.from_json(json.dumps(changed))
    assert count > 500
    sound["plan"]["components"][0]["processes"][0]["local_rank"] = -1
    path = write(json.dumps(sound).encode(), "my lock.json")
    with pytest.raises(
        roost.ConfigError, match="was changed after Roost wrote it: its checksum does not match"
    ) as raised:
        LockFile.load(path)
    assert f"--lock '{path}' --relock" in str(raised.value)


def test_white_space_of_a_lock_may_change():
    lock = lock_on(machines("ab"))
    assert LockFile.from_json(json.dumps(json.loads(lock.to_json()), indent=4)) == lock
    assert LockFile.from_json(lock.to_json().replace("\n", "\r\n")) == lock


def test_a_lock_that_is_not_there(tmp_path):
    with pytest.raises(roost.ConfigError, match="No such file"):
        LockFile.load(tmp_path / "job.lock.json")


# What is there now ---------------------------------------------------------------------------


def test_the_same_machines_do_not_differ():
    lock = lock_on(live(machines("abc"), [("1", "2"), ("3", "4"), ("5", "6")]))
    assert lines(lock, live(machines("abc"), [("1", "2"), ("3", "4"), ("5", "6")])) == []
    assert lines(lock, machines("abc")) == []


def test_what_one_side_does_not_know_is_no_difference():
    assert lines(lock_on(Topology.parse("2x2")), machines("ab")) == []
    assert lines(lock_on(machines("ab")), Topology.parse("2x2:H200")) == []
    assert lines(lock_on(machines("ab", name="")), machines("ab", name="computer")) == []


def test_nodes_beyond_those_of_the_plan_do_not_matter():
    assert lines(lock_on(machines("ab")), machines("abc")) == []


def test_a_node_that_is_gone():
    lock = lock_on(machines("abcd"))
    assert lines(lock, machines("abc")) == ["node 3: machine: planned gpu-d (10.0.0.100), found none: it is gone"]
    assert lines(lock, machines("acd")) == [
        "node 1: machine: planned gpu-b (10.0.0.98), found none: it is gone",
        "nodes 2-3: order: planned as nodes 2-3, found as nodes 1-2",
    ]
    assert lines(lock_on(Topology.parse("4x8")), Topology.parse("3x8")) == [
        "node 3: machine: planned one with 8 GPUs, found none: it is gone"
    ]


def test_another_machine_in_its_place():
    assert lines(lock_on(machines("ab")), machines("ax")) == [
        "node 1: machine: planned gpu-b (10.0.0.98), found gpu-x (10.0.0.120)"
    ]


def test_another_order():
    assert lines(lock_on(machines("abc")), machines("acb")) == [
        "node 1: order: planned as node 1, found as node 2",
        "node 2: order: planned as node 2, found as node 1",
    ]


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"accelerator_model": "H20"}, "nodes 0-1: GPU model: planned H200, found H20"),
        ({"accelerator_memory_gib": 80.0}, "nodes 0-1: GPU memory: planned 140.4 GiB, found 80 GiB"),
        ({"accelerator_ids": ("0",)}, "nodes 0-1: GPUs: planned 2, found 1"),
        ({"accelerator_ids": ("2", "3")}, "nodes 0-1: GPU ids: planned 0,1, found 2,3"),
        ({"accelerator_type": roost.AcceleratorType.AMD}, "nodes 0-1: GPU vendor: planned NVIDIA, found AMD"),
    ],
)
def test_other_cards(facts, line):
    assert lines(lock_on(machines("ab")), machines("ab", **facts)) == [line]


def test_cards_are_the_same_under_a_longer_name_and_with_a_little_less_memory():
    found = machines("ab", accelerator_model="NVIDIA H200-141GB", accelerator_memory_gib=139.8)
    assert lines(lock_on(machines("ab")), found) == []


def test_another_name_or_address_of_the_same_machine():
    lock = lock_on(machines("ab"))
    assert lines(lock, Topology((machine(0, "a"), machine(1, "b", name="new")))) == [
        "node 1: name: planned gpu-b, found new"
    ]
    assert lines(lock, Topology((machine(0, "a"), machine(1, "b", address="10.9.9.9")))) == [
        "node 1: address: planned 10.0.0.98, found 10.9.9.9"
    ]


def test_uuids_know_a_machine_again():
    lock = lock_on(live(machines("ab"), [("1", "2"), ("3", "4")]))
    swapped = live(machines("ab"), [("3", "4"), ("1", "2")])
    assert "node 0: order: planned as node 0, found as node 1" in lines(lock, swapped)
    assert lines(lock, live(machines("ab"), [("1", "2"), ("3", "9")])) == ["node 1: GPU 1: planned 4, found 9"]
    assert lines(lock, live(machines("ab"), [("2", "1"), ("3", "4")])) == [
        "node 0: GPU 0: planned 1, found 2",
        "node 0: GPU 1: planned 2, found 1",
    ]


def test_many_differences_stay_few_lines():
    lock = lock_on(machines([chr(i) for i in range(1000, 2000)]))
    found = machines([chr(i) for i in range(1000, 2000)], accelerator_model="B200")
    assert lines(lock, found) == ["nodes 0-999: GPU model: planned H200, found B200"]


# The command line ----------------------------------------------------------------------------

JOB = "run: json:dumps\ncluster:\n  component_placement:\n    actor: 0-3\n"


def test_plan_writes_a_lock_and_says_where(write, tmp_path, capsys):
    job = write(JOB)
    (tmp_path / "locks").mkdir()
    path = tmp_path / "locks" / "job.lock.json"
    assert main(["plan", str(job), "--cluster", "2x2", "--set", "cluster.num_nodes=2", "--lock", str(path)]) == 0
    assert f"wrote {path}: 2 nodes x 2 GPUs, fingerprint " in capsys.readouterr().out
    lock = LockFile.load(path)
    assert (lock.job_file, lock.job_hash) == ("../job.yaml", text_hash(job.read_bytes()))
    assert lock.settings == ("cluster.num_nodes=2",)
    text = path.read_text()
    assert main(["plan", str(job), "--cluster", "2x2", "--set", "cluster.num_nodes=2", "--lock", str(path)]) == 0
    assert path.read_text() == text


def test_plan_with_json_and_a_lock_prints_json_alone(write, tmp_path, capsys):
    path = tmp_path / "job.lock.json"
    assert main(["plan", str(write(JOB)), "--cluster", "2x2", "--json", "--lock", str(path)]) == 0
    printed = capsys.readouterr()
    assert Plan.from_json(printed.out) == LockFile.load(path).plan
    assert "wrote" in printed.err


def test_a_plan_with_problems_is_not_kept(write, tmp_path, capsys):
    job = write(
        "cluster: {component_placement: {a: {placement: 0, gpu_share: 0.8}, b: {placement: 0, gpu_share: 0.8}}}"
    )
    path = tmp_path / "job.lock.json"
    assert main(["plan", str(job), "--cluster", "1x1", "--lock", str(path)]) == 1
    printed = capsys.readouterr()
    assert "error[K101]" in printed.err
    assert "was not written" in printed.err
    assert not path.exists()


def locked(write, tmp_path, text=JOB):
    job, path = write(text), tmp_path / "job.lock.json"
    assert main(["plan", str(job), "--cluster", "2x2", "--lock", str(path)]) == 0
    return job, path


def test_run_stops_where_the_machines_differ(write, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    _, path = locked(write, tmp_path)
    assert main(["run", "--lock", str(path), "--cluster", "1x4"]) == 1
    printed = capsys.readouterr()
    assert "error[K201]" in printed.err
    assert "node 1: machine: planned one with 2 GPUs, found none: it is gone" in printed.err
    assert "--relock" in printed.err


def test_run_stops_where_the_job_places_something_else(write, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job, path = locked(write, tmp_path)
    job.write_text(JOB.replace("0-3", "1-3"))
    assert main(["run", str(job), "--lock", str(path), "--cluster", "2x2"]) == 1
    printed = capsys.readouterr()
    assert "error[K202]" in printed.err
    assert "3 moved, 0 added, 1 removed" in printed.out
    job.write_text(JOB.replace("0-3", "0-9"))
    assert main(["run", str(job), "--lock", str(path), "--cluster", "2x2"]) == 1
    assert "error[P105]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["run"], "U131"),
        (["run", "job.yaml", "--relock"], "U131"),
        (["run", "--lock", "no.lock.json"], "U132"),
        (["run", "--lock", "no.lock.json", "--relock"], "U131"),
    ],
)
def test_wrong_usage(arguments, code, write, tmp_path, capsys, monkeypatch):
    write(JOB)
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--cluster", "1x1"]) == 2
    assert f"error[{code}]" in capsys.readouterr().err


def test_a_lock_whose_job_file_is_gone(write, tmp_path, capsys):
    job, path = locked(write, tmp_path)
    job.unlink()
    assert main(["run", "--lock", str(path), "--cluster", "2x2"]) == 2
    assert "error[C101]" in capsys.readouterr().err

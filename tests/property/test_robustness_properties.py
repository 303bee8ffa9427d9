"""Whatever comes in: a result or a ``RoostError``, within a second."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from generators import anything, jobs, mutated, near_clusters, near_jobs, near_texts, only_roost_errors, topologies
from hypothesis import example, given, settings
from hypothesis import strategies as st

import roost
from roost import Plan, RoostError, Topology

AT_MOST_MS = 20_000  # nothing may take for ever, whatever it is given; how quick things are is measured elsewhere
LOOPS, LOOPS_S = 3_000_000, 0.06  # so many empty loops, and the seconds that they take on an ordinary machine
MACHINES = Topology.parse("2x8+1x3:AMD/MI300+1x0")

bounded = settings(deadline=AT_MOST_MS, max_examples=150)


def plan_and_check(config: Any, topology: Topology = MACHINES) -> None:
    """Everything that a job goes through on its way to a launch."""
    found = only_roost_errors(lambda: Plan.resolve(config, topology))
    if isinstance(found, Plan):
        assert all(str(finding) for finding in found.check())
        assert Plan.from_json(found.to_json()) == found
    for reader in (roost.ComponentPlacement, roost.HybridComponentPlacement, roost.ModelParallelComponentPlacement):
        only_roost_errors(lambda reader=reader: reader(config, topology))


@bounded
@given(st.one_of(st.text(), near_texts(total=19)))
def test_any_placement_text(text: str) -> None:
    found = only_roost_errors(
        lambda: roost.ComponentPlacement({"cluster": {"component_placement": {"actor": text}}}, MACHINES)
    )
    assert isinstance(found, (roost.ComponentPlacement, roost.PlacementError)), "a placement fault is a PlacementError"
    plan_and_check({"cluster": {"component_placement": {"actor": {"placement": text, "node_group": "node"}}}})


@settings(bounded, max_examples=400)
@given(st.one_of(near_jobs(), near_jobs(), anything()))
@example({"cluster": {"component_placement": {"actor": 0}, "placement_mode": ["auto"]}})
@example({"cluster": {"num_nodes": 10**5000}})
def test_any_data_as_a_job(config: Any) -> None:
    plan_and_check(config)


@bounded
@given(st.one_of(near_jobs(), anything()))
def test_any_data_as_node_groups(config: Any) -> None:
    only_roost_errors(lambda: MACHINES.with_groups(config))


@bounded
@given(st.one_of(near_clusters(), anything()))
@example({"nodes": [{"accelerators": {"ids": [str(i) for i in range(5000)]}}]})
def test_any_data_as_a_cluster(config: Any) -> None:
    found = only_roost_errors(lambda: Topology.from_dict(config))
    if isinstance(found, Topology):
        assert Topology.from_json(found.to_json()) == found


class Lazy(Mapping[str, Any]):
    """A mapping that makes its values anew whenever it is asked, as configuration libraries do."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        value = self.data[key]
        return Lazy(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)


@given(topologies(), st.data())
def test_any_mapping_is_read_like_a_dict(topology: Topology, data: st.DataObject) -> None:
    job = data.draw(jobs(topology))
    expected = only_roost_errors(lambda: Plan.resolve(job, topology))
    found = only_roost_errors(lambda: Plan.resolve(Lazy(job), topology))
    if isinstance(expected, Plan):
        assert found == expected
    else:
        assert found.findings == expected.findings


YAML_SLIPS = "0123456789-::,, \t\n\n[]{}&*!|>'\"%@`#?<~=\\\0\x85\u2028é😀null"


@st.composite
def near_yaml(draw: st.DrawFn, sound: st.SearchStrategy[Any]) -> str:
    """YAML of nearly sound data, with slips of the hand."""
    data = _sayable(draw(sound))
    text = yaml.safe_dump(data, default_flow_style=draw(st.sampled_from([None, True, False])))
    return draw(mutated(st.just(text), YAML_SLIPS, most=4))


def _sayable(data: Any) -> Any:
    """The same data, with an empty text for what YAML has no word for."""
    if isinstance(data, dict):
        return {_sayable(key): _sayable(value) for key, value in data.items() if not isinstance(key, tuple)}
    if isinstance(data, (list, tuple)):
        return [_sayable(item) for item in data]
    if data is None or isinstance(data, (bool, float, str)) or (isinstance(data, int) and abs(data) < 10**500):
        return data
    return ""


def read_back(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    config = only_roost_errors(lambda: roost.load_config(path))
    if not isinstance(config, RoostError):
        plan_and_check(config)
        plan_and_check(config.to_dict())
        assert list(config) == list(config.to_dict())
    only_roost_errors(lambda: Topology.load(path))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml") / "job.yaml"


@bounded
@given(st.one_of(st.text().map(str.encode), st.binary()))
def test_any_file(scratch: Path, content: bytes) -> None:
    read_back(scratch, content)


@bounded
@given(near_yaml(st.one_of(topologies().flatmap(jobs), near_jobs())))
def test_nearly_sound_job_files(scratch: Path, text: str) -> None:
    read_back(scratch, text.encode("utf-8", "replace"))


@bounded
@given(near_yaml(st.one_of(topologies().map(Topology.to_dict), near_clusters())))
def test_nearly_sound_cluster_files(scratch: Path, text: str) -> None:
    read_back(scratch, text.encode("utf-8", "replace"))


@bounded
@given(
    st.one_of(st.text(), mutated(st.sampled_from(["2x8", "8x8:A800+8x8:4090+2x0", "1x8:Ascend/910B"]), "0123x:+ /-A×٣"))
)
def test_any_cluster_text(text: str) -> None:
    only_roost_errors(lambda: Topology.parse(text))


@bounded
@given(st.one_of(st.text(), mutated(st.just(MACHINES.to_json()), '0123x:"{}[],nul-', most=4)))
def test_any_text_as_a_saved_topology(text: str) -> None:
    only_roost_errors(lambda: Topology.from_json(text))


@cache
def saved_plan() -> str:
    return Plan.resolve(
        {"cluster": {"component_placement": {"actor": "0-3", "rollout": "0-3:0-1"}}}, MACHINES
    ).to_json()


@bounded
@given(st.one_of(st.text(), mutated(st.builds(saved_plan), '0123x:"{}[],nul-', most=3)))
def test_any_text_as_a_saved_plan(text: str) -> None:
    found = only_roost_errors(lambda: Plan.from_json(text))
    if isinstance(found, Plan):
        found.check()


@bounded
@given(st.data())
def test_any_value_in_a_saved_plan(data: st.DataObject) -> None:
    """One value, anywhere in the file, replaced by anything that JSON can say."""
    plan = json.loads(saved_plan())
    spot: Any = plan
    for _ in range(data.draw(st.integers(0, 5))):
        children = list(spot) if isinstance(spot, dict) else list(range(len(spot))) if isinstance(spot, list) else []
        if not children:
            break
        key = data.draw(st.sampled_from(children))
        if data.draw(st.integers(0, 2)) == 0 or not isinstance(spot[key], (dict, list)):
            spot[key] = data.draw(st.sampled_from([None, True, -1, 3, 1e300, "x", [], {}, [1], {"a": []}, 10**30]))
            break
        spot = spot[key]
    found = only_roost_errors(lambda: Plan.from_json(json.dumps(plan)))
    if isinstance(found, Plan):
        only_roost_errors(found.check)


@pytest.mark.parametrize(
    ("sound", "wrong"),
    [
        ('"cluster_node_rank": 0', '"cluster_node_rank": -1'),
        ('"cluster_node_rank": 0', '"cluster_node_rank": 99'),
        ('"local_hardware_ranks": [0]', '"local_hardware_ranks": [-1]'),
        ('"local_hardware_ranks": [0]', '"local_hardware_ranks": [8]'),
        ('"name": "actor"', '"name": null'),
        ('"gpu_share": null', '"gpu_share": "half"'),
        ('"node_group_label": "cluster"', '"node_group_label": "nowhere"'),
    ],
)
def test_a_saved_plan_that_cannot_be_is_refused(sound: str, wrong: str) -> None:
    saved = saved_plan()
    assert sound in saved
    with pytest.raises(RoostError):
        Plan.from_json(saved.replace(sound, wrong))


# Inputs made to hurt: each is small, and must cost little. -------------------------------------


def _bomb() -> Any:
    value: Any = {"x": "y"}
    for _ in range(20):
        value = {"l": value, "r": value}
    return value


def _job(placements: Any, **more: Any) -> Any:
    return {"cluster": {"component_placement": placements, **more}}


def _arms(count: int) -> Any:
    configs = [{"node_rank": i % 3, "ip": f"10.0.{i}"} for i in range(count)]
    return [{"label": "arms", "node_ranks": "0-2", "hardware": {"type": "Arm", "configs": configs}}]


def _seconds(function: Callable[[], Any]) -> float:
    """CPU time until a person has the answer, or the full text of the error."""
    start = time.process_time()
    try:
        function()
    except RoostError as error:
        str(error)
    return time.process_time() - start


def _limit_s() -> float:
    """Two seconds of CPU time; on a slow machine as many more as a loop takes longer there."""
    start = time.process_time()
    for _ in range(LOOPS):
        pass
    return 2.0 * max(1.0, (time.process_time() - start) / LOOPS_S)


HURTING = {
    "data that doubles twenty times": lambda: {"cluster": _bomb()},
    "20,000 components, all wrong": lambda: _job({f"c{i}": "x" for i in range(20_000)}),
    "5,000 unknown keys": lambda: _job({"actor": 0}, **{f"num_node{i}": 1 for i in range(5_000)}),
    "a text of 200,000 commas": lambda: _job({"actor": "," * 200_000}),
    "a text of a million digits": lambda: _job({"actor": "1" * 1_000_000}),
    "a text of a million spaces": lambda: _job({"actor": " " * 1_000_000 + "x"}),
    "50,000 segments, one backwards": lambda: _job({"actor": ",".join(map(str, range(50_000))) + ",9-1"}),
    "10,000 segments on nodes that are not there": lambda: _job({"actor": ",".join(f"{2 * i}" for i in range(10_000))}),
    "a range of a billion": lambda: _job({"actor": "0-999999999999"}),
    "a label of 100,000 letters": lambda: _job({"actor": {"placement": 0, "node_group": "a" * 100_000}}),
    "10,000 labels that are not there": lambda: _job(
        {"actor": {"placement": 0, "node_group": [f"a{i}" for i in range(10_000)]}}
    ),
    "12,000 robots": lambda: _job({"env": {"placement": "all", "node_group": "arms"}}, node_groups=_arms(12_000)),
    "an int with 5,001 digits": lambda: _job({"actor": 10**5000}),
}


@pytest.mark.parametrize("name", HURTING)
def test_inputs_made_to_hurt(name: str) -> None:
    config = HURTING[name]()
    took_s = _seconds(lambda: Plan.resolve(config, MACHINES))
    assert took_s < _limit_s()


YAML_HURTING = {
    "a billion laughs": "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "\n".join(f"{b}: &{b} [{','.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "ten thousand brackets": "a: " + "[" * 10_000,
    "a hundred thousand open mappings": "{a: " * 100_000,
    "one long line, 50 faults": "cluster: {component_placement: {"
    + ", ".join(f"c{i}: x" for i in range(50_000))
    + "}}",
    "a tab on each of 50,000 lines": "a:\n" + "\tb: 1\n" * 50_000,
    "20,000 duplicate keys": "a: 1\n" * 20_000,
    "merge keys": "a: &a {x: 1}\n" + "\n".join(f"k{i}: {{<<: [{','.join(['*a'] * 50)}]}}" for i in range(1000)),
    "unknown keys": "cluster:\n  component_placement: {actor: 0}\n"
    + "".join(f"  num_node{i}: 1\n" for i in range(5_000)),
}


@pytest.mark.parametrize("name", YAML_HURTING)
def test_files_made_to_hurt(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(YAML_HURTING[name])
    took_s = _seconds(lambda: Plan.resolve(roost.load_config(path), MACHINES))
    assert took_s < _limit_s()


def test_a_long_key_over_many_values_takes_little_memory(tmp_path: Path) -> None:
    """Every value knows its path; a path must not cost its full length for every value."""
    path = tmp_path / "job.yaml"
    path.write_text(f"? {'k' * 10_000}\n: [{','.join('1' * 5_000)}]\ncluster: {{component_placement: {{actor: 0}}}}\n")
    tracemalloc.start()
    try:
        config = roost.load_config(path)
        assert len(config["k" * 10_000]) == 5_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * 2**20, f"{peak / 2**20:.0f} MiB for a file of {path.stat().st_size / 1024:.0f} KiB"

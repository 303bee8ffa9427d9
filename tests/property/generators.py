"""Machines, jobs and texts that hypothesis makes up."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from reference_model import resources_of

import roost
from roost import Hardware, Node, NodeGroup, Topology

LABELS = ["a800", "4090", "cpu-only", "robots", "räck 7"]


@roost.register_hardware("Arm")
@dataclass
class Arm:
    ip: str
    camera: str = ""
    joints: int = 7


@roost.register_hardware("Pad")
@dataclass
class Pad:
    """A device that nobody can tell from another of its kind."""


# Machines ------------------------------------------------------------------------------------

VENDORS = [
    (roost.AcceleratorType.NVIDIA, "H200"),
    (roost.AcceleratorType.NVIDIA, ""),
    (roost.AcceleratorType.AMD, "MI300"),
    (roost.AcceleratorType.ASCEND, "910B"),
]


@st.composite
def nodes(draw: st.DrawFn, most: int = 6) -> tuple[Node, ...]:
    """Uneven nodes: some without accelerators, some with ids that are not numbered from 0."""
    made = []
    for rank in range(draw(st.integers(1, most))):
        count = draw(st.sampled_from([0, 1, 2, 3, 4, 4, 8]))
        kind, model = draw(st.sampled_from(VENDORS)) if count else (roost.AcceleratorType.NO_ACCEL, "")
        first = draw(st.sampled_from([0, 0, 0, 4]))
        ids = tuple(str(first + i) for i in range(count))
        cpus = draw(st.sampled_from([None, 4.0, 64.0, 0.5]))
        memory_gib = draw(st.sampled_from([None, 80.0, 141.5])) if count else None
        made.append(
            Node(
                rank,
                name=draw(st.sampled_from(["", f"gpu-{rank}"])),
                address=draw(st.sampled_from(["", f"10.0.0.{rank}"])),
                cpus=cpus,
                accelerator_ids=ids,
                accelerator_type=kind,
                accelerator_model=model,
                accelerator_memory_gib=memory_gib,
                labels=draw(st.sampled_from([{}, {}, {"rack": "r1"}, {"zone": "z", "rack": "7"}])),
            )
        )
    return tuple(made)


@st.composite
def topologies(draw: st.DrawFn, most: int = 6) -> Topology:
    """Nodes, and groups that have no node in common; one of them may count robots."""
    made = draw(nodes(most))
    left = list(range(len(made)))
    groups = []
    for label in draw(st.permutations(LABELS)):
        ranks = tuple(sorted(draw(st.sets(st.sampled_from(left))))) if left else ()
        if not ranks:
            continue
        left = [rank for rank in left if rank not in ranks]
        if label == "robots":
            hardware = tuple(
                (rank, Hardware("Arm", {"ip": f"10.1.{rank}.{i}"}))
                for rank in ranks
                for i in range(draw(st.integers(0, 3)))
            )
            groups.append(NodeGroup(label, ranks, "Arm", hardware))
        else:
            groups.append(NodeGroup(label, ranks))
    return Topology(made, tuple(groups))


def labels_of(topology: Topology) -> st.SearchStrategy[list[str]]:
    """Node groups that a component may count in: none said, a reserved one, or some, in any order."""
    some = [group.label for group in topology.groups]
    lists = [st.just([]), st.just(["node"]), st.just(["cluster"])]
    if some:
        lists.append(st.lists(st.sampled_from(some), min_size=1, max_size=3, unique=True))
    return st.one_of(lists)


# Placement texts -----------------------------------------------------------------------------


@st.composite
def placement_texts(draw: st.DrawFn, total: int) -> str:
    """Texts for so many resources, most of them sound: ascending segments, counts that mostly divide."""
    if not total or draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(["all", "0", "all:0-7", "0-7", " 0 - 1 : 0 "]))
    bounds = sorted(draw(st.sets(st.integers(0, total), min_size=2, max_size=6)))
    if len(bounds) % 2:
        bounds.pop()
    parts = []
    process = 0
    for first, end in zip(bounds[::2], bounds[1::2], strict=True):
        count = end - first
        if draw(st.booleans()):
            parts.append(_written(first, end))
            process += count
            continue
        divisors = [d for d in range(1, count + 1) if count % d == 0]
        processes = draw(st.sampled_from([*divisors, count * 2, count * 3, count + 1]))
        parts.append(f"{_written(first, end)}:{_written(process, process + processes)}")
        process += processes
    return draw(st.sampled_from([",", ", ", " ,\t"])).join(parts)


def _written(first: int, end: int) -> str:
    return f"{first}" if end == first + 1 else f"{first}-{end - 1}"


@st.composite
def mutated(draw: st.DrawFn, texts: st.SearchStrategy[str], alphabet: str, most: int = 3) -> str:
    """A text with a few slips of the hand: a character lost, added, changed; a piece twice, or gone."""
    text = draw(texts)
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(text)))
        to = draw(st.integers(at, min(len(text), at + 12)))
        slip = draw(st.sampled_from(["delete", "insert", "replace", "double"]))
        if slip == "delete":
            text = text[:at] + text[to:]
        elif slip == "insert":
            text = text[:at] + draw(st.sampled_from(alphabet)) + text[at:]
        elif slip == "replace":
            text = text[:at] + draw(st.sampled_from(alphabet)) + text[at + 1 :]
        else:
            text = text[:to] + text[at:to] + text[to:]
    return text


SLIPS = "0123456789-::,,, \tallx.+_٣−–\n"
HUGE = ["999999999999", "9" * 30, "7" * 5000, "-1", "0x10", "1e3", "１２", "\0", "𝟘", "${n}", "::", ",,", "null"]


@st.composite
def near_texts(draw: st.DrawFn, total: int = 16) -> str:
    """Placement texts with slips, and perhaps something huge or strange in the middle."""
    text = draw(mutated(placement_texts(total), SLIPS))
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.sampled_from(HUGE)) + text[at:]
    return text


# Jobs ----------------------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn, topology: Topology) -> dict[str, Any]:
    """A job on these machines, most of them sound, with the extra keys that components may have."""
    components: dict[str, Any] = {}
    for name in draw(st.sets(st.sampled_from(["actor", "rollout", "reward", "env", "a,b"]), min_size=1)):
        labels = draw(labels_of(topology))
        text = draw(placement_texts(len(resources_of(topology, labels))))
        entry: dict[str, Any] = {"placement": text}
        if labels:
            entry["node_group"] = draw(st.sampled_from([labels, ",".join(labels)]))
        entry |= draw(
            st.fixed_dictionaries(
                {},
                optional={
                    "gpu_share": st.sampled_from([0.1, 0.25, 1, 0.5]),
                    "cpus": st.sampled_from([1, 2.5, 32]),
                    "memory_gib": st.sampled_from([10, 79.5]),
                    "role": st.sampled_from(["actor", "rollout", "critic"]),
                },
            )
        )
        components[name] = entry if len(entry) > 1 or draw(st.booleans()) else text
    job: dict[str, Any] = {"cluster": {"component_placement": components}}
    if draw(st.booleans()):
        job["rollout"] = {"tensor_parallel_size": draw(st.integers(1, 4))}
    if draw(st.booleans()):
        job["cluster"]["num_nodes"] = len(topology.nodes)
    return job


@st.composite
def shuffled(draw: st.DrawFn, value: Any) -> Any:
    """The same data with the keys of every mapping in another order; lists stay as they are."""
    if isinstance(value, dict):
        return {key: draw(shuffled(value[key])) for key in draw(st.permutations(list(value)))}
    if isinstance(value, list):
        return [draw(shuffled(item)) for item in value]
    return value


# Anything ------------------------------------------------------------------------------------

ABSURD = st.sampled_from([1, -1]).map(lambda sign: sign * 10**5000)
"""Numbers with more digits than Python is willing to print."""

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 20),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    near_texts(),
    st.binary(max_size=4),
    ABSURD,
    st.sampled_from([1j, datetime.date(2024, 1, 2), object, frozenset({1}), Ellipsis]),
)
KEYS = st.one_of(st.text(max_size=8), st.integers(), st.none(), st.booleans(), st.floats(), st.tuples(st.integers()))


def anything() -> st.SearchStrategy[Any]:
    """Nested Python data of any kind."""
    return st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.tuples(inner, inner),
            st.dictionaries(KEYS, inner, max_size=4),
        ),
        max_leaves=8,
    )


def near(*sound: Any) -> st.SearchStrategy[Any]:
    """Mostly one of these sound values, at times anything at all."""
    return st.one_of([st.sampled_from(sound)] * 3 + [anything()])


def some_of(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """A mapping with some of these keys, and at times one that nobody knows; at times no mapping at all."""
    known = st.fixed_dictionaries({}, optional=values)
    stray = st.builds(lambda base, key, value: {**base, key: value}, known, KEYS, anything())
    return st.one_of(known, known, known, stray, anything())


def near_groups() -> st.SearchStrategy[Any]:
    ranks = near(0, "0-1", [0, 1], "1", "0,1", ["0", 1], "0-999999999999")
    variables = some_of(A=near("x", 1, ""), RANK=near("1"), CUDA_VISIBLE_DEVICES=near("0"))
    environment = some_of(
        node_ranks=ranks, env_vars=st.lists(variables, max_size=2) | anything(), python_interpreter_path=near("/py")
    )
    arm = some_of(node_rank=near(0, 1, 7), ip=near("x"), camera=near("y"), joints=near(7, "seven"))
    hardware = some_of(type=near("Arm", "Leg"), configs=st.lists(arm, max_size=3) | anything())
    group = some_of(
        label=near("a", "b", 4090, "node", "x,y"),
        node_ranks=ranks,
        hardware=hardware,
        env_configs=st.lists(environment, max_size=2) | anything(),
    )
    return st.lists(group, max_size=3) | anything()


def near_jobs() -> st.SearchStrategy[Any]:
    """Jobs in which anything may be wrong, and most is right, so that deep code is reached."""
    component = st.one_of(
        near_texts(),
        some_of(
            placement=st.one_of(near_texts(), near("0-7", "all", 3, 180)),
            node_group=near("a", "a,b", ["b", "a"], "node", 4090, "cluster"),
            role=near("actor", "rollout", "inference"),
            gpu_share=near(0.5, 1),
            cpus=near(1),
            memory_gib=near(80),
        ),
    )
    placements = some_of(
        actor=component,
        rollout=component,
        inference=component,
        reward=component,
        critic=component,
        **{"x,y": component},
    )
    cluster = some_of(
        component_placement=placements,
        num_nodes=near(1, 2, 3),
        node_groups=near_groups(),
        auto_scheduler=near(True, False),
        placement_mode=near("collocated", "disaggregated", "auto", "hybrid"),
    )
    size = near(1, 2, 4)
    model = some_of(tensor_model_parallel_size=size, context_parallel_size=size, pipeline_model_parallel_size=size)
    return some_of(
        cluster=cluster,
        actor=some_of(model=model),
        inference=some_of(model=model),
        rollout=some_of(tensor_parallel_size=size, pipeline_parallel_size=size),
        algorithm=some_of(recompute_logprobs=near(True)),
    )


def near_clusters() -> st.SearchStrategy[Any]:
    """Cluster descriptions in which anything may be wrong, and most is right."""
    accelerators = some_of(
        count=near(8, 0, 5000), model=near("H200"), vendor=near("NVIDIA", "amd", "NVIDA"), memory_gib=near(80),
        ids=near(["0", "1"], ["a", "a"], [3]),
    )  # fmt: skip
    node = some_of(
        count=near(1, 2, 2**21),
        name=near("gpu", ["a", "b"]),
        address=near("10.0.0.1", ["10.0.0.1", "10.0.0.2"]),
        cpus=near(64),
        memory_gib=near(512),
        accelerators=st.one_of(near(8), accelerators),
        labels=near({"rack": "r1"}, {}),
        hardware=st.lists(some_of(type=near("Arm", "Leg"), ip=near("x")), max_size=2) | anything(),
        group=near("a", "b", "node"),
    )
    return some_of(nodes=st.lists(node, max_size=3) | anything(), node_groups=near_groups())


# What an error must be -----------------------------------------------------------------------


def only_roost_errors(function: Callable[[], Any]) -> Any:
    """Calls; a ``RoostError`` is given back if it is a good one; anything else goes up and fails the test."""
    try:
        return function()
    except roost.RoostError as raised:
        error = raised
    assert error.findings, "an error says what is wrong"
    text = str(error)
    assert all(finding.code in text and finding.render() for finding in error.findings[:20])
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert type(copy) is type(error)
    assert copy.findings == error.findings
    assert str(copy) == text
    if any(code.startswith("P") for code in error.codes):
        assert isinstance(error, roost.PlacementError)
    return error

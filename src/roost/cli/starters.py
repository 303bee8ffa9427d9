"""First job files, one per layout, for a given topology."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import groupby

from roost.cli.inputs import UsageError
from roost.cli.writing import Writer, ranks
from roost.errors import Finding, Fix
from roost.topology import Node, Topology

__all__ = ["LAYOUTS", "Starter", "start"]

LAYOUTS = ("collocated", "disaggregated", "hybrid", "heterogeneous")
ROBOTS = 2
"""Number of nodes with robots that are added to a topology without them."""

_SIZES_NOTE = "Parallel sizes. Everything else in these sections, and all other sections, are yours."
_ROBOTS_MODULE = '''"""Hardware types of the job: --import {module}"""

from dataclasses import dataclass

import roost


@roost.register_hardware("Franka")
@dataclass
class Franka:
    """A robot arm. Its fields are what hardware.configs may and must say."""

    robot_ip: str
    camera: str = ""
'''


@dataclass
class Starter:
    """What ``roost init`` writes.

    Attributes:
        job: The text of the job file.
        cluster: The value of ``--cluster`` for the next commands.
        beside: Further files, by name.
        imports: A module to import; may be empty.
    """

    job: str
    cluster: str
    beside: dict[str, str] = field(default_factory=dict)
    imports: str = ""


def start(layout: str, topology: Topology, cluster: str, stem: str) -> Starter:
    """Return the first files of a job.

    Args:
        layout: One of :data:`LAYOUTS`.
        topology: The nodes.
        cluster: The user's text for them.
        stem: The name of the job file, without its extension.

    Raises:
        UsageError: If there are too few accelerators or nodes for the layout (U131).
    """
    sizes = [node.num_accelerators for node in topology.nodes]
    if not any(sizes):
        raise _too_few(f"there are no accelerators: {topology.describe()}", "--cluster 2x8")
    if layout == "heterogeneous":
        return _heterogeneous(topology, cluster, stem)
    writer = Writer()
    write = {"collocated": _collocated, "disaggregated": _disaggregated, "hybrid": _hybrid}[layout]
    write(writer, topology, sizes)
    return Starter(writer.text(), cluster)


def _too_few(message: str, paste: str) -> UsageError:
    return UsageError([Finding("U131", message, fixes=(Fix("for example", paste),))])


# The layouts ------------------------------------------------------------------------------------


def _head(writer: Writer, about: str, topology: Topology, mode: str = "") -> None:
    writer.comment(f"{about}\nFor {topology.describe()}.").key("cluster")
    writer.key("num_nodes", topology.num_nodes, "the first so many nodes of the cluster", depth=1)
    if mode:
        writer.key("placement_mode", mode, "required: another placement is refused", depth=1)


def _collocated(writer: Writer, topology: Topology, sizes: list[int]) -> None:
    total, actor, engine = sum(sizes), _fitting(sizes, 4), _fitting(sizes, 2)
    about = "Collocated: trainer and rollout engines share all GPUs, in turn; weights are handed over in place."
    _head(writer, about, topology, "collocated")
    everything = ranks(0, total)
    writer.key("component_placement", depth=1)
    _component(writer, "actor", everything, "all GPUs: one trainer process each", 0.8)
    _component(writer, "rollout", everything, "the same GPUs; tensor_parallel_size makes engines", 0.2)
    _reward(writer)
    _parallel(writer, actor, engine)


def _disaggregated(writer: Writer, topology: Topology, sizes: list[int]) -> None:
    trainer, engines = _halves(sizes, "disaggregated")
    about = "Disaggregated: trainer and rollout engines have GPUs of their own, and work at the same time."
    _head(writer, about, topology, "disaggregated")
    first, rest = sum(trainer), sum(engines)
    writer.key("component_placement", depth=1)
    writer.key("actor", ranks(0, first), f"{_gpus(first)}, one trainer process each", depth=2)
    writer.key("rollout", ranks(first, rest), f"{_gpus(rest)}; tensor_parallel_size makes engines", depth=2)
    _reward(writer)
    _parallel(writer, _fitting(trainer, 4), _fitting(engines, 2))


def _hybrid(writer: Writer, topology: Topology, sizes: list[int]) -> None:
    total = sum(sizes)
    about = "Hybrid: any sets. The trainer has all GPUs; simulators share one part of them, engines the other."
    _head(writer, about, topology, "hybrid")
    writer.key("component_placement", depth=1)
    if total == 1:
        _component(writer, "actor", "0", "everybody is on the one GPU", 0.4)
        _component(writer, "rollout", "0", "an engine", 0.4)
        _component(writer, "env", "0", "a simulator", 0.2)
        _parallel(writer, 1, 1)
        return
    simulators, engines = _halves(sizes, "hybrid")
    first, rest = sum(simulators), sum(engines)
    size = _fitting(engines, 2)
    _component(writer, "actor", ranks(0, total), "all GPUs: one trainer process each", 0.4)
    placement = ranks(first, rest) + (f":{ranks(0, rest // size)}" if size > 1 else "")
    _component(writer, "rollout", placement, f"{rest // size} engines of {_gpus(size)}", 0.6)
    placement = f"{ranks(0, first)}:{ranks(0, 2 * first)}"
    _component(writer, "env", placement, f"{2 * first} simulators, two on each of {_gpus(first)}", 0.3, cpus=4)
    _parallel(writer, _fitting(sizes, 4), size)


def _heterogeneous(topology: Topology, cluster: str, stem: str) -> Starter:
    gpus = [node for node in topology.nodes if node.num_accelerators]
    robots = [node.rank for node in topology.nodes if not node.num_accelerators]
    beside: dict[str, str] = {}
    module = f"{stem}_robots".replace("-", "_").replace(".", "_")
    if not robots:
        if any(node.name or node.address for node in topology.nodes):
            message = f"robots live on nodes without accelerators, and {cluster} has none"
            raise _too_few(message, "- {count: 2, name: arm}")
        robots = [topology.num_nodes + i for i in range(ROBOTS)]
    trainers, players = _kinds(gpus)
    if robots[0] >= topology.num_nodes:
        cluster = f"{stem}-cluster.yaml"
        beside[cluster] = _cluster_file(trainers, players, len(robots), f"{stem}.yaml")
    beside[f"{module}.py"] = _ROBOTS_MODULE.format(module=module)

    writer = Writer()
    what = "Heterogeneous: training, generation and robots on nodes of their own kinds, under names."
    count = len(gpus) + len(robots)
    writer.comment(f"{what}\nThe robots' type is registered by {module}.py: --import {module}").key("cluster")
    writer.key("num_nodes", count, "nodes with GPUs, and nodes with robots", depth=1)
    writer.comment("Groups name nodes; ranks of a component that has a node_group are counted among its nodes.", 1)
    writer.key("node_groups", depth=1)
    _group(writer, "train", [node.rank for node in trainers])
    first = trainers[0].rank
    writer.comment(f"env_configs:      # variables and interpreter of workers on its nodes\n  - node_ranks: {first}", 3)
    writer.comment("    env_vars: [{NCCL_SOCKET_IFNAME: eth0}]", 3)
    if players:
        _group(writer, "play", [node.rank for node in players])
    _group(writer, "robot", robots)
    writer.key("hardware", depth=3).key("type", "Franka", depth=4)
    writer.key("configs", None, "one entry per robot: ranks of this group count robots", depth=4)
    for i, rank in enumerate(robots):
        writer.raw(f"          - {{node_rank: {rank}, robot_ip: 10.1.0.{4 + i}}}")
    writer.key("component_placement", depth=1)
    if players:
        sizes, engines = [n.num_accelerators for n in trainers], [n.num_accelerators for n in players]
        placed = {"actor": ("train", ranks(0, sum(sizes))), "rollout": ("play", _engine_text(0, engines))}
    elif sum(n.num_accelerators for n in trainers) > 1:
        sizes, engines = _halves([trainers[0].num_accelerators], "heterogeneous")
        placed = {
            "actor": ("train", ranks(0, sizes[0])),
            "rollout": ("train", _engine_text(sizes[0], engines)),
        }
    else:
        sizes = engines = [1]
        placed = {"actor": ("train", "0"), "rollout": ("train", "0")}
    is_shared = not players and sum(n.num_accelerators for n in trainers) == 1
    notes = {"actor": "one trainer process per GPU", "rollout": "engines"}
    for name, (label, text) in placed.items():
        writer.key(name, None, notes[name], depth=2).key("node_group", label, depth=3)
        writer.key("placement", text, depth=3)
        if is_shared:
            writer.key("gpu_share", 0.8 if name == "actor" else 0.2, depth=3)
    writer.key("env", None, "one process per robot", depth=2).key("node_group", "robot", depth=3)
    writer.key("placement", ranks(0, len(robots)), depth=3)
    _reward(writer)
    _parallel(writer, _fitting(sizes, 4), _fitting(engines, 2))
    return Starter(writer.text(), cluster, beside, module)


# Parts ------------------------------------------------------------------------------------------


def _component(writer: Writer, name: str, placement: str, note: str, share: float, cpus: int = 0) -> None:
    writer.key(name, None, note, depth=2).key("placement", placement, depth=3)
    writer.key("gpu_share", share, "of each of its GPUs; at most 1 together" if name == "actor" else "", depth=3)
    if cpus:
        writer.key("cpus", cpus, depth=3)
    if name == "actor":
        writer.comment("memory_gib: 40      # peak per GPU: added up, where cards are known", 3)
        writer.comment("worker: my_job:Actor  # what 'roost run' launches", 3)


def _reward(writer: Writer) -> None:
    writer.key("reward", None, "on a node, without a GPU: ranks count nodes", depth=2)
    writer.key("node_group", "node", depth=3).key("placement", 0, depth=3)


def _parallel(writer: Writer, actor: int, engine: int) -> None:
    writer.blank().comment(_SIZES_NOTE)
    writer.key("actor").key("model", depth=1).key("tensor_model_parallel_size", actor, depth=2)
    writer.key("rollout").key("tensor_parallel_size", engine, "GPUs of one engine", depth=1)


def _fitting(sizes: list[int], most: int) -> int:
    """Return the largest of 8, 4, 2 and 1 up to ``most`` that divides every node, so that no group crosses nodes."""
    divisor = math.gcd(*(size for size in sizes if size))
    return next(size for size in (8, 4, 2, 1) if size <= most and divisor % size == 0)


def _halves(sizes: list[int], layout: str) -> tuple[list[int], list[int]]:
    """Return node sizes for two sides: whole nodes, or the halves of a single node."""
    with_gpus = [size for size in sizes if size]
    if len(with_gpus) > 1:
        middle = (len(with_gpus) + 1) // 2
        return with_gpus[:middle], with_gpus[middle:]
    if with_gpus[0] < 2:
        message = f"a {layout} job has GPUs for the trainer and others for the engines: at least 2"
        finding = Finding(
            "U131", message, fixes=(Fix("share the one", "--layout collocated"), Fix("or", "--cluster 1x2"))
        )
        raise UsageError([finding])
    half = with_gpus[0] // 2
    return [half], [with_gpus[0] - half]


def _kinds(nodes: list[Node]) -> tuple[list[Node], list[Node]]:
    """Return nodes for training and for generation: by accelerator model, else the two halves."""
    first = (nodes[0].accelerator_type, nodes[0].accelerator_model)
    others = [node for node in nodes if (node.accelerator_type, node.accelerator_model) != first]
    if others:
        return [node for node in nodes if node not in others], others
    middle = (len(nodes) + 1) // 2
    return nodes[:middle], nodes[middle:]


def _engine_text(first: int, sizes: list[int]) -> str:
    total, size = sum(sizes), _fitting(sizes, 2)
    return ranks(first, total) + (f":{ranks(0, total // size)}" if size > 1 else "")


def _group(writer: Writer, label: str, nodes: list[int]) -> None:
    from roost.ranks import format_ranks

    writer.raw(f"    - label: {label}").key("node_ranks", format_ranks(nodes), depth=3)


def _cluster_file(trainers: list[Node], players: list[Node], robots: int, job: str) -> str:
    writer = Writer().comment(
        f"The machines of {job}, in the order that ranks count. Names, addresses, CPUs and memory are optional; "
        "what is said is checked."
    )
    writer.key("nodes")
    taken: list[str] = []
    nodes = sorted([*trainers, *players], key=lambda node: node.rank)
    for (side, size, vendor, model), run in groupby(nodes, lambda node: _kind(node, players)):
        taken.append(side)
        name = side if taken.count(side) == 1 else f"{side}{taken.count(side)}"
        what = (
            {"count": size} | ({} if vendor == "NVIDIA" else {"vendor": vendor}) | ({"model": model} if model else {})
        )
        writer.raw(f"  - count: {len(list(run))}").key("name", name, depth=2).key("accelerators", what, depth=2)
    writer.raw(f"  - count: {robots}").key("name", "arm", "a computer beside each robot", depth=2)
    return writer.text()


def _kind(node: Node, players: list[Node]) -> tuple[str, int, str, str]:
    side = "play" if node in players else "train"
    return side, node.num_accelerators, node.accelerator_type.name, node.accelerator_model


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"

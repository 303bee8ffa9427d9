"""What Roost costs on top of plain Ray: launching, calling, finding the nodes and their order."""

from __future__ import annotations

import compileall
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import roost
from roost.cluster.ray_typed import actor_class, node_address, nodes_of_ray
from roost.testing import local_ray

REPEATS = 2


@dataclass(frozen=True)
class Row:
    """One comparison: seconds of Roost, seconds of the baseline, and the ratio that is expected."""

    name: str
    roost_s: float
    plain_s: float
    expected: str
    is_met: bool

    @property
    def ratio(self) -> float:
        return self.roost_s / self.plain_s


class Plain:
    def ping(self) -> int:
        return 1


class Pinged(roost.Worker):
    def ping(self) -> int:
        return 1


def _row(name: str, roost_s: float, plain_s: float, limit: float) -> Row:
    return Row(name, roost_s, plain_s, f"≤ {limit:g} ×", roost_s <= limit * plain_s)


def _cost(action: Callable[[], Any], undo: Callable[[Any], None]) -> tuple[float, float]:
    """Wall and CPU seconds of an action, of the whole machine: workers are processes of others."""
    time.sleep(1.5)
    before, start = _busy_s(), time.perf_counter()
    result = action()
    wall, busy = time.perf_counter() - start, _busy_s() - before
    undo(result)
    return wall, busy


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _compare(ours: tuple[Any, Any], plain: tuple[Any, Any]) -> tuple[float, float, float, float]:
    """Best wall and CPU seconds of both, measured in turn."""
    ours_found, plain_found = [], []
    for _ in range(REPEATS):
        plain_found.append(_cost(*plain))
        ours_found.append(_cost(*ours))
    return (
        min(wall for wall, _ in ours_found), min(busy for _, busy in ours_found),
        min(wall for wall, _ in plain_found), min(busy for _, busy in plain_found),
    )  # fmt: skip


def _plain_actors(count: int, nodes: list[str], named: str = "") -> list[Any]:
    actor = actor_class(Plain, num_cpus=0)
    handles = []
    for index in range(count):
        options: dict[str, Any] = {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(nodes[index * len(nodes) // count], soft=False)
        }
        if named:
            options["name"] = f"{named}-{index}"
        handles.append(actor.options(**options).remote())
    ray.get([handle.ping.remote() for handle in handles])
    return handles


def _kill(handles: list[Any]) -> None:
    for handle in handles:
        ray.kill(handle)


def measure_launches() -> list[Row]:
    """Groups of 8 and 16 workers against as many plain actors; and calls on eight of them."""
    rows = []
    with local_ray("2x8"), roost.Cluster(num_nodes=2) as cluster:
        nodes = [cluster.get_node_info(rank).ray_id for rank in range(2)]
        for count in (8, 16):
            strategy = roost.PackedPlacementStrategy(0, 15, 16 // count)
            ours = (lambda s=strategy: Pinged.create_group().launch(cluster, s)), (lambda group: group.close())
            plain = (lambda n=count: _plain_actors(n, nodes)), _kill
            wall, busy, plain_wall, plain_busy = _compare(ours, plain)
            rows.append(_row(f"launch of {count} workers, wall", wall, plain_wall, 1.3))
            rows.append(_row(f"launch of {count} workers, CPU", busy, plain_busy, 1.3))
        rows.append(_measure_calls(cluster))
    return rows


def _measure_calls(cluster: roost.Cluster) -> Row:
    with Pinged.create_group().launch(cluster, roost.PackedPlacementStrategy(0, 15, 2)) as group:
        handles = group._handles

        def ours() -> None:
            group.ping().wait()

        def plain() -> None:
            ray.get([handle.call.remote("ping", (), {}) for handle in handles])

        times: dict[Callable[[], None], list[float]] = {ours: [], plain: []}
        for _ in range(400):
            for call, found in times.items():
                start = time.perf_counter()
                call()
                found.append(time.perf_counter() - start)
        return _row("a call on 8 workers", statistics.median(times[ours]), statistics.median(times[plain]), 1.1)


def measure_start(num_nodes: int) -> Row:
    """``Cluster(...)`` until all managers answer, against ray.init and 3 + nodes named actors."""
    ours, plain = [], []
    with local_ray(f"{num_nodes}x8") as machines:
        for _ in range(REPEATS):
            time.sleep(2)
            start = time.perf_counter()
            ray.init(address=machines.address, logging_level=logging.ERROR, log_to_driver=False)
            nodes = [node["NodeID"] for node in nodes_of_ray()]
            handles = _plain_actors(3 + num_nodes, nodes, named="plain")
            plain.append(time.perf_counter() - start)
            _kill(handles)
            ray.shutdown()
            time.sleep(2)
            start = time.perf_counter()
            cluster = roost.Cluster(num_nodes=num_nodes)
            ours.append(time.perf_counter() - start)
            cluster.close()
    return _row(f"Cluster(num_nodes={num_nodes}), wall", min(ours), min(plain), 1.2)


def measure_order() -> Row:
    """The stable order of 32 accelerators on four nodes that are up, against a probe actor per bundle."""
    with local_ray("4x8", cpus=8), roost.Cluster(num_nodes=4) as cluster:
        ours = (lambda: cluster.reserve_bundles(32)), (lambda bundles: bundles.release())
        _cost(*ours)
        ours_busy = _cost(*ours)[1]
        plain_busy = _cost(_probe_every_bundle, lambda group: remove_placement_group(group))[1]
    return Row("stable order of 32 accelerators, CPU", ours_busy, plain_busy, "≤ 0.1 ×", ours_busy <= plain_busy / 10)


class _Probe:
    def where(self) -> tuple[str, list[Any]]:
        return node_address(), ray.get_gpu_ids()


def _probe_every_bundle() -> Any:
    group = placement_group([{"GPU": 1, "CPU": 1}] * 32)
    group.wait(30)
    actor = actor_class(_Probe, num_gpus=1)
    probes = [
        actor.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        ).remote()
        for i in range(32)
    ]
    ray.get([probe.where.remote() for probe in probes])
    for probe in probes:
        ray.kill(probe)
    return group


def measure_launching() -> list[Row]:
    """All comparisons. Roost is compiled first, as it is where it was installed; Ray is."""
    compileall.compile_dir(str(Path(roost.__file__).parent), quiet=1)
    return [*measure_launches(), measure_start(1), measure_start(4), measure_order()]

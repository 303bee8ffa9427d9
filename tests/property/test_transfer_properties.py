"""Transfer plans beside an element-wise model of what every rank holds, on small shapes."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import permutations, product
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from roost import PlacementError, Sharding, TensorShards, TransferPlan, plan_transfer

ORDERS = ["-".join(order) for order in permutations(("tp", "pp", "dp"))]
NEARNESS = {"same": 0, "node": 1, "network": 2}
Element = tuple[int, ...]


# Made-up sides ----------------------------------------------------------------------------


@st.composite
def covering_slices(draw: st.DrawFn, extent: int, tp: int) -> tuple[tuple[int, int], ...]:
    """Uneven parts in any order that cover a dimension; some are widened, and overlap."""
    edges = sorted(draw(st.lists(st.integers(0, extent), min_size=tp - 1, max_size=tp - 1)))
    spans = list(zip([0, *edges], [*edges, extent], strict=True))
    spans = [
        (start - draw(st.integers(0, start)), stop) if draw(st.booleans()) else (start, stop) for start, stop in spans
    ]
    return tuple(draw(st.permutations(spans)))


@st.composite
def any_slices(draw: st.DrawFn, extent: int, tp: int) -> tuple[tuple[int, int], ...]:
    """What a destination may want: anything, also the same twice, also nothing."""
    pairs = st.tuples(st.integers(0, extent), st.integers(0, extent)).map(lambda pair: (min(pair), max(pair)))
    return tuple(draw(st.lists(pairs, min_size=tp, max_size=tp)))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Sharding, Sharding]:
    """Two sides that fit."""
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=3))
    dtypes = [draw(st.sampled_from(["bfloat16", "float32", "uint8"])) for _ in shapes]
    found = []
    for slices in (covering_slices, any_slices):
        tp, pp, dp = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
        tensors = []
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
            dim = draw(st.sampled_from([None, *range(len(shape))]))
            cut: tuple[tuple[int, int], ...] = ()
            if dim is not None and (shape[dim] % tp or draw(st.booleans())):
                cut = draw(slices(shape[dim], tp))
            tensors.append(TensorShards(f"t{i}", tuple(shape), dtype, dim, cut, draw(st.integers(0, pp - 1))))
        size = tp * pp * dp
        places = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), min_size=size, max_size=size)
        locations = draw(st.one_of(st.just([]), places))
        order = draw(st.sampled_from(ORDERS))
        found.append(Sharding(tuple(draw(st.permutations(tensors))), tp, pp, dp, order, tuple(locations)))
    return found[0], found[1]


# The model --------------------------------------------------------------------------------


def place_in(side: Sharding, rank: int) -> dict[str, int]:
    """Coordinates of a rank, found by counting."""
    axes = side.order.split("-")
    sizes = [getattr(side, axis) for axis in axes]
    counted = product(*(range(size) for size in reversed(sizes)))
    return dict(zip(reversed(axes), list(counted)[rank], strict=True))


def elements_of(side: Sharding, rank: int) -> dict[str, set[Element]]:
    """Every element of every tensor that a rank holds."""
    at = place_in(side, rank)
    found = {}
    for tensor in side.tensors:
        if tensor.stage != at["pp"]:
            continue
        ranges = [range(extent) for extent in tensor.shape]
        if tensor.dim is not None:
            part = tensor.shape[tensor.dim] // side.tp
            start, stop = tensor.slices[at["tp"]] if tensor.slices else (at["tp"] * part, (at["tp"] + 1) * part)
            ranges[tensor.dim] = range(start, stop)
        found[tensor.name] = set(product(*ranges))
    return found


def distance_between(source: Sharding, sender: int, target: Sharding, receiver: int) -> str:
    if not source.locations or not target.locations:
        return "network"
    one, other = source.locations[sender], target.locations[receiver]
    if one == other and one[1] >= 0:
        return "same"
    return "node" if one[0] == other[0] else "network"


def inside(box: tuple[tuple[int, int], ...]) -> list[Element]:
    return list(product(*(range(start, stop) for start, stop in box)))


@dataclass
class Model:
    source: Sharding
    target: Sharding

    def __post_init__(self) -> None:
        self.held = [elements_of(self.source, rank) for rank in range(self.source.world_size)]
        self.wanted = [elements_of(self.target, rank) for rank in range(self.target.world_size)]

    def holders(self, tensor: str, element: Element) -> frozenset[int]:
        return frozenset(rank for rank, held in enumerate(self.held) if element in held.get(tensor, ()))

    def nearest(self, holders: frozenset[int], receiver: int) -> tuple[str, frozenset[int]]:
        distances = {rank: distance_between(self.source, rank, self.target, receiver) for rank in holders}
        best = min(distances.values(), key=NEARNESS.__getitem__)
        return best, frozenset(rank for rank, distance in distances.items() if distance == best)


# Properties -------------------------------------------------------------------------------


@given(sides())
def test_every_element_comes_once_from_a_nearest_rank_that_has_it(pair: tuple[Sharding, Sharding]) -> None:
    plan, model = plan_transfer(*pair), Model(*pair)
    itemsize = {"bfloat16": 2, "float32": 4, "uint8": 1}
    size_of = {tensor.name: itemsize[tensor.dtype] for tensor in plan.target.tensors}
    by_distance: Counter[str] = Counter()
    for receiver, wanted in enumerate(model.wanted):
        got: dict[str, Counter[Element]] = {name: Counter() for name in wanted}
        for name, sender, box, distance in plan.for_target(receiver):
            elements = inside(box)
            assert elements
            got[name].update(elements)
            by_distance[distance] += len(elements) * size_of[name]
            for element in elements:
                assert element in model.held[sender][name]
                best, ranks = model.nearest(model.holders(name, element), receiver)
                assert (distance, sender in ranks) == (best, True)
        for name, elements in wanted.items():
            assert got[name] == Counter(elements)
    assert plan.bytes_by_distance == {distance: by_distance[distance] for distance in NEARNESS}
    assert plan.total_bytes == sum(by_distance.values())
    across = plan.total_bytes - by_distance["same"]
    assert plan.cross_accelerator_share == (across / plan.total_bytes if plan.total_bytes else 0)
    assert plan.summary()


@given(sides())
def test_equally_near_ranks_take_turns(pair: tuple[Sharding, Sharding]) -> None:
    plan, model = plan_transfer(*pair), Model(*pair)
    chosen: dict[tuple[frozenset[int], frozenset[int], str], dict[int, int]] = defaultdict(dict)
    for receiver in range(plan.target.world_size):
        for name, sender, box, distance in plan.for_target(receiver):
            holders = model.holders(name, inside(box)[0])
            _, pool = model.nearest(holders, receiver)
            assert chosen[holders, pool, distance].setdefault(receiver, sender) == sender
    for (_, pool, _), senders in chosen.items():
        counts = Counter(dict.fromkeys(pool, 0))
        counts.update(senders.values())
        assert max(counts.values()) - min(counts.values()) <= 1


@given(sides())
def test_both_ends_tell_the_same(pair: tuple[Sharding, Sharding]) -> None:
    plan = plan_transfer(*pair)
    assert moves(plan) == sorted(
        (name, sender, receiver, box, distance)
        for sender in range(plan.source.world_size)
        for name, receiver, box, distance in plan.for_source(sender)
    )


@given(sides(), st.randoms(use_true_random=False))
def test_the_same_for_the_same_input_in_any_order(pair: tuple[Sharding, Sharding], random: object) -> None:
    plan = plan_transfer(*pair)
    assert plan_transfer(*pair) == plan
    assert pickle.loads(pickle.dumps(plan)).bytes_by_distance == plan.bytes_by_distance  # noqa: S301
    shuffled = []
    for side in pair:
        tensors = list(side.tensors)
        random.shuffle(tensors)  # type: ignore[attr-defined]
        shuffled.append(replace(side, tensors=tuple(tensors)))
    assert moves(plan_transfer(*shuffled)) == moves(plan)


@given(sides())
def test_parts_name_each_pair_of_replicas_once(pair: tuple[Sharding, Sharding]) -> None:
    plan = plan_transfer(*pair)
    for part in plan.parts:
        replicas = [target for route in part.routes for target, _ in route.pairs()]
        assert replicas
        assert len(replicas) == len(set(replicas))
        assert set(replicas) <= set(range(plan.target.dp))
        for route in part.routes:
            assert len(route) == len(list(route.pairs()))
            for target, source in route.pairs():
                assert route.source_of(target) == source
                assert target in route.targets_of(source)
                assert 0 <= source < plan.source.dp
        assert part.nbytes % prod(stop - start for start, stop in part.box) == 0


@given(sides(), st.integers(1, 4))
def test_a_gather_gives_each_rank_what_its_group_had(pair: tuple[Sharding, Sharding], size: int) -> None:
    source, target = pair
    try:
        gathered = source.gathered(size)
    except PlacementError:
        return  # the group does not divide tp, or its slices are not contiguous
    for rank in range(source.world_size):
        tp, pp, dp = source.coordinates(rank)
        group = [source.rank_of(i, pp, dp) for i in range(tp // size * size, (tp // size + 1) * size)]
        together: dict[str, set[Element]] = {}
        for member in group:
            for name, elements in elements_of(source, member).items():
                together.setdefault(name, set()).update(elements)
        assert elements_of(gathered, rank) == together
    before, after = plan_transfer(source, target), plan_transfer(gathered, target)
    assert after.total_bytes == before.total_bytes
    assert after.bytes_by_distance["same"] >= before.bytes_by_distance["same"]
    assert after.bytes_by_distance["network"] <= before.bytes_by_distance["network"]


@given(sides())
def test_ranks_and_coordinates(pair: tuple[Sharding, Sharding]) -> None:
    for side in pair:
        for rank in range(side.world_size):
            at = place_in(side, rank)
            assert side.coordinates(rank) == (at["tp"], at["pp"], at["dp"])
            assert side.rank_of(**at) == rank


def moves(plan: TransferPlan) -> list[tuple[str, int, int, object, str]]:
    return sorted(
        (name, sender, receiver, box, distance)
        for receiver in range(plan.target.world_size)
        for name, sender, box, distance in plan.for_target(receiver)
    )

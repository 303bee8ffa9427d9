"""Whatever is done to a buffer, in whatever order: nothing is lost, nothing is doubled, nothing overflows."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from roost import CallTimeoutError, DataBuffer, RolloutError, Sample, SampleGroup

CAPACITY, PARTIAL_CAPACITY = 6, 3
NAMES = [f"g{n}" for n in range(14)]
names = st.lists(st.sampled_from(NAMES), max_size=CAPACITY, unique=True)
partial_names = st.lists(st.sampled_from(NAMES), max_size=PARTIAL_CAPACITY, unique=True)
versions = st.integers(0, 3)


def made(name: str, version: int, finish: str) -> SampleGroup:
    samples = [Sample([1], [2, 3], [-0.1, -0.2], [version, version + 1], index, finish) for index in range(2)]
    return SampleGroup(name, {"name": name}, samples)


def new_buffer() -> DataBuffer:
    return DataBuffer(CAPACITY, partial_capacity=PARTIAL_CAPACITY)


class BufferMachine(RuleBasedStateMachine):
    """The buffer beside lists that hold the same groups."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = new_buffer()
        self.waiting: list[tuple[int, SampleGroup]] = []
        self.in_flight: dict[str, tuple[int, SampleGroup]] = {}
        self.stale: list[SampleGroup] = []
        self.partial: list[tuple[int, SampleGroup]] = []
        self.partial_out: dict[str, tuple[int, SampleGroup]] = {}
        self.used: set[str] = set()
        self.number = 0
        self.folder = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        self.folder.cleanup()

    def finished(self) -> set[str]:
        return {one.id for _, one in self.waiting} | set(self.in_flight) | {one.id for one in self.stale} | self.used

    def numbered(self, groups: list[SampleGroup]) -> list[tuple[int, SampleGroup]]:
        self.number += len(groups)
        return list(enumerate(groups, self.number - len(groups)))

    @rule(chosen=names, version=versions)
    def put(self, chosen: list[str], version: int) -> None:
        groups = [made(name, version, "stop") for name in chosen]
        new = [one for one in groups if one.id not in self.finished()]
        try:
            assert self.buffer.put(groups, 0) == len(new)
        except CallTimeoutError:
            assert len(self.waiting) + len(self.in_flight) + len(new) > CAPACITY
            return
        self.waiting += self.numbered(new)
        ids = {one.id for one in new}
        self.partial = [one for one in self.partial if one[1].id not in ids]
        self.partial_out = {name: one for name, one in self.partial_out.items() if name not in ids}

    @rule(count=st.integers(1, CAPACITY), min_version=st.none() | versions)
    def take(self, count: int, min_version: int | None) -> None:
        least = -1 if min_version is None else min_version
        old = [one for one in self.waiting if one[1].oldest_version < least]
        room = CAPACITY - len(self.stale)
        moved = [number for number, _ in old[:room]]
        self.stale += [group for _, group in old[:room]]
        self.waiting = [one for one in self.waiting if one[0] not in moved]
        try:
            taken = self.buffer.take(count, 0, min_version)
        except CallTimeoutError:
            assert len(self.waiting) < count
            return
        except RolloutError:
            assert len(old) > room
            return
        assert taken == [group for _, group in self.waiting[:count]]
        self.in_flight |= {group.id: (number, group) for number, group in self.waiting[:count]}
        del self.waiting[:count]

    @rule(chosen=names)
    def confirm(self, chosen: list[str]) -> None:
        here = self.finished() - self.used | {one.id for _, one in self.partial} | set(self.partial_out)
        assert self.buffer.confirm(chosen) == len(here & set(chosen))
        self.used |= set(chosen)
        for shelf in (self.in_flight, self.partial_out):
            for name in chosen:
                shelf.pop(name, None)
        self.waiting = [one for one in self.waiting if one[1].id not in chosen]
        self.partial = [one for one in self.partial if one[1].id not in chosen]
        self.stale = [one for one in self.stale if one.id not in chosen]

    @precondition(lambda self: self.in_flight or self.partial_out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        out = sorted([*self.in_flight, *self.partial_out])
        chosen = data.draw(st.none() | st.lists(st.sampled_from(out), unique=True))
        assert self.buffer.give_back(chosen) == len(out if chosen is None else chosen)
        for name in out if chosen is None else chosen:
            if name in self.in_flight:
                self.waiting.append(self.in_flight.pop(name))
            else:
                self.partial.append(self.partial_out.pop(name))
        self.waiting.sort(key=lambda one: one[0])
        self.partial.sort(key=lambda one: one[0])

    @rule(chosen=partial_names, version=versions)
    def put_partial(self, chosen: list[str], version: int) -> None:
        groups = [made(name, version, "abort") for name in chosen]
        here = self.finished() | {one.id for _, one in self.partial}
        new = [one for one in groups if one.id not in here]
        more = [one for one in new if one.id not in self.partial_out]
        try:
            assert self.buffer.put_partial(groups, 0) == len(new)
        except CallTimeoutError:
            assert more
            assert len(self.partial) + len(self.partial_out) + len(more) > PARTIAL_CAPACITY
            return
        for one in new:
            self.partial_out.pop(one.id, None)
        self.partial += self.numbered(new)

    @rule(count=st.integers(1, PARTIAL_CAPACITY))
    def take_partial(self, count: int) -> None:
        assert self.buffer.take_partial(count) == [group for _, group in self.partial[:count]]
        self.partial_out |= {group.id: (number, group) for number, group in self.partial[:count]}
        del self.partial[:count]

    @rule()
    def drain_stale(self) -> None:
        assert self.buffer.drain_stale() == self.stale
        self.stale = []

    @rule()
    def save_and_load(self) -> None:
        path = Path(self.folder.name) / "saved"
        self.buffer.save(path)
        self.buffer = new_buffer()
        self.buffer.load(path)
        self.waiting = sorted([*self.in_flight.values(), *self.waiting], key=lambda one: one[0])
        self.partial = sorted([*self.partial_out.values(), *self.partial], key=lambda one: one[0])
        self.in_flight, self.partial_out = {}, {}

    @invariant()
    def every_group_is_on_one_shelf_and_none_overflows(self) -> None:
        stats = self.buffer.stats()
        for name in ("waiting", "in_flight", "stale", "partial", "partial_out"):
            assert stats[name] == len(getattr(self, name)), name
        assert stats["waiting"] + stats["in_flight"] <= CAPACITY
        assert stats["partial"] + stats["partial_out"] <= PARTIAL_CAPACITY
        assert stats["stale"] <= CAPACITY
        every = [
            *(one.id for _, one in self.waiting), *self.in_flight, *(one.id for one in self.stale),
            *(one.id for _, one in self.partial), *self.partial_out,
        ]  # fmt: skip
        assert len(every) == len(set(every))
        assert not set(every) & self.used

    @invariant()
    def the_shelves_hold_these_very_groups(self) -> None:
        shelves = self.buffer._shelves
        assert [entry.group for entry in shelves.waiting.values()] == [group for _, group in self.waiting]
        assert [entry.group for entry in shelves.partial.values()] == [group for _, group in self.partial]
        assert [entry.group for entry in shelves.stale.values()] == self.stale
        assert {name: entry.group for name, entry in shelves.in_flight.items()} == {
            name: group for name, (_, group) in self.in_flight.items()
        }
        assert set(shelves.used) == self.used


TestBuffer = BufferMachine.TestCase

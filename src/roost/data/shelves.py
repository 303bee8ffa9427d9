"""The state of a buffer: a shelf for each state that a group can be in. Nothing here locks or waits.

Each group is on exactly one shelf; :mod:`roost.data.buffer` shows the transitions.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roost.data.samples import SampleGroup
from roost.data.wait_queue import abbreviated
from roost.errors import Finding, Fix, RolloutError, counted

__all__ = ["Entry", "Shelves"]

UNDO_S = 300.0
"""Seconds during which a drain can be undone. A client notices a broken connection within about a minute."""


@dataclass(slots=True)
class Entry:
    """A group in the buffer.

    Attributes:
        group: The group.
        oldest_version: The oldest weight version that generated a token of the group; ``None`` where no token has a version.
        sequence: Sequence number of its put; groups given back return to their place in this order.
        taker: Name of the last caller that took it.
        taken_at_s: Time of that call (``time.monotonic``).
        ticket: Ticket of that call; see :meth:`Shelves.undo`.
        packed: The group serialized for a journal, until the journal has it.
        span: Where the group is in the journal.
    """

    group: SampleGroup
    oldest_version: int | None = None
    sequence: int = -1
    taker: str = ""
    taken_at_s: float = 0.0
    ticket: str = ""
    packed: bytes = b""
    span: tuple[int, int] | None = None


class Shelves:
    """Every group of a buffer, the ids of confirmed groups, and totals.

    Args:
        capacity: Most finished groups, waiting and in flight together; also most stale groups.
        partial_capacity: Most partial groups, in the buffer and handed out together.
        remembered_ids: How many ids of confirmed groups are remembered, the latest ones.
    """

    def __init__(self, capacity: int, partial_capacity: int, remembered_ids: int) -> None:
        self.capacity = capacity
        self.partial_capacity = partial_capacity
        self.remembered_ids = remembered_ids
        self.waiting: OrderedDict[str, Entry] = OrderedDict()
        self.in_flight: dict[str, Entry] = {}
        self.stale: OrderedDict[str, Entry] = OrderedDict()
        self.partial: OrderedDict[str, Entry] = OrderedDict()
        self.partial_out: dict[str, Entry] = {}
        self.used: OrderedDict[str, None] = OrderedDict()
        self._drained: OrderedDict[str, tuple[float, list[Entry]]] = OrderedDict()
        self.totals = dict.fromkeys(("put", "taken", "confirmed", "given_back", "repeated", "stale"), 0)
        self._next_sequence = 0

    # Finished groups ------------------------------------------------------------------------

    def add(self, entries: list[Entry], *, only_known: bool = False) -> int | None:
        """Append new groups to those that wait; return how many were new, or ``None`` where there is no room.

        Groups with a known id are ignored. A finished group replaces its partial one.

        Args:
            entries: The groups.
            only_known: Do nothing and return ``None`` where at least one group is new.
        """
        self._forget_drained()
        new = [entry for entry in entries if not self._is_finished_here(entry.group.id)]
        if new and (only_known or len(self.waiting) + len(self.in_flight) + len(new) > self.capacity):
            return None
        for entry in new:
            key = entry.group.id
            if self.partial.pop(key, None) is None:
                self.partial_out.pop(key, None)
        self._append(new, self.waiting)
        self.totals["put"] += len(new)
        self.totals["repeated"] += len(entries) - len(new)
        return len(new)

    def take(self, count: int, caller: str, ticket: str = "") -> list[SampleGroup] | None:
        """Move the first groups to those in flight and return them; ``None`` where fewer than ``count`` wait."""
        if len(self.waiting) < count:
            return None
        self.totals["taken"] += count
        return _hand_out(self.waiting, self.in_flight, count, caller, ticket)

    def set_aside(self, min_version: int, checked: int) -> int:
        """Move waiting groups that are too old to the stale shelf.

        Args:
            min_version: Groups with a token of an older weight version are too old.
            checked: Groups with a sequence number up to this one were checked before, with the same ``min_version``.

        Returns:
            The sequence number up to which groups are checked now.

        Raises:
            RolloutError: The stale shelf is full (B111).
        """
        old = []
        for key, entry in reversed(self.waiting.items()):
            if entry.sequence <= checked:
                break
            if entry.oldest_version is not None and entry.oldest_version < min_version:
                old.append(key)
        for key in reversed(old):
            if len(self.stale) >= self.capacity:
                message = f"{counted(len(self.stale), 'stale group')} are set aside, and there is no room for more"
                fix = Fix("remove the stale groups, to put them again or to drop them", "buffer.drain_stale()")
                raise RolloutError([Finding("B111", message, rule="at most as many as the capacity", fixes=(fix,))])
            self.stale[key] = self.waiting.pop(key)
            self.totals["stale"] += 1
        return self._next_sequence - 1

    def drain_stale(self, ticket: str = "") -> list[SampleGroup]:
        """Empty the stale shelf and return its groups. :meth:`undo` can put them back within :data:`UNDO_S`."""
        entries = list(self.stale.values())
        self.stale.clear()
        self._forget_drained()
        if ticket and entries:
            for entry in entries:
                entry.packed, entry.span = b"", None  # a rewritten journal no longer holds the group
            self._drained[ticket] = (time.monotonic(), entries)
        return [entry.group for entry in entries]

    def _forget_drained(self) -> None:
        """Forget groups whose drain can no longer be undone."""
        while self._drained and time.monotonic() - next(iter(self._drained.values()))[0] >= UNDO_S:
            self._drained.popitem(last=False)

    def confirm(self, keys: Sequence[str]) -> int:
        """Remove groups from whatever shelf they are on, and remember their ids; return how many were here."""
        found = 0
        for key in keys:
            if self.in_flight.pop(key, None) is not None:
                found += 1
            elif key not in self.used:
                found += sum([shelf.pop(key, None) is not None for shelf in self._all().values()])
            self.used[key] = None
        while len(self.used) > self.remembered_ids:
            self.used.popitem(last=False)
        self.totals["confirmed"] += found
        return found

    def give_back(self, keys: Sequence[str] | None) -> int:
        """Return groups that were handed out to their place in the order of puts; ``None``: all of them.

        Raises:
            RolloutError: A group is not here (B105); nothing was changed.
        """
        if keys is None:
            keys = [*self.in_flight, *self.partial_out]
        wrong = [key for key in keys if not any(key in shelf for shelf in self._all().values())]
        if wrong:
            used = [key for key in wrong if key in self.used]
            unknown = [key for key in wrong if key not in self.used]
            lines = (("confirmed before", used), ("unknown", unknown))
            context = tuple(f"{what}: {abbreviated(which)}" for what, which in lines if which)
            message = f"{counted(len(wrong), 'group')} of {len(keys)} cannot be given back: not here"
            raise RolloutError([Finding("B105", message, context=context)])
        moved = _to_front([self.in_flight.pop(key) for key in keys if key in self.in_flight], self.waiting)
        moved += _to_front([self.partial_out.pop(key) for key in keys if key in self.partial_out], self.partial)
        self.totals["given_back"] += moved
        return moved

    def undo(self, tickets: Sequence[str]) -> int:
        """Give back the groups that the calls with these tickets took or drained; return how many."""
        wanted = set(tickets) - {""}
        out = (*self.in_flight.items(), *self.partial_out.items())
        moved = self.give_back([key for key, entry in out if entry.ticket in wanted])
        return moved + self._undo_drains(wanted)

    def _undo_drains(self, tickets: Iterable[str]) -> int:
        """Put drained groups back on the stale shelf, except those that were put again since."""
        drained = [entry for ticket in tickets for entry in self._drained.pop(ticket, (0.0, []))[1]]
        back = {entry.group.id: entry for entry in drained if not self._is_finished_here(entry.group.id)}
        self.stale.update(back)
        return len(back)

    # Partial groups ------------------------------------------------------------------------

    def add_partial(self, entries: list[Entry], *, only_known: bool = False) -> int | None:
        """Append partial groups that are new or were handed out; return how many, or ``None`` where there is no room.

        Args:
            entries: The groups.
            only_known: Do nothing and return ``None`` where a group needs room.
        """
        new = [e for e in entries if e.group.id not in self.partial and not self._is_finished_here(e.group.id)]
        more = sum([entry.group.id not in self.partial_out for entry in new])
        if more and (only_known or len(self.partial) + len(self.partial_out) + more > self.partial_capacity):
            return None
        for entry in new:
            self.partial_out.pop(entry.group.id, None)
        self._append(new, self.partial)
        self.totals["repeated"] += len(entries) - len(new)
        return len(new)

    def take_partial(self, max_count: int, caller: str, ticket: str = "") -> list[SampleGroup]:
        """Hand out the first partial groups. Copies stay here, because the caller continues their samples in place."""
        groups = _hand_out(self.partial, self.partial_out, min(max_count, len(self.partial)), caller, ticket)
        for group in groups:
            self.partial_out[group.id].group = group.copy()
        return groups

    # Save and restore ------------------------------------------------------------------------

    def saved(self) -> tuple[dict[str, list[Entry]], list[str], dict[str, int]]:
        """Return the groups of each shelf (those handed out are back in their place), the used ids, and the totals."""
        shelves = {
            "finished": sorted([*self.in_flight.values(), *self.waiting.values()], key=_sequence),
            "partial": sorted([*self.partial_out.values(), *self.partial.values()], key=_sequence),
            "stale": list(self.stale.values()),
        }
        return shelves, list(self.used), dict(self.totals)

    def restore(self, shelves: dict[str, list[Entry]], used: Iterable[str], totals: dict[str, int], name: str) -> None:
        """Fill empty shelves with the content of a file.

        Args:
            shelves: The groups by shelf.
            used: Ids of confirmed groups, the oldest first.
            totals: The totals.
            name: Name of the file, for errors.

        Raises:
            RolloutError: The shelves are not empty, or too small (B109); nothing was changed.
        """
        here = [shelf for shelf, count in self.counts().items() if count]
        if here or self.used:
            message = f"{name} is loaded into a new buffer; this one has {', '.join(here) or 'used'} groups"
            raise RolloutError([Finding("B109", message)])
        limits = (("finished", self.capacity), ("partial", self.partial_capacity), ("stale", self.capacity))
        problems = [
            Finding("B109", f"{name} holds {len(shelves[shelf]):,} {shelf} groups; here is room for {limit:,}")
            for shelf, limit in limits
            if len(shelves[shelf]) > limit
        ]
        if problems:
            raise RolloutError(problems)
        self._append(shelves["finished"], self.waiting)
        self._append(shelves["partial"], self.partial)
        self._append(shelves["stale"], self.stale)
        self.used = OrderedDict.fromkeys(list(used)[-self.remembered_ids :])
        self.totals.update({total: totals.get(total, 0) for total in self.totals})

    def counts(self) -> dict[str, int]:
        """Return the number of groups on each shelf."""
        return {name: len(shelf) for name, shelf in self._all().items()}

    def oldest_version(self) -> int | None:
        """Return the oldest weight version among the groups that wait."""
        return min(
            (entry.oldest_version for entry in self.waiting.values() if entry.oldest_version is not None), default=None
        )

    def _all(self) -> dict[str, dict[str, Entry]]:
        return {
            "waiting": self.waiting, "in_flight": self.in_flight, "stale": self.stale,
            "partial": self.partial, "partial_out": self.partial_out,
        }  # fmt: skip

    def _is_finished_here(self, key: str) -> bool:
        return key in self.waiting or key in self.in_flight or key in self.used or key in self.stale

    def _append(self, entries: list[Entry], shelf: OrderedDict[str, Entry]) -> None:
        for number, entry in enumerate(entries, self._next_sequence):
            entry.sequence = number
            shelf[entry.group.id] = entry
        self._next_sequence += len(entries)


def _sequence(entry: Entry) -> int:
    return entry.sequence


def _hand_out(
    shelf: OrderedDict[str, Entry], out: dict[str, Entry], count: int, caller: str, ticket: str
) -> list[SampleGroup]:
    now_s = time.monotonic()
    groups = []
    for _ in range(count):
        key, entry = shelf.popitem(last=False)
        entry.taker, entry.taken_at_s, entry.ticket = caller, now_s, ticket
        out[key] = entry
        groups.append(entry.group)
    return groups


def _to_front(entries: list[Entry], shelf: OrderedDict[str, Entry]) -> int:
    """Insert entries by sequence number. They were taken from the front, so few others are in front of them."""
    if not entries:
        return 0
    last = max(entries, key=_sequence).sequence
    merged = list(entries)
    while shelf and next(iter(shelf.values())).sequence < last:
        merged.append(shelf.popitem(last=False)[1])
    for entry in sorted(merged, key=_sequence, reverse=True):
        shelf[entry.group.id] = entry
        shelf.move_to_end(entry.group.id, last=False)
    return len(entries)

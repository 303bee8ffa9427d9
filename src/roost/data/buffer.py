"""``DataBuffer``: what stands between generators and trainers. Bounded, fair, and nothing is lost or doubled.

A plain class for many threads of one process; it needs neither Ray nor torch. A group is on exactly one shelf::

    put ─▶ waiting ──take──▶ in flight ──confirm──▶ used: only its id is remembered
             │  ▲                │
             │  └── give_back ───┘
             └─ too old at a take ─▶ stale ──drain_stale──▶ the caller's

    put_partial ─▶ partial ──take_partial──▶ out ──put──▶ waiting
                      ▲                       │
                      └ put_partial, give_back┘
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from roost.data.buffer_file import check_header, pack_group, read_lines, unpack_group, write_lines
from roost.data.samples import SampleGroup
from roost.data.shelves import Entry, Shelves
from roost.data.wait_queue import Line, Request, serve, some
from roost.errors import CallTimeoutError, Finding, Fix, RolloutError, counted, shown

__all__ = ["DataBuffer"]


class DataBuffer:
    """Groups of samples on their way from generators to trainers.

    Attributes:
        capacity: How many finished groups it holds, waiting and in flight together; and how many stale ones.
        partial_capacity: How many unfinished groups it holds, here and handed out together; else as ``capacity``.
        remembered_ids: How many ids of used groups it remembers, the latest ones, to ignore them should they
            come again.
    """

    def __init__(self, capacity: int, *, partial_capacity: int | None = None, remembered_ids: int = 100_000) -> None:
        self.capacity = capacity
        self.partial_capacity = capacity if partial_capacity is None else partial_capacity
        self.remembered_ids = remembered_ids
        _check_positive(capacity=capacity, partial_capacity=self.partial_capacity, remembered_ids=remembered_ids)
        self._shelves = Shelves(capacity, self.partial_capacity, remembered_ids)
        self._putters, self._takers, self._partial_putters = Line(), Line(), Line()
        self._lines = {"put": self._putters, "take": self._takers, "put_partial": self._partial_putters}
        self._lock = threading.Lock()
        self._save_lock = threading.Lock()
        self._is_open = True

    # Finished groups -----------------------------------------------------------------------

    def put(self, groups: Sequence[SampleGroup], timeout_s: float | None = None, *, who: str = "") -> int:
        """Adds finished groups, all of them or none; waits while there is no room for them.

        A group whose id is here, or was confirmed, is ignored: a put can be repeated when its answer got lost.

        Args:
            groups: At most as many as the capacity.
            timeout_s: How long to wait for room; ``None``: until there is some, or the buffer is closed.
            who: A name for messages; else that of the thread.

        Returns:
            How many were new.

        Raises:
            CallTimeoutError: No room in time (B102): how full it is, who waits, who has what since when.
            RolloutError: More groups than the capacity (B101), an unfinished group (B104), or closed (B110).
        """
        groups = list(groups)
        _check_batch(groups, self.capacity, "capacity")
        unfinished = [group.id for group in groups if not group.is_finished]
        if unfinished:
            message = f"{counted(len(unfinished), 'group')} of {len(groups)} cannot be put: samples are not finished"
            rule = 'the finish_reason of every sample is "stop" or "length"'
            fix = Fix("unfinished groups go to", "put_partial(groups)")
            raise RolloutError([Finding("B104", message, context=(some(unfinished),), rule=rule, fixes=(fix,))])
        entries = [Entry(group, group.oldest_version) for group in groups]
        self._prepare(entries)
        return self._put_in_line(self._putters, self._shelves.add, entries, who, timeout_s)

    def take(
        self,
        count: int,
        timeout_s: float | None = None,
        min_version: int | None = None,
        *,
        who: str = "",
        ticket: str = "",
    ) -> list[SampleGroup]:
        """The ``count`` groups that were put first; waits until there are so many.

        They are in flight until :meth:`confirm` or :meth:`give_back`, and keep their room until then.

        Args:
            count: At most the capacity.
            timeout_s: How long to wait; ``None``: until they are there, or the buffer is closed.
            min_version: Waiting groups with a token of older weights are set aside, for :meth:`drain_stale`.
                A group whose tokens carry no versions is never too old.
            who: A name for messages; else that of the thread.
            ticket: A name of this call, for :meth:`undo_takes`.

        Raises:
            CallTimeoutError: Not so many in time (B103); nothing was taken.
            RolloutError: More than the capacity (B101), too many stale groups set aside (B111), or closed (B110).
        """
        _check_positive(count=count)
        if count > self.capacity:
            message = f"{counted(count, 'group')} can never be taken at once: the capacity is {self.capacity:,}"
            raise RolloutError([Finding("B101", message)])

        def attempt(request: Request) -> list[SampleGroup] | None:
            if min_version is not None:
                request.checked = self._shelves.set_aside(min_version, request.checked)
            return self._shelves.take(count, request.who, ticket)

        groups: list[SampleGroup] = self._wait(self._takers, attempt, who, count, timeout_s)
        return groups

    def drain_stale(self, *, ticket: str = "") -> list[SampleGroup]:
        """All groups that were set aside as too old; they are the caller's now, who may put them again."""
        with self._lock:
            return self._shelves.drain_stale(ticket)

    def confirm(self, ids: Iterable[str]) -> int:
        """These groups were used: they leave, and their ids are remembered so that they do not come again.

        That holds wherever they are by now (given back, or waiting again after a load), and for ids that are
        not known, such as those of groups that came after the save that was loaded. Can be repeated.

        Returns:
            How many of them were here.
        """
        keys = _checked_ids(ids)
        with self._lock:
            found = self._shelves.confirm(keys)
            self._serve()
            return found

    def give_back(self, ids: Iterable[str] | None = None) -> int:
        """Taken and not used: to the front again, in the order in which they were put.

        Args:
            ids: Of groups that were taken, finished or partial; ``None``: all that are out, for instance because
                who took them is gone. Those that wait already are ignored.

        Returns:
            How many went back.

        Raises:
            RolloutError: Ids that are not here, or were confirmed (B105); nothing was given back.
        """
        keys = None if ids is None else _checked_ids(ids)
        with self._lock:
            moved = self._shelves.give_back(keys)
            for request in self._takers.requests:
                request.checked = -1
            self._serve()
            return moved

    def undo_takes(self, tickets: Iterable[str]) -> int:
        """Give back what the calls with these tickets took, because their answers were lost on the way.

        Tickets of calls that took nothing, or whose groups came back since, are ignored.

        Returns:
            How many groups went back.
        """
        with self._lock:
            moved = self._shelves.undo(list(tickets))
            for request in self._takers.requests:
                request.checked = -1
            self._serve()
            return moved

    # Partial groups ------------------------------------------------------------------------

    def put_partial(self, groups: Sequence[SampleGroup], timeout_s: float | None = None, *, who: str = "") -> int:
        """Adds unfinished groups, all of them or none; they keep the tokens and versions that they have.

        A group that was handed out comes back in place of its older copy, and waits for nobody. One whose id is
        on this shelf already, or is finished, is ignored. Otherwise as :meth:`put`, with a capacity of its own.
        """
        groups = list(groups)
        _check_batch(groups, self.partial_capacity, "partial capacity")
        entries = [Entry(group) for group in groups]
        self._prepare(entries)
        return self._put_in_line(self._partial_putters, self._shelves.add_partial, entries, who, timeout_s)

    def take_partial(self, max_count: int, *, who: str = "", ticket: str = "") -> list[SampleGroup]:
        """Up to so many unfinished groups, to go on with before new prompts; empty where there are none.

        The buffer keeps a copy of what it hands out until the group comes back with :meth:`put` or
        :meth:`put_partial`, or is given up with :meth:`give_back` or :meth:`confirm`.
        """
        _check_positive(max_count=max_count)
        with self._lock:
            self._check_open()
            return self._shelves.take_partial(max_count, who or threading.current_thread().name, ticket)

    # The whole -----------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes everything to a file, as it is at one moment; others put and take meanwhile.

        The file is whole or not there: it is written beside its place, synced, and renamed.

        Raises:
            RolloutError: It cannot be written (B106), or a group holds what is no JSON (B108).
        """
        with self._save_lock:
            with self._lock:
                shelves, used, totals = self._shelves.saved()
            lines = ({"shelf": name, "group": pack_group(one.group)} for name in shelves for one in shelves[name])
            write_lines(Path(path), {"totals": totals, "used": used}, lines)

    def load(self, path: str | Path) -> None:
        """Makes a new buffer what :meth:`save` wrote. What was in flight is at the front again.

        Raises:
            RolloutError: No whole file (B106), another version (B107), or the buffer is in use or too
                small (B109); it is as it was before.
        """
        shelves, used, totals = self._read(Path(path))
        with self._lock:
            self._check_open()
            self._shelves.restore(shelves, used, totals, str(path))
            self._serve()

    def _read(self, path: Path) -> tuple[dict[str, list[Entry]], list[str], dict[str, int]]:
        """Return the shelves, the used ids and the totals of a file."""
        lines = enumerate(read_lines(path), 1)
        shelves: dict[str, list[Entry]] = {"finished": [], "partial": [], "stale": []}
        number, header = next(lines)
        try:
            used, totals = check_header(header)
            known: set[str] = set()
            for number, fields in lines:  # noqa: B007
                if fields.keys() != {"shelf", "group"} or fields["shelf"] not in (*shelves,):
                    raise ValueError(f"a line has a group and its shelf: {', '.join(shelves)}")
                group = unpack_group(fields["group"])
                if group.id in known:
                    raise ValueError(f"the group {group.id!r} is there twice")
                known.add(group.id)
                if fields["shelf"] == "finished" and not group.is_finished:
                    raise ValueError(f"the group {group.id!r} counts as finished, and its samples are not")
                shelves[fields["shelf"]].append(Entry(group, group.oldest_version))
        except ValueError as error:
            raise RolloutError([Finding("B106", f"{path}, line {number}: no saved buffer: {error}")]) from None
        return shelves, used, totals

    def stats(self) -> dict[str, Any]:
        """Counts of every shelf, totals since the beginning, and how long callers wait, as plain values."""
        with self._lock:
            now_s = time.monotonic()
            stats: dict[str, Any] = self._shelves.counts()
            stats["capacity"] = self.capacity
            stats["partial_capacity"] = self.partial_capacity
            stats["oldest_version"] = self._shelves.oldest_version()
            stats.update({f"total_{name}": count for name, count in self._shelves.totals.items()})
            for name, line in self._lines.items():
                waits = [now_s - request.since_s for request in line.requests]
                stats[f"{name}_waiters"] = len(waits)
                stats[f"{name}_wait_s"] = max(waits, default=0.0)
                stats[f"total_{name}_wait_s"] = line.waited_s + sum(waits)
            return stats

    def close(self) -> None:
        """Wakes everybody who waits, with an error. What is here can still be confirmed, given back and saved."""
        with self._lock:
            self._is_open = False
            for line in self._lines.values():
                for request in line.requests:
                    request.settle(_closed())
                line.requests.clear()

    def _prepare(self, entries: Sequence[Entry]) -> None:
        """Do what new entries need and takes time, before the lock is taken."""

    # Waiting -------------------------------------------------------------------------------

    def _put_in_line(
        self, line: Line, add: Callable[..., int | None], entries: list[Entry], who: str, timeout_s: float | None
    ) -> int:
        """Puts when it is one's turn; what needs no room waits for nobody."""
        with self._lock:
            self._check_open()
            count = add(entries, only_known=True)
            if count is not None:
                self._serve()
                return count
        return int(self._wait(line, lambda _: add(entries), who, len(entries), timeout_s))

    def _wait(
        self, line: Line, attempt: Callable[[Request], Any], who: str, count: int, timeout_s: float | None
    ) -> Any:
        """Stands in a line until the attempt gives something."""
        request = Request(attempt, who or threading.current_thread().name, count)
        with self._lock:
            self._check_open()
            line.requests.append(request)
            self._serve()
            if request.is_done():
                return request.outcome()
            request.woken = threading.Event()
        late: CallTimeoutError | None = None
        try:
            request.woken.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                line.waited_s += time.monotonic() - request.since_s
                if not request.is_done():
                    late = self._late(line, request)
                    line.requests.remove(request)
                    self._serve()
        if late is not None:
            raise late
        return request.outcome()

    def _serve(self) -> None:
        if any(line.requests for line in self._lines.values()):
            serve(self._lines.values())

    def _check_open(self) -> None:
        if not self._is_open:
            raise _closed()

    def _late(self, line: Line, request: Request) -> CallTimeoutError:
        """What to say when the wait was too long: how full it is, who waits, who has what since when."""
        now_s = time.monotonic()
        counts = self._shelves.counts()
        out, context = self._shelves.in_flight, []
        if line is self._partial_putters:
            out = self._shelves.partial_out
            context.append(f"{counts['partial']:,} partial, {len(out):,} out, room for {self.partial_capacity:,}")
        else:
            context.append(f"{counts['waiting']:,} waiting, {len(out):,} in flight, room for {self.capacity:,}")
        if out:
            first = min(out.values(), key=lambda entry: entry.taken_s)
            context.append(f"out the longest: {first.group.id!r} with {first.taker} for {now_s - first.taken_s:.1f} s")
        if line is self._takers and counts["stale"]:
            context.append(f"{counted(counts['stale'], 'stale group')} set aside")
        context += [f"in line to {name}: {one.described()}" for name, one in self._lines.items() if one.requests]
        groups, waited = counted(request.count, "group"), f"{now_s - request.since_s:.1f} s"
        if line is self._takers:
            message, code = f"{request.who} waited {waited} for {groups}, and they did not come", "B103"
        else:
            message, code = f"{request.who} waited {waited}, and there was no room for {groups}", "B102"
        rule = "what is out keeps its room until it is confirmed, finished or given back"
        return CallTimeoutError([Finding(code, message, context=tuple(context), rule=rule)])


def _check_batch(groups: Sequence[SampleGroup], limit: int, name: str) -> None:
    """Refuses at once what could never be put."""
    if len(groups) > limit:
        message = f"{counted(len(groups), 'group')} can never be put at once: the {name} is {limit:,}"
        raise RolloutError([Finding("B101", message, fixes=(Fix("put smaller batches, or make a larger buffer"),))])
    wrong = [group for group in groups if not isinstance(group, SampleGroup)]
    if wrong:
        raise RolloutError([Finding("B104", f"a SampleGroup is wanted, not {shown(wrong[0])}")])
    ids = [group.id for group in groups]
    nameless = [key for key in ids if not isinstance(key, str) or not key]
    if nameless:
        raise RolloutError([Finding("B104", f"the id of a group is a text, not {shown(nameless[0])}")])
    if len(set(ids)) < len(ids):
        twice = sorted({key for key in ids if ids.count(key) > 1})
        message = f"one batch has {counted(len(twice), 'id')} more than once: {some(twice)}"
        raise RolloutError([Finding("B104", message, rule="every group has an id of its own")])


def _checked_ids(ids: Iterable[str]) -> list[str]:
    """The ids, each once."""
    keys = list(dict.fromkeys([ids] if isinstance(ids, str) else ids))
    wrong = [key for key in keys if not isinstance(key, str)]
    if wrong:
        raise RolloutError([Finding("B105", f"ids of groups are wanted, not {shown(wrong[0])}")])
    return keys


def _check_positive(**numbers: int) -> None:
    problems = [
        Finding("B101", f"{name} is a whole number from 1 up, not {shown(number)}")
        for name, number in numbers.items()
        if isinstance(number, bool) or not isinstance(number, int) or number < 1
    ]
    if problems:
        raise RolloutError(problems)


def _closed() -> RolloutError:
    return RolloutError([Finding("B110", "the buffer was closed")])

"""``DataBuffer``: a bounded queue of sample groups between generators and trainers.

Blocked calls are served first come, first served. No group is lost, and none is handed out twice. The class is
thread-safe and needs neither Ray nor torch. Each group is in exactly one state::

    put ─▶ waiting ──take──▶ in flight ──confirm──▶ used: only its id is remembered
             │  ▲                │
             │  └── give_back ───┘
             └─ too old at a take ─▶ stale ──drain_stale──▶ removed

    put_partial ─▶ partial ──take_partial──▶ handed out ──put──▶ waiting
                      ▲                          │
                      └─ put_partial, give_back ─┘
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
from roost.data.wait_queue import Waiter, WaitQueue, abbreviated, serve
from roost.errors import CallTimeoutError, Finding, Fix, RolloutError, counted, shown

__all__ = ["DataBuffer"]


class DataBuffer:
    """A bounded queue of sample groups between generators and trainers.

    Attributes:
        capacity: Most finished groups, waiting and in flight together; also most stale groups.
        partial_capacity: Most partial groups, in the buffer and handed out together; default ``capacity``.
        remembered_ids: How many ids of used groups are remembered, the latest ones. A group with a remembered id is
            ignored when it is put again.
    """

    def __init__(self, capacity: int, *, partial_capacity: int | None = None, remembered_ids: int = 100_000) -> None:
        self.capacity = capacity
        self.partial_capacity = capacity if partial_capacity is None else partial_capacity
        self.remembered_ids = remembered_ids
        _check_positive(capacity=capacity, partial_capacity=self.partial_capacity, remembered_ids=remembered_ids)
        self._shelves = Shelves(capacity, self.partial_capacity, remembered_ids)
        self._puts, self._takes, self._partial_puts = WaitQueue(), WaitQueue(), WaitQueue()
        self._queues = {"put": self._puts, "take": self._takes, "put_partial": self._partial_puts}
        self._lock = threading.Lock()
        self._save_lock = threading.Lock()
        self._is_open = True

    # Finished groups -----------------------------------------------------------------------

    def put(self, groups: Sequence[SampleGroup], timeout_s: float | None = None, *, caller: str = "") -> int:
        """Add finished groups, all of them or none; block while there is no room for them.

        The call is idempotent: a group that is in the buffer already, or was confirmed, is ignored.

        Args:
            groups: At most as many as the capacity.
            timeout_s: Seconds to wait for room; ``None``: until there is room, or the buffer is closed.
            caller: Name of the caller for messages; default the name of the thread.

        Returns:
            How many groups were new.

        Raises:
            CallTimeoutError: There was no room in time (B102). The error says how full the buffer is, which calls wait,
                and which caller has had a group the longest.
            RolloutError: There are more groups than the capacity (B101), a group is unfinished (B104), or the buffer
                was closed (B110).
        """
        groups = list(groups)
        _check_batch(groups, self.capacity, "capacity")
        unfinished = [group.id for group in groups if not group.is_finished]
        if unfinished:
            message = f"{counted(len(unfinished), 'group')} of {len(groups)} cannot be put: samples are not finished"
            rule = 'the finish_reason of every sample is "stop" or "length"'
            fix = Fix("put unfinished groups with", "put_partial(groups)")
            raise RolloutError([Finding("B104", message, context=(abbreviated(unfinished),), rule=rule, fixes=(fix,))])
        entries = [Entry(group, group.oldest_version) for group in groups]
        self._prepare(entries)
        return self._put_or_wait(self._puts, self._shelves.add, entries, caller, timeout_s)

    def take(
        self,
        count: int,
        timeout_s: float | None = None,
        min_version: int | None = None,
        *,
        caller: str = "",
        ticket: str = "",
    ) -> list[SampleGroup]:
        """Take the ``count`` groups that were put first; block until there are so many.

        The groups are in flight, and keep their room, until :meth:`confirm` or :meth:`give_back`.

        Args:
            count: At most the capacity.
            timeout_s: Seconds to wait; ``None``: until the groups are there, or the buffer is closed.
            min_version: Waiting groups with a token of an older weight version become stale; see :meth:`drain_stale`.
                A group whose tokens have no versions is never too old.
            caller: Name of the caller for messages; default the name of the thread.
            ticket: Unique id of this call, for :meth:`undo_takes`.

        Raises:
            CallTimeoutError: There were not enough groups in time (B103); nothing was taken.
            RolloutError: ``count`` is above the capacity (B101), there are too many stale groups (B111), or the buffer
                was closed (B110).
        """
        _check_positive(count=count)
        if count > self.capacity:
            message = f"{counted(count, 'group')} can never be taken at once: the capacity is {self.capacity:,}"
            raise RolloutError([Finding("B101", message)])

        def attempt(waiter: Waiter) -> list[SampleGroup] | None:
            if min_version is not None:
                waiter.checked = self._shelves.set_aside(min_version, waiter.checked)
            return self._shelves.take(count, waiter.caller, ticket)

        groups: list[SampleGroup] = self._wait(self._takes, attempt, caller, count, timeout_s)
        return groups

    def drain_stale(self, *, ticket: str = "") -> list[SampleGroup]:
        """Remove all stale groups from the buffer and return them. The caller may put them again.

        Args:
            ticket: Unique id of this call, for :meth:`undo_takes`.
        """
        with self._lock:
            return self._shelves.drain_stale(ticket)

    def confirm(self, ids: Iterable[str]) -> int:
        """Remove groups that were used, and remember their ids so that they are ignored when they are put again.

        Groups are removed in whatever state they are, also where they were given back or wait again after a load.
        Unknown ids are remembered too, such as those of groups that were put after the save that was loaded. The call
        is idempotent.

        Returns:
            How many of the groups were in the buffer.
        """
        keys = _checked_ids(ids)
        with self._lock:
            found = self._shelves.confirm(keys)
            self._serve()
            return found

    def give_back(self, ids: Iterable[str] | None = None) -> int:
        """Return groups that were taken and not used to the front, in the order in which they were put.

        Args:
            ids: Ids of groups that were taken, finished or partial; ``None``: all groups that were taken, for example
                because the process that took them has died. Groups that wait already are ignored.

        Returns:
            How many groups were given back.

        Raises:
            RolloutError: A group is not in the buffer, or was confirmed (B105); nothing was given back.
        """
        keys = None if ids is None else _checked_ids(ids)
        with self._lock:
            moved = self._shelves.give_back(keys)
            self._serve_from_start()
            return moved

    def undo_takes(self, tickets: Iterable[str]) -> int:
        """Give back the groups that calls took or drained whose reply was lost.

        Tickets of calls that took nothing, or whose groups were given back since, are ignored.

        Args:
            tickets: The tickets that were passed to these calls.

        Returns:
            How many groups were given back.
        """
        with self._lock:
            moved = self._shelves.undo(list(tickets))
            self._serve_from_start()
            return moved

    # Partial groups ------------------------------------------------------------------------

    def put_partial(self, groups: Sequence[SampleGroup], timeout_s: float | None = None, *, caller: str = "") -> int:
        """Add unfinished groups with the tokens that they have, all of them or none; block while there is no room.

        A group that was handed out replaces its older copy and needs no further room. A group that is among the partial
        groups already, or is in the buffer as a finished one, is ignored. Otherwise the call works as :meth:`put`, with
        ``partial_capacity`` as its capacity.
        """
        groups = list(groups)
        _check_batch(groups, self.partial_capacity, "partial capacity")
        entries = [Entry(group) for group in groups]
        self._prepare(entries)
        return self._put_or_wait(self._partial_puts, self._shelves.add_partial, entries, caller, timeout_s)

    def take_partial(self, max_count: int, *, caller: str = "", ticket: str = "") -> list[SampleGroup]:
        """Hand out up to ``max_count`` unfinished groups, the oldest first, so that they are finished before new prompts.

        The call does not block; the list is empty where there are none. The buffer keeps a copy of each group until
        the group is put again (:meth:`put`, :meth:`put_partial`), given back or confirmed.

        Args:
            max_count: Most groups to hand out.
            caller: Name of the caller for messages; default the name of the thread.
            ticket: Unique id of this call, for :meth:`undo_takes`.
        """
        _check_positive(max_count=max_count)
        with self._lock:
            self._check_open()
            return self._shelves.take_partial(max_count, caller or threading.current_thread().name, ticket)

    # Save, load, close -----------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write a snapshot of the buffer to a file. Other calls go on while the file is written.

        The file is replaced atomically: a temporary file is written, synced and renamed.

        Raises:
            RolloutError: The file cannot be written (B106), or a group is not JSON-serializable (B108).
        """
        with self._save_lock:
            with self._lock:
                shelves, used, totals = self._shelves.saved()
            lines = ({"shelf": name, "group": pack_group(one.group)} for name in shelves for one in shelves[name])
            write_lines(Path(path), {"totals": totals, "used": used}, lines)

    def load(self, path: str | Path) -> None:
        """Fill a new buffer from a file that :meth:`save` wrote. Groups that were taken wait again, at the front.

        Raises:
            RolloutError: The file is not whole (B106) or has another format version (B107), or the buffer is in use or
                too small (B109). The buffer is unchanged.
        """
        shelves, used, totals = self._read(Path(path))
        with self._lock:
            self._check_open()
            self._shelves.restore(shelves, used, totals, str(path))
            self._serve()

    def _read(self, path: Path) -> tuple[dict[str, list[Entry]], list[str], dict[str, int]]:
        """Return the groups by shelf, the used ids and the totals of a file."""
        lines = enumerate(read_lines(path), 1)
        shelves: dict[str, list[Entry]] = {"finished": [], "partial": [], "stale": []}
        number, header = next(lines)
        try:
            used, totals = check_header(header)
            known: set[str] = set()
            for number, fields in lines:  # noqa: B007
                if fields.keys() != {"shelf", "group"} or fields["shelf"] not in (*shelves,):
                    raise ValueError(f"each line has a group and its shelf: {', '.join(shelves)}")
                group = unpack_group(fields["group"])
                if group.id in known:
                    raise ValueError(f"the group {group.id!r} is there twice")
                known.add(group.id)
                if fields["shelf"] == "finished" and not group.is_finished:
                    raise ValueError(
                        f"the group {group.id!r} is on the shelf of finished groups, but has unfinished samples"
                    )
                shelves[fields["shelf"]].append(Entry(group, group.oldest_version))
        except ValueError as error:
            raise RolloutError([Finding("B106", f"{path}, line {number}: not a saved buffer: {error}")]) from None
        return shelves, used, totals

    def stats(self) -> dict[str, Any]:
        """Return the number of groups in each state, totals since the start, and how long calls wait, as JSON values."""
        with self._lock:
            now_s = time.monotonic()
            stats: dict[str, Any] = self._shelves.counts()
            stats["capacity"] = self.capacity
            stats["partial_capacity"] = self.partial_capacity
            stats["oldest_version"] = self._shelves.oldest_version()
            stats.update({f"total_{name}": count for name, count in self._shelves.totals.items()})
            for name, queue in self._queues.items():
                waits = [now_s - waiter.since_s for waiter in queue.waiters]
                stats[f"{name}_waiters"] = len(waits)
                stats[f"{name}_wait_s"] = max(waits, default=0.0)
                stats[f"total_{name}_wait_s"] = queue.waited_s + sum(waits)
            return stats

    def close(self) -> None:
        """Refuse further puts and takes; calls that wait raise (B110). Groups can still be confirmed, given back, saved."""
        with self._lock:
            self._is_open = False
            for queue in self._queues.values():
                for waiter in queue.waiters:
                    waiter.finish(_closed())
                queue.waiters.clear()

    def _prepare(self, entries: Sequence[Entry]) -> None:
        """Hook for subclasses: do slow work on new entries, before the lock is taken."""

    # Waiting -------------------------------------------------------------------------------

    def _put_or_wait(
        self,
        queue: WaitQueue,
        add: Callable[..., int | None],
        entries: list[Entry],
        caller: str,
        timeout_s: float | None,
    ) -> int:
        """Put entries at once where they need no room, else when it is the call's turn."""
        with self._lock:
            self._check_open()
            count = add(entries, only_known=True)
            if count is not None:
                self._serve()
                return count
        return int(self._wait(queue, lambda _: add(entries), caller, len(entries), timeout_s))

    def _wait(
        self, queue: WaitQueue, attempt: Callable[[Waiter], Any], caller: str, count: int, timeout_s: float | None
    ) -> Any:
        """Wait in a queue until the attempt returns a value; return the value."""
        waiter = Waiter(attempt, caller or threading.current_thread().name, count)
        with self._lock:
            self._check_open()
            queue.waiters.append(waiter)
            self._serve()
            if waiter.is_done():
                return waiter.result()
            waiter.woken = threading.Event()
        late: CallTimeoutError | None = None
        try:
            waiter.woken.wait(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        finally:
            with self._lock:
                queue.waited_s += time.monotonic() - waiter.since_s
                if not waiter.is_done():
                    late = self._timed_out(queue, waiter)
                    queue.waiters.remove(waiter)
                    self._serve()
        if late is not None:
            raise late
        return waiter.result()

    def _serve(self) -> None:
        if any(queue.waiters for queue in self._queues.values()):
            serve(self._queues.values())

    def _serve_from_start(self) -> None:
        """Serve calls after groups came back to the front: takes check the versions of all groups again."""
        for waiter in self._takes.waiters:
            waiter.checked = -1
        self._serve()

    def _check_open(self) -> None:
        if not self._is_open:
            raise _closed()

    def _timed_out(self, queue: WaitQueue, waiter: Waiter) -> CallTimeoutError:
        """Return the error of a call that waited too long."""
        now_s = time.monotonic()
        counts = self._shelves.counts()
        out, context = self._shelves.in_flight, []
        if queue is self._partial_puts:
            out = self._shelves.partial_out
            context.append(
                f"{counts['partial']:,} partial, {len(out):,} handed out, room for {self.partial_capacity:,}"
            )
        else:
            context.append(f"{counts['waiting']:,} waiting, {len(out):,} in flight, room for {self.capacity:,}")
        if out:
            first = min(out.values(), key=lambda entry: entry.taken_at_s)
            held_s = now_s - first.taken_at_s
            context.append(f"taken the longest ago: {first.group.id!r} by {first.taker}, {held_s:.1f} s")
        if queue is self._takes and counts["stale"]:
            context.append(f"{counted(counts['stale'], 'stale group')} set aside")
        context += [f"waiting to {name}: {one.described()}" for name, one in self._queues.items() if one.waiters]
        groups, waited = counted(waiter.count, "group"), f"{now_s - waiter.since_s:.1f} s"
        if queue is self._takes:
            message, code = f"{waiter.caller} waited {waited} for {groups}, and too few were put", "B103"
        else:
            message, code = f"{waiter.caller} waited {waited}, and there was no room for {groups}", "B102"
        rule = "groups that were taken keep their room until they are confirmed, finished or given back"
        return CallTimeoutError([Finding(code, message, context=tuple(context), rule=rule)])


def _check_batch(groups: Sequence[SampleGroup], limit: int, name: str) -> None:
    """Refuse a batch that can never be put."""
    if len(groups) > limit:
        message = f"{counted(len(groups), 'group')} can never be put at once: the {name} is {limit:,}"
        raise RolloutError([Finding("B101", message, fixes=(Fix("put smaller batches, or make the buffer larger"),))])
    wrong = [group for group in groups if not isinstance(group, SampleGroup)]
    if wrong:
        raise RolloutError([Finding("B104", f"expected a SampleGroup, not {shown(wrong[0])}")])
    ids = [group.id for group in groups]
    nameless = [key for key in ids if not isinstance(key, str) or not key]
    if nameless:
        raise RolloutError([Finding("B104", f"the id of a group is a non-empty string, not {shown(nameless[0])}")])
    if len(set(ids)) < len(ids):
        twice = sorted({key for key in ids if ids.count(key) > 1})
        message = f"one batch has {counted(len(twice), 'id')} more than once: {abbreviated(twice)}"
        raise RolloutError([Finding("B104", message, rule="each group has a unique id")])


def _checked_ids(ids: Iterable[str]) -> list[str]:
    """Return the ids without duplicates."""
    keys = list(dict.fromkeys([ids] if isinstance(ids, str) else ids))
    wrong = [key for key in keys if not isinstance(key, str)]
    if wrong:
        raise RolloutError([Finding("B105", f"expected ids of groups, not {shown(wrong[0])}")])
    return keys


def _check_positive(**numbers: int) -> None:
    problems = [
        Finding("B101", f"{name} is an integer of at least 1, not {shown(number)}")
        for name, number in numbers.items()
        if isinstance(number, bool) or not isinstance(number, int) or number < 1
    ]
    if problems:
        raise RolloutError(problems)


def _closed() -> RolloutError:
    return RolloutError([Finding("B110", "the buffer was closed")])

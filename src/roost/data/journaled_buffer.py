"""A buffer that a later process can continue after the one that has it was killed.

Each change of the buffer is a record of a :class:`~roost.data.journal.Journal`, written before the caller gets its
answer: what was answered is in the journal. The groups themselves are records too, followed by the record of the change
that brought them; a change is done where its record is there. A journal that has grown to several times of what the
buffer holds is written anew.

Groups are pickled, so that they come back as they were whatever is in them. Unpickling can run code: the file is
readable and writable by this user alone, and is not opened where it belongs to another user or is a link.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ray import cloudpickle

from roost.data.buffer import DataBuffer
from roost.data.journal import Journal, damaged, read_journal
from roost.data.samples import SampleGroup
from roost.data.shelves import Entry, Shelves
from roost.errors import counted

__all__ = ["JournaledBuffer"]

SMALL_BYTES = 64 << 20
"""A journal up to this size is not written anew."""
GROWTH = 3
"""A larger one is, when it has grown by this factor since."""
RETRY_S = 10.0
"""Seconds between two attempts to begin a new journal, after one could not be written."""

logger = logging.getLogger("roost")


class JournaledBuffer(DataBuffer):
    """A :class:`DataBuffer` with a journal.

    Args:
        capacity: See :class:`DataBuffer`.
        path: The file of the journal.
        continues: Whether to begin with what the file holds, where it is there; else it is replaced.

    Attributes:
        notes: What was found at the start, for the user: that a torn record was dropped, or no file found.

    Raises:
        RolloutError: The journal is damaged (B112).
        ClusterError: The file is not a regular file of this user (R141).
    """

    def __init__(self, capacity: int, path: str, *, continues: bool = False) -> None:
        super().__init__(capacity)
        self.notes: list[str] = []
        self._recorded = _JournaledShelves(capacity, self.partial_capacity, self.remembered_ids)
        if continues:
            self.notes = _replay(self._recorded, path)
        self._recorded.begin(Journal(path))
        self._shelves = self._recorded

    def _prepare(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            entry.packed = _packed("group", entry.group)

    def remove_journal(self) -> None:
        """Close the journal and remove its file; later changes are not recorded."""
        with self._lock:
            self._recorded.end()


class _JournaledShelves(Shelves):
    """Shelves that record each change; see the module."""

    def __init__(self, capacity: int, partial_capacity: int, remembered_ids: int) -> None:
        super().__init__(capacity, partial_capacity, remembered_ids)
        self._journal: Journal | None = None
        self._is_broken = False
        self._retry_s = 0.0
        self._kept_bytes = 0

    def begin(self, journal: Journal) -> None:
        """Write a journal of what is here, and record changes from now on."""
        self._journal = journal
        self._attempt(self._rewrite, journal)

    def end(self) -> None:
        """Remove the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # Changes -------------------------------------------------------------------------------

    def add(self, entries: list[Entry], *, only_known: bool = False) -> int | None:
        new = [entry for entry in entries if not self._is_finished_here(entry.group.id)]
        count = super().add(entries, only_known=only_known)
        if count is not None:
            self._record(new, "add", _ids(new))
        return count

    def add_partial(self, entries: list[Entry], *, only_known: bool = False) -> int | None:
        new = [e for e in entries if e.group.id not in self.partial and not self._is_finished_here(e.group.id)]
        count = super().add_partial(entries, only_known=only_known)
        if count is not None:
            self._record(new, "add_partial", _ids(new))
        return count

    def take(self, count: int, who: str, ticket: str = "") -> list[SampleGroup] | None:
        groups = super().take(count, who, ticket)
        if groups:
            self._record((), "take", [group.id for group in groups], who, ticket)
        return groups

    def take_partial(self, max_count: int, who: str, ticket: str = "") -> list[SampleGroup]:
        groups = super().take_partial(max_count, who, ticket)
        if groups:
            self._record((), "take_partial", [group.id for group in groups], who, ticket)
        return groups

    def set_aside(self, min_version: int, checked: int) -> int:
        before = len(self.stale)
        try:
            return super().set_aside(min_version, checked)
        finally:  # some may have been moved before it found that there is no room for more
            if len(self.stale) > before:
                self._record((), "set_aside", list(self.stale)[before:])

    def drain_stale(self, ticket: str = "") -> list[SampleGroup]:
        groups = super().drain_stale(ticket)
        if groups:
            self._record((), "drain_stale", ticket)
        return groups

    def confirm(self, keys: Sequence[str]) -> int:
        found = super().confirm(keys)
        if keys:
            self._record((), "confirm", list(keys))
        return found

    def give_back(self, keys: Sequence[str] | None) -> int:
        keys = [*self.in_flight, *self.partial_out] if keys is None else keys
        moved = super().give_back(keys)
        if moved:
            self._record((), "give_back", list(keys))
        return moved

    def _undo_drains(self, tickets: Iterable[str]) -> int:
        moved = super()._undo_drains(tickets)
        if moved and self._journal is not None:
            self._attempt(self._rewrite, self._journal)
        return moved

    def restore(self, *arguments: Any) -> None:
        super().restore(*arguments)
        if self._journal is not None:
            self._attempt(self._rewrite, self._journal)

    # Writing -------------------------------------------------------------------------------

    def _record(self, new: Sequence[Entry], change: str, *arguments: Any) -> None:
        """Write a change, behind the groups that it brings."""
        journal = self._journal
        if journal is not None:
            if self._is_broken:
                if time.monotonic() >= self._retry_s:
                    self._attempt(self._rewrite, journal)
            elif new or arguments[0] or change == "drain_stale":
                self._attempt(self._write_change, journal, new, change, arguments)
        for entry in new:
            entry.packed = b""

    def _write_change(self, journal: Journal, new: Sequence[Entry], change: str, arguments: Sequence[Any]) -> None:
        contents = [entry.packed or _packed("group", entry.group) for entry in new]
        spans = journal.append([*contents, _packed(change, *arguments)])
        for entry, span in zip(new, spans, strict=False):
            entry.span = span
        if journal.size > max(SMALL_BYTES, GROWTH * self._kept_bytes):
            self._rewrite(journal)

    def _rewrite(self, journal: Journal) -> None:
        """Write the journal anew, with what is here now."""
        entries = [entry for shelf in self._all().values() for entry in shelf.values()]
        contents = (journal.read(e.span) if e.span is not None else _packed("group", e.group) for e in entries)
        spans = journal.rewrite(_followed(contents, _packed("state", self._state())))
        for entry, span in zip(entries, spans, strict=False):
            entry.span = span
        self._kept_bytes = journal.size
        if self._is_broken:
            self._is_broken = False
            logger.warning("the journal of the buffer, %s, is complete again", journal.path)

    def _attempt(self, write: Callable[..., None], journal: Journal, *arguments: Any) -> None:
        """Write; where that fails the job goes on without a journal until one can be written."""
        try:
            write(journal, *arguments)
        except OSError as error:
            if not self._is_broken:
                text = "the journal of the buffer, %s, cannot be written: %s; if the hub dies now, its groups are lost"
                logger.warning(text, journal.path, error)
                journal.invalidate()
            self._is_broken, self._retry_s = True, time.monotonic() + RETRY_S

    def _state(self) -> dict[str, Any]:
        shelves = {
            name: [(e.group.id, e.oldest, e.number, e.taker, e.ticket) for e in shelf.values()]
            for name, shelf in self._all().items()
        }
        return {
            "shelves": shelves, "used": list(self.used), "totals": dict(self.totals), "next": self._next_number,
        }  # fmt: skip

    # Reading -------------------------------------------------------------------------------

    def replay(self, change: str, groups: dict[str, SampleGroup], *arguments: Any) -> None:
        """Do a recorded change again; ``groups`` are those that came since the change before."""
        if change == "state":
            self._set(arguments[0], groups)
        elif change == "add":
            self.add([Entry(groups[key], groups[key].oldest_version) for key in arguments[0]])
        elif change == "add_partial":
            self.add_partial([Entry(groups[key]) for key in arguments[0]])
        elif change in ("take", "take_partial"):
            keys, who, ticket = arguments
            taken = getattr(self, change)(len(keys), who, ticket) or []
            if [group.id for group in taken] != keys:
                raise ValueError(f"a {change} of {counted(len(keys), 'group')} that were not in front")
        elif change == "set_aside":
            for key in arguments[0]:
                self.stale[key] = self.waiting.pop(key)
                self.totals["stale"] += 1
        elif change in ("drain_stale", "confirm", "give_back"):
            getattr(self, change)(*arguments)
        else:
            raise ValueError(f"an unknown change {change!r}")

    def _set(self, state: dict[str, Any], groups: dict[str, SampleGroup]) -> None:
        for name, shelf in self._all().items():
            shelf.clear()
            for key, oldest, number, taker, ticket in state["shelves"][name]:
                shelf[key] = Entry(groups[key], oldest, number, taker, time.monotonic(), ticket)
        self.used.clear()
        self.used.update(dict.fromkeys(state["used"]))
        self.totals.update(state["totals"])
        self._next_number = state["next"]


def _replay(shelves: _JournaledShelves, path: str) -> list[str]:
    """Do all changes of a journal again; return what the user should know."""
    groups: dict[str, SampleGroup] = {}
    is_torn = False
    try:
        for number, content in enumerate(read_journal(path), 1):
            if content is None:
                is_torn = True
            else:
                groups = _replay_one(shelves, groups, content, path, number)
    except FileNotFoundError:
        return [f"there is no journal {path}: the buffer is empty"]
    if is_torn or groups:
        return [f"the last change in {path} was not written completely; it was never confirmed, and is dropped"]
    return []


def _replay_one(
    shelves: _JournaledShelves, groups: dict[str, SampleGroup], content: bytes, path: str, number: int
) -> dict[str, SampleGroup]:
    """Do a record again; return the groups that wait for the record of their change."""
    try:
        change, *arguments = pickle.loads(content)  # noqa: S301
        if change == "group":
            groups[arguments[0].id] = arguments[0]
            return groups
        shelves.replay(change, groups, *arguments)
    except Exception as error:  # whatever unpickling raises
        raise damaged(path, f"record {number} cannot be used: {error!r}") from error
    return {}


def _packed(*what: Any) -> bytes:
    try:
        return pickle.dumps(what, 5)
    except Exception:  # classes of the driver's main module are pickled by value
        return bytes(cloudpickle.dumps(what, 5))


def _ids(entries: Iterable[Entry]) -> list[str]:
    return [entry.group.id for entry in entries]


def _followed(contents: Iterator[bytes], last: bytes) -> Iterator[bytes]:
    yield from contents
    yield last

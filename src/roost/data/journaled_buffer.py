"""A buffer with a write-ahead journal, from which another process can continue after a crash.

Each change of the buffer is a record of a :class:`~roost.data.journal.Journal`, written before the call returns. New
groups are records too, followed by the record of the change that added them; a change without its own record did not
happen. A journal that has grown to :data:`GROWTH` times the content of the buffer is rewritten.

Groups are pickled, so that they come back with their exact types. Unpickling can run code: only this user can read and
write the file, and a file of another user or a link is not opened.
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
"""A journal up to this size is not rewritten."""
GROWTH = 3
"""A larger journal is rewritten when it has grown by this factor since the last rewrite."""
RETRY_S = 10.0
"""Seconds between two attempts to rewrite a journal that could not be written."""

logger = logging.getLogger("roost")


class JournaledBuffer(DataBuffer):
    """A :class:`DataBuffer` with a journal.

    Args:
        capacity: See :class:`DataBuffer`.
        path: Path of the journal.
        continues: Restore the buffer from the journal where there is one. Otherwise the journal is replaced.

    Attributes:
        notes: Messages for the user about the restore: a torn record was dropped, or there was no journal.

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
    """Shelves that write each change to a journal."""

    def __init__(self, capacity: int, partial_capacity: int, remembered_ids: int) -> None:
        super().__init__(capacity, partial_capacity, remembered_ids)
        self._journal: Journal | None = None
        self._is_broken = False
        self._retry_s = 0.0
        self._kept_bytes = 0

    def begin(self, journal: Journal) -> None:
        """Write the current content to the journal, and record changes from now on."""
        self._journal = journal
        self._attempt(self._rewrite, journal)

    def end(self) -> None:
        """Remove the journal; later changes are not recorded."""
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

    def take(self, count: int, caller: str, ticket: str = "") -> list[SampleGroup] | None:
        groups = super().take(count, caller, ticket)
        if groups:
            self._record((), "take", [group.id for group in groups], caller, ticket)
        return groups

    def take_partial(self, max_count: int, caller: str, ticket: str = "") -> list[SampleGroup]:
        groups = super().take_partial(max_count, caller, ticket)
        if groups:
            self._record((), "take_partial", [group.id for group in groups], caller, ticket)
        return groups

    def set_aside(self, min_version: int, checked: int) -> int:
        before = len(self.stale)
        try:
            return super().set_aside(min_version, checked)
        finally:  # groups may have been moved before the shelf was full
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
        """Append the groups that a change adds, and then the change."""
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
        """Replace the journal by the current content of the buffer."""
        entries = [entry for shelf in self._all().values() for entry in shelf.values()]
        contents = (journal.read(e.span) if e.span is not None else _packed("group", e.group) for e in entries)
        spans = journal.rewrite(_followed(contents, _packed("state", self._state())))
        for entry, span in zip(entries, spans, strict=False):
            entry.span = span
        self._kept_bytes = journal.size
        if self._is_broken:
            self._is_broken = False
            logger.warning("the journal of the buffer, %s, can be written again and is complete", journal.path)

    def _attempt(self, write: Callable[..., None], journal: Journal, *arguments: Any) -> None:
        """Write to the journal. Where this fails, the buffer works without a journal until one can be written."""
        try:
            write(journal, *arguments)
        except OSError as error:
            if not self._is_broken:
                text = "the journal of the buffer, %s, cannot be written: %s; the groups are lost if the hub dies now"
                logger.warning(text, journal.path, error)
                journal.invalidate()
            self._is_broken, self._retry_s = True, time.monotonic() + RETRY_S

    def _state(self) -> dict[str, Any]:
        shelves = {
            name: [(e.group.id, e.oldest_version, e.sequence, e.taker, e.ticket) for e in shelf.values()]
            for name, shelf in self._all().items()
        }
        return {
            "shelves": shelves, "used": list(self.used), "totals": dict(self.totals), "next": self._next_sequence,
        }  # fmt: skip

    # Reading -------------------------------------------------------------------------------

    def replay(self, change: str, groups: dict[str, SampleGroup], *arguments: Any) -> None:
        """Apply a recorded change. ``groups`` are the groups recorded since the previous change, by id."""
        if change == "state":
            self._set(arguments[0], groups)
        elif change == "add":
            self.add([Entry(groups[key], groups[key].oldest_version) for key in arguments[0]])
        elif change == "add_partial":
            self.add_partial([Entry(groups[key]) for key in arguments[0]])
        elif change in ("take", "take_partial"):
            keys, caller, ticket = arguments
            taken = getattr(self, change)(len(keys), caller, ticket) or []
            if [group.id for group in taken] != keys:
                raise ValueError(f"a {change} of {counted(len(keys), 'group')} that were not at the front")
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
            for key, oldest_version, sequence, taker, ticket in state["shelves"][name]:
                shelf[key] = Entry(groups[key], oldest_version, sequence, taker, time.monotonic(), ticket)
        self.used.clear()
        self.used.update(dict.fromkeys(state["used"]))
        self.totals.update(state["totals"])
        self._next_sequence = state["next"]


def _replay(shelves: _JournaledShelves, path: str) -> list[str]:
    """Apply all changes of a journal; return messages for the user."""
    groups: dict[str, SampleGroup] = {}
    is_torn = False
    try:
        for number, content in enumerate(read_journal(path), 1):
            if content is None:
                is_torn = True
            else:
                groups = _replay_one(shelves, groups, content, path, number)
    except FileNotFoundError:
        return [f"there is no journal {path}: the buffer starts empty"]
    if is_torn or groups:
        return [f"the last change in {path} is incomplete and was dropped; its call had not returned"]
    return []


def _replay_one(
    shelves: _JournaledShelves, groups: dict[str, SampleGroup], content: bytes, path: str, number: int
) -> dict[str, SampleGroup]:
    """Apply a record; return the groups whose change has not been read yet."""
    try:
        change, *arguments = pickle.loads(content)  # noqa: S301
        if change == "group":
            groups[arguments[0].id] = arguments[0]
            return groups
        shelves.replay(change, groups, *arguments)
    except Exception as error:  # unpickling can raise any exception
        raise damaged(path, f"record {number} cannot be used: {error!r}") from error
    return {}


def _packed(*record: Any) -> bytes:
    try:
        return pickle.dumps(record, 5)
    except Exception:  # pickle cannot find classes of the driver's __main__ module; cloudpickle stores them by value
        dumps: Callable[..., bytes] = cloudpickle.dumps
        return dumps(record, 5)


def _ids(entries: Iterable[Entry]) -> list[str]:
    return [entry.group.id for entry in entries]


def _followed(contents: Iterator[bytes], last: bytes) -> Iterator[bytes]:
    yield from contents
    yield last

"""``Lock``: a plan that is kept, with what it was resolved against."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import groupby
from typing import Any

from roost.errors import ConfigError, Finding, Fix, RoostError, shown
from roost.plan.machines import MachineChange, compare_machines, device_uuids, fingerprint
from roost.plan.plan import Plan
from roost.plan.serial import plan_from_plain, plan_to_json
from roost.ranks import format_ranks
from roost.topology import Node, Topology

__all__ = ["Lock", "text_hash"]

FORMAT = "roost.lock/2"

_ANEW = (
    Fix("write it again for machines that are described", "roost plan JOB.yaml --cluster … --lock FILE"),
    Fix("or when the job is launched", "roost run JOB.yaml --lock FILE --relock"),
)


@dataclass(frozen=True)
class Lock:
    """A plan that is kept, to be compared and replayed. A plain value: no clock in it.

    Attributes:
        plan: The plan.
        job_file: The job file, as seen from the lock's folder; empty where there was none.
        job_hash: SHA-256 of that file's text, in hex.
        settings: Values that were set beside the file, each ``KEY=VALUE``.
        uuids: The UUIDs of each node's accelerators; empty for a node where they were not known.
    """

    plan: Plan
    job_file: str = ""
    job_hash: str = ""
    settings: tuple[str, ...] = ()
    uuids: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def of(
        plan: Plan, machines: Any = None, job_file: str = "", job_hash: str = "", settings: Sequence[str] = ()
    ) -> Lock:
        """The lock of a plan.

        Args:
            plan: The plan.
            machines: The live cluster that it was resolved on, which knows the UUIDs of its accelerators.
            job_file: The job file, as seen from where the lock will be.
            job_hash: What :func:`text_hash` gives for it.
            settings: Values that were set beside the file.
        """
        uuids = device_uuids(machines if machines is not None else plan.topology)[: plan.topology.num_nodes]
        return Lock(plan, job_file, job_hash, tuple(settings), uuids if any(uuids) else ())

    @property
    def topology(self) -> Topology:
        """The machines that the plan was resolved on."""
        return self.plan.topology

    @property
    def fingerprint(self) -> str:
        """A short text that is the same for the same machines in the same order."""
        return fingerprint(self.plan.topology, self.uuids)

    def differences(self, machines: Any) -> list[MachineChange]:
        """What is not as it was: a node gone, another order, another card, another name or address.

        What either side does not know is not compared, and nodes beyond those of the plan do not matter.

        Args:
            machines: A topology, or a live cluster.
        """
        changes = compare_machines(self.plan.topology, Topology.of(machines), self.uuids, device_uuids(machines))
        return [change for change in changes if change.kind != "further"]

    def is_of(self, job_hash: str, settings: Sequence[str] = ()) -> bool:
        """Whether it was made from a job file of that text, with the same values set."""
        return (job_hash, tuple(settings)) == (self.job_hash, self.settings)

    # Keeping -------------------------------------------------------------------------------

    def to_json(self) -> str:
        """JSON text, byte-identical for equal locks, a line per node and process; see :meth:`from_json`."""
        job: dict[str, Any] = {"file": self.job_file, "sha256": self.job_hash}
        if self.settings:
            job["set"] = list(self.settings)
        rows = ",\n  ".join(_dump(row) for row in _machine_rows(self.plan.topology.nodes, self.uuids))
        text = (
            f'{{"format": "{FORMAT}",\n "job": {_dump(job)},\n "fingerprint": "{self.fingerprint}",\n'
            f' "machines": [\n  {rows}],\n "plan": {plan_to_json(self.plan).rstrip()}'
        )
        return f'{text},\n "checksum": "{_checksum(json.loads(text + "}"))}"}}\n'

    @staticmethod
    def from_json(text: str) -> Lock:
        """The inverse of :meth:`to_json`.

        Raises:
            ConfigError: Where the text is no lock, is cut off, is of another Roost, or was changed since it was written.
        """
        plain = dict(_parse(text))
        if plain.pop("checksum", None) != _checksum(plain):
            message = "the lock was changed after Roost wrote it: its checksum does not fit"
            rule = "a lock is written by Roost alone: a plan that is edited by hand has not been checked"
            raise ConfigError([Finding("C405", message, rule=rule, fixes=_ANEW)])
        try:
            plan = plan_from_plain(plain["plan"])
            job, rows = plain["job"], plain["machines"]
            uuids = _uuids(rows, plan.topology.num_nodes)
            lock = Lock(plan, _text(job["file"]), _text(job["sha256"]), tuple(map(_text, job.get("set", ()))), uuids)
        except RoostError:
            raise
        except KeyError as error:
            raise ConfigError([Finding("C402", f"not a lock: {error} is missing", fixes=_ANEW)]) from None
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError([Finding("C402", f"not a lock: {str(error)[:200]}", fixes=_ANEW)]) from None
        if plain.get("fingerprint") != lock.fingerprint or rows != _machine_rows(plan.topology.nodes, uuids):
            message = "the lock contradicts itself: its machines are not those of its plan"
            rule = "a lock is written by Roost alone"
            raise ConfigError([Finding("C405", message, rule=rule, fixes=_ANEW)])
        return lock

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Lock:
        """Reads it from a file.

        Raises:
            ConfigError: Where the file cannot be read, or is no lock; the message names it.
        """
        name = os.fspath(path)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise ConfigError([Finding("C101", f"{name}: {error.strerror or error}")]) from None
        except UnicodeDecodeError:
            raise ConfigError([Finding("C402", f"{name}: not a lock: it is no text", fixes=_ANEW)]) from None
        try:
            return Lock.from_json(text)
        except RoostError as error:
            found = error.findings
        raise ConfigError([_in_file(finding, name) for finding in found])


def text_hash(text: str | bytes) -> str:
    """SHA-256 of a text, in hex."""
    return sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _in_file(finding: Finding, name: str) -> Finding:
    """The finding about the text of a lock, with the file's name in its message and in the commands that it shows."""
    fixes = tuple(Fix(fix.text, fix.paste.replace("FILE", shlex.quote(name))) for fix in finding.fixes)
    return replace(finding, message=f"{name}: {finding.message}", fixes=fixes)


def _checksum(plain: Mapping[str, Any]) -> str:
    """SHA-256 of everything in a lock except the checksum itself; white space does not matter."""
    return sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} stands where a text must")
    return value


def _parse(text: str) -> Mapping[str, Any]:
    """The JSON object of a text that says it is a lock of this version."""
    try:
        plain = json.loads(text)
    except RecursionError:
        raise ConfigError([Finding("C402", "not a lock: it nests too deep", fixes=_ANEW)]) from None
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated")
        if is_cut and '"roost.lock/' in text[:200]:
            message = f"the lock is cut off at line {error.lineno}: it was not written to its end"
            raise ConfigError([Finding("C403", message, fixes=_ANEW)]) from None
        message = f"not a lock: line {error.lineno}, column {error.colno} is not JSON ({error.msg})"
        raise ConfigError([Finding("C402", message, fixes=_ANEW)]) from None
    except ValueError as error:  # a number with more digits than Python reads
        raise ConfigError([Finding("C402", f"not a lock: {str(error)[:200]}", fixes=_ANEW)]) from None
    found = plain.get("format") if isinstance(plain, dict) else None
    if found == FORMAT:
        return plain  # type: ignore[no-any-return]
    number = re.fullmatch(r"roost\.lock/([0-9]{1,6})", found, re.ASCII) if isinstance(found, str) else None
    if number and found == "roost.lock/1":
        message = (
            f"the lock is of an older Roost: its format is {found!r}, which has no checksum, and {FORMAT!r} is read"
        )
        raise ConfigError([Finding("C406", message, fixes=_ANEW)])
    if number and int(number[1]) > 2:
        message = f"the lock is of a newer Roost: its format is {found!r}, and {FORMAT!r} is read"
        raise ConfigError([Finding("C404", message, fixes=(Fix("update Roost, or write the lock again here"),))])
    message = f"not a lock: its format is {shown(found)}, and {FORMAT!r} is read"
    raise ConfigError([Finding("C402", message, fixes=_ANEW)])


def _machine_rows(nodes: Sequence[Node], uuids: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What people look at: who and what the nodes are; consecutive nodes that say the same in one row."""

    def facts(node: Node) -> dict[str, Any]:
        known = {"name": node.name, "address": node.address, "accelerators": _accelerators(node)}
        given = list(uuids[node.rank]) if node.rank < len(uuids) else []
        return {**{key: value for key, value in known.items() if value}, **({"uuids": given} if given else {})}

    rows = []
    known = ((facts(node), node.rank) for node in nodes)
    for (row, _), run in groupby(known, key=lambda item: (item[0], item[1] if "uuids" in item[0] else -1)):
        rows.append({"nodes": format_ranks(rank for _, rank in run), **row})
    return rows


def _accelerators(node: Node) -> str:
    """``8 x NVIDIA H200 141 GiB``."""
    if not node.accelerator_ids:
        return ""
    memory = f"{node.accelerator_memory_gib:g} GiB" if node.accelerator_memory_gib is not None else ""
    words = (f"{node.num_accelerators} x", node.accelerator_type.name, node.accelerator_model, memory)
    return " ".join(word for word in words if word)


def _uuids(rows: Iterable[Any], num_nodes: int) -> tuple[tuple[str, ...], ...]:
    """The UUIDs of each node, from rows in which a node with UUIDs stands alone."""
    found: list[tuple[str, ...]] = [()] * num_nodes
    for row in rows:
        if "uuids" in row:
            rank = int(_text(row["nodes"]))
            if not 0 <= rank < num_nodes:
                raise ValueError(f"there are UUIDs of node {rank}, and no such node")
            found[rank] = tuple(map(_text, row["uuids"]))
    return tuple(found) if any(found) else ()

"""``LockFile``: a saved plan, with the job file and the nodes that it was resolved from."""

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
from roost.plan.node_changes import NodeChange, accelerator_uuids, compare_nodes, fingerprint
from roost.plan.plan import Plan
from roost.plan.serial import plan_from_plain, plan_to_json
from roost.ranks import format_ranks
from roost.topology import Node, Topology

__all__ = ["LockFile", "text_hash"]

FORMAT = "roost.lock/2"

_ANEW = (
    Fix("write it again for described nodes", "roost plan JOB.yaml --cluster … --lock FILE"),
    Fix("or when the job is launched", "roost run JOB.yaml --lock FILE --relock"),
)


@dataclass(frozen=True)
class LockFile:
    """A saved plan, to compare and to replay. Equal plans make equal lock files: there is no time stamp.

    Attributes:
        plan: The plan.
        job_file: Path of the job file, relative to the folder of the lock file; empty if there was none.
        job_hash: SHA-256 of the text of the job file, in hex.
        settings: Values that ``--set`` changed, each as ``KEY=VALUE``.
        uuids: UUIDs of the accelerators of each node; empty for a node whose UUIDs are unknown.
    """

    plan: Plan
    job_file: str = ""
    job_hash: str = ""
    settings: tuple[str, ...] = ()
    uuids: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def of(
        plan: Plan, cluster: Any = None, job_file: str = "", job_hash: str = "", settings: Sequence[str] = ()
    ) -> LockFile:
        """Return the lock file of a plan.

        Args:
            plan: The plan.
            cluster: The live cluster that the plan was resolved on, which knows the UUIDs of its accelerators.
            job_file: Path of the job file, relative to the folder of the lock file.
            job_hash: :func:`text_hash` of the job file.
            settings: Values that ``--set`` changed.
        """
        uuids = accelerator_uuids(cluster if cluster is not None else plan.topology)[: plan.topology.num_nodes]
        return LockFile(plan, job_file, job_hash, tuple(settings), uuids if any(uuids) else ())

    @property
    def topology(self) -> Topology:
        """The nodes that the plan was resolved on."""
        return self.plan.topology

    @property
    def fingerprint(self) -> str:
        """Short hash that is equal for the same nodes in the same order."""
        return fingerprint(self.plan.topology, self.uuids)

    def differences(self, cluster: Any) -> list[NodeChange]:
        """Return how the nodes changed: a missing node, another order, another accelerator, another name or address.

        Facts that one side does not know are not compared. Nodes beyond those of the plan are ignored.

        Args:
            cluster: A topology, or a live cluster.
        """
        changes = compare_nodes(self.plan.topology, Topology.of(cluster), self.uuids, accelerator_uuids(cluster))
        return [change for change in changes if change.kind != "further"]

    def is_of(self, job_hash: str, settings: Sequence[str] = ()) -> bool:
        """Return whether the lock file was made from a job file with that hash, and with the same settings."""
        return (job_hash, tuple(settings)) == (self.job_hash, self.settings)

    # Reading and writing -------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return JSON text, byte-identical for equal lock files, with a line per node and process."""
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
    def from_json(text: str) -> LockFile:
        """Return the lock file of a JSON text; the inverse of :meth:`to_json`.

        Raises:
            ConfigError: If the text is no lock file (C402), is truncated (C403), was written by a newer or an older
                Roost (C404, C406), or was changed after it was written (C405).
        """
        plain = dict(_parse(text))
        if plain.pop("checksum", None) != _checksum(plain):
            message = "the lock was changed after Roost wrote it: its checksum does not match"
            rule = "only Roost writes lock files: a plan that is edited by hand has not been checked"
            raise ConfigError([Finding("C405", message, rule=rule, fixes=_ANEW)])
        try:
            plan = plan_from_plain(plain["plan"])
            job, rows = plain["job"], plain["machines"]
            uuids = _uuids(rows, plan.topology.num_nodes)
            lock = LockFile(
                plan, _text(job["file"]), _text(job["sha256"]), tuple(map(_text, job.get("set", ()))), uuids
            )
        except RoostError:
            raise
        except KeyError as error:
            raise ConfigError([Finding("C402", f"not a lock: {error} is missing", fixes=_ANEW)]) from None
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError([Finding("C402", f"not a lock: {str(error)[:200]}", fixes=_ANEW)]) from None
        if plain.get("fingerprint") != lock.fingerprint or rows != _machine_rows(plan.topology.nodes, uuids):
            message = "the lock contradicts itself: its list of nodes differs from the nodes of its plan"
            rule = "only Roost writes lock files"
            raise ConfigError([Finding("C405", message, rule=rule, fixes=_ANEW)])
        return lock

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LockFile:
        """Read a lock file.

        Raises:
            ConfigError: If the file cannot be read (C101), or for the reasons of :meth:`from_json`. The message
                starts with the path.
        """
        name = os.fspath(path)
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise ConfigError([Finding("C101", f"{name}: {error.strerror or error}")]) from None
        except UnicodeDecodeError:
            raise ConfigError([Finding("C402", f"{name}: not a lock: it is not text in UTF-8", fixes=_ANEW)]) from None
        try:
            return LockFile.from_json(text)
        except RoostError as error:
            found = error.findings
        raise ConfigError([_in_file(finding, name) for finding in found])


def text_hash(text: str | bytes) -> str:
    """Return the SHA-256 of a text, in hex."""
    return sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def _in_file(finding: Finding, name: str) -> Finding:
    """Return a finding about a lock file with the path in its message and in the commands that it suggests."""
    fixes = tuple(Fix(fix.text, fix.paste.replace("FILE", shlex.quote(name))) for fix in finding.fixes)
    return replace(finding, message=f"{name}: {finding.message}", fixes=fixes)


def _checksum(plain: Mapping[str, Any]) -> str:
    """Return the SHA-256 of everything in a lock file except the checksum. White space does not matter."""
    return sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} stands in place of a text")
    return value


def _parse(text: str) -> Mapping[str, Any]:
    """Return the JSON object of a text if its format is that of this version."""
    try:
        plain = json.loads(text)
    except RecursionError:
        raise ConfigError([Finding("C402", "not a lock: it is nested too deeply", fixes=_ANEW)]) from None
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated")
        if is_cut and '"roost.lock/' in text[:200]:
            message = f"the lock is truncated at line {error.lineno}: writing it was interrupted"
            raise ConfigError([Finding("C403", message, fixes=_ANEW)]) from None
        message = f"not a lock: line {error.lineno}, column {error.colno} is not JSON ({error.msg})"
        raise ConfigError([Finding("C402", message, fixes=_ANEW)]) from None
    except ValueError as error:  # a number with more digits than Python converts
        raise ConfigError([Finding("C402", f"not a lock: {str(error)[:200]}", fixes=_ANEW)]) from None
    found = plain.get("format") if isinstance(plain, dict) else None
    if found == FORMAT:
        return plain  # type: ignore[no-any-return]
    number = re.fullmatch(r"roost\.lock/([0-9]{1,6})", found, re.ASCII) if isinstance(found, str) else None
    if number and found == "roost.lock/1":
        message = f"the lock was written by an older Roost: its format is {found!r}, without a checksum; this Roost reads {FORMAT!r}"
        raise ConfigError([Finding("C406", message, fixes=_ANEW)])
    if number and int(number[1]) > 2:
        message = f"the lock was written by a newer Roost: its format is {found!r}; this Roost reads {FORMAT!r}"
        raise ConfigError([Finding("C404", message, fixes=(Fix("update Roost, or write the lock again here"),))])
    message = f"not a lock: its format is {shown(found)}; this Roost reads {FORMAT!r}"
    raise ConfigError([Finding("C402", message, fixes=_ANEW)])


def _machine_rows(nodes: Sequence[Node], uuids: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return the nodes as rows for people: names, addresses, accelerators. Consecutive equal nodes share a row."""

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
    """Return such as ``8 x NVIDIA H200 141 GiB``."""
    if not node.accelerator_ids:
        return ""
    memory = f"{node.accelerator_memory_gib:g} GiB" if node.accelerator_memory_gib is not None else ""
    words = (f"{node.num_accelerators} x", node.accelerator_type.name, node.accelerator_model, memory)
    return " ".join(word for word in words if word)


def _uuids(rows: Iterable[Any], num_nodes: int) -> tuple[tuple[str, ...], ...]:
    """Return the UUIDs of each node. A node with UUIDs has a row of its own."""
    found: list[tuple[str, ...]] = [()] * num_nodes
    for row in rows:
        if "uuids" in row:
            rank = int(_text(row["nodes"]))
            if not 0 <= rank < num_nodes:
                raise ValueError(f"there are UUIDs of node {rank}, which does not exist")
            found[rank] = tuple(map(_text, row["uuids"]))
    return tuple(found) if any(found) else ()

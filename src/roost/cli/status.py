"""``roost status``: jobs, groups and ranks on a Ray."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from typing import Any

from roost.cli.inputs import Formatter
from roost.cli.live import add_address, joined
from roost.cli.output import print_view

__all__ = ["add", "run"]

_DESCRIPTION = """\
Lists what runs: jobs, their groups, and for every rank its node, accelerators, process and state.

  roost status
  roost status --address 10.0.0.1:6379 --json
"""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser("status", help="show what runs", description=_DESCRIPTION, formatter_class=Formatter)
    add_address(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, to stdout")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Runs the command; returns the exit code."""
    with joined(args):
        jobs = _jobs()
    if args.json:
        sys.stdout.write(json.dumps({"jobs": jobs}, indent=1) + "\n")
        return 0
    from roost.report.columns import align

    if not jobs:
        print_view("no Roost job runs on this Ray")
    for job in jobs:
        owner = job["owner"]
        print_view(
            f"{owner['namespace']}: {job['machines']}, {owner['user']} on {owner['host']} since {owner['since']}"
        )
        rows = [["  group", "rank", "node", "address", "accelerators", "process", "state"]]
        for group in job["groups"]:
            for worker in group["workers"]:
                used = ",".join(map(str, worker["accelerators"])) or "-"
                rows.append(
                    [
                        f"  {group['name']}", str(worker["rank"]), str(worker["node_rank"]), worker["address"],
                        used, str(worker["pid"]), _doing(worker),
                    ]
                )  # fmt: skip
        print_view(align(rows) if len(rows) > 1 else "  no groups")
    return 0


def _doing(worker: dict[str, Any]) -> str:
    if worker["state"] == "busy":
        return f"busy in {worker['call']} for {worker['since_s']:.0f} s"
    return str(worker["state"])


def _jobs() -> list[dict[str, Any]]:
    import ray

    from roost.cluster.managers import MANAGERS

    jobs = []
    named = ray.util.list_named_actors(all_namespaces=True)
    for namespace in sorted({entry["namespace"] for entry in named if entry["name"] == MANAGERS}):
        try:
            managers = ray.get_actor(MANAGERS, namespace=namespace)
            owner, topology, groups = ray.get(
                [managers.owner.remote(), managers.get_topology.remote(), managers.get_groups.remote()], timeout=10
            )
        except (ValueError, ray.exceptions.RayError):
            continue  # it ended while we looked
        records = [{"name": name, "workers": _workers(record, namespace)} for name, record in sorted(groups.items())]
        jobs.append({"owner": owner, "machines": topology.describe(), "groups": records})
    return jobs


def _workers(record: dict[str, Any], namespace: str) -> list[dict[str, Any]]:
    import ray

    try:
        handles = [ray.get_actor(actor, namespace=namespace) for actor in record["actors"]]
    except ValueError:
        return [{**worker, "state": "dead"} for worker in record["workers"]]
    refs = [handle.state.remote() for handle in handles]
    ready = set(ray.wait(refs, num_returns=len(refs), timeout=5)[0]) if refs else set()
    workers = []
    for worker, ref in zip(record["workers"], refs, strict=False):
        try:
            state = ray.get(ref) if ref in ready else {"state": "silent"}
        except ray.exceptions.RayError:
            state = {"state": "dead"}
        workers.append({**worker, **state})
    return workers

"""``python examples/grpo --mode hybrid --steps 20 --seed 3``: the job file with a few values changed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from roost.cli import main as roost

JOB = Path(__file__).parent.parent / "grpo.yaml"


def main() -> int:
    """Runs ``roost run`` on the job."""
    parser = argparse.ArgumentParser(prog="python examples/grpo", description=__doc__)
    parser.add_argument("--mode", choices=["collocated", "disaggregated", "hybrid"], default="collocated")
    parser.add_argument("--async", dest="is_async", action="store_true", help="generate while learning")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--model", help="a directory with a causal language model of transformers")
    parser.add_argument("--goal", type=float, help="fail where the mean reward of the last steps is below")
    parser.add_argument("--only", choices=["rollout", "train"], help="one half alone, from or into a file of rollouts")
    parser.add_argument("--html", help="write a page of where everything ran")
    parser.add_argument("--cluster", default="2x2", help="made-up machines, or a cluster file")
    args = parser.parse_args()
    values = {"cluster.layout.mode": args.mode}
    if args.mode == "hybrid":  # the last engine has an accelerator of its own
        values["cluster.layout.rollout_num_gpus"] = "3"
    for name in ("steps", "seed", "goal", "model"):
        if getattr(args, name) is not None:
            values[f"grpo.{name}"] = str(getattr(args, name))
    if args.is_async:
        values["cluster.layout.async_training"] = "true"
    if args.only:
        values[f"cluster.layout.debug_{args.only}_only"] = "true"
    sets = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
    page = ["--html", args.html] if args.html else []
    return roost(["run", str(JOB), "--cluster", args.cluster, *sets, *page])


if __name__ == "__main__":
    sys.exit(main())

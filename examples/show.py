"""Plans every example and shows where everything goes: what ``make run`` does."""

import os
import sys
from pathlib import Path

from roost.cli import main

HERE = Path(__file__).parent
EXAMPLES = [
    ("collocated.yaml", ["--cluster", "2x8:H200"]),
    ("disaggregated.yaml", ["--cluster", "3x8:H100"]),
    ("hybrid.yaml", ["--cluster", "1x8:A100"]),
    (
        "heterogeneous.yaml",
        ["--cluster", "examples/heterogeneous-cluster.yaml", "--import", "examples.robots"],
    ),
]

if __name__ == "__main__":
    os.chdir(HERE.parent)
    sys.path.insert(0, "")
    codes = []
    for name, arguments in EXAMPLES:
        command = ["plan", f"examples/{name}", *arguments]
        print(f"\n$ roost {' '.join(command)}\n", flush=True)
        codes.append(main(command))
    sys.exit(max(codes))

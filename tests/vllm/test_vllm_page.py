"""The job of the page about vLLM runs as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from snippets import ROOT, blocks_of


def test_the_job_of_the_page_runs(model: Path, tmp_path: Path) -> None:
    shown = ""
    for block in blocks_of(ROOT / "docs" / "how-to" / "vllm.md"):
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.text.startswith("$ roost run"):
            shown = block.text
    words = shown.splitlines()[0].removeprefix("$ ").split()
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        [*words, "--set", f"model={model}"],
        cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout

    def steps(text: str) -> list[str]:
        return re.findall(r"step \d+: samples of version \d+|version \d+ by \w+", text)

    assert steps(done.stdout) == steps(shown)
    assert all(float(apart) < 1e-3 for apart in re.findall(r"at most (\S+) apart", done.stdout)), done.stdout

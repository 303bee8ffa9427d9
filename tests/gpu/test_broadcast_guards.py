"""NCCL broadcasts to an engine that hangs or was killed: the trainer gets an error, and its GPU works on."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

END = Path(__file__).parent / "guarded_end.py"
LIMIT_S = 120
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM beside the trainer")


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(END), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    print(found)
    return found


@pytest.mark.parametrize("engine", ["built-in", "sglang", pytest.param("vllm", marks=needs_vllm)])
@pytest.mark.parametrize("is_killed", [False, True], ids=["hung", "killed"])
def test_a_broadcast_that_an_engine_left_is_given_up(engine: str, is_killed: bool) -> None:
    sender = start("sender", engine)
    receiver = start("receiver", engine, read(sender)["address"])
    try:
        assert read(sender)["sum"] == read(receiver)["sum"], "the first version arrived"
        if is_killed:
            receiver.kill()
            receiver.wait()
        assert sender.stdin is not None
        sender.stdin.write("go on\n")
        sender.stdin.flush()
        found = read(sender)
        assert found["codes"] == ["S207"] or is_killed, "a death may be noticed by NCCL before the deadline"
        assert found["error"] != "none"
        assert found["closed_after_s"] < LIMIT_S / 2
        assert sender.wait(LIMIT_S) == 0
    finally:
        sender.kill()
        receiver.kill()

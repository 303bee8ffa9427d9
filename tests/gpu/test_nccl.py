"""Weights by NCCL. Two ranks on one GPU are two hosts to it here, as it refuses them otherwise: they meet over sockets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

END = Path(__file__).parent / "nccl_end.py"


def start(end: str, address: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(END), end, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def read(process: subprocess.Popen[str]) -> object:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_weights_arrive_on_the_other_device_bit_for_bit() -> None:
    sender = start("sender")
    address = str(read(sender))
    receiver = start("receiver", address)
    try:
        for version in (1, 2):
            sent, received = read(sender), read(receiver)
            print(f"version {version}: {sent} {received}")
            assert isinstance(sent, dict)
            assert isinstance(received, dict)
            assert sent["checksum"] == received["checksum"]
            assert received["device"] == "cuda"
        assert sender.wait(60) == receiver.wait(60) == 0
    finally:
        sender.kill()
        receiver.kill()


def test_a_sender_that_dies_is_an_error_and_not_the_end_of_the_receiver() -> None:
    sender = start("dying-sender")
    address = str(read(sender))
    receiver = start("receiver", address)
    try:
        read(sender)
        read(receiver)
        found = read(receiver)
        print(found)
        assert isinstance(found, dict)
        assert found["error"]
        assert receiver.wait(60) == 0
    finally:
        sender.kill()
        receiver.kill()

"""SIGTERM and SIGINT while ``roost run`` starts and closes: the first one stops it, the others do not disturb its closing."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from roost.cli import main
from roost.cli.signals import StopSignals, one_stop_signal
from roost.cluster import local_ray
from roost.cluster.signals import keep_signal_handlers


def test_each_signal_raises_while_the_program_runs() -> None:
    with StopSignals():
        with one_stop_signal():
            pass
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)


class InterruptedRay:
    """As a local Ray that gets one signal while it starts, and others while it ends what it has started."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __enter__(self) -> None:
        try:
            with keep_signal_handlers(starts_processes=True):
                signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            signal.raise_signal(signal.SIGTERM)
            self.events.append("processes are ended")
            signal.raise_signal(signal.SIGTERM)
            self.events.append("the folder is removed")
            raise

    def __exit__(self, *error: Any) -> None:
        raise AssertionError("it was not entered")


def test_signals_do_not_disturb_the_end_of_a_ray_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events: list[str] = []
    monkeypatch.setattr(local_ray, "local_ray", lambda topology: InterruptedRay(events))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = tmp_path / "job.yaml"
    job.write_text("run: json:dumps\ncluster: {num_nodes: 1, component_placement: {actor: 0}}\n")
    before = signal.getsignal(signal.SIGTERM)
    assert main(["run", str(job), "--cluster", "1x1"]) == 143
    assert events == ["processes are ended", "the folder is removed"]
    assert capsys.readouterr().err.endswith("roost: stopped by SIGTERM\n")
    assert signal.getsignal(signal.SIGTERM) is before

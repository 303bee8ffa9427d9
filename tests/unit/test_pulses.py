"""Engines that do not answer: their silence is measured, and nothing waits for them."""

import os
import signal

import pytest
from serving import start_server, url_of
from toy_models import toy, until

from roost import EnginePlace, TorchEngine, lease_ports
from roost.engines.handles import ExternalEngine
from roost.engines.pulses import STEP_S, Pulses


@pytest.fixture
def stoppable():
    """A server as a process of its own, which a test may stop."""
    process = start_server("toy_models:toy", "--context", "32")
    try:
        yield process, ExternalEngine(url_of(process))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def looking(pulses, engine, is_done):
    """Looks again and again until something holds."""

    def look():
        pulses.look([engine])
        return is_done()

    until(look)


def test_silence_grows_while_a_server_hangs_and_ends_when_it_answers(stoppable):
    process, engine = stoppable
    pulses = Pulses(limit_s=1.0)
    looking(pulses, engine, lambda: pulses.silent_s(engine) == 0.0)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        looking(pulses, engine, lambda: pulses.silent_s(engine) > pulses.limit_s)
        assert f"{engine.url}/health has not answered for" in pulses.described(engine)
        assert not pulses.is_dead(engine), "a process that is stopped may go on"
    finally:
        os.kill(process.pid, signal.SIGCONT)
    looking(pulses, engine, lambda: pulses.silent_s(engine) == 0.0)


def test_a_driver_that_was_stopped_itself_blames_no_engine(stoppable):
    process, engine = stoppable
    pulses = Pulses(limit_s=60.0)
    os.kill(process.pid, signal.SIGSTOP)
    looking(pulses, engine, lambda: pulses.silent_s(engine) > 0.0)
    before_s = pulses.silent_s(engine)
    pulses._looked_s -= 3600.0
    pulses.look([engine])
    assert pulses.silent_s(engine) <= before_s + STEP_S


def test_an_engine_that_is_not_healthy_answers():
    class Sick(TorchEngine):
        def health(self):
            return "it has a fever"

    engine = Sick(toy, context=64, length_multiple=16, batch_rows=8)
    served = ExternalEngine(engine.start(EnginePlace()))
    pulses = Pulses(limit_s=60.0)
    pulses.look([served])
    (probe,) = pulses._probes[served.identity]
    until(lambda: probe._answers)
    pulses.look([served])
    assert pulses.silent_s(served) == 0.0
    engine.stop()


def test_a_server_that_is_gone_does_not_answer():
    with lease_ports() as lease:
        gone = ExternalEngine(f"http://127.0.0.1:{lease.port}")
        pulses = Pulses(limit_s=1.0)
        looking(pulses, gone, lambda: pulses.silent_s(gone) > pulses.limit_s)


def test_others_can_ask_while_it_looks():
    class Reading:
        """A probe in place of another thread: it asks for the silence of all engines while they are looked at."""

        silent_s, is_dead, what = 3.0, False, "its process"

        def look(self, step_s):
            seen.append([pulses.silent_s(engine) for engine in engines])

    seen = []
    engines = [ExternalEngine(f"http://127.0.0.1:{port}") for port in (1, 2)]
    pulses = Pulses(limit_s=60.0)
    pulses._probes = {engine.identity: [Reading()] for engine in engines}
    pulses.look(engines)
    assert seen == [[3.0, 3.0], [3.0, 3.0]]

"""An engine that SIGSTOP holds: every operation ends at its deadline, and says which engine does not answer."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from processes import alive, wait_for
from rl_parts import Talker, Trainer, check_complete, new_groups, told

import roost
from roost.rl.rollout import RolloutManager
from roost.rl.train import TrainGroup

PARAMS = {"max_new_tokens": 4, "temperature": 1.0}
JOB = {"cluster": {"num_nodes": 4, "component_placement": {"actor": "0", "rollout": "1-2"}}}


@pytest.mark.parametrize("pause", ["wait", "abort"])
def test_operations_end_at_their_deadlines_while_an_engine_hangs(
    cluster: roost.Cluster, monkeypatch: pytest.MonkeyPatch, pause: str
) -> None:
    plan = roost.Plan.resolve(JOB, cluster)
    pids: list[int] = []
    rollout = RolloutManager(cluster, plan, Talker, router=None, name=f"hung-{pause}", silence_limit_s=600.0)
    try:
        with TrainGroup(cluster, Trainer, plan) as train:
            train.init()
            train.connect(rollout)
            train.update_weights()
            check_complete(rollout.generate(new_groups(4), PARAMS), ["g0", "g1", "g2", "g3"], 2, 4)
            pids = [told(engine)["pid"] for engine in rollout.engines]
            os.kill(pids[1], signal.SIGSTOP)

            started = time.monotonic()
            with pytest.raises(roost.GenerationError) as failed:
                rollout.generate(new_groups(4), PARAMS, timeout_s=6.0)
            assert failed.value.codes == ("E108",)
            assert f"the last at rollout/1 ({rollout.engines[1].url}): no answer before the deadline" in str(
                failed.value
            )
            assert re.search(r"rollout/1: .* has not answered for", str(failed.value)), "its process, or its /health"

            monkeypatch.setattr(rollout, "_sync_timeout_s", 6.0)
            with pytest.raises(roost.RolloutError, match=r"engines keep version 1|some may have version 1") as kept:
                train.update_weights(pause)
            assert kept.value.codes == ("S205",)
            assert "rollout/1: " in str(kept.value)

            with pytest.raises(roost.CallTimeoutError, match="1 of 1 ranks did not end within "):
                rollout.pause(timeout_s=3.0)
            assert time.monotonic() - started < 120, "15 s of deadlines, where each step used to wait by itself"
            rollout.close()
            wait_for(lambda: not alive(pids), "the end of both engines", 60.0)
    finally:
        for pid in alive(pids):
            os.kill(pid, signal.SIGKILL)
        rollout.close()

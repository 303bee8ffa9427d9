"""An engine that does not fit says so in its own words, beside what the plan had given it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import roost

torch = pytest.importorskip("torch", reason="needs torch")
sys.path.insert(0, str(Path(__file__).parent))

from big_parts import engine  # noqa: E402

JOB = {"cluster": {"component_placement": {"rollout": {"placement": "0", "gpu_share": 0.2}}}}


def test_an_engine_that_is_too_large() -> None:
    os.environ.pop("RAY_ADDRESS", None)
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    with roost.Cluster(num_nodes=1) as cluster:
        plan = roost.Plan.resolve(JOB, cluster)
        with pytest.raises(roost.RolloutError) as caught:
            roost.RolloutManager(cluster, plan, engine(2, 1024 * total), router=None)
    text = str(caught.value)
    print(text)
    assert "rollout/0 did not start: it ran out of memory: CUDA out of memory" in text
    assert f"the plan gives it 20% of 1 GPU, {0.2 * total:.1f} of {total:.1f} GiB each" in text
    assert "gpu_share: 0.4" in text

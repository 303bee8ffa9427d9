"""Starts that fail, a start outside any job, and what vLLM's own classes make of what they are sent."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from vllm_parts import OPTIONS

import roost
from roost.engines.vllm.messages import PACKING, tensor_list
from roost.plan import WeightTransport
from roost.weights.streams import Piece, WeightStream

JOB = {"cluster": {"num_nodes": 1, "component_placement": {"rollout": "5"}}}
SENDER = "roost.engines.vllm.sender:DirectSender"


def test_out_of_memory_at_the_start_is_said_in_vllms_own_words(one_node: object, model: Path) -> None:
    options = [*OPTIONS, "--kv-cache-memory-bytes", "900G"]
    engine = functools.partial(roost.VllmEngine, str(model), options=options)
    with roost.Cluster(num_nodes=1) as job:
        plan = roost.Plan.resolve(JOB, job)
        with pytest.raises(roost.RolloutError) as error:
            roost.RolloutManager(job, plan, engine, start_timeout_s=600)
    assert error.value.codes == ("E121",)
    message = error.value.findings[0].message
    assert "rollout/0" in message
    assert "the plan gives it 100% of 1 GPU" in message
    assert "Decrease --kv-cache-memory-bytes" in message


@pytest.mark.filterwarnings("ignore")
def test_what_is_sent_fits_vllms_own_broadcast() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

    from roost.engines.vllm.intake import VllmIntake

    class Engine:
        source = None

        def __init__(self):
            self.said = {}

        def command(self, route, body, timeout_s):
            self.said[route] = body

        def load_version(self, version, updates):
            self.said["updates"] = updates

    box = ((0, 4), (0, 2))
    pieces = (Piece("w", "bfloat16", (4, 2), box, box, box, (4, 2), 0, 16),)
    stream = WeightStream("c", WeightTransport.BROADCAST, 0, (3, 4), pieces, 16, "nccl", SENDER, (1, 3), 5)
    engine = Engine()
    intake = VllmIntake(engine, [stream], {"c": "10.0.0.7:4711"}, 4, 5.0)
    intake.commit(1)
    init = NCCLWeightTransferInitInfo(**engine.said["init_weight_transfer_engine"]["init_info"]["nccl"])
    assert (init.master_address, init.master_port, init.rank_offset, init.world_size) == ("10.0.0.7", 4711, 3, 5)
    assert (init.packed, init.packed_buffer_size_bytes) == (True, PACKING["packed_buffer_size_bytes"])
    update = NCCLWeightTransferUpdateInfo(**engine.said["updates"][0]["nccl"])
    assert (update.names, update.dtype_names, update.shapes) == (["w"], ["bfloat16"], [[4, 2]])
    assert tensor_list(pieces) == engine.said["updates"][0]["nccl"]

"""One end of a broadcast over NCCL whose receiver takes one version and then hangs, in a process of its own."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from dataclasses import replace

end, engine = sys.argv[1], sys.argv[2]
os.environ["NCCL_HOSTID"] = end

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from roost.errors import RolloutError  # noqa: E402
from roost.plan import Sharding, TensorShards, WeightTransport, plan_transfer  # noqa: E402
from roost.weights.collective import CollectiveReceiver, join_rendezvous, nccl_errors_raised  # noqa: E402
from roost.weights.endpoints import WeightSender  # noqa: E402
from roost.weights.streams import make_streams  # noqa: E402

TIMEOUT_S = 60.0
SHAPES = {"large": (4096, 4096), "small": (3, 5)}


def say(**found: object) -> None:
    print(json.dumps(found), flush=True)


side = Sharding(tuple(TensorShards(name, shape, "float32") for name, shape in SHAPES.items()))
[stream] = make_streams(plan_transfer(side, side), lambda *_: WeightTransport.BROADCAST)
SENDERS = {"vllm": "roost.engines.vllm.sender:DirectSender", "sglang": "roost.engines.sglang.sender:DirectSender"}
stream = replace(stream, backend="nccl", sender=SENDERS.get(engine, ""), first_ranks=(1,), world_size=2)
torch.cuda.set_device(0)


def receive_once(address: str) -> None:
    host, _, port = address.rpartition(":")
    tensors = {name: torch.empty(shape, device="cuda") for name, shape in SHAPES.items()}
    if engine == "built-in":
        receiver = CollectiveReceiver(stream, join_rendezvous(address, TIMEOUT_S), 1, host, TIMEOUT_S)
        receiver.begin(1)
        receiver.finish()
        say(sum=float(sum(view.double().sum() for view in receiver.staged())))
    elif engine == "sglang":
        from roost.engines.sglang.intake import group_name

        limit = datetime.timedelta(seconds=TIMEOUT_S)
        store, _, _ = next(c10d.rendezvous(f"tcp://{address}", 1, 2, timeout=limit))
        name = group_name(stream, address)
        with nccl_errors_raised():
            group, _ = c10d._new_process_group_helper(
                2, 1, [], c10d.Backend("nccl"), dist.PrefixStore(name, store), group_name=name, timeout=limit
            )
        c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
        for piece in stream.pieces:
            dist.broadcast(tensors[piece.name], 0, group=group)
        torch.cuda.synchronize()
        say(sum=float(sum(tensor.double().sum() for tensor in tensors.values())))
    else:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

        from roost.engines.vllm.messages import PACKING

        group = trainer_init({"master_address": host, "master_port": int(port), "world_size": 2}, rank=1)
        found: list[tuple[str, torch.Tensor]] = []
        packed_nccl_broadcast_consumer(
            iterator=((piece.name, (list(piece.shape), torch.float32)) for piece in stream.pieces),
            group=group,
            src=0,
            post_unpack_func=lambda given: found.extend((name, tensor.clone()) for name, tensor in given),
            buffer_size_bytes=PACKING["packed_buffer_size_bytes"],
            num_buffers=PACKING["packed_num_buffers"],
        )
        torch.cuda.synchronize()
        say(sum=float(sum(tensor.double().sum() for _, tensor in found)))
    time.sleep(600)


def send_twice() -> None:
    sender = WeightSender([stream], None, "127.0.0.1", "", TIMEOUT_S)
    say(address=str(sender.addresses[stream.id]))
    sender.join()
    weights = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
    sender.send(lambda: weights, 1, stream.is_direct)
    say(sum=float(sum(tensor.double().sum() for tensor in weights.values())))
    sys.stdin.readline()  # the receiver hangs, or is dead, by now
    sender._timeout_s = 5.0
    start = time.perf_counter()
    try:
        sender.send(lambda: weights, 2, stream.is_direct)
        say(error="none")
    except Exception as error:  # of a killed receiver NCCL may know before the deadline
        seconds = time.perf_counter() - start
        sender.close()
        torch.cuda.synchronize()  # nothing of the broadcast is left on the device
        say(
            error=str(error),
            codes=error.codes if isinstance(error, RolloutError) else [],
            seconds=seconds,
            closed_after_s=time.perf_counter() - start,
            sum=float(sum(tensor.double().sum() for tensor in weights.values())),
        )


if end == "receiver":
    receive_once(sys.argv[3])
else:
    send_twice()
    os._exit(0)

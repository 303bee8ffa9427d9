"""One end of a stream over NCCL, in a process of its own."""

from __future__ import annotations

import json
import os
import sys
import time

end, address = sys.argv[1], sys.argv[2]
os.environ["NCCL_HOSTID"] = end

import torch  # noqa: E402

from roost.plan import Sharding, TensorShards, WeightTransport, plan_transfer  # noqa: E402
from roost.weights.collective import (  # noqa: E402
    CollectiveReceiver,
    CollectiveSender,
    Rendezvous,
    join_rendezvous,
)
from roost.weights.streams import make_streams  # noqa: E402

TIMEOUT_S = 15.0
SHAPES = {"large": (1024, 4096), "small": (3, 5), "other": (7,)}


def say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def checksum(tensors: list[torch.Tensor]) -> float:
    return float(sum(tensor.double().sum() for tensor in tensors))


side = Sharding(tuple(TensorShards(name, shape, "float32") for name, shape in SHAPES.items()))
[stream] = make_streams(plan_transfer(side, side), lambda *_: WeightTransport.BROADCAST)
object.__setattr__(stream, "backend", "nccl")
torch.cuda.set_device(0)
if end == "receiver":
    receiver = CollectiveReceiver(stream, join_rendezvous(address, TIMEOUT_S), 1, "127.0.0.1", TIMEOUT_S)
    for version in (1, 2):
        try:
            start = time.perf_counter()
            receiver.begin(version)
            receiver.finish()
        except Exception as error:  # what a group raises is torch's business
            say(error=f"{type(error).__name__}: {str(error)[:200]}", seconds=time.perf_counter() - start)
            break
        views = receiver.staged()
        say(checksum=checksum(views), device=views[0].device.type)
    receiver.close()
else:
    meeting = Rendezvous("127.0.0.1", TIMEOUT_S)
    sender = CollectiveSender(stream, meeting)
    print(json.dumps(sender.address), flush=True)
    sender.join()
    for version in (1, 2):
        tensors = {name: torch.randn(shape, device="cuda") for name, shape in SHAPES.items()}
        sender.send(tensors, version)
        say(checksum=checksum([tensors[piece.name] for piece in stream.pieces]))
        if end == "dying-sender":
            os._exit(1)
    sender.close()

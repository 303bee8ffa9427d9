"""An engine's process that joins a broadcast and then hangs: it never takes part in it."""

from __future__ import annotations

import datetime
import pickle
import sys
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from roost.engines.sglang.intake import group_name
from roost.weights.collective import CollectiveReceiver, join_rendezvous

stream, address = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the test
if stream.is_direct:  # as SGLang joins
    limit = datetime.timedelta(seconds=60)
    store, _, _ = next(c10d.rendezvous(f"tcp://{address}", 1, 2, timeout=limit))
    name = group_name(stream, address)
    prefixed = dist.PrefixStore(name, store)
    joined = c10d._new_process_group_helper(2, 1, [], c10d.Backend("gloo"), prefixed, group_name=name, timeout=limit)
else:
    joined = CollectiveReceiver(stream, join_rendezvous(address, 60.0), 1, "127.0.0.1", 60.0)
print("joined", flush=True)
time.sleep(600)

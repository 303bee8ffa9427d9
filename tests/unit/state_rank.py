"""One rank of a trainer with two tensor-parallel ranks, in a process of its own: obeys commands from stdin."""

from __future__ import annotations

import datetime
import json
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from roost.errors import CheckpointError
from roost.rl import train_state
from roost.rl.train_state import load_trainer, save_trainer
from roost.weights.host_copies import HostCopies

rank, meeting, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(model.parameters())
worker = SimpleNamespace(
    rank=rank, world_size=2, tensor_parallel=2, pipeline_parallel=1, model=model, optimizer=optimizer, global_step=0,
    _copies=HostCopies,
)  # fmt: skip


def say(**found: object) -> None:
    print(json.dumps(found), flush=True)


def stalls(*_: object) -> None:
    say(event="stalled")
    time.sleep(600)


def stall_when(what: str) -> None:
    """Stop for good with a part of the state file written, or with all of it but before it counts."""
    if what == "writing":
        write = train_state._Hashing.write

        def write_a_part(file: train_state._Hashing, data: bytes) -> None:
            write(file, data)
            file.flush()
            stalls()

        train_state._Hashing.write = write_a_part
    else:
        train_state._replace = stalls


def obey(command: str, value: str) -> None:
    if command == "train":
        worker.global_step = int(value)
        with torch.no_grad():
            model.weight.fill_(int(value) * 10 + rank)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    elif command == "save":
        save_trainer(worker, folder)
    elif command == "load":
        load_trainer(worker, folder)
    elif command == "stall":
        stall_when(value)


for line in sys.stdin:
    try:
        obey(*line.split())
        moments = optimizer.state_dict()["state"]
        say(
            step=worker.global_step,
            weight=[round(number, 4) for number in model.weight.flatten().tolist()],
            moments=moments[0]["exp_avg"].flatten().tolist() if moments else [],
        )
    except CheckpointError as error:
        say(codes=error.codes, error=str(error))

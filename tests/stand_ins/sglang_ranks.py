"""The processes that have the model of ``sglang_server``: each takes weights by all the ways that SGLang documents."""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from sglang_model import Tiny
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing import reductions


class Rank:
    """One process of tensor parallelism: it has the model, and takes weights."""

    def __init__(self, asked: argparse.Namespace, rank: int) -> None:
        self.rank, self.device = rank, asked.device
        self.model = Tiny()
        self.model.load_state_dict(load_file(Path(asked.model_path) / "model.safetensors"))
        self.model.to(self.device).requires_grad_(False)
        self.groups: dict[str, Any] = {}
        self.has_backup = asked.enable_weights_cpu_backup
        self.backup: dict[str, torch.Tensor] = {}
        address = asked.dist_init_addr or f"127.0.0.1:{asked.nccl_port}"
        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=asked.tp_size)

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> str:
        rank = rank_offset + self.rank
        store, _, _ = next(
            c10d.rendezvous(f"tcp://{master_address}:{master_port}", rank, world_size, timeout=c10d.default_pg_timeout)
        )
        prefixed = dist.PrefixStore(group_name, store)
        group, _ = c10d._new_process_group_helper(
            world_size, rank, [], c10d.Backend(backend), prefixed, group_name=group_name,
            timeout=c10d.default_pg_timeout,
        )  # fmt: skip
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        self.groups[group_name] = group
        return "Succeeded to initialize custom process group."

    def destroy_weights_update_group(self, group_name: str) -> str:
        dist.destroy_process_group(self.groups.pop(group_name))
        return "Succeeded to destroy custom process group."

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
    ) -> str:
        group = self.groups[group_name]
        found = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        }
        for work in [dist.broadcast(tensor, 0, group=group, async_op=True) for tensor in found.values()]:
            work.wait()
        return self.load(found)

    def update_weights_from_tensor(self, serialized_named_tensors: list[str], load_format: str | None) -> str:
        if load_format is not None:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        patch_reductions()
        return self.load(dict(Careful(io.BytesIO(base64.b64decode(serialized_named_tensors[self.rank]))).load()))

    def update_weights_from_disk(self, model_path: str, load_format: str) -> str:
        if load_format not in ("auto", "safetensors"):
            raise ValueError(f"Failed to get model loader: {load_format}.")
        files = sorted(Path(model_path).glob("*.safetensors"))
        if not files:
            raise ValueError(f"Failed to get weights iterator: Cannot find any model weights with `{model_path}`.")
        return self.load({name: tensor for file in files for name, tensor in load_file(file).items()})

    def load(self, named: Mapping[str, torch.Tensor]) -> str:
        own = self.model.state_dict()
        for name, tensor in named.items():
            if own[name].shape != tensor.shape:
                raise ValueError(f"Attempted to load weight {tuple(tensor.shape)} into parameter {own[name].shape}")
            own[name].copy_(tensor)
        return "Success"

    def release(self, tags: list[str]) -> str:
        if "weights" in tags:
            self.backup = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            for tensor in self.model.state_dict().values():
                tensor.fill_(float("nan"))
        return ""

    def restore(self, tags: list[str]) -> str:
        if "weights" in tags and self.has_backup:
            self.load(self.backup)
        return ""

    def obey(self, command: str, arguments: Mapping[str, Any]) -> tuple[bool, str, str]:
        try:
            said = getattr(self, command)(**arguments)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}", ""
        return True, said, checksum_of(self.model.state_dict())

    def run(self) -> None:
        """What ranks above 0 do: whatever the first is told."""
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, 0)
            answer = self.obey(*told[0])
            dist.gather_object(answer, None, 0)

    def tell_all(self, command: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        """Has all ranks obey; they must have the same weights afterwards."""
        dist.broadcast_object_list([(command, arguments)], 0)
        answers: list[Any] = [None] * dist.get_world_size()
        own = self.obey(command, arguments)
        dist.gather_object(own, answers, 0)
        failed = [message for success, message, _ in answers if not success]
        if failed or len({checksum for _, _, checksum in answers}) > 1:
            return False, " | ".join(failed or ["ranks have different weights"])
        return True, " | ".join(message for _, message, _ in answers)


def checksum_of(named: Mapping[str, torch.Tensor]) -> str:
    """The bits of all tensors."""
    flat = [tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in named.values()]
    return hashlib.sha256(b"".join(flat)).hexdigest()


class Careful(pickle.Unpickler):
    """Reads tensors, and nothing that could do harm."""

    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] not in ("torch", "collections", "builtins", "_codecs"):
            raise pickle.UnpicklingError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


def patch_reductions() -> None:
    """GPUs are named by their UUIDs in what arrives."""
    if hasattr(reductions, "original_of_test"):
        return
    original = reductions.original_of_test = reductions.rebuild_cuda_tensor

    def rebuild(*arguments: Any) -> torch.Tensor:
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        return original(*arguments[:6], uuids.index(arguments[6]), *arguments[7:])

    reductions.rebuild_cuda_tensor = rebuild

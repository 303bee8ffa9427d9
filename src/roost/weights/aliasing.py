"""Modules whose tensors are memory of another process. Nothing is copied, and that process can die at any time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from roost.worker.processes import look_at

__all__ = ["AliasedTensors", "MemoryOwner"]


class MemoryOwner:
    """The process that owns mapped memory.

    Args:
        pid: Process id on this node.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._known = look_at(pid)

    def is_alive(self) -> bool:
        """Return whether the process runs. After its death, the contents of its memory are undefined."""
        found = look_at(self.pid)
        if found is None or self._known is None:
            return False
        return found.is_alive and found.is_same(self._known.started)  # else the id was reused


class AliasedTensors:
    """The tensors of a module, which can be pointed to memory of another process.

    Args:
        module: The module. Pointing its tensors elsewhere frees the memory that they had.
        aliases: Name of each ``state_dict`` entry → the name of its tensor in :meth:`point`. Tied entries share one.
    """

    def __init__(self, module: torch.nn.Module, aliases: Mapping[str, str]) -> None:
        self._owners: dict[str, list[torch.Tensor]] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if name in aliases:
                self._owners.setdefault(aliases[name], []).append(tensor)

    def point(self, given: Mapping[str, torch.Tensor]) -> None:
        """Make the module use the memory of these tensors."""
        for name, tensor in given.items():
            for owner in self._owners[name]:
                if owner.data_ptr() != tensor.data_ptr() or owner.shape != tensor.shape:
                    owner.data = tensor.detach()

    def drop(self) -> None:
        """Point all tensors to empty memory: the module cannot compute until :meth:`point` is called again."""
        for owners in self._owners.values():
            for owner in owners:
                owner.data = torch.empty(0, dtype=owner.dtype, device=owner.device)

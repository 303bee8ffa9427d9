"""A module that computes with tensors of another process: nothing is copied, and the other can be gone any time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from roost.worker.processes import look_at

__all__ = ["BorrowedTensors", "Lender"]


class Lender:
    """The process whose memory is used.

    Args:
        pid: Its process id, on this node.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._known = look_at(pid)

    def is_alive(self) -> bool:
        """Whether it runs; its memory is not to be trusted otherwise."""
        found = look_at(self.pid)
        if found is None or self._known is None:
            return False
        return found.is_alive and found.is_same(self._known.started)  # else the number is another's by now


class BorrowedTensors:
    """Points the tensors of a module to memory that is not its own, and away from it.

    Args:
        module: The module. What its tensors have of their own is given up.
        aliases: For every name of ``state_dict`` the one under which its tensor stands.
    """

    def __init__(self, module: torch.nn.Module, aliases: Mapping[str, str]) -> None:
        self._owners: dict[str, list[torch.Tensor]] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if name in aliases:
                self._owners.setdefault(aliases[name], []).append(tensor)

    def point(self, given: Mapping[str, torch.Tensor]) -> None:
        """Uses these tensors from now on."""
        for name, tensor in given.items():
            for owner in self._owners[name]:
                if owner.data_ptr() != tensor.data_ptr() or owner.shape != tensor.shape:
                    owner.data = tensor.detach()

    def drop(self) -> None:
        """Uses nobody's: the module cannot compute until it is pointed somewhere again."""
        for owners in self._owners.values():
            for owner in owners:
                owner.data = torch.empty(0, dtype=owner.dtype, device=owner.device)

"""A module that computes with tensors of another process: nothing is copied, and the other can be gone any time."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["BorrowedTensors", "Lender"]


PF_EXITING = 0x4
"""A flag of a process that has begun to end: its memory goes before it does."""
_FLAGS, _STARTED = 6, 19
"""Fields of ``/proc/<pid>/stat``, counted from the state of the process."""


class Lender:
    """The process whose memory is used.

    Args:
        pid: Its process id, on this node.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        found = self._look()
        self._started = found[_STARTED] if found else ""

    def is_alive(self) -> bool:
        """Whether it runs; its memory is not to be trusted otherwise."""
        found = self._look()
        if not found or found[_STARTED] != self._started:  # gone, or the number is another's by now
            return False
        return found[0] not in ("Z", "X") and not int(found[_FLAGS]) & PF_EXITING

    def _look(self) -> list[str]:
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return []


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

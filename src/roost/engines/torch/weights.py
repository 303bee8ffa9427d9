"""The weights of a torch module that an engine serves: describe, check, replace, alias and offload them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roost.errors import Finding, Fix, RolloutError
from roost.weights.aliasing import AliasedTensors, MemoryOwner
from roost.weights.buffers import Copies, StagedTensors, dtype_name
from roost.weights.host_copies import HostCopies, device_storages

__all__ = ["ModuleWeights"]


class ModuleWeights:
    """The parameters and buffers of a module, by their names in ``state_dict``; of tied tensors by the first name.

    They are on the device, in host memory, or aliases of the trainer's memory.

    Attributes:
        described: Name → shape and dtype name.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._tensors, self._canonical = _tensors_of(module)
        self.described = {name: (tuple(t.shape), dtype_name(t)) for name, t in self._tensors.items()}
        self._host = HostCopies()
        self._is_offloaded = False
        self._aliased: AliasedTensors | None = None
        self._memory_owner: MemoryOwner | None = None

    @property
    def can_compute(self) -> bool:
        """Whether the module's tensors are on the device, its own or the trainer's."""
        return not self._is_offloaded and (self._aliased is None or self._memory_owner is not None)

    def check_owner(self) -> None:
        """Check that the trainer whose memory the module uses is alive.

        Raises:
            RolloutError: The trainer's process has ended (E112).
        """
        if self._memory_owner is not None and not self._memory_owner.is_alive():
            message = "the trainer whose memory the engine computes with is gone"
            fixes = (Fix("start a trainer, and send its weights", "train.update_weights()"),)
            raise RolloutError([Finding("E112", message, fixes=fixes)])

    # New weights ---------------------------------------------------------------------------

    def copies(self, named: Mapping[str, torch.Tensor]) -> Copies:
        """Return the copies that load new weights. They are prepared once for tensors that are sent repeatedly.

        Raises:
            RolloutError: Names, shapes or dtypes differ; with all differences (E102).
        """
        staged = named if isinstance(named, StagedTensors) and not self._is_offloaded else None
        if staged is not None and staged.engine_cache is not None and staged.engine_cache[0] is self._tensors:
            found: Copies = staged.engine_cache[1]
            return found
        given = self.checked(named)
        if self._aliased is not None:
            self._allocate_own(given)
        made = Copies([self._host.view(self._tensors[name]) for name in given], list(given.values()))
        if staged is not None:
            staged.engine_cache = (self._tensors, made)
        return made

    def alias(self, named: Mapping[str, torch.Tensor], owner: MemoryOwner) -> None:
        """Compute with these tensors in place from now on. Tensors on another device are copied.

        Raises:
            RolloutError: Names, shapes or dtypes differ; with all differences (E102).
        """
        if any(tensor.numel() and not _is_on(self._device, tensor) for tensor in named.values()):
            self.copies(named).run()
            return
        if (
            isinstance(named, StagedTensors)
            and self._aliased is not None
            and named.engine_cache == (self._aliased, owner)
        ):
            return  # already in use
        given = self.checked(named)
        if self._aliased is None:
            self._aliased = AliasedTensors(self._module, self._canonical)
        self._aliased.point(given)
        self._tensors, self._memory_owner = given, owner
        self._host = HostCopies()  # drop offloaded weights: they are outdated
        if isinstance(named, StagedTensors):
            named.engine_cache = (self._aliased, owner)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # free the memory of the module's own tensors

    def drop_aliases(self) -> None:
        """Drop all references to the trainer's memory."""
        if self._aliased is not None:
            self._aliased.drop()
            self._tensors = {}
            if self._memory_owner is not None and self._memory_owner.is_alive():
                self._memory_owner = None

    def checked(self, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors by the module's canonical names.

        Raises:
            RolloutError: Names, shapes or dtypes differ; with all differences (E102).
        """
        problems: list[Finding] = []
        given: dict[str, torch.Tensor] = {}
        for name, tensor in named.items():
            canonical = self._canonical.get(name)
            if canonical is None:
                problems.append(Finding("E102", f"weights: the engine has no tensor {name!r}"))
                continue
            shape, dtype = self.described[canonical]
            if tuple(tensor.shape) != shape:
                message = f"weights: {name} has shape {list(tensor.shape)}, and the engine's has {list(shape)}"
                problems.append(Finding("E102", message))
            elif dtype_name(tensor) != dtype:
                message = f"weights: {name} is {dtype_name(tensor)}, and the engine's is {dtype}"
                problems.append(Finding("E102", message))
            elif canonical in given and not torch.equal(given[canonical], tensor):
                message = (
                    f"weights: {name} and {canonical} are one tensor of the engine, and came with different values"
                )
                problems.append(Finding("E102", message))
            given[canonical] = tensor
        problems += [Finding("E102", f"weights: {name} is missing") for name in self.described if name not in given]
        if problems:
            raise RolloutError(problems)
        return given

    def _allocate_own(self, given: Mapping[str, torch.Tensor]) -> None:
        """Replace aliases of the trainer's memory by new memory of the module."""
        if self._aliased is not None:
            own = {name: torch.empty_like(tensor, device=self._device) for name, tensor in given.items()}
            self._aliased.point(own)
            self._tensors, self._aliased, self._memory_owner = own, None, None

    # Offloading ----------------------------------------------------------------------------

    def offload(self) -> None:
        """Move the weights to host memory. Aliases of the trainer's memory stay as they are."""
        self._is_offloaded = True
        if self._aliased is None:
            self._host.offload(device_storages(self._module, None))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move the weights back to the device."""
        self._is_offloaded = False
        self._host.onload()


def _is_on(device: torch.device, tensor: torch.Tensor) -> bool:
    return tensor.device.type == device.type and (tensor.device.index or 0) == (device.index or 0)


def _tensors_of(module: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return name → tensor with tied tensors once, and every name → the name of its tensor in the first mapping."""
    tensors: dict[str, torch.Tensor] = {}
    canonical: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):  # a state_dict may have other objects, such as extra state
            key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())) if tensor.numel() else (name,)
            canonical[name] = seen.setdefault(key, name)
            if canonical[name] == name:
                tensors[name] = tensor.detach()
    return tensors, canonical

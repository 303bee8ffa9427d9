"""A temporary folder with weights, from which another program loads them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from roost.cluster.private_folder import PrivateFolder
from roost.plan import TensorShards
from roost.weights.buffers import dtype_name
from roost.weights.files import write_tensor
from roost.weights.shard_files import FILE_NAME, file_layout

__all__ = ["saved"]


@contextlib.contextmanager
def saved(named: Mapping[str, torch.Tensor], parent: str | None) -> Iterator[str]:
    """Yield the path of a folder with these tensors in a safetensors file; delete the folder afterwards.

    Args:
        named: The tensors.
        parent: The folder in which to create it, for programs on other nodes. ``None``: the file is anonymous memory
            of this process (a memfd), which the kernel frees with the process; the folder has a link to it, and is in
            the private folder of this user.

    Raises:
        ClusterError: The private folder of this user cannot be used (R140).
        OSError: The file cannot be written: the disk may be full.
    """
    with _folder(parent) as folder:
        path = Path(folder) / FILE_NAME
        if parent is not None:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        else:
            file = os.memfd_create("roost-weights")
            path.symlink_to(f"/proc/{os.getpid()}/fd/{file}")
        try:
            _write(file, named)
            yield folder
        finally:
            os.close(file)


@contextlib.contextmanager
def _folder(parent: str | None) -> Iterator[str]:
    if parent is not None:
        with tempfile.TemporaryDirectory(prefix="roost-weights-", dir=parent) as path:
            yield path
        return
    with contextlib.closing(PrivateFolder("sglang")) as own:
        yield own.path()


def _write(handle: int, named: Mapping[str, torch.Tensor]) -> None:
    shards = [TensorShards(name, tuple(tensor.shape), dtype_name(tensor)) for name, tensor in named.items()]
    header, offsets, _ = file_layout(shards)
    with open(handle, "wb", closefd=False) as file:
        file.write(header)
        for name in offsets:  # in the order of the file
            write_tensor(file, named[name])

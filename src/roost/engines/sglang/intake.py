"""Load weights in SGLang's own processes, by its three commands for that.

* From tensors: SGLang's processes map the trainer's GPU memory by its IPC handles, and copy from it.
* From a process group: SGLang's processes are ranks of the trainer's broadcast, and receive into their parameters.
* From files: SGLang reads a folder that trainers wrote.

Weights that arrive in pieces or through host memory are assembled in the engine's worker first.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.multiprocessing.reductions import rebuild_cuda_tensor

from roost.engines.engine import EnginePlace, WeightIntake
from roost.engines.sglang.command import ranks_of
from roost.errors import RolloutError
from roost.plan import WeightTransport
from roost.weights.files import version_folder
from roost.weights.ipc import DEVICE, IpcAddress
from roost.weights.streams import Piece, WeightStream

if TYPE_CHECKING:
    from roost.engines.sglang.engine import SglangEngine

__all__ = ["FolderIntake", "GroupIntake", "HandleIntake", "buckets_of", "group_name", "make_intake", "payload_of"]


def make_intake(
    engine: SglangEngine,
    place: EnginePlace,
    streams: Sequence[WeightStream],
    addresses: Mapping[str, Any],
    rank: int,
    timeout_s: float,
) -> WeightIntake | None:
    """Return the intake for these streams; ``None`` if the engine's worker must assemble tensors."""
    kinds = {stream.transport for stream in streams}
    if streams and all(stream.is_direct for stream in streams):
        return GroupIntake(engine, streams, addresses, rank, timeout_s)
    if kinds == {WeightTransport.FILE}:
        return FolderIntake(engine, str(addresses[streams[0].id]))
    is_whole = all(_is_whole(piece) for stream in streams for piece in stream.pieces)
    if kinds == {WeightTransport.IPC} and is_whole and place.num_members == 1:
        return HandleIntake(engine, place, streams, addresses)
    return None


class FolderIntake:
    """Weights from files that trainers write."""

    def __init__(self, engine: SglangEngine, folder: str) -> None:
        self._engine = engine
        self._folder = folder

    def receive(self, version: int) -> None:
        """Do nothing: trainers write the files."""

    def commit(self, version: int) -> None:
        """Have SGLang load the version from the folder."""
        self._engine.load_folder(str(version_folder(self._folder, version)), version)

    def close(self) -> None:
        """Do nothing: nothing is kept between versions."""


class HandleIntake:
    """Weights in GPU memory of a trainer, on GPUs that SGLang's processes see."""

    def __init__(
        self, engine: SglangEngine, place: EnginePlace, streams: Sequence[WeightStream], addresses: Mapping[str, Any]
    ) -> None:
        self._engine = engine
        self._count = ranks_of(place)
        self._arguments: dict[str, tuple[Any, ...]] = {}
        for stream in streams:
            there = IpcAddress.from_bytes(addresses[stream.id])
            for piece, handle in zip(stream.pieces, there.handles, strict=True):
                # SGLang finds the GPU by its UUID, because its index may differ between processes.
                self._arguments[piece.name] = (*handle[:DEVICE], there.uuid, *handle[DEVICE + 1 :])

    def receive(self, version: int) -> None:
        """Do nothing: SGLang reads the trainer's memory directly."""

    def commit(self, version: int) -> None:
        """Have every process of SGLang copy the trainer's tensors.

        One command has all tensors. It needs no extra memory: SGLang maps the tensors and copies each into its
        parameter.
        """
        payload = payload_of((name, rebuild_cuda_tensor, arguments) for name, arguments in self._arguments.items())
        command = ("update_weights_from_tensor", {"serialized_named_tensors": [payload] * self._count})
        self._engine.update([command], version)

    def close(self) -> None:
        """Do nothing: SGLang keeps nothing mapped between updates."""


class GroupIntake:
    """Weights by the trainer's broadcast, of which SGLang's processes are ranks."""

    def __init__(
        self,
        engine: SglangEngine,
        streams: Sequence[WeightStream],
        addresses: Mapping[str, Any],
        rank: int,
        timeout_s: float,
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._groups: list[tuple[str, WeightStream]] = []
        for stream in streams:
            address = str(addresses[stream.id])
            host, _, port = address.rpartition(":")
            name = group_name(stream, address)
            body = {
                "master_address": host.strip("[]"),
                "master_port": int(port),
                "rank_offset": stream.first_ranks[stream.targets.index(rank)],
                "world_size": stream.world_size,
                "group_name": name,
                "backend": stream.backend,
            }
            engine.post("init_weights_update_group", body, timeout_s)
            self._groups.append((name, stream))

    def receive(self, version: int) -> None:
        """Do nothing: SGLang receives directly into its parameters, in :meth:`commit`."""

    def commit(self, version: int) -> None:
        """Have SGLang receive the tensors; the trainer must send them at the same time."""
        commands = []
        for name, stream in self._groups:
            for bucket in buckets_of(stream.pieces, self._engine.bucket_bytes):
                body = {
                    "names": [piece.name for piece in bucket],
                    "dtypes": [piece.dtype for piece in bucket],
                    "shapes": [list(piece.shape) for piece in bucket],
                    "group_name": name,
                }
                commands.append(("update_weights_from_distributed", body))
        self._engine.update(commands, version)

    def close(self) -> None:
        """Leave the groups; log SGLang's errors."""
        for name, _ in self._groups:
            try:
                self._engine.post("destroy_weights_update_group", {"group_name": name}, self._timeout_s)
            except RolloutError as error:
                self._engine.log.info("%s", error.findings[0].message)
        self._groups.clear()


def group_name(stream: WeightStream, address: str) -> str:
    """Return the name of a stream's process group, the same on both sides; a new one each time the stream is opened."""
    return f"{stream.id}-{address.rpartition(':')[2]}"


def buckets_of(pieces: Sequence[Piece], limit: float) -> list[list[Piece]]:
    """Split pieces, in order, into buckets of at most ``limit`` bytes; a larger piece is a bucket of its own."""
    buckets: list[list[Piece]] = []
    left = 0.0
    for piece in pieces:
        if not buckets or piece.nbytes > left:
            buckets.append([])
            left = limit
        buckets[-1].append(piece)
        left -= piece.nbytes
    return buckets


def payload_of(recipes: Iterable[tuple[str, Callable[..., Any], tuple[Any, ...]]]) -> str:
    """Return named tensors in SGLang's format: functions that rebuild them in another process, pickled, in base64."""
    named = [(name, _Recipe(rebuild, arguments)) for name, rebuild, arguments in recipes]
    return base64.b64encode(pickle.dumps(named)).decode()


class _Recipe:
    """Unpickles as the result of ``rebuild(*arguments)``: a tensor."""

    def __init__(self, rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._rebuild = rebuild
        self._arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (self._rebuild, self._arguments)


def _is_whole(piece: Piece) -> bool:
    return tuple(stop - start for start, stop in piece.box) == piece.target_shape == piece.shape

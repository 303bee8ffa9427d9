"""Checkpoints of a trainer: a folder that is replaced as a whole.

::

    step-100/
        checkpoint.json           which of the folders beside it counts, and each file's size and SHA-256
        state-6f1c09ab/
            tp-0-pp-0.pt          what one tensor-parallel rank of one pipeline stage holds
            tp-1-pp-0.pt

Data-parallel replicas hold the same, so the first one writes. A save writes a new state folder beside the one that
``checkpoint.json`` names, and replaces that file at the end by an atomic rename. Whenever a process dies, the folder
holds the previous checkpoint or the new one, and never a part of either. Folders that no ``checkpoint.json`` names
are removed by the next save.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import torch
import torch.distributed as dist

from roost.errors import CheckpointError, Finding
from roost.plan import Sharding

if TYPE_CHECKING:
    from roost.rl.train import TrainWorker

__all__ = ["INDEX", "load_state", "load_trainer", "save_state", "save_trainer"]

INDEX = "checkpoint.json"
FORMAT = 1
_PREFIX = "state-"
_SHOWN = 5
"""Of a long list of problems, so many are shown."""
_Value = TypeVar("_Value")


def save_state(path: str | os.PathLike[str], state: Callable[[], Mapping[str, Any]], side: Sharding, rank: int) -> None:
    """Write a checkpoint; all ranks of the default process group call this together.

    Args:
        path: The checkpoint's folder, which all ranks see. What it holds is replaced.
        state: Gives what this rank holds. It is called on the ranks that write: the first of each set of replicas.
        side: The parallel sizes of the trainer.
        rank: This rank.

    Raises:
        CheckpointError: It could not be written (W301), on every rank with the problems of all. The folder's
            previous checkpoint is whole.
    """
    folder = Path(path)
    ranks = _Ranks("W301", f"{folder} was not saved", rank)
    tp, pp, dp = side.coordinates(rank)
    name = ranks.all_do(lambda: _make_folder(folder) if rank == 0 else "")[0]
    try:
        written = ranks.all_do(
            lambda: {"tp": tp, "pp": pp, **_write(folder / name / f"tp-{tp}-pp-{pp}.pt", state())} if dp == 0 else None
        )
        ranks.all_do(lambda: _commit(folder, name, side, written) if rank == 0 else None)
    finally:
        if rank == 0:
            _remove_unnamed(folder)


def load_state(
    path: str | os.PathLike[str], side: Sharding, rank: int, misfits: Callable[[Mapping[str, Any]], Sequence[str]]
) -> dict[str, Any]:
    """Return what this rank's tensor-parallel rank and stage saved; all ranks call this together.

    The number of data-parallel replicas may differ from that of the trainer that saved.

    Args:
        path: The checkpoint's folder.
        side: The parallel sizes of the trainer.
        rank: This rank.
        misfits: Says what of a state does not fit this rank.

    Raises:
        CheckpointError: The checkpoint is not whole, or does not fit (W302), on every rank with the problems of
            all. No rank has taken anything of it.
    """
    folder = Path(path)
    ranks = _Ranks("W302", f"{folder} was not loaded", rank)
    tp, pp, _ = side.coordinates(rank)

    state: dict[str, Any] = {}

    def read() -> str:
        index = _read_index(folder, side)
        entry = next(entry for entry in index["files"] if (entry["tp"], entry["pp"]) == (tp, pp))
        state.update(_read(folder / index["state"] / entry["file"], entry))
        if wrong := misfits(state):
            raise ValueError(f"{entry['file']} does not fit this rank: {'; '.join(wrong)}")
        return str(index["state"])

    if len(set(ranks.all_do(read))) > 1:
        message = f"{ranks.what}: ranks see different checkpoints there, and all nodes must share the folder"
        raise CheckpointError([Finding("W302", message)])
    return state


class _Ranks:
    """All ranks, as they go through the steps of a checkpoint together.

    Args:
        code: The code of what fails.
        what: What has failed then.
        rank: This rank.
    """

    def __init__(self, code: str, what: str, rank: int) -> None:
        self._code = code
        self.what = what
        self._rank = rank

    def all_do(self, step: Callable[[], _Value]) -> list[_Value]:
        """Run this rank's part of a step, and return what all ranks have returned, in rank order.

        Raises:
            CheckpointError: The step failed on some rank; with the problems of all ranks.
        """
        value, problem, cause = None, "", None
        try:
            value = step()
        except Exception as error:
            problem, cause = f"rank {self._rank} on {os.uname().nodename}: {_reason(error)}", error
        found: list[Any] = [(value, problem)]
        if dist.is_initialized() and dist.get_world_size() > 1:
            found *= dist.get_world_size()
            try:
                dist.all_gather_object(found, (value, problem))
            except Exception as error:
                message = f"{self.what}: rank {self._rank} lost another rank, which may have died: {_reason(error)}"
                raise CheckpointError([Finding(self._code, message)]) from error
        problems = [problem for _, problem in found if problem]
        if problems:
            raise CheckpointError([Finding(self._code, f"{self.what}: {text}") for text in problems]) from cause
        return [value for value, _ in found]


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# Writing -----------------------------------------------------------------------------------------


def _make_folder(folder: Path) -> str:
    """Make the checkpoint's folder and a state folder in it; return the name of the latter."""
    if folder.exists() and not folder.is_dir():
        raise ValueError("it is a file, and a checkpoint is a folder")
    name = _PREFIX + secrets.token_hex(4)
    (folder / name).mkdir(parents=True)
    return name


def _commit(folder: Path, name: str, side: Sharding, written: Sequence[Mapping[str, Any] | None]) -> None:
    """Make a state folder the one that counts."""
    files = {rank: entry for rank, entry in enumerate(written) if entry is not None}
    _check_visible(folder / name, files)
    _sync_folder(folder / name)
    index = {"format": FORMAT, "state": name, "tensor_parallel": side.tp, "pipeline_parallel": side.pp}
    _replace(folder / INDEX, json.dumps({**index, "files": list(files.values())}, indent=2))


def _remove_unnamed(folder: Path) -> None:
    """Remove the state folders that do not count: older ones, and what failed or was killed."""
    name = ""
    try:
        name = json.loads((folder / INDEX).read_text(encoding="utf-8"))["state"]
    except FileNotFoundError:
        pass  # nothing was saved here yet
    except (OSError, ValueError, KeyError, TypeError):
        return  # which one counts is not known
    for found in folder.glob(f"{_PREFIX}*"):
        if found.name != name:
            shutil.rmtree(found, ignore_errors=True)


class _Hashing:
    """A file to write to that knows what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.nbytes = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self._hash.update(data)
        self.nbytes += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _write(path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write a file that is on the disk when this returns; return what ``checkpoint.json`` says of it."""
    with path.open("xb") as file:
        counted = _Hashing(file)
        torch.save(dict(state), counted)  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "bytes": counted.nbytes, "sha256": counted.digest}


def _check_visible(folder: Path, written: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise where rank 0 does not see what other ranks wrote: their nodes have another folder of that name."""
    for rank, entry in written.items():
        path = folder / entry["file"]
        size = path.stat().st_size if path.exists() else -1
        if size != entry["bytes"]:
            what = "does not exist" if size < 0 else f"has {size:,} bytes instead of {entry['bytes']:,}"
            raise ValueError(f"{path}, which rank {rank} wrote, {what} here: all nodes must share the folder")


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically, and have that on the disk when this returns."""
    draft = path.with_name(f".{path.name}.new")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading -----------------------------------------------------------------------------------------


def _read_index(folder: Path, side: Sharding) -> dict[str, Any]:
    if not (folder / INDEX).is_file():
        what = (
            "is a file, and a checkpoint is a folder"
            if folder.is_file()
            else f"has no {INDEX}: no save has ended there"
        )
        raise ValueError(f"it {what}")
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise ValueError(f"it has format {index['format']!r}, and this Roost reads {FORMAT}")
        sizes = index["tensor_parallel"], index["pipeline_parallel"]
        names = [index["state"], *(entry["file"] for entry in index["files"])]
        expected = {(entry["tp"], entry["pp"]): (entry["bytes"], entry["sha256"]) for entry in index["files"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is not a checkpoint's: {_reason(error)}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{folder / INDEX} names {name!r}, which is not in the folder itself")
    if sizes != (side.tp, side.pp):
        said = f"tensor_parallel {sizes[0]}, pipeline_parallel {sizes[1]}"
        raise ValueError(f"it was saved with {said}, and this trainer has {side.tp} and {side.pp}")
    missing = [(tp, pp) for tp in range(side.tp) for pp in range(side.pp) if (tp, pp) not in expected]
    if missing:
        raise ValueError(f"{folder / INDEX} lacks the files of (tensor-parallel rank, stage) {missing}")
    return index


def _read(path: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state in a file whose bytes are those that were written."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise ValueError(f"{path} has {size:,} bytes instead of {entry['bytes']:,}")
        digest = hashlib.sha256()
        while block := file.read(io.DEFAULT_BUFFER_SIZE * 128):
            digest.update(block)
        if digest.hexdigest() != entry["sha256"]:
            raise ValueError(f"{path} is damaged: its SHA-256 is not the one in {INDEX}")
        file.seek(0)
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        return state


# Trainers ----------------------------------------------------------------------------------------


def save_trainer(worker: TrainWorker, path: str | os.PathLike[str]) -> None:
    """Save model, optimizer and step count of a trainer's rank: see :meth:`TrainWorker.save`."""
    save_state(path, lambda: _state_of(worker), _side_of(worker, "W301"), worker.rank)


def load_trainer(worker: TrainWorker, path: str | os.PathLike[str]) -> None:
    """Load them: see :meth:`TrainWorker.load`."""
    side = _side_of(worker, "W302")
    state = load_state(path, side, worker.rank, lambda saved: _misfits(saved, _state_of(worker)))
    model: Any = worker.model
    model.load_state_dict(state["model"])
    if worker.optimizer is not None:
        worker.optimizer.load_state_dict(state["optimizer"])
    worker.global_step = state["global_step"]


def _state_of(worker: TrainWorker) -> dict[str, Any]:
    if worker.model is None:
        raise ValueError("there is no model: init() sets self.model")
    if worker._copies().is_offloaded:
        raise ValueError("the trainer is offloaded: call onload() before")
    state: dict[str, Any] = {"model": worker.model.state_dict(), "global_step": worker.global_step}
    if worker.optimizer is not None:
        state["optimizer"] = worker.optimizer.state_dict()
    return state


def _misfits(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Return what of a saved state cannot be taken by a rank that holds another one, in words."""
    given, wanted = saved["model"], own["model"]
    found = [f"{name} is missing" for name in wanted.keys() - given.keys()]
    found += [f"there is no tensor {name!r}" for name in given.keys() - wanted.keys()]
    for name in given.keys() & wanted.keys():
        shapes = [list(getattr(side[name], "shape", ())) for side in (given, wanted)]
        if shapes[0] != shapes[1]:
            found.append(f"{name} has shape {shapes[0]} instead of {shapes[1]}")
    found.sort()
    if ("optimizer" in saved) != ("optimizer" in own):
        found.append("one has an optimizer, and the other has none")
    elif "optimizer" in own:
        counts = [[len(group["params"]) for group in side["optimizer"]["param_groups"]] for side in (saved, own)]
        if counts[0] != counts[1]:
            found.append(f"the optimizer has parameter groups of {counts[0]} instead of {counts[1]} parameters")
    return found if len(found) <= _SHOWN else [*found[:_SHOWN], f"and {len(found) - _SHOWN} more"]


def _side_of(worker: TrainWorker, code: str) -> Sharding:
    """Return the parallel sizes of a trainer; raise where its ranks cannot be divided by them."""
    tp, pp = worker.tensor_parallel, worker.pipeline_parallel
    replicas, rest = divmod(worker.world_size, tp * pp)
    if rest or not replicas:
        message = f"{worker.world_size} ranks cannot be divided by tensor_parallel {tp} and pipeline_parallel {pp}"
        raise CheckpointError([Finding(code, message)])
    return Sharding((), tp, pp, replicas)

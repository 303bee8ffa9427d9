"""Trainers: a small worker to derive from, and the group that commands all its ranks."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist

from roost.cluster import Cluster
from roost.cluster.ray_typed import node_address
from roost.errors import Finding, Fix, LaunchError
from roost.plan import Plan, TensorShards
from roost.rl.train_state import load_trainer, save_trainer
from roost.weights.buffers import dtype_name
from roost.weights.endpoints import WeightSender
from roost.weights.host_copies import HostCopies, device_storages
from roost.weights.progress import ProgressAddress, SharedProgress
from roost.weights.shard_files import FileShard
from roost.weights.streams import WeightDescription, WeightStream
from roost.worker import GroupRequest, Worker, WorkerGroup

if TYPE_CHECKING:
    from roost.rl.rollout import RolloutManager
    from roost.weights.sync import SyncReport

__all__ = ["TrainGroup", "TrainWorker"]

DISTRIBUTED_TIMEOUT_S = 600.0
_VERBS = ("init", "train", "eval", "save", "load", "offload", "onload", "clear_memory")


class TrainWorker(Worker):
    """One rank of a trainer. Derive from it, and fill in what it should do::

        class Mine(TrainWorker):
            def init(self, width):
                self.model = torch.nn.Linear(width, width).to(self.device)
                self.optimizer = torch.optim.Adam(self.model.parameters())

            def train(self, batch): ...

    ``torch.distributed`` is set up before ``init`` is called: over NCCL where this worker has a real
    GPU, over gloo otherwise.

    Attributes:
        model: What is trained. Its parameters and buffers are what engines get, and what is offloaded.
        optimizer: Its optimizer; its state is offloaded too.
        global_step: A count for the worker's own use, such as of training steps; saved and loaded with the model.
        tensor_parallel: Size of the tensor-parallel groups of this trainer.
        pipeline_parallel: Number of its pipeline stages.
    """

    model: torch.nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    global_step: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    _progress: SharedProgress | None = None
    _slot: int = 0

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        if self.local_accelerator_rank >= 0 and torch.cuda.is_available():
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        return torch.device("cpu")

    # What users fill in --------------------------------------------------------------------

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Builds the model and whatever else this rank needs."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is built: define init()")

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Learns from a batch."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it learns: define train()")

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """Judges the model."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it is judged: define eval()")

    def save(self, path: str) -> None:
        """Write model, optimizer and ``global_step`` to a folder; all ranks call this together.

        Each tensor-parallel rank of each pipeline stage writes what it holds; of data-parallel replicas, the first
        one does. The folder's previous checkpoint counts until the new one is whole. Waiting for other ranks ends
        at the timeout of ``torch.distributed``.

        Args:
            path: A folder that all ranks see.

        Raises:
            CheckpointError: The checkpoint could not be written (W301), on every rank. The previous one is whole.
        """
        save_trainer(self, path)

    def load(self, path: str) -> None:
        """Take model, optimizer and ``global_step`` from a folder that :meth:`save` wrote; all ranks call this together.

        ``init`` has made model and optimizer before. The number of data-parallel replicas may have changed.

        Args:
            path: The folder.

        Raises:
            CheckpointError: The checkpoint is not whole or does not fit (W302), on every rank. All ranks keep what
                they had.
        """
        load_trainer(self, path)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What engines get, by the names that they know: parameters and buffers of the model."""
        if self.model is None:
            raise RuntimeError("there are no weights yet: init() sets self.model")
        return self.model.state_dict(keep_vars=True)

    def shards(self) -> Sequence[TensorShards]:
        """How those are cut over tensor-parallel ranks; whole unless a subclass says otherwise.

        A rank of a pipeline stage names the tensors of its own stage.
        """
        found = []
        seen: set[tuple[int, int | torch.SymInt]] = set()
        for name, tensor in self.weights().items():
            key = (tensor.data_ptr(), tensor.storage_offset())
            if tensor.numel() == 0 or key not in seen:  # tied tensors go once
                found.append(TensorShards(name, tuple(tensor.shape), dtype_name(tensor)))
            seen.add(key)
        return found

    # What is given -------------------------------------------------------------------------

    def setup_distributed(self, timeout_s: float) -> str:
        """Joins the ranks into a process group; returns its backend."""
        if not dist.is_available() or dist.is_initialized():
            return ""
        backend = "cpu:gloo"
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            backend = "cpu:gloo,cuda:nccl"
        if os.environ["MASTER_ADDR"].startswith("127."):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=timeout_s))
        return backend

    def offload(self) -> int:
        """Moves parameters and optimizer state to host memory, and frees the device's; returns bytes."""
        if self.device.type == "cpu":
            return 0
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        moved = self._copies().offload(device_storages(self.model, self.optimizer), meanwhile=gc.collect)
        torch.cuda.empty_cache()
        if (sender := getattr(self, "_sender", None)) is not None:
            sender.invalidate_mappings()
        return moved

    def onload(self) -> int:
        """Brings them back; returns bytes."""
        return self._copies().onload()

    def clear_memory(self) -> None:
        """Gives cached memory back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _copies(self) -> HostCopies:
        if not hasattr(self, "_host_copies"):
            self._host_copies = HostCopies()
        return self._host_copies

    # Weight sync: called by roost.weights.sync -----------------------------------------------

    def describe_weights(self) -> WeightDescription:
        """The tensors of this rank, for the other side to compare with."""
        is_on_gpu = all(tensor.is_cuda for tensor in self.weights().values())
        gpus = (
            (str(torch.cuda.get_device_properties(self.device).uuid),)
            if is_on_gpu and self.device.type == "cuda"
            else ()
        )
        return WeightDescription(tuple(self.shards()), self.tensor_parallel, self.pipeline_parallel, gpus)

    def open_streams(
        self, streams: Sequence[WeightStream], shard: FileShard | None, folder: str, timeout_s: float
    ) -> dict[str, Any]:
        """Opens this rank's ends; returns where each is found."""
        self.close_streams()
        self._sender = WeightSender(streams, shard, self.address, folder, timeout_s, self.weights)
        return self._sender.addresses

    def join_streams(self) -> None:
        """Waits until the other ends are there."""
        self._use_device()
        self._sender.join()

    def stop_broadcasts(self, reason: str) -> None:
        """Gives up broadcasts that this rank waits in; called beside the call that waits."""
        sender: WeightSender | None = getattr(self, "_sender", None)
        if sender is not None:
            sender.stop(reason)

    def send_weights(self, version: int, is_direct: bool = False) -> int:
        """Sends this rank's part of a version; returns bytes."""
        self._use_device()
        sent = self._sender.send(self.weights, version, is_direct)
        if self._progress is not None and not is_direct:
            self._progress.set(self._slot, version)
        return sent

    def join_pieces(self, version: int) -> None:
        """Writes tensors that are cut over several ranks into this rank's file, from what all of them have written."""
        self._sender.join_pieces(version)

    def _use_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the thread of a lane knows only the first one

    def open_progress(self, address: ProgressAddress, first_slot: int) -> bool:
        """Open the progress to which :meth:`send_weights` writes; return whether it is on this node."""
        self._progress, self._slot = SharedProgress.open(address), first_slot + self.rank
        return self._progress is not None

    def close_streams(self) -> None:
        """Closes this rank's ends."""
        sender: WeightSender | None = getattr(self, "_sender", None)
        if sender is not None:
            sender.close()
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    @property
    def address(self) -> str:
        """Address of this node."""
        return node_address()


class TrainGroup:
    """All ranks of a trainer, commanded as one.

    ``init``, ``train``, ``eval``, ``save``, ``load``, ``offload``, ``onload`` and ``clear_memory`` go to all
    ranks at once and return their values in rank order; ``async_init`` and so on return the
    references at once. Arguments go to every rank as they are, or one each as ``PerRank([...])``.

    Args:
        cluster: The machines.
        worker: A subclass of :class:`TrainWorker`.
        plan: The plan of the job.
        component: The component of it that is the trainer.
        args: Arguments of the worker's constructor.
        kwargs: Keyword arguments of the worker's constructor.
        name: Name of the group; default the component's.
        timeout_s: How long ranks wait for each other in ``torch.distributed``.
    """

    init: Callable[..., list[Any]]
    train: Callable[..., list[Any]]
    eval: Callable[..., list[Any]]
    save: Callable[..., list[Any]]
    load: Callable[..., list[Any]]
    offload: Callable[..., list[Any]]
    onload: Callable[..., list[Any]]
    clear_memory: Callable[..., list[Any]]
    async_init: Callable[..., list[ray.ObjectRef[Any]]]
    async_train: Callable[..., list[ray.ObjectRef[Any]]]
    async_eval: Callable[..., list[ray.ObjectRef[Any]]]
    async_save: Callable[..., list[ray.ObjectRef[Any]]]
    async_load: Callable[..., list[ray.ObjectRef[Any]]]
    async_offload: Callable[..., list[ray.ObjectRef[Any]]]
    async_onload: Callable[..., list[ray.ObjectRef[Any]]]
    async_clear_memory: Callable[..., list[ray.ObjectRef[Any]]]

    def __init__(
        self,
        cluster: Cluster,
        worker: type[TrainWorker],
        plan: Plan,
        component: str = "actor",
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        timeout_s: float = DISTRIBUTED_TIMEOUT_S,
    ) -> None:
        given: Any = worker
        if not (isinstance(given, type) and issubclass(given, TrainWorker)):
            message = f"a trainer derives from TrainWorker, and {given!r} does not"
            raise LaunchError([Finding("W106", message, fixes=(Fix("derive from it", "class Mine(TrainWorker)"),))])
        self._cluster = cluster
        self._worker = worker
        self._plan = plan
        self._component = component
        self._arguments = (tuple(args), dict(kwargs or {}))
        self._name = name or component
        self._timeout_s = timeout_s
        self._group: WorkerGroup | None = None
        self._manager: RolloutManager | None = None
        self.create()

    # Coming and going ----------------------------------------------------------------------

    def create(self) -> None:
        """Starts all ranks, and joins them in ``torch.distributed``. Does nothing where they run."""
        if self._group is not None:
            return
        args, kwargs = self._arguments
        group = GroupRequest(self._worker, args, kwargs).launch(
            self._cluster, plan=self._plan, component=self._component, name=self._name
        )
        try:
            group.setup_distributed(self._timeout_s).wait()
        except BaseException:
            group.close()
            raise
        self._group = group

    def release(self) -> None:
        """Ends all ranks, and gives their accelerators back; :meth:`create` starts them again."""
        if self._group is not None:
            self._group.close()
            self._group = None

    close = release

    def __enter__(self) -> TrainGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # Commands ------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Callable[..., Any]:
        verb = name.removeprefix("async_")
        if verb not in _VERBS:
            raise AttributeError(
                f"a TrainGroup has no {name!r}; the workers' own methods are called by .workers.{name}()"
            )

        def call(*args: Any, **kwargs: Any) -> Any:
            if verb == "offload" and self._manager is not None:
                self._manager.unmap_weights()
            if name.startswith("async_"):
                return getattr(self.workers, verb)(*args, **kwargs).refs
            return getattr(self.workers, verb)(*args, **kwargs).wait()

        return call

    @property
    def workers(self) -> WorkerGroup:
        """The group of workers, for their own methods: ``train.workers.method(…).wait()``."""
        if self._group is None:
            message = f"the ranks of {self._name!r} were released"
            raise LaunchError([Finding("W111", message, fixes=(Fix("start them again", "train.create()"),))])
        return self._group

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._plan.component(self._component).world_size

    @property
    def plan(self) -> Plan:
        """The plan that it was launched from."""
        return self._plan

    @property
    def component(self) -> str:
        """The component of the plan that it is."""
        return self._component

    def connect(self, manager: RolloutManager) -> None:
        """Says which engines :meth:`update_weights` goes to."""
        self._manager = manager

    def update_weights(self, pause: str = "wait") -> SyncReport:
        """Sends the weights to all engines; returns what that took.

        Args:
            pause: What happens to running generations: see :meth:`RolloutManager.update_weights`.
        """
        if self._manager is None:
            message = "the trainer does not know whom to send weights to"
            raise LaunchError([Finding("W112", message, fixes=(Fix("say it", "train.connect(rollout)"),))])
        return self._manager.update_weights(self, pause)

    def __repr__(self) -> str:
        return f"TrainGroup({self._name!r}, {self.world_size} ranks)"

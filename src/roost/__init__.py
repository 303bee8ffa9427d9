"""Roost decides where every worker of a reinforcement-learning job lives.

The names below load their modules on first use: ``import roost`` loads neither Ray, torch nor
OmegaConf, and costs a few milliseconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_ROOMS = {
    "roost.cluster": (
        "Cluster",
        "CollectiveManager",
        "NodeInfo",
        "NodeManager",
        "PortLease",
        "WorkerManager",
        "lease_ports",
    ),
    "roost.config": ("Config", "load_config"),
    "roost.errors": (
        "AttestationError",
        "CallTimeoutError",
        "CheckpointError",
        "ClusterError",
        "ConfigError",
        "Finding",
        "GenerationError",
        "LaunchError",
        "PlacementError",
        "ReservationError",
        "RolloutError",
        "RoostError",
        "TopologyError",
        "WorkerDiedError",
        "WorkerError",
    ),
    "roost.hardware": ("AcceleratorType", "register_accelerator", "register_hardware"),
    "roost.placement": (
        "ComponentPlacement",
        "FlexiblePlacementStrategy",
        "HybridComponentPlacement",
        "ModelParallelComponentPlacement",
        "NodePlacementStrategy",
        "PackedPlacementStrategy",
        "Placement",
        "PlacementMode",
        "PlacementStrategy",
    ),
    "roost.placement.layouts": ("EngineShare", "Layout", "resolve_layout"),
    "roost.plan": (
        "ComponentPlan",
        "Plan",
        "Process",
        "Sharding",
        "TensorShards",
        "TransferPlan",
        "WeightTransport",
        "plan_transfer",
    ),
    "roost.plan.diff": ("PlanDiff", "diff_plans"),
    "roost.plan.lock_file": ("LockFile",),
    "roost.data.buffer": ("DataBuffer",),
    "roost.engines.engine": ("Engine", "EngineOutput", "EnginePlace"),
    "roost.rl.placement_groups": ("create_placement_groups",),
    "roost.rl.job": ("RunningJob", "launch"),
    "roost.rl.hub": ("BufferClient", "LockClient"),
    "roost.data.lock": ("LeaseLock",),
    "roost.rl.rollout": ("RolloutManager",),
    "roost.engines.router": ("Router",),
    "roost.data.samples": ("Sample", "SampleGroup"),
    "roost.engines.sglang.engine": ("SglangEngine",),
    "roost.engines.torch.engine": ("TorchEngine",),
    "roost.rl.train": ("TrainGroup", "TrainWorker"),
    "roost.engines.vllm.engine": ("VllmEngine",),
    "roost.weights.sync": ("SyncReport",),
    "roost.report.page": ("draw_page",),
    "roost.report.svg": ("draw_image",),
    "roost.topology": ("Hardware", "Node", "NodeGroup", "Topology"),
    "roost.topology.order": ("stable_order_key",),
    "roost.worker": ("Binding", "GroupResult", "PerRank", "Worker", "WorkerGroup"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

if TYPE_CHECKING:
    from roost.cluster import Cluster as Cluster
    from roost.cluster import CollectiveManager as CollectiveManager
    from roost.cluster import NodeInfo as NodeInfo
    from roost.cluster import NodeManager as NodeManager
    from roost.cluster import PortLease as PortLease
    from roost.cluster import WorkerManager as WorkerManager
    from roost.cluster import lease_ports as lease_ports
    from roost.config import Config as Config
    from roost.config import load_config as load_config
    from roost.data.buffer import DataBuffer as DataBuffer
    from roost.data.lock import LeaseLock as LeaseLock
    from roost.data.samples import Sample as Sample
    from roost.data.samples import SampleGroup as SampleGroup
    from roost.engines.engine import Engine as Engine
    from roost.engines.engine import EngineOutput as EngineOutput
    from roost.engines.engine import EnginePlace as EnginePlace
    from roost.engines.router import Router as Router
    from roost.engines.sglang.engine import SglangEngine as SglangEngine
    from roost.engines.torch.engine import TorchEngine as TorchEngine
    from roost.engines.vllm.engine import VllmEngine as VllmEngine
    from roost.errors import AttestationError as AttestationError
    from roost.errors import CallTimeoutError as CallTimeoutError
    from roost.errors import CheckpointError as CheckpointError
    from roost.errors import ClusterError as ClusterError
    from roost.errors import ConfigError as ConfigError
    from roost.errors import Finding as Finding
    from roost.errors import GenerationError as GenerationError
    from roost.errors import LaunchError as LaunchError
    from roost.errors import PlacementError as PlacementError
    from roost.errors import ReservationError as ReservationError
    from roost.errors import RolloutError as RolloutError
    from roost.errors import RoostError as RoostError
    from roost.errors import TopologyError as TopologyError
    from roost.errors import WorkerDiedError as WorkerDiedError
    from roost.errors import WorkerError as WorkerError
    from roost.hardware import AcceleratorType as AcceleratorType
    from roost.hardware import register_accelerator as register_accelerator
    from roost.hardware import register_hardware as register_hardware
    from roost.placement import ComponentPlacement as ComponentPlacement
    from roost.placement import FlexiblePlacementStrategy as FlexiblePlacementStrategy
    from roost.placement import HybridComponentPlacement as HybridComponentPlacement
    from roost.placement import ModelParallelComponentPlacement as ModelParallelComponentPlacement
    from roost.placement import NodePlacementStrategy as NodePlacementStrategy
    from roost.placement import PackedPlacementStrategy as PackedPlacementStrategy
    from roost.placement import Placement as Placement
    from roost.placement import PlacementMode as PlacementMode
    from roost.placement import PlacementStrategy as PlacementStrategy
    from roost.placement.layouts import EngineShare as EngineShare
    from roost.placement.layouts import Layout as Layout
    from roost.placement.layouts import resolve_layout as resolve_layout
    from roost.plan import ComponentPlan as ComponentPlan
    from roost.plan import Plan as Plan
    from roost.plan import Process as Process
    from roost.plan import Sharding as Sharding
    from roost.plan import TensorShards as TensorShards
    from roost.plan import TransferPlan as TransferPlan
    from roost.plan import WeightTransport as WeightTransport
    from roost.plan import plan_transfer as plan_transfer
    from roost.plan.diff import PlanDiff as PlanDiff
    from roost.plan.diff import diff_plans as diff_plans
    from roost.plan.lock_file import LockFile as LockFile
    from roost.report.page import draw_page as draw_page
    from roost.report.svg import draw_image as draw_image
    from roost.rl.hub import BufferClient as BufferClient
    from roost.rl.hub import LockClient as LockClient
    from roost.rl.job import RunningJob as RunningJob
    from roost.rl.job import launch as launch
    from roost.rl.placement_groups import create_placement_groups as create_placement_groups
    from roost.rl.rollout import RolloutManager as RolloutManager
    from roost.rl.train import TrainGroup as TrainGroup
    from roost.rl.train import TrainWorker as TrainWorker
    from roost.topology import Hardware as Hardware
    from roost.topology import Node as Node
    from roost.topology import NodeGroup as NodeGroup
    from roost.topology import Topology as Topology
    from roost.topology.order import stable_order_key as stable_order_key
    from roost.weights.sync import SyncReport as SyncReport
    from roost.worker import Binding as Binding
    from roost.worker import GroupResult as GroupResult
    from roost.worker import PerRank as PerRank
    from roost.worker import Worker as Worker
    from roost.worker import WorkerGroup as WorkerGroup

__all__ = ["__version__", *sorted(_ROOM_OF)]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'roost' has no attribute {name!r}")
    value = getattr(importlib.import_module(room), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

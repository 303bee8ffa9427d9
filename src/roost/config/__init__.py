"""Job files: YAML, a mapping or a ``DictConfig``, read once into a typed :class:`Job`."""

from roost.config.components import Component
from roost.config.job import ClusterSettings, Job, load_config, read_cluster, read_job
from roost.config.layout import LayoutSection, RolloutGroup
from roost.config.sizes import Algorithm, ParallelSizes
from roost.source import Config

__all__ = [
    "Algorithm",
    "ClusterSettings",
    "Component",
    "Config",
    "Job",
    "LayoutSection",
    "ParallelSizes",
    "RolloutGroup",
    "load_config",
    "read_cluster",
    "read_job",
]

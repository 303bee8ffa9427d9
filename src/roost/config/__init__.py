"""Job files: YAML, a mapping or a ``DictConfig`` → a typed job description."""

from roost.config.job import Component, Job, load_config, read_job
from roost.source import Config

__all__ = ["Component", "Config", "Job", "load_config", "read_job"]

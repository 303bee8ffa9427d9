"""Workers and worker groups: launch, attestation, calls, states, and complete teardown."""

from roost.worker.binding import Attestation, Binding
from roost.worker.group import PerRank, WorkerGroup
from roost.worker.launch import GroupRequest
from roost.worker.results import GroupResult
from roost.worker.worker import Worker

__all__ = ["Attestation", "Binding", "GroupRequest", "GroupResult", "PerRank", "Worker", "WorkerGroup"]

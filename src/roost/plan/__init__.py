"""A resolved job: the place, environment and weight transport of every process, and the checks of all that."""

from typing import TYPE_CHECKING

from roost.plan.plan import ComponentPlan, Plan, Process
from roost.plan.transport import WeightTransport

if TYPE_CHECKING:
    from roost.plan.transfer import Sharding, TensorShards, TransferPlan, plan_transfer

__all__ = [
    "ComponentPlan",
    "Plan",
    "Process",
    "Sharding",
    "TensorShards",
    "TransferPlan",
    "WeightTransport",
    "plan_transfer",
]


def __getattr__(name: str) -> object:
    # Loaded on first use: most commands plan no transfer.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from roost.plan import transfer

    return getattr(transfer, name)

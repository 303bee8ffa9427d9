"""A whole job resolved: who lives where, with which environment, and what is wrong with that."""

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
    # Most commands plan no transfer, and start sooner without it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from roost.plan import transfer

    return getattr(transfer, name)

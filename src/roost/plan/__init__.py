"""A whole job resolved: who lives where, with which environment, and what is wrong with that."""

from roost.plan.plan import ComponentPlan, Plan, Process
from roost.plan.transport import WeightTransport

__all__ = ["ComponentPlan", "Plan", "Process", "WeightTransport"]

"""Test tools for Roost and its users: made-up topologies, and a Ray of many nodes on one computer."""

from roost.cluster.local_ray import LocalRay, local_ray
from roost.testing.machines import made_up_topology

__all__ = ["LocalRay", "local_ray", "made_up_topology"]

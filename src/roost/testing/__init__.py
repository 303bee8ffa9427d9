"""For Roost's tests and for users': made-up machines, and a many-node Ray on one computer."""

from roost.cluster.local_ray import LocalRay, local_ray
from roost.testing.machines import made_up_topology

__all__ = ["LocalRay", "local_ray", "made_up_topology"]

"""Hardware types of the heterogeneous example."""

from dataclasses import dataclass

import roost


@roost.register_hardware("Franka")
@dataclass
class Franka:
    """A robot arm: a job must say at which address it listens."""

    robot_ip: str
    camera: str = ""

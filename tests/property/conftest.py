"""The same examples on every run, few enough for a slow machine.

``pytest tests/property --hypothesis-profile=search`` looks for new ones.
"""

from hypothesis import HealthCheck, settings

_SLOW_MACHINE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "roost", derandomize=True, deadline=None, max_examples=80, suppress_health_check=_SLOW_MACHINE
)
settings.register_profile("search", deadline=None, max_examples=3000, suppress_health_check=_SLOW_MACHINE)
settings.load_profile("roost")

"""Checks of the options of a launch: a value in the wrong place is reported, not taken for another option."""

from __future__ import annotations

from roost.errors import Finding, LaunchError, shown
from roost.placement import PlacementStrategy

__all__ = ["check_options"]

_CALL = "launch(cluster, placement_strategy, name, *, isolate_accelerator, max_concurrency, plan, component, timeout_s)"


def check_options(strategy: object, name: object, isolate_accelerator: object, max_concurrency: object) -> None:
    """Raise ``LaunchError`` (W106) if options have values of a wrong type; it names all of them."""
    is_count = isinstance(max_concurrency, int) and not isinstance(max_concurrency, bool) and max_concurrency > 0
    options = (
        ("placement_strategy", strategy, strategy is None or isinstance(strategy, PlacementStrategy), "a strategy"),
        ("name", name, name is None or isinstance(name, str), "a text"),
        ("isolate_accelerator", isolate_accelerator, isinstance(isolate_accelerator, bool), "True or False"),
        ("max_concurrency", max_concurrency, max_concurrency is None or is_count, "a whole number from 1 up"),
    )
    wrong = [f"{option} is {kind}, not {shown(value)}" for option, value, is_right, kind in options if not is_right]
    if wrong:
        raise LaunchError([Finding("W106", message, rule=_CALL) for message in wrong])

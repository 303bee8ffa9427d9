"""The programs of a job: what a job file names as ``module:Name``, loaded."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roost.config import Job
from roost.errors import ConfigError, Finding, Fix

__all__ = ["FUNCTION", "Program", "load_programs"]

FUNCTION = ""
"""Name under which the function of the job (``run``) is among the programs; no component can have it."""


@dataclass(frozen=True)
class Program:
    """What runs in the processes of a component.

    Attributes:
        value: The worker class, the function that makes an engine, or the function of the job.
        kind: The key that named it: ``worker``, ``engine`` or ``run``; empty if the value and the role of the component
            decide whether it is a worker or an engine.
    """

    value: Any
    kind: str = ""


def load_programs(
    job: Job | None, given: Mapping[str, Any] | None = None, *, with_function: bool = False
) -> dict[str, Program]:
    """Return the programs of a job by the name of their component.

    Args:
        job: The job; ``None`` if only the given programs count.
        given: Programs by name, as Python objects. They replace those of the job file, which are then not loaded.
        with_function: Whether to load the function of the job (``run``), too. Its name is :data:`FUNCTION`.

    Raises:
        ConfigError: There is no program (U103), or some cannot be loaded (U104), with all of them.
    """
    named = _named(job) if job is not None else {}
    if job is not None and with_function and job.run:
        named[FUNCTION] = (job.run, "run")
    programs: dict[str, Program] = {}
    findings: list[Finding] = []
    for name, (text, kind) in named.items():
        if given is not None and name in given:
            continue
        module, _, attribute = text.partition(":")
        try:
            programs[name] = Program(getattr(importlib.import_module(module), attribute), kind)
        except Exception as error:  # a module can raise anything while it is imported
            findings.append(Finding("U104", f"{text} cannot be loaded: {type(error).__name__}: {error}"))
    programs.update({name: Program(value) for name, value in (given or {}).items()})
    if not programs and not findings:
        function = Fix("a function that is called with cluster and plan", "run: my_job:main")
        worker = Fix("a worker class beside a placement", "actor: {placement: 0-7, worker: my_job:Actor}")
        in_python = Fix("or in Python", 'roost.launch(…, programs={"actor": Actor})')
        fixes = (function, worker) if with_function else (worker, in_python)
        findings.append(Finding("U103", "the job names no program", fixes=fixes))
    if findings:
        raise ConfigError(findings)
    return programs


def _named(job: Job) -> dict[str, tuple[str, str]]:
    """Return text and kind of the programs that a job file names, in the order of the file."""
    named: dict[str, tuple[str, str]] = {}
    for component in job.components:
        if component.placeholder:
            continue
        if component.worker:
            named[component.name] = (component.worker, "worker")
        elif component.engine:
            named[component.name] = (component.engine, "engine")
    named.update({name: (text, "") for name, text in job.programs.items()})
    return named

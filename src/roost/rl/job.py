"""A running job: one call that plans, checks, reserves and starts every component that has a program."""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeGuard

from roost.cluster import Cluster
from roost.cluster.local_ray import local_ray
from roost.config import Config, Job, load_config, read_job
from roost.errors import ConfigError, Finding, Fix, LaunchError, PlacementError, did_you_mean, shown
from roost.plan import ComponentPlan, Plan
from roost.rl.programs import FUNCTION, Program, load_programs
from roost.topology import Topology
from roost.worker import GroupRequest, Worker, WorkerGroup

if TYPE_CHECKING:
    from roost.engines.engine import Engine
    from roost.rl.rollout import RolloutManager
    from roost.rl.train import TrainGroup, TrainWorker

__all__ = ["RunningJob", "assign_programs", "launch"]

ROLLOUT = "rollout"
TRAINER_ROLES = ("actor", "critic")
_LAYOUT_NAMES = re.compile(r"actor|critic|rollout(-\d+)?")
"""Names of components that a layout places; with debug_train_only, for example, some of them are not placed."""


def launch(
    job: Any,
    *,
    cluster: str | Topology | Cluster | None = None,
    programs: Mapping[str, Any] | None = None,
    namespace: str | None = None,
    rollout_options: Mapping[str, Any] | None = None,
) -> RunningJob:
    """Plan and check a job, reserve its accelerators, and start every component that has a program.

    Blocks until all workers are constructed and all engines are healthy. If something fails, everything that was
    started is closed again. Components without a program are planned, and not started::

        with roost.launch("job.yaml") as job:
            job.train.init()
            job.train.update_weights()

    The job file names programs: ``worker: module:Class`` and ``engine: module:function`` beside the placement of a
    component, or ``cluster.programs``. Modules are searched beside the job file first. The folder of the job file stays
    in ``sys.path``.

    Args:
        job: Path of a job file, a mapping, the result of :func:`load_config`, a ``DictConfig``, or a plan. A plan needs
            ``programs``.
        cluster: The machines. A topology, such as ``"2x2"``, starts an embedded Ray of made-up nodes on this machine,
            which is closed with the job; if ``RAY_ADDRESS`` is set, that Ray is joined instead. A live ``Cluster`` is
            used, and left open. Default: join the Ray of ``RAY_ADDRESS``, or start one on this machine.
        programs: Worker classes, and functions that return an engine, by the name or the role of their component. They
            replace those of the job file.
        namespace: Name of the job on its Ray; default as for ``Cluster``.
        rollout_options: Keyword arguments for the ``RolloutManager``, such as ``{"capacity": 64}``.

    Raises:
        PlacementError: The plan has problems (see ``Plan.check``), with all of them. Nothing was started.
        ConfigError: No program is named (U103), some cannot be loaded (U104), or they do not fit the components (U107).
            Nothing was started.
        LaunchError: An argument has a wrong type (W106). Nothing was started.
        RoostError: The job is wrong, or the cluster, a worker or an engine cannot be started.
    """
    _check_arguments(cluster, programs, rollout_options)
    plan, described, config = _read(job)
    loaded = load_programs(described, programs)
    topology = Topology.parse(cluster) if isinstance(cluster, str) else cluster
    is_embedded = isinstance(topology, Topology) and not os.environ.get("RAY_ADDRESS")
    with ExitStack() as stack:
        if isinstance(topology, Topology):
            resolved = plan or Plan.resolve(described, topology)
            _check(resolved)
            assign_programs(resolved, loaded, described)
            if is_embedded:
                stack.enter_context(local_ray(topology))
                plan = resolved
        if isinstance(topology, Cluster):
            live = topology
        elif described is not None:
            live = stack.enter_context(Cluster(cluster_cfg=Config(described.tree), namespace=namespace))
        else:
            nodes = plan.topology.num_nodes if plan is not None else 0
            live = stack.enter_context(Cluster(num_nodes=nodes, namespace=namespace))
        plan = plan or Plan.resolve(described, live)
        _check(plan)
        running = RunningJob(live, plan, config, stack.pop_all())
    try:
        running.start(loaded, described, rollout_options=rollout_options)
    except BaseException:
        running.close()
        raise
    return running


class RunningJob:
    """The running components of a job; made by :func:`roost.launch`.

    It is a context manager; :meth:`close` is idempotent.

    Attributes:
        cluster: The cluster on which the job runs.
        plan: The plan of the job.
        config: All values of the job as plain Python data; empty if the job was launched from a plan.
    """

    def __init__(
        self, cluster: Cluster, plan: Plan, config: Mapping[str, Any], closers: ExitStack | None = None
    ) -> None:
        self.cluster = cluster
        self.plan = plan
        self.config = dict(config)
        self._groups: dict[str, WorkerGroup | TrainGroup] = {}
        self._train: TrainGroup | None = None
        self._rollout: RolloutManager | None = None
        self._closers = closers or ExitStack()  # what surrounds the job; each started component is added

    def start(
        self,
        programs: Mapping[str, Program],
        job: Job | None = None,
        *,
        rollout_options: Mapping[str, Any] | None = None,
        on_start: Callable[[str, int, str], None] | None = None,
    ) -> None:
        """Start all components; :func:`roost.launch` calls this. After an error, :meth:`close` closes those started.

        Args:
            programs: The programs of the components, loaded.
            job: The job that named them, if there is one.
            rollout_options: Keyword arguments for the ``RolloutManager``.
            on_start: Called after the start of a component, with its name, a count, and ``worker`` or ``engine``.

        Raises:
            ConfigError: Programs do not fit the components (U107). Nothing was started.
        """
        assigned = assign_programs(self.plan, programs, job)
        for component in self.plan.components:
            if component.placeholder and not (assigned.engines and component.role == ROLLOUT):
                token = self.cluster.reserve(component.accelerators)
                self._closers.callback(self.cluster.release, token)
        for name, cls in assigned.workers.items():
            component = self.plan.component(name)
            group = self._groups[name] = self._start_workers(component, cls)
            self._closers.callback(group.close)
            if on_start is not None:
                on_start(name, group.world_size, "worker")
        if assigned.engines:
            self._start_engines(assigned.engines, rollout_options or {})
            for name in assigned.engines:
                if on_start is not None:
                    on_start(name, len(self.plan.component(name).engines), "engine")

    def _start_workers(self, component: ComponentPlan, cls: type) -> WorkerGroup | TrainGroup:
        if component.role not in TRAINER_ROLES or not _is_trainer(cls):
            return GroupRequest(cls).launch(self.cluster, plan=self.plan, component=component.name)
        from roost.rl.train import TrainGroup

        group = TrainGroup(self.cluster, cls, self.plan, component.name)
        before = self._train and self.plan.component(self._train.component).role
        if before is None or (before, component.role) == ("critic", "actor"):
            self._train = group
        return group

    def _start_engines(self, factories: Mapping[str, Callable[..., Engine]], options: Mapping[str, Any]) -> None:
        from roost.rl.rollout import RolloutManager

        engines = {name: self._with_config(factory) for name, factory in factories.items()}
        self._rollout = self._closers.enter_context(RolloutManager(self.cluster, self.plan, engines, **options))
        if self._train is not None:
            self._train.connect(self._rollout)

    def _with_config(self, factory: Callable[..., Engine]) -> Callable[[], Engine]:
        """Return a function without arguments: a factory that takes an argument gets all values of the job."""
        return partial(factory, self.config) if _takes_argument(factory) else factory

    # What runs -----------------------------------------------------------------------------

    @property
    def train(self) -> TrainGroup:
        """The trainer: the actor if there are an actor and a critic.

        Raises:
            LaunchError: No component is a trainer (W115).
        """
        if self._train is None:
            fix = Fix("derive the class of the actor from it", "class Actor(roost.TrainWorker)")
            raise LaunchError([Finding("W115", "the job has no trainer", fixes=(fix,))])
        return self._train

    @property
    def rollout(self) -> RolloutManager:
        """The rollout manager with all engines.

        Raises:
            LaunchError: No component has an engine (W115).
        """
        if self._rollout is None:
            fix = Fix("name it beside the placement", "engine: my_job:make_engine")
            raise LaunchError([Finding("W115", "the job has no engines", fixes=(fix,))])
        return self._rollout

    @property
    def has_train(self) -> bool:
        """Whether the job has a trainer."""
        return self._train is not None

    @property
    def has_rollout(self) -> bool:
        """Whether the job has engines."""
        return self._rollout is not None

    def group(self, name: str) -> WorkerGroup | TrainGroup:
        """Return the running workers of a component: a ``TrainGroup`` for a trainer, else a ``WorkerGroup``.

        Raises:
            LaunchError: The component has no workers (W115).
        """
        if name not in self._groups:
            near = did_you_mean(name, self._groups)
            fixes = (Fix("did you mean", near),) if near else ()
            rule = "components with workers: " + (", ".join(self._groups) or "none")
            raise LaunchError([Finding("W115", f"the job has no workers of {name!r}", rule=rule, fixes=fixes)])
        return self._groups[name]

    @property
    def worker_groups(self) -> dict[str, WorkerGroup]:
        """The worker groups by component, also those of trainers; without engines."""
        return {
            name: group if isinstance(group, WorkerGroup) else group.workers for name, group in self._groups.items()
        }

    # Closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close all that :func:`roost.launch` started, in reverse order: engines, workers, cluster, embedded Ray."""
        closers, self._closers = self._closers, ExitStack()
        closers.close()

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        names = [*self._groups, *([ROLLOUT] if self._rollout is not None else [])]
        return f"RunningJob({', '.join(names)})"


# From programs to components -------------------------------------------------------------------


@dataclass
class _Assignment:
    """The programs of components, by the component's name."""

    workers: dict[str, type] = field(default_factory=dict)
    engines: dict[str, Callable[..., Engine]] = field(default_factory=dict)


def assign_programs(plan: Plan, programs: Mapping[str, Program], job: Job | None = None) -> _Assignment:
    """Return which program each component of a plan has, as a worker class or as a function that returns an engine.

    Args:
        plan: The plan.
        programs: The programs by the name or the role of their component.
        job: The job that named them. A program for a component that its layout could place, and does not, is ignored.

    Raises:
        ConfigError: Programs do not fit the components, with all problems (U107).
    """
    findings = _unknown(plan, programs, job)
    found = _Assignment()
    components = {c.name: c for c in plan.components if not c.placeholder}
    by_role = {name: program for name, program in programs.items() if not program.kind}
    order = [name for name in programs if name in components]
    order += [name for name in components if name not in programs and components[name].role in by_role]
    for name in order:
        component = components[name]
        program = programs[name] if name in programs else by_role[component.role]
        value = program.value
        is_worker = isinstance(value, type) and issubclass(value, Worker)
        is_engine = program.kind == "engine" or (not program.kind and component.role == ROLLOUT and not is_worker)
        if is_engine and component.role != ROLLOUT:
            message = f"{name} has an engine, and its role is {component.role}"
            findings.append(Finding("U107", message, fixes=(Fix("engines have another role", f"role: {ROLLOUT}"),)))
        elif is_engine and not callable(value):
            findings.append(Finding("U107", f"{name}: an engine is made by a function, not by {value!r}"))
        elif is_engine:
            found.engines[name] = value
        elif not isinstance(value, type):
            findings.append(Finding("U107", f"{name}: a worker is a class, not {value!r}"))
        else:
            found.workers[name] = value
    without = [c.name for c in components.values() if c.role == ROLLOUT and c.name not in found.engines]
    if found.engines and without and not findings:
        message = f"no engine is named for {', '.join(without)}, and one is for {', '.join(found.engines)}"
        rule = f"all components with the role {ROLLOUT} have engines, or none has"
        findings.append(Finding("U107", message, rule=rule))
    if findings:
        raise ConfigError(findings)
    return found


def _unknown(plan: Plan, programs: Mapping[str, Program], job: Job | None) -> list[Finding]:
    """Return a finding for each program whose component does not exist."""
    known = {component.name for component in plan.components} | {component.role for component in plan.components}
    findings = []
    for name in programs:
        could_be_placed = job is not None and job.layout is not None and _LAYOUT_NAMES.fullmatch(name)
        if name in known or name == FUNCTION or could_be_placed:
            continue
        near = did_you_mean(name, known)
        fixes = (Fix("did you mean", near),) if near else ()
        rule = "components: " + ", ".join(component.name for component in plan.components)
        findings.append(
            Finding("U107", f"a program is named for {name!r}, which is no component", rule=rule, fixes=fixes)
        )
    return findings


def _check_arguments(cluster: Any, programs: Any, rollout_options: Any) -> None:
    """Raise a ``LaunchError`` with every argument that has a wrong type (W106)."""
    wrong = []
    if cluster is not None and not isinstance(cluster, (str, Topology, Cluster)):
        wrong.append(f'cluster is a topology, such as "2x2", or a Cluster, not {shown(cluster)}')
    for name, value in (("programs", programs), ("rollout_options", rollout_options)):
        if value is not None and not isinstance(value, Mapping):
            wrong.append(f"{name} is a mapping, not {shown(value)}")
        elif value is not None and not all(isinstance(key, str) for key in value):
            odd = next(key for key in value if not isinstance(key, str))
            wrong.append(f"the keys of {name} are texts, not {shown(odd)}")
    if wrong:
        rule = 'launch("job.yaml", cluster="2x2", programs={"actor": Actor}, rollout_options={"capacity": 64})'
        raise LaunchError([Finding("W106", message, rule=rule) for message in wrong])


def _read(job: Any) -> tuple[Plan | None, Job | None, dict[str, Any]]:
    """Return the plan or the job that ``launch`` was given, and the values of the job."""
    if isinstance(job, Plan):
        return job, None, {}
    if isinstance(job, (str, os.PathLike)):
        folder = os.path.dirname(os.path.abspath(job))
        if folder not in sys.path:
            sys.path.insert(0, folder)
        job = load_config(job)
    described = read_job(job)
    config: dict[str, Any] = described.tree.plain()
    return None, described, config


def _check(plan: Plan) -> None:
    problems = [finding for finding in plan.check() if finding.is_problem]
    if problems:
        raise PlacementError(problems)


def _is_trainer(cls: type) -> TypeGuard[type[TrainWorker]]:
    """Return whether a class derives from ``TrainWorker``, without loading torch for a job that has no such class."""
    module = sys.modules.get("roost.rl.train")
    return module is not None and issubclass(cls, module.TrainWorker)


def _takes_argument(factory: Callable[..., Any]) -> bool:
    """Return whether a function needs an argument."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # a class of C code without a signature
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in positional and p.default is p.empty for p in parameters)

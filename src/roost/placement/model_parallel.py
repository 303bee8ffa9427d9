"""``ModelParallelComponentPlacement``: actor, rollout and inference with tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from roost.errors import Finding, Fix, PlacementError
from roost.placement.component import ComponentPlacement, Masks, PlacementMode, count_bits
from roost.placement.resources import ACCELERATOR, Resources
from roost.placement.strategies import PackedPlacementStrategy
from roost.ranks import format_ranks

__all__ = ["ModelParallelComponentPlacement"]

_DISJOINT_ROLES = ("actor", "rollout", "inference", "critic", "critic_inference")
_SIZES_LIKE = {"inference": "actor", "critic_inference": "critic"}
"""Role → the role whose parallel sizes are its default."""


@dataclass(frozen=True)
class _Sizes:
    """Tensor, context and pipeline parallel sizes of a component, and its number of accelerators."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    world_size: int = 0

    @property
    def replica(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        return self.world_size // self.replica


class ModelParallelComponentPlacement(ComponentPlacement):
    """Placement of model-parallel components, each on a contiguous range of accelerators.

    * **collocated**: actor and rollout have the same accelerators. An engine takes
      ``rollout_tp`` of them with stride ``actor_tp / rollout_tp``, so that a source of each of
      its shards is on the same accelerator and its weights travel by CUDA IPC.
    * **disaggregated**: no two components share an accelerator.
    * **auto** (``cluster.auto_scheduler: true``): disaggregated in the order actor, rollout,
      inference over the whole cluster. The actor is placed on the whole cluster, so that it can grow.
    """

    def _decide(self, findings: list[Finding]) -> None:
        self._by_role: dict[str, str] = {}
        self._ranges: dict[str, range] = {}
        self._sets: dict[str, Masks] = {}
        self._sizes: dict[str, _Sizes] = {}
        self._processes: dict[str, int] = {}
        for name in self.components:
            self._take_role(name, findings)
        for role in ("actor", "rollout"):
            if role not in self._by_role:
                message = f"model-parallel placement needs a component with role {role!r}"
                fix = Fix("add it", f"{role}: all")
                findings.append(Finding("P301", message, self.job.components_tree.place(), fixes=(fix,)))
        if findings:
            return
        self._read_sizes(findings)
        mode = self._find_mode(findings)
        if mode is None or findings:
            return
        self._mode = mode
        for name in self.components:
            self._place_component(name, mode, findings)

    # Public --------------------------------------------------------------------------------

    @property
    def is_collocated(self) -> bool:
        """Whether actor and rollout have the same accelerators."""
        return self._mode is PlacementMode.COLLOCATED

    @property
    def is_disaggregated(self) -> bool:
        """Whether each component has accelerators of its own."""
        return self._mode is PlacementMode.DISAGGREGATED

    @property
    def is_auto(self) -> bool:
        """Whether the actor may grow onto all accelerators."""
        return self._mode is PlacementMode.AUTO

    @property
    def has_dedicated_inference(self) -> bool:
        """Whether log-probabilities are recomputed on accelerators of their own."""
        return "inference" in self._by_role

    def get_world_size(self, component_name: str) -> int:
        """Return the number of processes that are placed for a component."""
        self._known(component_name)
        return self._processes.get(component_name) or super().get_world_size(component_name)

    def __getattr__(self, name: str) -> int:
        # actor_tp, rollout_dp, inference_world_size, …: one rule replaces twenty properties.
        role, _, size = name.rpartition("_")
        if name.endswith("_world_size"):
            role, size = name[: -len("_world_size")], "world_size"
        sizes = self.__dict__.get("_sizes", {})
        if size in ("tp", "cp", "pp", "dp", "world_size") and role in sizes:
            return int(getattr(sizes[role], size))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Reading -------------------------------------------------------------------------------

    def _take_role(self, name: str, findings: list[Finding]) -> None:
        spec = self._specs[name]
        role = spec.role
        if role not in (*_DISJOINT_ROLES, "reward"):
            return
        if role in self._by_role:
            message = f"{self._by_role[role]!r} and {name!r} both have the role {role!r}"
            findings.append(Finding("P301", message, spec.placement.place(), (spec.placement.mark(),)))
            return
        self._by_role[role] = name
        segments = self._segments[name]
        parts = self._resources[spec.labels].nodes_of(segments[0].resources)
        if parts[0].kind != ACCELERATOR:
            if role != "reward":
                message = f"{name}: model-parallel components are placed on accelerators, not on {parts[0].kind}s"
                findings.append(Finding("P302", message, spec.placement.place(), (spec.placement.mark(),)))
            return
        first, last = segments[0].resources[0], segments[-1].resources[-1]
        for before, after in pairwise(segments):
            if after.resources[0] != before.resources[-1] + 1:
                message = f"{name}: its accelerators are not contiguous: {self._ranks_text(name)}"
                fix = Fix("one range", f"{name}: {first}-{last}")
                marks = (spec.placement.mark(after.offset, after.resource_length),)
                rule = "a model-parallel component has one range of accelerators"
                place = spec.placement.place(after.offset)
                findings.append(Finding("P302", message, place, marks, rule=rule, fixes=(fix,)))
                return
        self._ranges[role] = range(first, last + 1)
        self._sets[role] = self._accelerators(name)

    def _read_sizes(self, findings: list[Finding]) -> None:
        for role in _DISJOINT_ROLES:
            written = self.job.sizes_of(self._by_role.get(role, role), role)  # also of roles without a component
            findings += written.problems
            if role == "rollout":
                sizes = _Sizes(written.engine_tensor or 1, 1, written.engine_pipeline or 1)
            else:
                like = self._sizes.get(_SIZES_LIKE.get(role, ""), _Sizes())
                sizes = _Sizes(
                    written.model_tensor or like.tp,
                    written.model_context or like.cp,
                    written.model_pipeline or like.pp,
                )
            sizes = replace(sizes, world_size=count_bits(self._sets.get(role, {})))
            self._sizes[role] = sizes
            if sizes.world_size % sizes.replica:
                self._indivisible(role, sizes, findings)

    def _indivisible(self, role: str, sizes: _Sizes, findings: list[Finding]) -> None:
        placement = self._specs[self._by_role[role]].placement
        product = " x ".join(f"{key} {n}" for key, n in (("tp", sizes.tp), ("cp", sizes.cp), ("pp", sizes.pp)) if n > 1)
        message = f"{role}: {sizes.world_size} GPUs are no multiple of one model copy ({product} = {sizes.replica})"
        fits = sizes.world_size // sizes.replica * sizes.replica
        first = self._ranges[role][0]
        fixes = (Fix("a range that fits", f"{role}: {first}-{first + fits - 1}"),) if fits else ()
        rule = "a component's accelerators are a multiple of tp x cp x pp"
        findings.append(Finding("P304", message, placement.place(), (placement.mark(),), self._context, rule, fixes))

    # Modes ---------------------------------------------------------------------------------

    def _find_mode(self, findings: list[Finding]) -> PlacementMode | None:
        wanted = self.job.placement_mode
        actor, rollout = self._sets["actor"], self._sets["rollout"]
        if actor == rollout and wanted in ("", "collocated"):
            self._check_collocated(findings)
            return PlacementMode.COLLOCATED
        clash = self._clash()
        if clash is None and wanted in ("", "disaggregated", "auto"):
            self._check_inference(findings)
            if wanted != "auto":
                return PlacementMode.DISAGGREGATED
            self._check_auto(findings)
            return PlacementMode.AUTO
        findings.append(self._no_mode(clash, wanted))
        return None

    def _clash(self) -> tuple[str, str] | None:
        """Return two roles that share an accelerator; ``None`` if no two do."""
        roles = [role for role in _DISJOINT_ROLES if role in self._sets]
        pairs = ((a, b) for i, a in enumerate(roles) for b in roles[i + 1 :])
        return next(((a, b) for a, b in pairs if _overlap(self._sets[a], self._sets[b])), None)

    def _no_mode(self, clash: tuple[str, str] | None, wanted: str) -> Finding:
        first, second = clash or ("actor", "rollout")
        texts = [f"{role} on {self._set_text(role)}" for role in dict.fromkeys(("actor", "rollout", first, second))]
        asked = f"placement_mode is {wanted}, and the job is not" if wanted else "neither collocated nor disaggregated"
        actor_text = self._specs[self._by_role["actor"]].placement.text
        name = self._by_role["rollout"]
        fixes = [Fix("collocated: the same accelerators", f"{name}: {actor_text}")]
        free = self.topology.num_accelerators - self._sizes["actor"].world_size
        if free > 0:
            start = self._ranges["actor"][-1] + 1
            fixes.append(Fix("disaggregated: others", f"{name}: {start}-{self.topology.num_accelerators - 1}"))
        fixes.append(Fix("any sets", "HybridComponentPlacement, or placement_mode: hybrid"))
        placement = self._specs[self._by_role[second]].placement
        return Finding(
            "P303",
            f"{asked}: {'; '.join(texts)}",
            placement.place(),
            (placement.mark(),),
            self._context,
            "collocated: actor and rollout on the same accelerators; disaggregated: no accelerator in common",
            tuple(fixes),
        )

    def _check_collocated(self, findings: list[Finding]) -> None:
        for role in ("inference", "critic", "critic_inference"):
            if role not in self._sets:
                continue
            if role == "critic" and self._sets[role] == self._sets["actor"]:
                continue
            placement = self._specs[self._by_role[role]].placement
            message = (
                f"{role} ({self._set_text(role)}) cannot be beside a collocated actor and rollout "
                f"({self._set_text('actor')})"
            )
            rule = "collocated: the actor recomputes by itself, and a critic shares all its accelerators"
            fixes = (Fix(f"remove {role}, or give actor, rollout and {role} accelerators of their own"),)
            marks = (placement.mark(),)
            findings.append(Finding("P303", message, placement.place(), marks, self._context, rule, fixes))
        actor_tp, rollout_tp = self._sizes["actor"].tp, self._sizes["rollout"].tp
        if self._sizes["rollout"].pp > 1:
            placement = self._specs[self._by_role["rollout"]].placement
            message = (
                f"collocated engines have no pipeline stages, and pipeline_parallel_size is {self._sizes['rollout'].pp}"
            )
            fixes = (Fix("more tensor parallelism instead", "pipeline_parallel_size: 1"),)
            findings.append(Finding("P307", message, placement.place(), (placement.mark(),), fixes=fixes))
        if actor_tp > rollout_tp and actor_tp % rollout_tp:
            spec = self._specs[self._by_role["rollout"]]
            tree = self.job.sizes_of(spec.name, spec.role).engine_tensor_tree or spec.placement
            fits = [str(n) for n in range(1, actor_tp + 1) if actor_tp % n == 0]
            message = f"rollout tp {rollout_tp} does not divide actor tp {actor_tp}"
            rule = "collocated: shards of the actor map onto shards of the rollout"
            fixes = (Fix("sizes that divide", "tensor_parallel_size: " + " | ".join(fits)),)
            findings.append(Finding("P307", message, tree.place(), (tree.mark(),), rule=rule, fixes=fixes))

    def _check_inference(self, findings: list[Finding]) -> None:
        if "inference" not in self._sets:
            return
        findings += self.job.algorithm.problems
        if self.job.algorithm.recompute_logprobs:
            return
        placement = self._specs[self._by_role["inference"]].placement
        findings.append(
            Finding(
                "P305",
                "inference is placed, but algorithm.recompute_logprobs is not true: it would have nothing to do",
                placement.place(),
                (placement.mark(),),
                rule="dedicated inference recomputes log-probabilities",
                fixes=(
                    Fix("switch it on", "algorithm: {recompute_logprobs: true}"),
                    Fix("or remove inference, and give its accelerators to others"),
                ),
            )
        )

    def _check_auto(self, findings: list[Finding]) -> None:
        starts = [0, *accumulate(node.num_accelerators for node in self.topology.nodes)]
        expected = 0
        for role in ("actor", "rollout", "inference"):
            if role not in self._sets:
                continue
            masks = self._sets[role]
            count = count_bits(masks)
            first = min(starts[node] + (bits & -bits).bit_length() - 1 for node, bits in masks.items())
            last = max(starts[node] + bits.bit_length() - 1 for node, bits in masks.items())
            if (first, last) != (expected, expected + count - 1):
                self._auto_finding(role, f"{role} must begin at GPU {expected}", expected, findings)
                return
            expected += count
        if expected != self.topology.num_accelerators:
            message = f"GPUs {expected}-{self.topology.num_accelerators - 1} are left over"
            self._auto_finding("rollout", message, self._ranges["rollout"][0], findings)

    def _auto_finding(self, role: str, message: str, start: int, findings: list[Finding]) -> None:
        placement = self._specs[self._by_role[role]].placement
        rule = "auto: actor, then rollout, then inference, over all accelerators of the cluster"
        fix = Fix("for example", f"{role}: {start}-{self.topology.num_accelerators - 1}")
        marks = (placement.mark(),)
        findings.append(Finding("P306", f"auto: {message}", placement.place(), marks, self._context, rule, (fix,)))

    # Strategies ----------------------------------------------------------------------------

    def _place_component(self, name: str, mode: PlacementMode, findings: list[Finding]) -> None:
        spec = self._specs[name]
        role = spec.role
        if role not in self._sets or role == "reward":
            self._strategies[name] = self._general_strategy(name)
            return
        per_process = stride = 1
        ranks, labels = self._ranges[role], spec.labels
        if role == "rollout":
            sizes = self._sizes[role]
            per_process = sizes.replica
            if mode is PlacementMode.COLLOCATED and self._sizes["actor"].tp > sizes.tp:
                stride = self._sizes["actor"].tp // sizes.tp
        elif role == "actor" and mode is PlacementMode.AUTO:
            ranks, labels = range(self.topology.num_accelerators), ()
        try:
            strategy = PackedPlacementStrategy(ranks[0], ranks[-1], per_process, stride, list(labels) or None)
            resources = Resources(self.topology, labels)
            strategy._remembering(resources)
            for _ in strategy._runs(resources):
                pass  # no process spans nodes
        except PlacementError as error:
            at = spec.placement
            for finding in error.findings:
                message = f"{name}: {finding.message}"
                findings.append(replace(finding, message=message, place=at.place(), marks=(at.mark(),)))
            return
        self._strategies[name] = strategy
        self._processes[name] = len(ranks) // per_process
        self._check_processes(name, mode, findings)

    def _check_processes(self, name: str, mode: PlacementMode, findings: list[Finding]) -> None:
        """Check process ranks in the job file against the number of processes that the parallel sizes give."""
        segments, count = self._segments[name], self._processes[name]
        written = segments[-1].processes[-1] + 1
        role = self._specs[name].role
        if not any(segment.explicit for segment in segments) or written == count:
            return
        if role == "actor" and mode is PlacementMode.AUTO:
            return
        placement = self._specs[name].placement
        ranks = self._ranges[role]
        findings.append(
            Finding(
                "P308",
                f"{name}: {written} processes are asked for, and its parallel sizes make {count}",
                placement.place(segments[-1].process_offset),
                (placement.mark(segments[-1].process_offset, segments[-1].process_length),),
                rule="one process per GPU; for the rollout, one per tp x pp GPUs",
                fixes=(Fix("leave it to the sizes", f"{name}: {ranks[0]}-{ranks[-1]}"),),
            )
        )

    # Words ---------------------------------------------------------------------------------

    @property
    def _context(self) -> tuple[str, ...]:
        return (f"cluster: {self.topology.describe()}",)

    def _ranks_text(self, name: str) -> str:
        return format_ranks(self.get_hardware_ranks(name))

    def _set_text(self, role: str) -> str:
        name = self._by_role[role]
        labels = self._specs[name].labels
        return self._ranks_text(name) + (f" of {', '.join(labels)}" if labels else "")


def _overlap(one: Masks, other: Masks) -> bool:
    return any(bits & other.get(node, 0) for node, bits in one.items())

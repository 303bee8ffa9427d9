"""The map and the tables of a plan, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from roost.errors import counted
from roost.plan import ComponentPlan, Plan
from roost.plan.plan import ENGINE
from roost.report.columns import align
from roost.report.letters import COLOURS, component_letters
from roost.report.rows import NodeRow, ProcessRow, fold, node_rows, process_rows

__all__ = ["draw_map", "draw_plan", "summary"]

_GRID_COLUMNS = 16
_IDLE = "·"


def summary(plan: Plan) -> str:
    """Return one line with the mode, the nodes, the used accelerators and the number of processes."""
    total = plan.topology.num_accelerators
    used = total - len(plan.idle_accelerators)
    processes = sum(component.world_size for component in plan.components if not component.placeholder)
    gpus = f"{used:,} of {counted(total, plan.topology.noun)} used" if total else "no GPUs"
    return f"{plan.mode.value}: {plan.topology.describe()}, {gpus}, {counted(processes, 'process')}"


def draw_map(plan: Plan) -> Text:
    """Return the summary, the map and the legend."""
    painter = _Painter(plan)
    return Text("\n\n").join([Text(summary(plan), style="bold"), painter.map(), painter.legend()])


def draw_plan(plan: Plan) -> Text:
    """Return what ``roost plan`` shows of a plan, without the findings."""
    painter = _Painter(plan)
    return Text("\n\n").join([draw_map(plan), *(painter.table(component) for component in plan.components)])


class _Columns:
    """The columns of a map."""

    def __init__(self, rows: Sequence[NodeRow]) -> None:
        self.widest = max(len(row.crowds) for row in rows)
        self.is_grid = self.widest <= _GRID_COLUMNS
        self.has_names = any(row.name for row in rows)
        self.has_models = any(row.model for row in rows)
        self.has_bare_processes = any(row.on_node for row in rows)

    def header(self) -> list[Text]:
        cells = ["node"]
        cells += ["name"] * self.has_names + ["GPU"] * self.has_models
        cells += [str(i) for i in range(self.widest)] if self.is_grid else ["accelerators"]
        cells.append("on the node" if self.has_bare_processes else "")
        return [Text(cell) for cell in cells]


class _Painter:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.letters = component_letters([component.name for component in plan.components])
        self.colours = {
            component.name: COLOURS[index % len(COLOURS)] for index, component in enumerate(plan.components)
        }

    # The map -------------------------------------------------------------------------------

    def map(self) -> Text:
        rows = node_rows(self.plan)
        columns = _Columns(rows)
        lines = [columns.header()]
        head, middle, tail = fold(rows, 20, 3)
        lines += [self._map_row(row, columns) for row in head]
        if middle:
            left_out = sum(len(row.ranks) for row in middle)
            lines.append([Text(f"… {left_out:,} more nodes", style="dim")])
            lines += [self._map_row(row, columns) for row in tail]
        return align(lines, rule=True)

    def _map_row(self, row: NodeRow, columns: _Columns) -> list[Text]:
        many = len(row.ranks) > 1
        cells = [Text(f"{row.ranks[0]}-{row.ranks[-1]}" if many else f"{row.ranks[0]}")]
        if columns.has_names:
            cells.append(Text(f"{row.name} …" if many and row.name else row.name))
        if columns.has_models:
            cells.append(Text(row.model))
        if columns.is_grid:
            cells += [self._crowd(crowd) for crowd in row.crowds]
            cells += [Text()] * (columns.widest - len(row.crowds))
        elif columns.widest:
            cells.append(self._runs(row.crowds))
        cells.append(self._on_node(row.on_node))
        return cells

    def _crowd(self, crowd: int) -> Text:
        if not crowd:
            return Text(_IDLE, style="dim")
        text = Text()
        for index, count in self.plan.occupancy.members(crowd).items():
            text.append(self._letter(self.plan.components[index]))
            if count > 1:
                text.append(str(count))
        return text

    def _runs(self, crowds: tuple[int, ...]) -> Text:
        """Return such as ``0-31 A  32-63 R``, for a node with more accelerators than a terminal has columns."""
        text = Text()
        first = 0
        for index in range(1, len(crowds) + 1):
            if index < len(crowds) and crowds[index] == crowds[first]:
                continue
            text.append(f"{first}-{index - 1} " if index - first > 1 else f"{first} ", style="dim")
            text.append_text(self._crowd(crowds[first])).append("  ")
            first = index
        text.rstrip()
        return text

    def _on_node(self, counts: Sequence[tuple[int, int]]) -> Text:
        text = Text()
        for index, count in counts:
            text.append_text(self._letter(self.plan.components[index]))
            text.append(f" x{count}  " if count > 1 else "  ")
        text.rstrip()
        return text

    def _letter(self, component: ComponentPlan) -> Text:
        return Text(self.letters[component.name], style=f"bold {self.colours[component.name]}")

    def legend(self) -> Text:
        text = Text()
        for component in self.plan.components:
            what = " (reserved)" if component.placeholder else ""
            text.append_text(self._letter(component)).append(f" {component.name}{what}   ")
        if self.plan.idle_accelerators:
            text.append(_IDLE, style="dim").append(" idle")
        text.rstrip()
        return text

    # The tables ----------------------------------------------------------------------------

    def table(self, component: ComponentPlan) -> Text:
        title = self._letter(component)
        title.append(f" {component.name}", style="bold")
        for fact in self._facts(component):
            title.append(f", {fact}")
        lines: list[list[Text | str]] = [["  rank", "node", self._resource_heading(component), "local rank"]]
        if component.gpu_share is not None:
            lines[0].append("share")
        if component.transports:
            lines[0].append("weights by")
        head, middle, tail = fold(process_rows(component, self.plan.transport_texts(component.name)), 16, 2)
        lines += [self._process_row(component, row) for row in head]
        if middle:
            left_out = sum(row.processes for row in middle)
            lines.append([Text(f"  … {left_out:,} more processes", style="dim")])
            lines += [self._process_row(component, row) for row in tail]
        return title.append("\n").append_text(align(lines))

    @staticmethod
    def _process_row(component: ComponentPlan, row: ProcessRow) -> list[Text | str]:
        cells: list[Text | str] = [f"  {row.ranks}", row.nodes, row.resources, row.local_ranks]
        if component.gpu_share is not None:
            cells.append(f"{component.gpu_share:g}")
        if component.transports:
            cells.append(row.transport)
        return cells

    @staticmethod
    def _resource_heading(component: ComponentPlan) -> str:
        first = component.placements[0]
        if first.local_accelerator_rank >= 0:
            return first.accelerator_type.noun
        return "hardware" if first.local_hardware_ranks else "GPU"

    @staticmethod
    def _facts(component: ComponentPlan) -> list[str]:
        facts = _count_facts(component)
        if component.role != component.name:
            facts.append(f"role {component.role}")
        if component.node_groups:
            facts.append("in " + " + ".join(component.node_groups))
        if component.cpus is not None:
            facts.append(f"{component.cpus:g} CPUs each")
        if component.memory_gib is not None:
            facts.append(f"{component.memory_gib:g} GiB each")
        return facts


def _count_facts(component: ComponentPlan) -> list[str]:
    """Return the number of processes, or of engines with their size, or of reserved accelerators."""
    first = component.placements[0]
    if component.placeholder:
        gpus = sum(len(placement.accelerators) for placement in component.placements)
        return [f"{counted(gpus, first.accelerator_type.noun)} reserved, nothing is started"]
    if component.role != ENGINE or first.local_accelerator_rank < 0:
        return [counted(component.world_size, "process")]
    members = component.processes_per_engine
    size = counted(len(first.accelerators) * members, first.accelerator_type.noun)
    facts = [f"{counted(len(component.engines), 'engine')} of {size}"]
    if members > 1:
        facts.append(f"{members} nodes each")
    if component.gpu_share is not None and component.gpu_share < 1:
        facts.append(f"{component.gpu_share:g} of each {first.accelerator_type.noun}")
    return facts

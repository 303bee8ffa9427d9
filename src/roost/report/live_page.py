"""Running jobs as one HTML page, without scripts and without access to the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from roost.errors import counted
from roost.plan.states import STATES, AcceleratorStatus, JobStatus, NodeStatus
from roost.report.letters import component_letters
from roost.report.live_parts import (
    MARKS,
    Member,
    accelerators_of,
    all_ranks,
    crowds,
    doing,
    headline,
    last_errors,
    one_line,
    tally,
    usage_text,
    worst_first,
)
from roost.report.palette import paint_of

__all__ = ["draw_status_page"]

MAX_ERRORS = 50
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--line:#d5dae1;--dim:#667080;--dead:#d1242f;
--silent:#8250df;--starting:#0969da;--busy:#bf6a02;--ready:#1a7f37}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--paper:#14171b;--line:#363c45;--dim:#98a2b0;--dead:#ff7b72;
--silent:#bc8cff;--starting:#79c0ff;--busy:#e3a34a;--ready:#56d364}}
body{font:14px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:1.5rem}
h1{font-size:1.25rem}h2{font-size:1rem;margin-top:1.6rem}p.dim,.dim{color:var(--dim)}
table{border-collapse:collapse;display:block;overflow-x:auto}
th{text-align:left;font-weight:500;color:var(--dim)}
th,td{padding:.2rem .6rem;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
td.what{white-space:normal;min-width:18rem}
.map td{border:1px solid var(--line);padding:.25rem .4rem;min-width:2.6rem;text-align:center}
.map td:first-child,.map td:nth-child(2){border:0;text-align:left}
.chip{display:inline-block;min-width:1.1em;padding:0 .3em;border-radius:3px;font-weight:600;
border-bottom:4px solid transparent}
.bar{display:block;height:5px;margin-top:3px;background:var(--line)}.bar i{display:block;height:5px;background:var(--dim)}
.bar.full i{background:var(--dead)}
""" + "".join(f".{s}{{color:var(--{s})}}.chip.{s}{{border-color:var(--{s})}}\n" for s in STATES)


def draw_status_page(jobs: Sequence[JobStatus], refresh_s: float | None = None) -> str:
    """Return the page. With ``refresh_s`` the browser reloads it after that many seconds, at least 1."""
    again = f'<meta http-equiv="refresh" content="{max(1, round(refresh_s))}">' if refresh_s is not None else ""
    body = "".join(_Page(job).html() for job in jobs) or "<h1>no Roost job runs on this Ray</h1>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{again}'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>roost status</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _text(value: object) -> str:
    return escape(one_line(value))


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return "<tr>" + "".join(cell if cell.startswith("<t") else f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


class _Page:
    def __init__(self, job: JobStatus) -> None:
        self.job = job
        names = [group.name for group in job.groups]
        self.letters = component_letters(names)
        self.paints = {name: paint_of(index) for index, name in enumerate(names)}

    def html(self) -> str:
        counts = dict.fromkeys(STATES, 0)
        for _, rank in all_ranks(self.job):
            counts[rank.state] = counts.get(rank.state, 0) + 1
        total = sum(counts.values())
        present = {state: count for state, count in counts.items() if count}
        parts = [f"<h1>{_text(headline(self.job))}</h1><p>{counted(total, 'rank')}: {tally(present)}</p>"]
        if self.job.groups:
            parts += [self._map(), self._groups(), self._ranks()]
        errors = last_errors(self.job, MAX_ERRORS)
        if errors:
            parts.append("<h2>Last errors</h2><ul>" + "".join(f"<li>{escape(line)}</li>" for line in errors) + "</ul>")
        return f"<main>{''.join(parts)}</main>"

    def _chip(self, member: Member) -> str:
        count = str(member.count) if member.count > 1 else ""
        ranks = ",".join(map(str, member.ranks[:20])) + ("…" if len(member.ranks) > 20 else "")
        label = _text(f"{member.group}[{ranks}]" + (f": {member.state}" if member.state else ""))
        fill, ink = self.paints[member.group]
        return (
            f'<span class="chip {_text(member.state)}" style="background:{fill};color:{ink}" '
            f'title="{label}" aria-label="{label}" role="img">{_text(self.letters[member.group])}{count}{MARKS.get(member.state, "")}</span>'
        )

    def _map(self) -> str:
        found = crowds(self.job)
        widest = max((len(cells) for cells, _ in found.values()), default=0)
        rows = [_row(["node", "", *map(str, range(widest)), "on the node"], "th")]
        for node in self.job.nodes:
            cells, bare = found[node.rank]
            drawn = [self._cell(members, node, index) for index, members in enumerate(cells)]
            drawn += [""] * (widest - len(cells))
            name = _text(f"{node.name} {node.model}".strip() or node.address)
            rows.append(_row([str(node.rank), name, *drawn, "".join(map(self._chip, bare))]))
        return f'<h2>Map</h2><table class="map">{"".join(rows)}</table>'

    def _cell(self, members: Sequence[Member], node: NodeStatus, index: int) -> str:
        chips = "".join(map(self._chip, members)) or '<span class="dim" title="idle">·</span>'
        known = index < len(node.accelerators)
        accelerator = node.accelerators[index] if known else AcceleratorStatus()
        return f'<td title="node {node.rank}, {index}: {usage_text(accelerator)}">{chips}{_bar(accelerator)}</td>'

    def _groups(self) -> str:
        states = [f'<span class="{state}">{state}{MARKS[state]}</span>' for state in STATES]
        rows = [_row(["group", "class", "ranks", *states, "calls", "errors"], "th")]
        for group in self.job.groups:
            counts = group.counts()
            chip = self._chip(Member(group.name, "", 1, tuple(rank.rank for rank in group.workers)))
            cells = [f"{chip} {_text(group.name)}", _text(group.kind), f"{len(group.workers):,}"]
            cells += [f'<span class="{s}">{counts[s]:,}</span>' if counts.get(s) else "-" for s in STATES]
            cells += [f"{sum(getattr(rank, what) for rank in group.workers):,}" for what in ("calls", "errors")]
            rows.append(_row(cells))
        return f"<h2>Groups</h2><table>{''.join(rows)}</table>"

    def _ranks(self) -> str:
        heading = ["rank", "node", "state", "note", "accelerators", "memory and use", "process", "address"]
        nodes = {node.rank: node for node in self.job.nodes}
        rows = [_row(heading, "th")]
        for name, rank in worst_first(self.job):
            node = nodes.get(rank.node_rank)
            own = [node.accelerators[i] for i in rank.accelerators if node and i < len(node.accelerators)]
            use = "<br>".join(usage_text(accelerator) for accelerator in own) or "-"
            state = f'<td class="what {_text(rank.state)}">{escape(doing(rank))}</td>'
            where = [accelerators_of(rank), use, str(rank.pid or "-"), _text(rank.address)]
            rows.append(_row([_text(f"{name}[{rank.rank}]"), str(rank.node_rank), state, _text(rank.note), *where]))
        return f"<h2>Ranks</h2><table>{''.join(rows)}</table>"


def _bar(accelerator: AcceleratorStatus) -> str:
    if accelerator.used_gib is None or not accelerator.memory_gib:
        return ""
    share = min(1.0, accelerator.used_gib / accelerator.memory_gib)
    return f'<span class="bar{" full" if share > 0.95 else ""}"><i style="width:{share:.0%}"></i></span>'

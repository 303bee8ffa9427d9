"""``python -m benchmarks [--largest N]``: measures, and prints tables. It never fails on times."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence

import ray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import launching, learning, measure, page, routing, startup, transfer, watching, weights
from benchmarks.cases import CASES, Case, floor

LARGEST = 131_072
WIDTH = 124
"""Columns that the table needs, also where its output goes into a file."""


def main() -> None:
    arguments = _arguments()
    if arguments.child:
        name, accelerators = arguments.child
        measure.run_once_and_print_peak(name, int(accelerators))
        return
    console = Console(width=max(WIDTH, Console().width))
    progress = Console(stderr=True)
    if arguments.only in (None, "placement"):
        _placement(console, progress, arguments.largest)
    if arguments.only in (None, "launching"):
        with progress.status("launching"):
            rows = [*launching.measure_launching(), *watching.measure_watching()]
        caption = (
            f"best of {launching.REPEATS} in turn (calls: median of 400); Ray {ray.__version__}, made-up accelerators"
        )
        console.print(_comparison_table(rows, "Beside plain Ray", "plain Ray", caption))
    if arguments.only in (None, "learning"):
        with progress.status("learning"):
            rows = learning.measure_learning()
            phases = learning.measure_phases()
        caption = (
            f"buffer: best of {learning.REPEATS}, {learning.SAMPLES} samples of {learning.TOKENS} tokens per group, "
            f"beside a deque · weights: best of {weights.REPEATS}, two processes, {weights.TENSORS} tensors · "
            f"router: {routing.REQUESTS} requests in turn, beside the engine hit directly"
        )
        console.print(_comparison_table(rows, "Learning", "floor", caption))
        console.print(_phase_table(phases))


def _placement(console: Console, progress: Console, largest: int) -> None:
    table = _scaling_table()
    for name in track(CASES, "measuring", console=progress, transient=True):
        _measure_case(table, name, measure.sizes_up_to(largest))
    console.print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    console.print(table)
    console.print(_transfer_table(transfer.measure_transfer()))
    console.print(_startup_table(startup.measure_startup()))
    console.print(_comparison_table(page.measure_page(), "Page", "planning it", "best of several runs each"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--largest", type=_size, default=LARGEST, metavar="N", help="most accelerators (%(default)s)")
    parser.add_argument("--only", choices=("placement", "launching", "learning"), help="one part")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def _size(text: str) -> int:
    number = int(text)
    if number < 8 or number % 8:
        raise argparse.ArgumentTypeError("a multiple of 8, from 8 up")
    return number


def _comparison_table(rows: Sequence[launching.Row], title: str, baseline: str, caption: str) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("what", no_wrap=True)
    for column in ("Roost", baseline, "ratio"):
        table.add_column(column, justify="right")
    table.add_column("expected")
    for row in rows:
        mark = "✓" if row.is_met else "✗"
        ours, plain = (f"{s:.2f} s" if s >= 0.1 else f"{s * 1e3:.2f} ms" for s in (row.roost_s, row.plain_s))
        table.add_row(row.name, ours, plain, f"{row.ratio:.2f}", f"{mark} {row.expected}")
    return table


def _phase_table(phases: dict[str, dict[str, float]]) -> Table:
    caption = f"ms per step, mean of {learning.STEPS} steps of examples/grpo; start: seconds until the first step"
    table = Table(title="A step of GRPO", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("mode")
    names = list(dict.fromkeys(name for found in phases.values() for name in found))
    for name in names:
        table.add_column(name, justify="right")
    for mode, found in phases.items():
        table.add_row(mode, *(f"{found[name]:,.1f}" if name in found else "" for name in names))
    return table


def _scaling_table() -> Table:
    caption = (
        "time: best of several runs, machines described beforehand · growth: slope of log time over log size, "
        "fitted to the three largest sizes · floor: a bare loop that builds as many 11-tuples of the same numbers, in this run, collector on · "
        "peak: resident memory of a process of its own that runs the case once, interpreter and all"
    )
    table = Table(title="Placement", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("accelerators", "processes", "time", "growth", "× floor", "peak"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("expected", no_wrap=True)
    return table


def _measure_case(table: Table, name: str, sizes: Sequence[int]) -> None:
    case = CASES[name]
    times: list[float] = []
    for accelerators in sizes:
        times.append(measure.best_time_s(case.prepare(accelerators)))
        processes = case.processes(accelerators)
        ratio = times[-1] / measure.best_time_s(floor(processes))
        mib = measure.peak_mib_in_child(name, accelerators)
        is_last = accelerators == sizes[-1]
        exponent = measure.growth_exponent(sizes, times) if is_last else None
        table.add_row(
            case.name if accelerators == sizes[0] else "",
            f"{accelerators:,}",
            f"{processes:,}",
            _duration(times[-1]),
            "" if exponent is None else f"{exponent:.2f}",
            f"{ratio:.1f}",
            f"{mib:,.0f} MiB",
            _verdicts(case, accelerators, times[-1], exponent, ratio, mib) if is_last else "",
            end_section=is_last,
        )


def _verdicts(case: Case, accelerators: int, seconds: float, exponent: float | None, ratio: float, mib: float) -> str:
    """Every expectation of a case and whether it held; what is said of small jobs needs a large one."""
    verdicts = []
    if exponent is not None and case.max_growth is not None:
        verdicts.append(_verdict(f"growth ≤ {case.max_growth:g}", exponent <= case.max_growth))
    if case.max_ratio is not None and accelerators >= 4096:
        verdicts.append(_verdict(f"≤ {case.max_ratio:g} × floor", ratio <= case.max_ratio))
    if case.max_seconds is not None:
        verdicts.append(_verdict(f"≤ {case.max_seconds:g} s", seconds <= case.max_seconds))
    if case.max_gib is not None:
        verdicts.append(_verdict(f"≤ {case.max_gib:g} GiB", mib <= case.max_gib * 1024))
    return "\n".join(verdicts)


def _verdict(text: str, holds: bool) -> str:
    return f"[green]✓[/] {text}" if holds else f"[bold red]✗[/] {text}"


def _duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def _transfer_table(row: transfer.Row) -> Table:
    caption = (
        "time: best of several runs · one rank: everything that one rank gets, spelled out · pieces and routes: what "
        "the plan holds · parts: what goes between two ranks, all told"
    )
    table = Table(title="Weight transfer", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("time", "one rank", "pieces", "routes", "parts"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("expected", no_wrap=True)
    counts = (f"{count:,}" for count in (row.pieces, row.routes, row.moves))
    verdict = _verdict(f"< {transfer.MAX_S:g} s", row.is_met)
    table.add_row(row.name, _duration(row.plan_s), _duration(row.rank_s), *counts, verdict)
    return table


def _startup_table(found: startup.Startup) -> Table:
    caption = f"median of {startup.RUNS} runs each, in turn; {startup.EXAMPLE} on 2x8"
    table = Table(title="Command line", caption=caption, title_justify="left", caption_justify="left")
    table.add_column("command")
    for column in ("time", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("expected", no_wrap=True)
    if found.problem:
        table.add_row(found.problem, "–", "–", "not measured")
        return table
    ratio = found.plan_s / found.imports_s
    table.add_row('python -c "import yaml, rich"', _duration(found.imports_s), "1.0", "")
    verdict = _verdict(f"≤ {startup.MAX_RATIO:g} ×", ratio <= startup.MAX_RATIO)
    table.add_row("python -m roost plan", _duration(found.plan_s), f"{ratio:.1f}", verdict)
    return table


if __name__ == "__main__":  # processes that are spawned load this module again
    main()

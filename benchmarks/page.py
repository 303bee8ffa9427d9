"""What the page of a plan costs, beside making the plan."""

from __future__ import annotations

import tempfile
from pathlib import Path

import roost
from benchmarks.cases import full_job, topology_of
from benchmarks.launching import Row
from benchmarks.measure import best_time_s
from roost.report.page import draw_page

ACCELERATORS = 8192
MAX_RATIO = 3.0


def measure_page() -> list[Row]:
    """The page of a whole job on 8,192 accelerators, drawn and written, against ``Plan.resolve`` and ``check``."""
    topology, job = topology_of(ACCELERATORS), full_job(ACCELERATORS)

    def plan() -> object:
        made = roost.Plan.resolve(job, topology)
        return made, made.check()

    made = roost.Plan.resolve(job, topology)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.html"

        def page() -> object:
            return path.write_text(draw_page(made, "job.yaml", made.check()), encoding="utf-8")

        page_s, plan_s = best_time_s(page), best_time_s(plan)
        kilobytes = path.stat().st_size / 1000
    name = f"page of {ACCELERATORS:,} accelerators ({kilobytes:,.0f} kB)"
    return [Row(name, page_s, plan_s, f"≤ {MAX_RATIO:g} ×", page_s <= MAX_RATIO * plan_s)]

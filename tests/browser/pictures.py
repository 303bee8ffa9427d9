"""Takes the pictures of the page that the docs show: ``make pictures``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from driving import Opened, start_browser

import roost
from roost.report.page import draw_page

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
CARDS = {"nodes": [{"cpus": 96, "accelerators": {"count": 8, "model": "A100", "memory_gib": 80}}]}


def large_job() -> dict[str, object]:
    components = {
        "actor": {"placement": "0-4095", "gpu_share": 0.6},
        "inference": {"placement": "0-2047", "gpu_share": 0.4},
        "rollout": "4096-7999:0-487",
    }
    return {"cluster": {"component_placement": components}, "rollout": {"tensor_parallel_size": 8}}


def take(page: Opened, name: str) -> None:
    page.screenshot(PICTURES / f"{name}.png")


def main() -> None:
    driver = start_browser(1280, 860)
    try:
        with tempfile.TemporaryDirectory() as folder:
            take_all(driver, Path(folder))
    finally:
        driver.quit()


def take_all(driver: Any, folder: Path) -> None:
    def opened(name: str, job: object, machines: roost.Topology) -> Opened:
        plan = roost.Plan.resolve(job, machines)
        path = folder / f"{name}.html"
        path.write_text(draw_page(plan, name), encoding="utf-8")
        page = Opened(driver, plan, path)
        page.load()
        return page

    os.chdir(ROOT)  # problems name their files as they were named here
    examples = Path("examples")
    job = roost.load_config(examples / "collocated.yaml")
    page = opened("collocated.yaml", job, roost.Topology.parse("2x8:H200"))
    page.one("#show-weights").click()
    page.search("rollout[3]")
    take(page, "page")
    job = roost.load_config(examples / "disaggregated.yaml")
    page = opened("disaggregated.yaml", job, roost.Topology.parse("3x8:H100"))
    for selector in ("#theme", "#theme", "#show-groups", "#show-weights"):
        page.one(selector).click()
    take(page, "page-dark")
    page.run("localStorage.clear()")
    job = roost.load_config(examples / "hybrid.yaml")
    page = opened("hybrid.yaml", job, roost.Topology.from_dict(CARDS))
    take(page, "page-problems")
    take(opened("large.yaml", large_job(), roost.Topology.parse("1024x8:H200")), "page-large")


if __name__ == "__main__":
    main()

"""A real browser: Debian's chromium, without a window. Without one, the tests say what they need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Opened, start_browser

import roost
from roost.report.page import draw_page

NEEDS = "needs chromium and chromedriver: apt-get install chromium chromium-driver"


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip(NEEDS)
    driver = start_browser()
    yield driver
    driver.quit()


@pytest.fixture
def open_page(chromium: Any, tmp_path: Path):
    """``open_page(job, "2x8")`` → the page of that plan, open in the browser."""

    def open_it(job: Any, machines: Any, title: str = "job.yaml") -> Opened:
        topology = roost.Topology.parse(machines) if isinstance(machines, str) else machines
        plan = roost.Plan.resolve(job, topology)
        path = tmp_path / "plan.html"
        path.write_text(draw_page(plan, title), encoding="utf-8")
        page = Opened(chromium, plan, path)
        page.load()
        return page

    yield open_it
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    chromium.get("about:blank")

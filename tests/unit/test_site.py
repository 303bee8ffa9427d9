"""The documentation builds as a site without warnings, and its reference is complete and current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import roost

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "docs"))

from generated import DOCS, pages  # noqa: E402

UPDATE = os.environ.get("UPDATE_SNAPSHOTS") == "1"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_generated_pages_are_current(page: Path) -> None:
    if UPDATE:
        page.write_text(pages()[page], encoding="utf-8")
    assert page.read_text(encoding="utf-8") == pages()[page], "make snapshots writes it anew"


def test_each_public_name_has_one_reference_entry() -> None:
    entries = [
        name
        for page in sorted((DOCS / "reference" / "api").glob("*.md"))
        for name in re.findall(r"^::: roost\.(\w+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(entries) == sorted(set(roost.__all__) - {"__version__"})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_builds_and_can_be_searched(site: Path) -> None:
    assert (site / "index.html").exists()
    assert "roost.Plan.resolve" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = set()
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded |= set(re.findall(r'<(?:script|img|iframe|source)[^>]* src="?((?:https?:)?//[^" >]+)', html))
        links = re.findall(r"<link[^>]*>", html)
        loaded |= {link for link in links if re.search(r'href="?(?:https?:)?//', link) and "canonical" not in link}
    assert loaded == set()

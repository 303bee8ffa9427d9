"""A plan as one page that opens from disk: no network, no server, nothing beside it."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from roost.errors import Finding
from roost.plan import Plan
from roost.report.page_data import finding_rows, page_data
from roost.report.terminal import summary

__all__ = ["draw_page"]

_SCRIPTS = ("data.js", "details.js", "map.js", "overview.js", "links.js", "search.js", "main.js")
"""In this order they make one script."""

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def draw_page(plan: Plan, title: str = "", findings: Sequence[Finding] | None = None) -> str:
    """The page of a plan: a map to point at, search and print, with everything that is known of each process.

    Equal plans give the same bytes. Names and labels are text wherever they stand, whatever is in them.

    Args:
        plan: The plan.
        title: What the page is called, such as the name of the job file.
        findings: What :meth:`Plan.check` has found, where that is known already.
    """
    rows = finding_rows(plan, plan.check() if findings is None else findings)
    data = page_data(plan)
    data["findings"] = [[row["is_problem"], row["cells"]] for row in rows]
    script = _script()
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _template().render(
        title=title or "plan",
        summary=summary(plan),
        findings=rows,
        problems=sum(row["is_problem"] for row in rows),
        style=_read("style.css"),
        script=script,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:",
        data=embed(data),
    )
    return page.encode("utf-8", "replace").decode("utf-8")  # a label may hold half a character


def embed(data: Any) -> str:
    """JSON that may stand inside a script element, whatever texts are in it: plain ASCII without <, > and &."""
    text = json.dumps(data, separators=(",", ":"))
    for sign, escape in _ESCAPES.items():
        text = text.replace(sign, escape)
    return text


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("roost.report", "page"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html.j2")


def _read(name: str) -> str:
    return (files("roost.report") / "page" / name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    parts = "\n".join(_read(name) for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'

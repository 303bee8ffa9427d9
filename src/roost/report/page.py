"""A plan as one HTML file that opens from disk, without a server and without access to the network."""

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
"""They are joined to one script, in this order."""

_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def draw_page(plan: Plan, title: str = "", findings: Sequence[Finding] | None = None) -> str:
    """Return the page of a plan: an interactive map with search and the details of each process.

    Equal plans give the same bytes. Names and labels are escaped, so that no content of them runs.

    Args:
        plan: The plan.
        title: Title of the page, such as the name of the job file.
        findings: Result of :meth:`Plan.check`; ``None``: the check runs here.
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
    return page.encode("utf-8", "replace").decode("utf-8")  # a label may contain an unpaired surrogate


def embed(data: Any) -> str:
    """Return JSON that is safe inside a script element: plain ASCII without <, > and &."""
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

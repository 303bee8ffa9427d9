"""Every snippet of the README and the docs runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from snippets import PAGES, ROOT, Block, blocks_of, commands_of, matches

UPDATE = os.environ.get("UPDATE_SNAPSHOTS") == "1"
LANGUAGES = {"python", "yaml", "console", "sh", "text", "json"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    namespace: dict[str, object] = {"__name__": "__main__"}
    edits: list[tuple[Block, str]] = []
    for block in blocks_of(page):
        where = f"{page.name}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: a block of language {block.language!r} is run by nobody"
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "sh":
            check_setup_commands(block, where)
        elif block.language == "python":
            run_python(block, where, namespace)
        elif block.language == "console":
            new_text = run_console(block, where, tmp_path)
            if new_text != block.text:
                edits.append((block, new_text))
    if edits:
        source = page.read_text(encoding="utf-8")
        for block, text in reversed(edits):
            source = source[: block.start] + text + source[block.end :]
        page.write_text(source, encoding="utf-8")


def run_python(block: Block, where: str, namespace: dict[str, object]) -> None:
    """Runs a block; comments ``# prints: …`` say what it prints, line by line."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block.text, where, "exec"), namespace)  # noqa: S102
    expected = re.findall(r"# prints: (.*)$", block.text, re.MULTILINE)
    assert printed.getvalue().splitlines() == expected, f"{where} prints something else"


def run_console(block: Block, where: str, folder: Path) -> str:
    env = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", "PYTHONPATH": str(folder)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    text = ""
    for command in commands_of(block):
        done = subprocess.run(
            ["bash", "-c", command.text],
            cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stdout, f"{where}: {done.stdout}"
        if UPDATE and not matches(command.expected, done.stdout):
            printed = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
            text += f"$ {command.text}\n{printed}\n"
            continue
        assert matches(command.expected, done.stdout), f"{where}: $ {command.text}\nprints:\n{done.stdout}"
        text += f"$ {command.text}\n{command.expected}\n" if command.expected else f"$ {command.text}\n"
    return text if UPDATE else block.text


def check_setup_commands(block: Block, where: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in block.text.splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["make"]:
            assert set(words[1:]) <= targets, f"{where}: {line} is no make target"
        elif words:
            assert words[:2] == ["pip", "install"], f"{where}: {line} is run by nobody"


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_error_code_is_documented() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    used = set(re.findall(r'"([BCEKLNPRSTUW]\d{3})"', source))
    used |= {f"C{number}" for number in re.findall(r'(?:complain|_report)\(\s*"(\d{3})"', source)}
    documented = set(
        re.findall(r"^### ([A-Z]\d{3})", (ROOT / "docs" / "reference" / "errors.md").read_text(), re.MULTILINE)
    )
    assert used == documented


def test_example_jobs_are_in_order(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "examples/show.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("collocated", "disaggregated", "hybrid", "heterogeneous"):
        assert f"roost plan examples/{name}.yaml" in done.stdout

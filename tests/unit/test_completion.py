"""Shell completion, asked as a shell asks: by running bash with the script (zsh and fish where they are)."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from roost.cli import build_parser
from roost.cli.shells import script

BASH = shutil.which("bash")
needs_bash = pytest.mark.skipif(BASH is None, reason="there is no bash here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text("")
    (tmp_path / "joblist.txt").write_text("")
    (tmp_path / "bash.sh").write_text(script(build_parser(), "bash"))
    return tmp_path


def complete(folder: Path, line: str) -> list[str]:
    """What bash offers for a line; ``<files>`` where it would go on with files."""
    words = line.split(" ")
    asked = f"""
        source {folder}/bash.sh
        compopt() {{ echo "compopt $*"; }}
        COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
        _roost
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", asked], cwd=folder, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    offered = [word for word in done.stdout.splitlines() if word]
    if any(word.startswith("compopt +o default") for word in offered):
        return [word for word in offered if not word.startswith("compopt")]
    return offered or ["<files>"]


def commands() -> list[str]:
    parser = build_parser()
    return next(list(a.choices) for a in parser._actions if isinstance(a, argparse._SubParsersAction))


@needs_bash
def test_commands(folder: Path) -> None:
    assert complete(folder, "roost ") == commands()
    assert complete(folder, "roost pl") == ["plan"]
    assert {"init", "import", "schema", "completion"} <= set(commands())


@needs_bash
def test_options_of_a_command(folder: Path) -> None:
    offered = complete(folder, "roost plan job.yaml --")
    assert {"--cluster", "--set", "--json", "--help"} <= set(offered)
    assert complete(folder, "roost plan --cl") == ["--cluster"]
    assert "--json" not in complete(folder, "roost validate --")
    assert complete(folder, "roost --ver") == ["--version"]


@needs_bash
def test_files_are_left_to_the_shell(folder: Path) -> None:
    assert complete(folder, "roost plan jo") == ["<files>"]
    assert complete(folder, "roost plan job.yaml --cluster cl") == ["<files>"]
    assert complete(folder, "roost import slime -- --act") == ["<files>"]
    assert complete(folder, "roost doctor x") == [], "it takes none"
    assert complete(folder, "roost plan job.yaml --import x") == [], "a module is no file"


@needs_bash
def test_choices(folder: Path) -> None:
    assert complete(folder, "roost schema ") == ["job", "cluster"]
    assert complete(folder, "roost completion z") == ["zsh"]
    assert complete(folder, "roost init --layout h") == ["hybrid", "heterogeneous"]
    assert complete(folder, "roost import ") == ["slime", "rlinf", "verl"]
    assert "--out" in complete(folder, "roost import verl --o")


@needs_bash
def test_the_shell_itself_completes(folder: Path) -> None:
    """Through the shell's own machinery: what a key press would show."""
    asked = f"source {folder}/bash.sh; complete -p roost; compgen -F _roost roost 2>/dev/null; true"
    done = subprocess.run(["bash", "-c", asked], cwd=folder, capture_output=True, text=True, check=False)
    assert "-F _roost roost" in done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_has_every_command_and_option(shell: str) -> None:
    text = script(build_parser(), shell)
    for name in commands():
        assert f"roost {name}" in text
    for option in ("cluster", "layout", "force", "out"):
        assert f"--{option}" in text or f"-l {option}" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_read_without_complaint(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    path = tmp_path / "script"
    path.write_text(script(build_parser(), shell))
    done = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""Shell completion scripts, generated from the parser of the command line."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["script"]

_NO_FILES = {"ADDRESS", "FLAG", "KEY", "KEY=VALUE", "MODULE", "N", "NAME", "PROCESS", "S", "SECONDS"}
"""Metavariables of values that are not files."""


def script(parser: ArgumentParser, shell: str) -> str:
    """Return the completion script of a parser for a shell: ``bash``, ``zsh`` or ``fish``."""
    commands = list(_walk(parser, ("roost",), ""))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](commands)


# What there is to complete ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Option:
    flags: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    takes_files: bool


@dataclass(frozen=True)
class _Command:
    path: tuple[str, ...]
    help: str
    options: tuple[_Option, ...]
    words: tuple[tuple[str, str], ...]
    """Subcommands and choices of positional arguments, with their help."""
    takes_files: bool

    @property
    def name(self) -> str:
        return " ".join(self.path)


def _walk(parser: ArgumentParser, path: tuple[str, ...], help_text: str) -> Iterator[_Command]:
    options: list[_Option] = []
    words: list[tuple[str, str]] = []
    takes_files = False
    below: list[_Command] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        choices = tuple(str(choice) for choice in action.choices or ())
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                words.append((name, about.get(name, "")))
                below += _walk(child, (*path, name), about.get(name, ""))
        elif action.option_strings:
            is_file = action.nargs != 0 and not choices and _is_file(action)
            text = (action.help or "").replace("%%", "%")
            options.append(_Option(tuple(action.option_strings), text, action.nargs != 0, choices, is_file))
        elif choices:
            words += [(choice, "") for choice in choices]
        else:
            takes_files = takes_files or _is_file(action)
    yield _Command(path, help_text, tuple(options), tuple(words), takes_files)
    yield from below


def _is_file(action: argparse.Action) -> bool:
    return str(action.metavar or action.dest).strip("[]") not in _NO_FILES


# Bash, which zsh understands --------------------------------------------------------------------

_BASH = """\
# Completion of roost for bash. Made by: roost completion bash
_roost() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    local place="roost" options="" words="" files=1 i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        if [[ "${{COMP_WORDS[i]}}" == -- ]]; then return; fi
        case "$place ${{COMP_WORDS[i]}}" in
            {paths}) place="$place ${{COMP_WORDS[i]}}" ;;
        esac
    done
    case "$place $prev" in
{values}
    esac
    case "$place" in
{commands}
    esac
    if [[ "$cur" == -* ]]; then
        words="$options"
    elif [[ $files -eq 0 ]]; then
        compopt +o default +o bashdefault 2>/dev/null
    fi
    COMPREPLY=( $(compgen -W "$words" -- "$cur") )
}}
complete -o bashdefault -o default -F _roost roost
"""


def _bash(commands: list[_Command]) -> str:
    paths = " | ".join(f'"{command.name}"' for command in commands[1:])
    values: list[str] = []
    places: list[str] = []
    for command in commands:
        for option in command.options:
            if not option.takes_value:
                continue
            pattern = " | ".join(f'"{command.name} {flag}"' for flag in option.flags)
            if option.choices:
                act = f'COMPREPLY=( $(compgen -W "{" ".join(option.choices)}" -- "$cur") ); return'
            elif option.takes_files:
                act = "return"
            else:
                act = "compopt +o default +o bashdefault 2>/dev/null; return"
            values.append(f"        {pattern}) {act} ;;")
        flags = " ".join(flag for option in command.options for flag in option.flags)
        words = " ".join(word for word, _ in command.words)
        files = int(command.takes_files)
        places.append(f'        "{command.name}") options="{flags}"; words="{words}"; files={files} ;;')
    return _BASH.format(paths=paths, values="\n".join(values), commands="\n".join(places))


_ZSH = """\
#compdef roost
# Completion of roost for zsh. Made by: roost completion zsh
_roost() {{
    local place="roost" i
    local -a options words_ values
    local files=1
    for ((i = 2; i < CURRENT; i++)); do
        if [[ "$words[i]" == "--" ]]; then _files; return; fi
        case "$place $words[i]" in
            {paths}) place="$place $words[i]" ;;
        esac
    done
    case "$place $words[CURRENT-1]" in
{values}
    esac
    case "$place" in
{commands}
    esac
    if [[ "$PREFIX" == -* ]]; then
        _describe -o option options
        return
    fi
    if (( $#words_ )); then _describe word words_; fi
    if (( files )); then _files; fi
}}
if (( $+functions[compdef] )); then compdef _roost roost; fi
"""


def _zsh(commands: list[_Command]) -> str:
    paths = "|".join(f'"{command.name}"' for command in commands[1:])
    values: list[str] = []
    places: list[str] = []
    for command in commands:
        for option in command.options:
            if not option.takes_value:
                continue
            pattern = "|".join(f'"{command.name} {flag}"' for flag in option.flags)
            if option.choices:
                act = f"values=({' '.join(option.choices)}); _describe value values; return"
            else:
                act = "_files; return" if option.takes_files else "return"
            values.append(f"        {pattern}) {act} ;;")
        options = " ".join(_described(flag, option.help) for option in command.options for flag in option.flags)
        words = " ".join(_described(word, text) for word, text in command.words)
        files = int(command.takes_files)
        places.append(f'        "{command.name}") options=({options}); words_=({words}); files={files} ;;')
    return _ZSH.format(paths=paths, values="\n".join(values), commands="\n".join(places))


def _described(word: str, text: str) -> str:
    return _quoted(f"{word}:{text.splitlines()[0]}" if text else word)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# Fish -------------------------------------------------------------------------------------------


def _fish(commands: list[_Command]) -> str:
    lines = [
        "# Completion of roost for fish. Made by: roost completion fish",
        "function __roost_at",
        "    set -l words (commandline -opc)",
        "    set -l place roost",
        "    for word in $words[2..-1]",
        '        switch "$place $word"',
        f"            case {' '.join(_quoted(command.name) for command in commands[1:])}",
        '                set place "$place $word"',
        "        end",
        "    end",
        '    test "$place" = "$argv"',
        "end",
        "complete -c roost -f",
    ]
    for command in commands:
        at = f'complete -c roost -n "__roost_at {command.name}"'
        for word, text in command.words:
            lines.append(f"{at} -a {_quoted(word)}" + (f" -d {_quoted(text)}" if text else ""))
        if command.takes_files:
            lines.append(f"{at} -F")
        for option in command.options:
            parts = [f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in option.flags]
            if option.choices:
                parts.append(f"-xa {_quoted(' '.join(option.choices))}")
            elif option.takes_value:
                parts.append("-rF" if option.takes_files else "-x")
            first = option.help.splitlines()[0] if option.help else ""
            lines.append(f"{at} {' '.join(parts)} -d {_quoted(first)}")
    return "\n".join(lines) + "\n"

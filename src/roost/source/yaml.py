"""Build a ``Tree`` from YAML text.

The parser's events come from libyaml if it is installed; it is 30 times as fast as the Python parser. PyYAML's loader is
not used, for three reasons: it drops the source text of scalars (YAML 1.1 reads ``3:0`` as the number 180), it expands
nested aliases without limit, and it does not report duplicate keys.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from roost.errors import ConfigError, Finding, Fix, Mark, Place
from roost.source.tree import MAX_DEPTH, MAX_VALUES, Document, Tree

MAX_BYTES = 10 * 2**20
"""Size of the largest file that is read."""

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_INT = re.compile(r"[-+]?[0-9]+\Z", re.ASCII)
_HEX = re.compile(r"0x[0-9a-fA-F]+\Z", re.ASCII)
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?\Z", re.ASCII)
_SPECIAL_FLOAT = re.compile(r"([-+]?)\.(inf|nan)\Z", re.IGNORECASE)
_WORDS: dict[str, Any] = {"": None, "~": None}
_WORDS |= dict.fromkeys(("null", "Null", "NULL"))
_WORDS |= {form: True for word in ("true", "yes", "on") for form in (word, word.title(), word.upper())}
_WORDS |= {form: False for word in ("false", "no", "off") for form in (word, word.title(), word.upper())}
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "seq", "map")}


def read_file(path: str) -> Tree:
    """Read one YAML mapping from a file.

    Raises:
        ConfigError: The file cannot be read, or with every problem that can be seen at once.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError([Finding("C101", f"cannot read {path}: {reason}", Place(file=path))]) from None
    except ValueError:  # a NUL in the name
        raise ConfigError([Finding("C101", f"cannot read {path!r}: not a file name")]) from None
    if len(data) > MAX_BYTES:
        message = f"{path} is larger than {MAX_BYTES // 2**20} MiB, the most that is read"
        fixes = (Fix("keep data out of the file; write like nodes once, with a count"),)
        raise ConfigError([Finding("C102", message, Place(file=path), fixes=fixes)])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{path} is not UTF-8 text (byte {error.start})"
        raise ConfigError([Finding("C103", message, Place(file=path))]) from None
    return read_text(text, path)


def read_text(text: str, name: str = "<text>") -> Tree:
    """Read one YAML mapping from text.

    Raises:
        ConfigError: With every problem that can be seen at once.
    """
    composer = _Composer(Document(name, text))
    root = composer.compose()
    if composer.findings:
        raise ConfigError(composer.findings)
    if root is None or root.value is None:
        message = f"{name} is empty" if not text.strip() else f"{name} holds no values"
        raise ConfigError([Finding("C105", message, Place(file=name), rule="a file holds one mapping")])
    if not root.is_mapping:
        message = f"{name} must hold a mapping of keys to values, not {root.kind}"
        raise ConfigError([Finding("C106", message, root.place(), (root.mark(),))])
    return root


def read_value(text: str, name: str) -> Tree:
    """Read one YAML value of any kind, such as one from a command line. Its place is a name without a line.

    Raises:
        ConfigError: With every problem that can be seen at once.
    """
    document = Document(name, text)
    composer = _Composer(document)
    root = composer.compose()
    if composer.findings:
        raise ConfigError(composer.findings)
    return _without_position(root) if root is not None else Tree(None, document=document)


def _without_position(tree: Tree) -> Tree:
    tree.line = tree.column = tree.inner = 0
    for child in (*tree.keys.values(), *(tree.value if tree.is_list else (child for _, child in tree.items()))):
        _without_position(child)
    return tree


class _GiveUpError(Exception):
    """Stops composing early; the reason is among the findings."""


class _Composer:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.findings: list[Finding] = []
        self.anchors: dict[str, tuple[Tree, int] | None] = {}
        self.values = 0

    def compose(self) -> Tree | None:
        """Return the tree of the only document in the text, or ``None``; problems are in ``findings``."""
        root: Tree | None = None
        try:
            loader = _Loader(self.document.text)
            try:
                self.event = loader.get_event
                while True:
                    event = self.event()
                    if isinstance(event, yaml.StreamEndEvent):
                        break
                    if isinstance(event, yaml.DocumentStartEvent):
                        if root is not None:
                            self._report("C106", "a file holds one document, and here begins another", event)
                            break
                        root = self._node(self.event(), "", None, 0)
            finally:
                loader.dispose()
        except _GiveUpError:
            pass
        except yaml.YAMLError as error:
            self.findings.append(self._syntax_finding(error))
        except RecursionError:  # the pure Python parser, deep in flow brackets
            self.findings.append(Finding("C108", "the file nests too deep", Place(file=self.document.name)))
        return root

    def _node(self, event: Any, key: str, parent: Tree | None, depth: int) -> Tree:
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        self._count(1, event)
        if depth > MAX_DEPTH:
            self._report("C108", f"values nest deeper than {MAX_DEPTH} levels", event)
            raise _GiveUpError
        before = self.values
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        if event.tag is not None and event.tag != "!" and event.tag not in _TAGS:
            self._report("C109", f"the tag {event.tag} is not supported: values are plain YAML", event)
        if isinstance(event, yaml.ScalarEvent):
            tree = self._scalar(event, key, parent)
        elif isinstance(event, yaml.SequenceStartEvent):
            tree = self._tree([], key, parent, event)
            child = self.event()
            while not isinstance(child, yaml.SequenceEndEvent):
                tree.value.append(self._node(child, str(len(tree.value)), tree, depth + 1))
                child = self.event()
        else:
            tree = self._mapping(event, key, parent, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = (tree, self.values - before + 1)
        return tree

    def _mapping(self, event: Any, key: str, parent: Tree | None, depth: int) -> Tree:
        tree = self._tree({}, key, parent, event)
        merges: list[Tree] = []
        child = self.event()
        while not isinstance(child, yaml.MappingEndEvent):
            if not isinstance(child, yaml.ScalarEvent):
                self._report("C109", "a key must be a plain word, not a list, a mapping or an alias", child)
                raise _GiveUpError
            name = child.value
            key_tree = self._scalar(child, name, tree)
            value = self._node(self.event(), name, tree, depth + 1)
            if name == "<<" and child.implicit[0]:
                merges.extend(value.value if value.is_list else [value])
            elif name in tree.value:
                self._duplicate(name, key_tree, tree.keys[name])
            else:
                tree.value[name] = value
                tree.keys[name] = key_tree
            child = self.event()
        for merge in merges:
            if not merge.is_mapping:
                message = f"'<<' takes a mapping, not {merge.kind}"
                self.findings.append(Finding("C109", message, merge.place(), (merge.mark(),)))
                continue
            for name, value in merge.value.items():
                tree.value.setdefault(name, value)
                tree.keys.setdefault(name, merge.keys[name])
        return tree

    def _scalar(self, event: Any, key: str, parent: Tree | None) -> Tree:
        text = event.value
        is_text = event.tag.endswith((":str", "!")) if event.tag else not event.implicit[0]
        tree = self._tree(text if is_text else _resolve(text), key, parent, event, text)
        end = event.end_mark
        if event.start_mark.line == end.line:
            first = end.column - len(text) - (1 if event.style else 0)
            if not event.style or self.document.line(end.line + 1).startswith(text, max(0, first)):
                tree.inner = first + 1
        return tree

    def _tree(self, value: Any, key: str, parent: Tree | None, event: Any, text: str | None = None) -> Tree:
        mark = event.start_mark
        return Tree(value, key, parent, text, self.document, mark.line + 1, mark.column + 1)

    def _alias(self, event: Any) -> Tree:
        if event.anchor not in self.anchors:
            self._report("C104", f"the alias *{event.anchor} has no anchor before it", event)
            raise _GiveUpError
        target = self.anchors[event.anchor]
        if target is None:
            self._report("C108", f"the alias *{event.anchor} contains itself", event)
            raise _GiveUpError
        tree, size = target
        self._count(size, event)
        return tree

    def _count(self, values: int, event: Any) -> None:
        self.values += values
        if self.values > MAX_VALUES:
            self._report("C108", f"the file expands to more than {MAX_VALUES:,} values", event)
            raise _GiveUpError

    def _duplicate(self, name: str, key: Tree, first: Tree) -> None:
        self.findings.append(
            Finding(
                "C107",
                f"the key {name!r} stands here a second time; the first is in line {first.line}",
                key.place(),
                (key.mark(),),
                rule="a key stands once in a mapping",
                fixes=(Fix("remove one of the two, or rename it"),),
            )
        )

    def _report(self, code: str, message: str, event: Any) -> None:
        mark = event.start_mark
        self.findings.append(Finding(code, message, self._place(mark.line, mark.column)))

    def _place(self, line: int, column: int) -> Place:
        return Place("", self.document.name, line + 1, column + 1, self.document.line(line + 1))

    def _syntax_finding(self, error: yaml.YAMLError) -> Finding:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        context = getattr(error, "context", None)
        message = f"not YAML: {problem}" + (f" ({context})" if context else "")
        if mark is None:
            position = getattr(error, "position", None)
            if position is None:
                return Finding("C104", message, Place(file=self.document.name))
            before = self.document.text[:position]
            line, column = before.count("\n"), position - (before.rfind("\n") + 1)
        else:
            line, column = mark.line, mark.column
        place = self._place(line, column)
        opened = getattr(error, "context_mark", None)
        if (
            not place.source.strip() and opened is not None
        ):  # at the end of the file: show the bracket that was left open
            place = self._place(opened.line, opened.column)
        if place.source[column : column + 1] == "\t" or "\t" in place.source[: column + 1]:
            tab = place.source.index("\t")
            return Finding(
                "C104",
                "not YAML: a tab stands where YAML wants spaces",
                self._place(line, tab),
                (Mark(tab + 1, 1, "tab"),),
                rule="YAML is indented with spaces",
                fixes=(Fix("replace the tab by spaces"),),
            )
        fixes: tuple[Fix, ...] = ()
        if "mapping values are not allowed" in message:
            fixes = (Fix("a colon inside a value has no space after it, or the value is quoted", '"0-3:0-7"'),)
        return Finding("C104", message, place, fixes=fixes)


def _resolve(text: str) -> Any:
    """Return the value of an unquoted scalar.

    The rules are those of YAML 1.2 plus the words yes, no, on and off. There are no base-60 numbers (``3:0``), no
    underscores (``0_7``), and no octal numbers with a leading zero.
    """
    if text in _WORDS:
        return _WORDS[text]
    first = text[0]
    if not (first.isdigit() or first in "+-.") or len(text) > 400:
        return text
    if _INT.match(text):
        return int(text)
    if _HEX.match(text):
        return int(text, 16)
    if _FLOAT.match(text):
        return float(text)
    special = _SPECIAL_FLOAT.match(text)
    return float(special[1] + special[2]) if special else text

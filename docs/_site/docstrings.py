"""Adapts Roost's docstrings and classes for the pages that mkdocstrings makes."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`[~!]?([^`]+)`")
_LITERAL_BLOCK = re.compile(r"::(?=\n\n +\S)")


class PlainMarkdown(griffe.Extension):
    """Replaces Sphinx markup by Markdown, and shows the signature of ``__new__`` where a class has no ``__init__``."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of an object, before mkdocstrings parses it."""
        if obj.docstring is not None:
            obj.docstring.value = _LITERAL_BLOCK.sub(":", _ROLE.sub(r"`\1`", obj.docstring.value))

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give a class that is made by ``__new__`` alone, such as ``Cluster``, the same signature as ``__init__``."""
        made_by = cls.members.get("__new__")
        if isinstance(made_by, griffe.Function) and "__init__" not in cls.members:
            made_by.returns = None
            cls.members["__init__"] = made_by

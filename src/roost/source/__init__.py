"""Configuration values that remember where they stand.

A YAML file, a plain mapping or an OmegaConf ``DictConfig`` becomes a :class:`Tree`: the values,
the source text of each scalar, and its file, line and column. Everything that reads a
configuration reads a tree, so that every complaint can point at its culprit.
"""

from roost.source.fields import Fields
from roost.source.keys import Key, Section
from roost.source.tree import Config, Tree, Unresolved, as_tree, load_tree

__all__ = ["Config", "Fields", "Key", "Section", "Tree", "Unresolved", "as_tree", "load_tree"]

"""Configuration values that know their place in the file.

A YAML file, a mapping or an OmegaConf ``DictConfig`` becomes a :class:`Tree`: the values, the source text of each
scalar, and its file, line and column. All readers of configurations read trees, so that each error can point at the
wrong value. :class:`Key` and :class:`Section` declare the keys of a mapping.
"""

from roost.source.fields import Fields
from roost.source.keys import Key, Section
from roost.source.tree import Config, Tree, Unresolved, as_tree, load_tree

__all__ = ["Config", "Fields", "Key", "Section", "Tree", "Unresolved", "as_tree", "load_tree"]

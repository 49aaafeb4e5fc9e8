"""Reads and changes trees of parameters by path; the nodes are dicts, tuples or structs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from fp8flax._core.names import PARAMS
from fp8flax._core.state.tree import key_name

Path = tuple[str, ...]


def leaves(tree: Any, **options: Any) -> dict[Path, Any]:
    """Returns the leaves of a tree by their paths."""
    found = jax.tree_util.tree_flatten_with_path(tree, **options)[0]
    return {tuple(str(key_name(key)) for key in keys): leaf for keys, leaf in found}


def get(params: Mapping[Path, Any], path: Path) -> Any:
    """Returns the parameter at ``path``; raises ``ValueError`` if there is none."""
    if path not in params:
        raise ValueError(
            f"{PARAMS}/{'/'.join(path)} is missing from the variables. To freeze, pass the trained "
            "variables of this model; to serve, pass the variables that fp8flax.freeze returned."
        )
    return params[path]


def replaced(tree: Any, path: Path, value: Any) -> Any:
    """Returns a tree with ``value`` at ``path``; nodes that are missing on the way become dicts."""
    name, *rest = path
    children = tree
    if not isinstance(tree, Mapping):  # a tuple or a struct
        children = {key: child for (key,), child in leaves(tree, is_leaf=lambda x: x is not tree).items()}
    value = replaced(children.get(name, {}), tuple(rest), value) if rest else value
    if isinstance(tree, Mapping):
        return {**tree, name: value}
    treedef = jax.tree.structure(tree, is_leaf=lambda x: x is not tree)
    return treedef.unflatten({**children, name: value}.values())


def without(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns a tree without the node at ``path``, and without dicts that become empty by this."""
    name, *rest = path
    others = {key: value for key, value in tree.items() if key != name}
    below = without(tree[name], tuple(rest)) if rest else {}
    return {**others, name: below} if below else others


def reboxed(tree: Any, boxed: Any) -> Any:
    """Returns a tree in the boxes that ``boxed`` has, such as those of ``nn.with_partitioning``."""

    def is_box(x: Any) -> bool:
        return isinstance(x, nn.meta.AxisMetadata)

    values = leaves(tree)
    for path, box in leaves(boxed, is_leaf=is_box).items():
        if is_box(box):
            tree = replaced(tree, path, box.replace_boxed(values[path]))
    return tree

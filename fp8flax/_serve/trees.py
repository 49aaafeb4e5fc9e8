"""Reads and changes trees of parameters by path; the nodes are dicts, tuples or structs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from fp8flax._core.names import PARAMS
from fp8flax._core.state.tree import key_name

Path = tuple[str, ...]


def _children(node: Any) -> Mapping[str, Any]:
    """Returns the children of a dict, a tuple or a struct, by name."""
    if isinstance(node, Mapping):
        return node
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return {str(key_name(path[0])): child for path, child in children if path}


def has(tree: Any, path: Path) -> bool:
    """Returns whether the tree has a node at ``path``."""
    for name in path:
        children = _children(tree)
        if name not in children:
            return False
        tree = children[name]
    return True


def get(params: Any, path: Path) -> Any:
    """Returns the node of the parameters at ``path``; raises ``ValueError`` if there is none."""
    if not has(params, path):
        raise ValueError(
            f"{PARAMS}/{'/'.join(path)} is missing from the variables. To freeze, pass the trained "
            "variables of this model; to serve, pass the variables that fp8flax.freeze returned."
        )
    for name in path:
        params = _children(params)[name]
    return params


def replaced(tree: Any, path: Path, value: Any) -> Any:
    """Returns a tree with ``value`` at ``path``; nodes that are missing on the way become dicts."""
    name, *rest = path
    children = _children(tree)
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

    for keys, box in jax.tree_util.tree_flatten_with_path(boxed, is_leaf=is_box)[0]:
        if is_box(box):
            path = tuple(str(key_name(key)) for key in keys)
            tree = replaced(tree, path, box.replace_boxed(get(tree, path)))
    return tree

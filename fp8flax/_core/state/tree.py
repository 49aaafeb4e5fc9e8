"""Finds the scaling state in a tree of variables, and takes it into and out of a gradient.

``fp8flax.value_and_grad`` works in three steps::

    entered, leave = enter(variables)
    value, cotangents = jax.value_and_grad(loss)(entered)
    grads = leave(cotangents)

``enter`` replaces each scale by ``fp8_meta`` (see ``state``). If a layer runs several times, the cotangents
of its meta merge by maximum. ``leave`` computes the next states from these cotangents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey, KeyPath, PyTreeDef, keystr

from fp8flax._compat.max_dtype import from_max_dtype
from fp8flax._core.names import AMAX_HISTORY, OVERWRITE_WITH_GRADIENT, PARAMS, SCALE, STATE_LEAF_NAMES
from fp8flax._core.state.state import (
    ScalingState,
    check_state_dtype,
    next_states,
    on_device,
    warn_if_constant_of_loop,
    with_metas,
)
from fp8flax._core.types import PyTree

# Finding the state in a tree.


def path_names(path: KeyPath) -> tuple[str, ...]:
    """Returns the names on a tree path, without the ``.value`` of NNX's variables and of Linen's boxes."""
    return tuple(keystr((key,), simple=True) for key in _of_variable(path))


def _of_variable(path: KeyPath) -> KeyPath:
    """Returns a path without the ``.value`` of NNX's variables and of Linen's boxes at its end."""
    while path and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return path


def path_str(path: KeyPath) -> str:
    """Formats a tree path as ``a/b/c``."""
    return "/".join(path_names(path))


def _find_pairs(paths: Sequence[KeyPath]) -> list[tuple[int, int]]:
    """Returns the position of each scale, with the position of the amax history beside it.

    They are found by their names, such as ``input_scale`` and ``input_amax_history``, because a user may
    pass the inside of the collection ``_overwrite_with_gradient`` alone. Among parameters only
    the names of our ops count.
    """
    index = {}
    for i, path in enumerate(map(_of_variable, paths)):
        index[path[:-1], keystr(path[-1:], simple=True)] = i
    pairs = [
        (i, index.get((parent, name.removesuffix(SCALE) + AMAX_HISTORY)), (*path_names(parent), name))
        for (parent, name), i in index.items()
        if name.endswith(SCALE)
    ]
    return [
        (i, j)
        for i, j, names in pairs
        if j is not None
        and (PARAMS not in names or names[-1] in STATE_LEAF_NAMES or OVERWRITE_WITH_GRADIENT in names)
    ]


def find_state(paths: Sequence[KeyPath]) -> list[bool]:
    """Returns for each leaf whether it is scaling state: a scale with its amax history, or the reverse."""
    of_state = {i for pair in _find_pairs(paths) for i in pair}
    return [i in of_state for i in range(len(paths))]


def has_state(tree: PyTree) -> bool:
    """Returns whether any leaf of ``tree`` is scaling state."""
    return bool(_find_pairs([path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]))


def map_state(f: Callable[[Any], Any], g: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Maps ``f`` over the leaves that are scaling state, and ``g`` over all others."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    is_state = find_state([path for path, _ in leaves])
    return treedef.unflatten([(f if s else g)(leaf) for s, (_, leaf) in zip(is_state, leaves)])


def history_axis(scale: Any, history: Any) -> int | None:
    """Returns the axis along which a history holds past amaxes; None if scale and history do not fit.

    ``nn.scan`` stacks layers along a further axis, at any position. The wanted axis is the only one where
    the sizes differ, and the scale has size 1 there. If the history has length 1, no sizes differ, and the
    result is the first axis of size 1.
    """
    if len(scale.shape) != len(history.shape):
        return None
    differing = [i for i, (one, length) in enumerate(zip(scale.shape, history.shape)) if one != length]
    axes = differing or [i for i, length in enumerate(history.shape) if length == 1]
    return axes[0] if axes and len(differing) <= 1 and scale.shape[axes[0]] == 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateTree:
    """A tree of arrays, and the places of the scaling state in it."""

    paths: list[KeyPath]
    leaves: list[Any]
    treedef: PyTreeDef
    pairs: list[tuple[int, int]]
    """The positions of each scale and its amax history among the leaves."""
    axes: list[int]
    """For each pair, the axis of the history that holds the past amaxes, see ``history_axis``."""

    @classmethod
    def of(cls, tree: PyTree) -> StateTree:
        """Returns where the scaling state is in a tree; raises an error if a pair does not fit."""
        flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
        paths, leaves = [path for path, _ in flat], [leaf for _, leaf in flat]
        pairs, axes = _find_pairs(paths), []
        for pair in pairs:
            for i in pair:
                check_state_dtype(path_str(paths[i]), leaves[i])
            axis = history_axis(*(leaves[i] for i in pair))
            if axis is None:
                shapes = " and ".join(f"{path_str(paths[i])} has shape {leaves[i].shape}" for i in pair)
                raise ValueError(
                    f"A scale and its amax history do not fit: {shapes}. The state of a tensor has shapes "
                    "(1,) and (length,). Layers may be stacked along another axis of both."
                )
            axes.append(axis)
        return cls(paths=paths, leaves=leaves, treedef=treedef, pairs=pairs, axes=axes)

    def histories(self) -> list[str]:
        """Returns the path of each amax history, as messages name a tensor."""
        return [path_str(self.paths[j]) for _, j in self.pairs]

    def where(self, chosen: Sequence[bool]) -> StateTree:
        """Returns the tree with some of its states; the others are leaves like any other."""
        pairs, axes = list(compress(self.pairs, chosen)), list(compress(self.axes, chosen))
        return dataclasses.replace(self, pairs=pairs, axes=axes)

    def states(self, leaves: Sequence[Any] | None = None) -> list[ScalingState]:
        """Returns the scale and the history of each pair, with the past amaxes on the last axis.

        ``leaves`` are those of another tree with this structure.
        """
        leaves = self.leaves if leaves is None else leaves
        return [
            ScalingState(*(_moved(on_device(leaves[i]), axis, leaves[i].ndim - 1) for i in pair))
            for pair, axis in zip(self.pairs, self.axes)
        ]

    def replaced(self, states: Sequence[ScalingState], leaves: Sequence[Any] | None = None) -> PyTree:
        """Returns the tree with other states, the reverse of ``states``."""
        leaves = list(self.leaves if leaves is None else leaves)
        for pair, axis, state in zip(self.pairs, self.axes, states):
            for i, x in zip(pair, state):
                leaves[i] = _moved(x, x.ndim - 1, axis)
        return self.treedef.unflatten(leaves)


def _moved(x: jax.Array, axis: int, to: int) -> jax.Array:
    """Returns ``jnp.moveaxis(x, axis, to)``, and most often ``x`` itself, which takes no time to trace."""
    return x if axis == to else jnp.moveaxis(x, axis, to)


# Taking the state into a gradient, and out of it.


def merge_by_max(tree: PyTree) -> PyTree:
    """Makes ``jax.grad`` return the next state; returns the variables to call the model with.

    Call it inside the differentiated function and before ``apply``, as ``TrainState.apply_fn`` does. The
    backward rule of the metas computes the next state. All other leaves, and metas, stay as they are.
    """
    found = StateTree.of(tree)
    return found.replaced(with_metas(found.states()))


def enter(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """Returns the variables that JAX differentiates, and ``leave``.

    ``leave(cotangents)`` returns the gradients of ``tree``, with the next states. So both do outside of a
    gradient what ``merge_by_max`` does inside of it. If the tree has entered another gradient before, the
    state is cast back, and enters again without a derivative.
    """
    found = StateTree.of(tree)
    if found.pairs:
        warn_if_constant_of_loop(found.leaves[found.pairs[0][0]], stacklevel=3)
    found = dataclasses.replace(found, leaves=list(map(from_max_dtype, found.leaves)))
    states = [ScalingState(*map(lax.stop_gradient, state)) for state in found.states()]

    def leave(cotangents: PyTree) -> PyTree:
        grads = found.treedef.flatten_up_to(cotangents)
        metas = [state.scale for state in found.states(grads)]
        return found.replaced(next_states(states, metas), grads)

    return found.replaced(with_metas(states)), leave


def from_max(tree: PyTree) -> PyTree:
    """Casts every leaf of ``tree`` that merges by maximum back to float32."""
    return jax.tree.map(from_max_dtype, tree)

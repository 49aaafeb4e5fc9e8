"""Finds the scaling state in a tree of variables, and takes it into and out of a gradient.

``fp8flax.value_and_grad`` works in three steps::

    entered = enter(variables)
    value, cotangents = jax.value_and_grad(loss)(entered)
    next_state = leave(variables, cotangents)

``enter`` replaces each scale by its digest (see ``state``). If a layer runs several times, the cotangents
of its digest merge by maximum. ``leave`` computes the next states from these cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey, KeyPath, keystr

from fp8flax._compat.max_dtype import from_max_dtype
from fp8flax._core.names import AMAX_HISTORY, OVERWRITE_WITH_GRADIENT, PARAMS, SCALE
from fp8flax._core.state.state import ScalingState, check_state_dtype, next_states, on_device, with_digests

# Finding the state in a tree.


def flatten(tree: Any) -> tuple[list[KeyPath], list[Any], Any]:
    """Returns the paths, the leaves and the structure of a tree."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [path for path, _ in leaves], [leaf for _, leaf in leaves], treedef


def path_names(path: KeyPath) -> tuple[str, ...]:
    """Returns the names on a tree path, without the ``.value`` of NNX's variables and of Linen's boxes."""
    while path and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return tuple(keystr((key,), simple=True) for key in path)


def path_str(path: KeyPath) -> str:
    """Formats a tree path as ``a/b/c``."""
    return "/".join(path_names(path))


def _find_pairs(paths: Sequence[KeyPath]) -> list[tuple[int, int]]:
    """Returns the position of each scale, with the position of the amax history beside it.

    They are found by their names, such as ``input_scale`` and ``input_amax_history``, because a user may
    pass the inside of the collection ``_overwrite_with_gradient`` alone. Parameters are no state.
    """
    index = {path_names(path): i for i, path in enumerate(paths)}
    pairs = []
    for names, i in index.items():
        *parent, name = names or ("",)
        is_parameter = PARAMS in parent and OVERWRITE_WITH_GRADIENT not in parent
        if name.endswith(SCALE) and not is_parameter:
            j = index.get((*parent, name.removesuffix(SCALE) + AMAX_HISTORY))
            pairs += [] if j is None else [(i, j)]
    return pairs


def find_state(paths: Sequence[KeyPath]) -> list[bool]:
    """Returns for each leaf whether it is scaling state: a scale with its amax history, or the reverse."""
    of_state = {i for pair in _find_pairs(paths) for i in pair}
    return [i in of_state for i in range(len(paths))]


def has_state(tree: Any) -> bool:
    """Returns whether any leaf of ``tree`` is scaling state."""
    return any(find_state(flatten(tree)[0]))


def map_state(f: Callable[..., Any], g: Callable[..., Any], tree: Any) -> Any:
    """Maps ``f`` over the leaves that are scaling state, and ``g`` over all others."""
    paths, leaves, treedef = flatten(tree)
    return treedef.unflatten([(f if s else g)(leaf) for s, leaf in zip(find_state(paths), leaves)])


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


class Places(NamedTuple):
    """The positions of the scaling state among the leaves of a tree (hashable)."""

    pairs: tuple[tuple[int, int], ...]
    """The positions of each scale and its amax history."""
    axes: tuple[int, ...]
    """For each pair, the axis of the history that holds the past amaxes, see ``history_axis``."""

    @classmethod
    def of(cls, paths: Sequence[KeyPath], leaves: Sequence[Any]) -> Places:
        """Returns the positions of the scaling state in a tree; raises an error if a pair does not fit."""
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
        return cls(tuple(pairs), tuple(axes))

    def states(self, leaves: Sequence[Any]) -> list[ScalingState]:
        """Returns the scale and the history of each pair, with the past amaxes on the last axis."""
        return [
            ScalingState(*(jnp.moveaxis(on_device(leaves[i]), axis, -1) for i in pair))
            for pair, axis in zip(self.pairs, self.axes)
        ]

    def put(self, leaves: list[Any], states: Sequence[ScalingState]) -> None:
        """Writes states to the positions of the pairs, the reverse of ``states``."""
        for pair, axis, state in zip(self.pairs, self.axes, states):
            for i, x in zip(pair, state):
                leaves[i] = jnp.moveaxis(x, -1, axis)


# Taking the state into a gradient, and out of it.


def merge_by_max(tree: Any) -> Any:
    """Makes ``jax.grad`` return the next state; returns the variables to call the model with.

    Call it inside the differentiated function and before ``apply``, as ``TrainState.apply_fn`` does. The
    backward rule of the digests computes the next state. All other leaves, and digests, stay as they are.
    """
    paths, leaves, treedef = flatten(tree)
    places = Places.of(paths, leaves)
    # The digests have the gradients of the histories, too.
    states = with_digests(places.states(leaves))
    places.put(leaves, [ScalingState(x.scale, lax.stop_gradient(x.amax_history)) for x in states])
    return treedef.unflatten(leaves)


def enter(tree: Any) -> Any:
    """Returns the variables that JAX differentiates: each scale is replaced by its digest.

    ``enter`` and ``leave`` do outside of a gradient what ``merge_by_max`` does inside of it.
    """
    return merge_by_max(map_state(lax.stop_gradient, lambda leaf: leaf, tree))


def leave(tree: Any, cotangents: Any) -> Any:
    """Returns the gradients of ``tree``, with the next states, from the cotangents of ``enter(tree)``."""
    paths, leaves, treedef = flatten(tree)
    places, grads = Places.of(paths, leaves), treedef.flatten_up_to(cotangents)
    of_digests = [state.scale for state in places.states(grads)]
    places.put(grads, next_states(places.states(leaves), of_digests))
    return treedef.unflatten(grads)


def from_max(tree: Any) -> Any:
    """Casts every leaf of ``tree`` that merges by maximum back to float32."""
    return jax.tree.map(from_max_dtype, tree)

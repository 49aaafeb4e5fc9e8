"""Finds the scaling state in a tree of variables, and takes it into and out of a gradient.

``fp8flax.value_and_grad`` works in three steps::

    entered = enter(variables)
    value, cotangents = jax.value_and_grad(lambda entered: loss(as_read(entered)))(entered)
    next_state = leave(variables, cotangents)

``enter`` replaces each scale by its digest (``state.Digest``). If a layer runs several times, the
cotangents of its digest merge by maximum. ``leave`` computes the next states from these cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey, KeyPath

from fp8flax._compat.max_dtype import (
    digested,
    from_max_dtype,
    is_max_dtype,
    to_digest,
    to_max_dtype,
)
from fp8flax._core.names import AMAX_HISTORY, OVERWRITE_WITH_GRADIENT, PARAMS, SCALE, STATE_LEAF_NAMES
from fp8flax._core.state.batching import each_alike
from fp8flax._core.state.state import ScalingState, digest_of, is_state_dtype, kept_state, next_state

# Finding the state in a tree.


def key_name(key: Any) -> Any:
    """Returns what one key of a tree path stands for: a dict key, the name of an attribute, or an index."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def path_names(path: KeyPath) -> tuple[Any, ...]:
    """Returns the names on a tree path, without the ``.value`` of an ``nnx.Variable`` or a Linen box."""
    if path and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return tuple(map(key_name, path))


def path_str(path: KeyPath) -> str:
    """Formats a tree path as ``a/b/c``."""
    return "/".join(map(str, path_names(path)))


def _partner(name: Any) -> str | None:
    """Returns the history's name for the name of a scale, and the reverse; None for any other name."""
    if name not in STATE_LEAF_NAMES:
        return None
    if name.endswith(SCALE):
        return name.removesuffix(SCALE) + AMAX_HISTORY
    return name.removesuffix(AMAX_HISTORY) + SCALE


def find_state(paths: list[KeyPath]) -> list[bool]:
    """Returns for each leaf whether it is scaling state.

    Every leaf of the collection ``_overwrite_with_gradient`` is scaling state. A user may also pass the
    inside of this collection alone, without its name. So a scale is also scaling state if the amax history
    of the same role is beside it, and the reverse, except under ``params``.
    """
    names = set(map(path_names, paths))

    def is_state(path: KeyPath) -> bool:
        *parent, name = path_names(path) or (None,)
        if OVERWRITE_WITH_GRADIENT in parent:
            return True
        partner = _partner(name)
        return partner is not None and PARAMS not in parent and (*parent, partner) in names

    return [is_state(path) for path in paths]


def find_pairs(paths: list[KeyPath]) -> list[tuple[int, int]]:
    """Returns the position of each scale, with the position of the amax history beside it."""
    index = {path_names(path): i for i, path in enumerate(paths)}
    pairs = []
    for i, (path, is_state) in enumerate(zip(paths, find_state(paths))):
        names = path_names(path)
        partner = _partner(names[-1]) if names else None
        j = index.get((*names[:-1], partner))
        if is_state and partner is not None and partner.endswith(AMAX_HISTORY) and j is not None:
            pairs.append((i, j))
    return pairs


def history_axis(scale: Any, history: Any) -> int | None:
    """Returns the axis along which a history holds past amaxes; None if scale and history do not fit.

    ``nn.scan`` stacks layers along a further axis, at any position. This axis has the same size in both
    arrays. The wanted axis is the only one where the sizes differ, and the scale has size 1 there. If the
    history has length 1, no sizes differ, and the result is the first axis of size 1.
    """
    if len(scale.shape) != len(history.shape):
        return None
    differing = [i for i, (one, length) in enumerate(zip(scale.shape, history.shape)) if one != length]
    axes = differing or [i for i, length in enumerate(history.shape) if length == 1]
    return axes[0] if axes and len(differing) <= 1 and scale.shape[axes[0]] == 1 else None


def has_state(tree: Any) -> bool:
    """Returns whether any leaf of ``tree`` is scaling state."""
    return any(find_state([path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]))


def check_state_dtype(path: KeyPath, leaf: Any) -> None:
    """Raises ``TypeError`` if a leaf of scaling state is neither float32 nor merges by maximum."""
    if not is_state_dtype(leaf):
        got = getattr(leaf, "dtype", None) or type(leaf).__name__
        raise TypeError(
            f"The scaling state at {path_str(path)} must be float32; got {got}. "
            f"Cast variables['params'] alone, or cast this leaf back with .astype(jnp.float32)."
        )


class Places(NamedTuple):
    """The positions of the scaling state among the leaves of a tree (hashable)."""

    pairs: tuple[tuple[int, int], ...]
    """The positions of each scale and its amax history."""
    axes: tuple[int, ...]
    """For each pair, the axis of the history that holds the past amaxes, see ``history_axis``."""
    others: tuple[int, ...]
    """The positions of all other state: of another package, or with shapes that do not fit."""

    @classmethod
    def of(cls, paths: list[KeyPath], leaves: Sequence[Any]) -> Places:
        """Returns the positions of the scaling state in a tree with these paths and leaves.

        Raises:
            TypeError: a leaf of scaling state is not float32.
        """
        of_state = [i for i, found in enumerate(find_state(paths)) if found]
        for i in of_state:
            check_state_dtype(paths[i], leaves[i])
        axes = {pair: history_axis(*(leaves[i] for i in pair)) for pair in find_pairs(paths)}
        pairs = {pair: axis for pair, axis in axes.items() if axis is not None}
        paired = {i for pair in pairs for i in pair}
        return cls(tuple(pairs), tuple(pairs.values()), tuple(i for i in of_state if i not in paired))

    def states(self, leaves: Sequence[Any]) -> list[ScalingState]:
        """Returns the scale and the history of each pair, with the past amaxes on the last axis."""
        return [
            ScalingState(*(jnp.moveaxis(leaves[i], axis, -1) for i in pair))
            for pair, axis in zip(self.pairs, self.axes)
        ]

    def put(self, leaves: list[Any], states: Sequence[ScalingState]) -> None:
        """Writes states to the positions of the pairs, the reverse of ``states``."""
        for pair, axis, state in zip(self.pairs, self.axes, states):
            for i, x in zip(pair, state):
                leaves[i] = jnp.moveaxis(x, -1, axis)


def flatten(tree: Any) -> tuple[list[KeyPath], list[Any], Any]:
    """Returns the paths, the leaves and the structure of a tree."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [path for path, _ in leaves], [leaf for _, leaf in leaves], treedef


# Taking the state into a gradient, and out of it.


def enter(tree: Any) -> Any:
    """Returns the variables that JAX differentiates: each scale is replaced by its digest.

    The cotangents of digests merge by maximum. Scaling state that is not a pair of a scale and a history is
    cast to ``fp32_max_grad``. All other leaves are returned unchanged, and so is state that has entered
    before.

    Raises:
        TypeError: a leaf of scaling state is not float32.
    """
    paths, leaves, treedef = flatten(tree)
    places = Places.of(paths, leaves)
    # A digest is of a max dtype, too: such a state has entered before.
    entered = [any(is_max_dtype(leaves[i]) for i in pair) for pair in places.pairs]
    new = places._replace(
        pairs=tuple(pair for pair, is_in in zip(places.pairs, entered) if not is_in),
        axes=tuple(axis for axis, is_in in zip(places.axes, entered) if not is_in),
    )
    states = lax.stop_gradient(new.states(leaves))
    digests = each_alike(digest_of, states)
    # Each digest is an array of its own. XLA for GPUs would need one kernel per tensor to split an array of
    # all digests.
    new.put(leaves, [s._replace(scale=to_digest(*digest)) for s, digest in zip(states, digests)])
    for i in places.others:
        leaves[i] = to_max_dtype(leaves[i])
    return treedef.unflatten(leaves)


def as_read(entered: Any) -> Any:
    """Returns the variables to call the loss with; called inside the differentiated function.

    The argument is the result of ``enter``. Each history loses its gradient, because the digest has it, and
    gets a dtype that refuses arithmetic.
    """
    paths, leaves, treedef = flatten(entered)
    for _, j in find_pairs(paths):
        if not is_max_dtype(leaves[j]):
            leaves[j] = to_max_dtype(lax.stop_gradient(leaves[j]))
    return treedef.unflatten(leaves)


def leave(tree: Any, cotangents: Any) -> Any:
    """Returns the gradients of the variables, with the next state as the gradient of the state.

    Args:
        tree: the variables that ``enter`` was called with, with all state in float32.
        cotangents: the cotangents of the result of ``enter``.
    """
    paths, leaves, treedef = flatten(tree)
    places, grads = Places.of(paths, leaves), treedef.flatten_up_to(cotangents)
    # The scales and the amaxes of the step.
    numbers = [
        [jnp.moveaxis(x, axis, -1) for x in digested(grads[i], 2)]
        for (i, _), axis in zip(places.pairs, places.axes)
    ]
    places.put(grads, each_alike(next_state, places.states(leaves), *zip(*numbers), in_parts=True))
    for i in places.others:
        grads[i] = _kept_other(leaves[i], from_max_dtype(grads[i]))
    return treedef.unflatten(grads)


def merge_by_max(tree: Any) -> Any:
    """Makes ``jax.grad`` return the next state; returns the variables to call the model with.

    ``fp8flax.grad`` calls ``enter`` before the differentiated function, and ``leave`` after it. This
    function does both for ``jax.grad``: it returns ``as_read(enter(tree))``, and its backward rule is
    ``leave``. Call it once, inside the differentiated function and before ``apply``, as
    ``TrainState.apply_fn`` does.
    """
    paths, leaves, treedef = flatten(tree)
    enters = [found and not is_max_dtype(leaf) for found, leaf in zip(find_state(paths), leaves)]
    # All other leaves are left out of the ``custom_vjp``, so that they keep their derivatives of any order.
    state = treedef.unflatten([leaf if new else None for leaf, new in zip(leaves, enters)])
    entered = treedef.flatten_up_to(_entered(state)) if any(enters) else leaves
    return as_read(treedef.unflatten([x if new else leaf for x, leaf, new in zip(entered, leaves, enters)]))


# The backward rule computes no derivative: the cotangent of the state is its next value.
_entered = jax.custom_vjp(enter)
_entered.defvjp(lambda state: (enter(state), state), lambda state, cotangents: (leave(state, cotangents),))


def from_max(tree: Any) -> Any:
    """Casts every leaf of ``tree`` that merges by maximum back to float32."""
    return jax.tree.map(from_max_dtype, tree)


# The state after a step.


def new_leaves(old: Any, new: Any) -> list[Any]:
    """Returns the leaves of the gradient of ``old``, with scaling state in float32; see ``kept_tree``."""
    paths, old_leaves, treedef = flatten(old)
    leaves = treedef.flatten_up_to(new)
    for i, found in enumerate(find_state(paths)):
        if not found:
            continue
        check_state_dtype(paths[i], leaves[i])
        leaves[i] = from_max_dtype(leaves[i])
        if leaves[i].shape != old_leaves[i].shape:
            raise ValueError(
                f"The scaling state at {path_str(paths[i])} has shape {old_leaves[i].shape}, its new value "
                f"{leaves[i].shape}. Pass the gradient with respect to the same variables."
            )
    return leaves


def kept_tree(old: Any, new: Any) -> Any:
    """Returns the next state, with the old state wherever the new one is not usable.

    The state of a tensor is taken from ``old`` if no gradient arrived. Its history is taken from ``old`` if
    the data held a NaN or an Inf. Leaves that are not scaling state are taken from ``new``. ``kept_tree``
    trusts that a step produced ``new``; ``_train.check.checked_next_state`` checks that, too.

    Args:
        old: a tree of variables (or a bare collection) as it was before the step.
        new: the gradient with respect to it: same structure, scaling state in float32 or
            ``fp32_max_grad``.

    Raises:
        TypeError: a leaf of scaling state in ``new`` is not float32.
        ValueError: the structures or the shapes of the scaling state differ.
    """
    paths, old_leaves, treedef = flatten(old)
    leaves = new_leaves(old, new)
    places = Places.of(paths, old_leaves)
    olds, news = places.states(old_leaves), places.states(leaves)
    places.put(leaves, each_alike(kept_state, olds, news, in_parts=True))
    for i in places.others:
        leaves[i] = _kept_other(old_leaves[i], leaves[i])
    return treedef.unflatten(leaves)


def _kept_other(old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the value after a step of state that is not a pair of a scale and a history.

    The old value is kept where the new value is not finite.
    """
    return jnp.where(lax.is_finite(new), new, old)


def map_state(f: Callable[..., Any], g: Callable[..., Any], tree: Any) -> Any:
    """Maps ``f`` over the leaves that are scaling state, and ``g`` over all others."""
    paths, leaves, treedef = flatten(tree)
    return treedef.unflatten([(f if s else g)(leaf) for s, leaf in zip(find_state(paths), leaves)])

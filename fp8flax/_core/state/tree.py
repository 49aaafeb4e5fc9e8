"""The scaling state in a tree of variables: where it lies, how it enters a gradient, and how it leaves it.

A gradient is taken in three steps::

    entered = enter(variables)
    value, cotangents = jax.value_and_grad(lambda entered: loss(as_read(entered)))(entered)
    next_state = leave(variables, cotangents)

What has entered merges by maximum where a layer runs several times. A digest (``state.Digest``) stands in
the place of each scale.
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey, KeyPath

from fp8flax._compat.max_dtype import MaxArray, fp32_max_grad, from_max_dtype, is_max_dtype, to_max_dtype
from fp8flax._core.names import AMAX_HISTORY, OVERWRITE_WITH_GRADIENT, PARAMS, ROLES, SCALE
from fp8flax._core.state import state
from fp8flax._core.state.batching import digests, each_alike, groups, kind_of, next_states
from fp8flax._core.state.state import ScalingState

_LEAF_NAMES = frozenset(role + suffix for role in ROLES for suffix in (SCALE, AMAX_HISTORY))


# Where the state lies.


def key_name(key: Any) -> Any:
    """Returns the name in a key of a tree path: a dict key, an attribute's name or a position."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _names(path: KeyPath) -> tuple[Any, ...]:
    """Returns the names on a path; ``nnx.Variable`` and Linen's boxes have their array as ``value``."""
    if path and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return tuple(map(key_name, path))


def path_str(path: KeyPath) -> str:
    """Formats a tree path as ``a/b/c``."""
    return "/".join(map(str, _names(path)))


def _partner(name: Any) -> str | None:
    """Returns the leaf name that must stand beside ``name`` for both to be scaling state."""
    if name not in _LEAF_NAMES:
        return None
    if name.endswith(SCALE):
        return name.removesuffix(SCALE) + AMAX_HISTORY
    return name.removesuffix(AMAX_HISTORY) + SCALE


def find_state(paths: list[KeyPath]) -> list[bool]:
    """Returns for each leaf whether it is scaling state.

    A leaf in the collection ``_overwrite_with_gradient`` is. The collection may also be an argument of its
    own: therefore a scale and an amax history of one role in one node are state, too, except under
    ``params``.
    """
    names = set(map(_names, paths))

    def is_state(path: KeyPath) -> bool:
        *parent, name = _names(path) or (None,)
        if OVERWRITE_WITH_GRADIENT in parent:
            return True
        partner = _partner(name)
        return partner is not None and PARAMS not in parent and (*parent, partner) in names

    return [is_state(path) for path in paths]


def find_pairs(paths: list[KeyPath]) -> list[tuple[int, int]]:
    """Returns the positions of each scale and of the amax history beside it."""
    index = {_names(path): i for i, path in enumerate(paths)}
    pairs = []
    for (names, i), is_state in zip(index.items(), find_state(paths)):
        partner = _partner(names[-1]) if names else None
        j = index.get((*names[:-1], partner))
        if is_state and partner is not None and partner.endswith(AMAX_HISTORY) and j is not None:
            pairs.append((i, j))
    return pairs


def history_axis(scale: Any, history: Any) -> int | None:
    """Returns the axis of the history, wherever layers were stacked; None if the two do not fit."""
    if len(scale.shape) != len(history.shape):
        return None
    differing = [i for i, (one, length) in enumerate(zip(scale.shape, history.shape)) if one != length]
    axes = differing or [i for i, length in enumerate(history.shape) if length == 1]
    return axes[0] if axes and len(differing) <= 1 and scale.shape[axes[0]] == 1 else None


def has_state(tree: Any) -> bool:
    """Returns whether any leaf of ``tree`` is scaling state."""
    return any(find_state([path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]))


def check_state_dtype(path: KeyPath, leaf: Any) -> None:
    """Raises ``TypeError`` if a leaf of scaling state is not float32."""
    dtype = getattr(leaf, "dtype", None)
    if dtype != jnp.float32 and not is_max_dtype(leaf):
        raise TypeError(
            f"The scaling state at {path_str(path)} must be float32; got {dtype or type(leaf).__name__}. "
            f"Cast variables['params'] alone, or cast this leaf back with .astype(jnp.float32)."
        )


class Places(NamedTuple):
    """The positions of the scaling state among the leaves of a tree (hashable)."""

    pairs: tuple[tuple[int, int], ...]
    """Of each scale and its history."""
    axes: tuple[int, ...]
    """Along which each of these histories runs."""
    others: tuple[int, ...]
    """Of state that is no such pair: of another package, or with shapes that do not fit."""

    @classmethod
    def of(cls, paths: list[KeyPath], leaves: Sequence[Any]) -> Places:
        """Returns those in a tree with these leaves at these paths.

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
        """Returns the state at each of ``pairs``."""
        return [ScalingState(leaves[i], leaves[j]) for i, j in self.pairs]


def _flatten(tree: Any) -> tuple[list[KeyPath], list[Any], Any]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [path for path, _ in leaves], [leaf for _, leaf in leaves], treedef


# How it enters a gradient, and leaves it.


def enter(tree: Any) -> Any:
    """Returns variables whose state has gradients that merge by maximum: what is differentiated.

    All other leaves stay as they are. State that has entered already stays, too.

    Raises:
        TypeError: a leaf of scaling state is not float32.
    """
    paths, leaves, treedef = _flatten(tree)
    return treedef.unflatten(_enter(Places.of(paths, leaves), leaves))


def _enter(places: Places, leaves: Sequence[Any]) -> list[Any]:
    leaves = list(leaves)
    new = [
        (pair, axis)
        for pair, axis in zip(places.pairs, places.axes)
        if not any(is_max_dtype(leaves[i]) for i in pair)
    ]
    states = [ScalingState(*(lax.stop_gradient(leaves[i]) for i in pair)) for pair, _ in new]
    for ((i, j), _), before, digest in zip(new, states, digests([axis for _, axis in new], states)):
        leaves[i], leaves[j] = digest, before.amax_history
    for i in places.others:
        leaves[i] = to_max_dtype(leaves[i])
    return leaves


def as_read(entered: Any) -> Any:
    """Returns what ``enter`` returned as a loss takes it, inside of the differentiated function.

    Only the shape of a history is read now. It has no gradient, and no arithmetic can use it.
    """
    paths, leaves, treedef = _flatten(entered)
    for _, j in find_pairs(paths):
        if not is_max_dtype(leaves[j]):
            leaves[j] = to_max_dtype(lax.stop_gradient(leaves[j]))
    return treedef.unflatten(leaves)


def leave(tree: Any, cotangents: Any) -> Any:
    """Returns cotangents with the next state in the place of those of the state.

    Args:
        tree: the variables that ``enter`` was given.
        cotangents: those of what ``enter`` returned.
    """
    paths, leaves, treedef = _flatten(tree)
    return treedef.unflatten(_leave(Places.of(paths, leaves), leaves, treedef.flatten_up_to(cotangents)))


def _leave(places: Places, leaves: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    left = list(cotangents)
    states = places.states(leaves)
    kept = next_states(places.axes, states, [left[i] for i, _ in places.pairs])
    for (i, j), after in zip(places.pairs, kept):
        left[i], left[j] = after
    for i in places.others:
        new = from_max_dtype(left[i])
        left[i] = jnp.where(lax.is_finite(new), new, leaves[i])
    return left


def merge_by_max(tree: Any) -> Any:
    """Returns ``as_read(enter(tree))``, whose derivative is ``leave``: for gradients that JAX takes.

    Call it once, inside the differentiated function and before ``apply``, as ``TrainState.apply_fn`` does.
    """
    paths, leaves, treedef = _flatten(tree)
    of_state = [i for i, found in enumerate(find_state(paths)) if found and not is_max_dtype(leaves[i])]
    not_entered = [leaves[i] for i in of_state]
    if not_entered:
        places = Places.of([paths[i] for i in of_state], not_entered)
        histories = {j for _, j in places.pairs}
        for k, (i, leaf) in enumerate(zip(of_state, _merged(places, not_entered))):
            if k not in histories:
                leaves[i] = leaf
    return as_read(treedef.unflatten(leaves))


# Derivation. The state is not differentiated: its cotangent is its next value.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _merged(places: Places, leaves: list[jax.Array]) -> list[jax.Array]:
    return _enter(places, leaves)


_merged.defvjp(
    lambda places, leaves: (_merged(places, leaves), leaves),
    lambda places, leaves, cotangents: (_leave(places, leaves, cotangents),),
)


def to_max(tree: Any) -> Any:
    """Casts the state in a tree to ``fp32_max_grad``; its gradient is not yet the state to keep.

    It is -inf where nothing contributed, and inf where a NaN or an Inf was seen, so that gradients of
    several calls can be merged by maximum.
    """
    return map_state(to_max_dtype, lambda x: x, tree)


def unmerge(tree: Any) -> Any:
    """Casts every leaf of ``tree`` that merges by maximum back to float32."""
    return jax.tree.map(from_max_dtype, tree)


# What becomes of it after a step.


def kept_state(old: Any, new: Any) -> Any:
    """Returns the scaling state to keep after a step, given the old state and its "gradient".

    Leaves that are not scaling state are taken from ``new``. State that got no gradient, or saw a NaN or
    an Inf, is taken from ``old``; so the result is always usable.

    Args:
        old: a tree of variables (or a bare collection) as it was before the step.
        new: the gradient with respect to it: same structure, scaling state in float32 or
            ``fp32_max_grad``.

    Raises:
        TypeError: a leaf of scaling state in ``new`` is not float32.
        ValueError: the structures or the shapes of the scaling state differ.
    """
    paths, old_leaves, leaves, treedef = leaves_of_both(old, new)
    places = Places.of(paths, old_leaves)
    olds, news = places.states(old_leaves), places.states(leaves)
    for group in groups_alike(places.axes, olds, news):
        of_group = _kept_alike(places.axes[group[0]], [olds[k] for k in group], [news[k] for k in group])
        for k, kept in zip(group, of_group):
            i, j = places.pairs[k]
            leaves[i], leaves[j] = kept
    return treedef.unflatten(leaves)


def leaves_of_both(old: Any, new: Any) -> tuple[list[KeyPath], list[Any], list[Any], Any]:
    """Returns the paths, the leaves of both trees, with the new state in float32, and the tree structure.

    The arguments and errors are those of ``kept_state``.
    """
    paths, old_leaves, treedef = _flatten(old)
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
    return paths, old_leaves, leaves, treedef


def groups_alike(axes: Sequence[int], *states: Sequence[ScalingState]) -> list[list[int]]:
    """Returns the places of states that can be one array: of one axis, one type and one sharding."""
    return groups((axis, *(kind_of(x) for s in each for x in s)) for axis, *each in zip(axes, *states))


@partial(jax.jit, static_argnums=0)
def _kept_alike(
    axis: int, olds: Sequence[ScalingState], news: Sequence[ScalingState]
) -> list[ScalingState]:
    return each_alike(partial(kept_of_tensor, axis=axis), olds, news, read_once=False)


def kept_of_tensor(old: ScalingState, new: ScalingState, axis: int) -> ScalingState:
    """Returns ``kept_state`` of one tensor, whose history runs along ``axis``."""
    return state.kept_state(old, new, lax.slice_in_dim(new.amax_history, 0, 1, axis=axis))


# By the id of a tracer, that of a leaf of scaling state after a step: it, and the leaf before the step.
_steps: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def remember_step(old: Any, new: Any) -> None:
    """Remembers, while they are traced, that the state in ``new`` is what a step leaves of ``old``.

    ``apply_gradients`` need not check such state again.

    Args:
        old: a tree of variables.
        new: the gradient with respect to it, whose scaling state is the one to keep.
    """
    paths, old_leaves, treedef = _flatten(old)
    for before, after, found in zip(old_leaves, treedef.flatten_up_to(new), find_state(paths)):
        if found and isinstance(before, jax.core.Tracer) and isinstance(after, jax.core.Tracer):
            place = id(after)
            _steps[place] = weakref.ref(after, partial(_forget, place)), weakref.ref(before)


def _forget(place: int, _: Any) -> None:
    _steps.pop(place, None)


def is_step(old: Any, new: Any) -> bool:
    """Returns whether one leaf is known to be what a step leaves of the other."""
    after, before = _steps.get(id(new), (None, None))
    return after is not None and before is not None and after() is new and before() is old


# Small helpers.


def map_state(f: Callable[..., Any], g: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps ``f`` over the leaves that are scaling state, and ``g`` over all others."""
    paths, leaves, treedef = _flatten(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    is_state = find_state(paths)
    return treedef.unflatten(
        [(f if s else g)(leaf, *more) for s, leaf, *more in zip(is_state, leaves, *others)]
    )


def split_state(variables: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns ``(the other collections, the scaling state)``; the state is None if there is none."""
    others = {k: v for k, v in variables.items() if k != OVERWRITE_WITH_GRADIENT}
    return others, variables.get(OVERWRITE_WITH_GRADIENT)


@contextmanager
def refusing_arithmetic(
    merged: Callable[[], Sequence[Any]], params: str, array_of: Callable[[Any], Any] = lambda x: x
) -> Iterator[None]:
    """A context in which arithmetic on scaling state raises a ``TypeError`` that names the leaf.

    JAX refuses the dtype, with many messages, and none names the leaf. So the leaf is looked up among the
    local variables of the functions that were running.

    Args:
        merged: returns trees, some of them of variables that have entered.
        params: the expression for the parameters, which are numbers.
        array_of: returns the array of a local variable that is a wrapper, else the variable itself.
    """
    try:
        yield
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        is_ours = frames[-1].f_globals.get("__name__", "").startswith("fp8flax.")
        if is_ours or not any(name in str(error) for name in (fp32_max_grad.name, MaxArray.__name__)):
            raise
        which = " or ".join(_leaves_in(frames, merged(), array_of)) or "of some layer"
        raise TypeError(
            f"The FP8 scaling state {which} was used as a number in the function that is differentiated. "
            "The gradient of the state is its next value there, so no arithmetic, comparison or cast can "
            f"use the state. For weight decay, norms and the like take {params}; read the state outside of "
            "the function."
        ) from error


def _leaves_in(
    frames: Sequence[FrameType], trees: Sequence[Any], array_of: Callable[[Any], Any]
) -> list[str]:
    """Returns the paths of the leaves that the innermost function with any has in its local variables."""
    flattened = [pair for tree in trees for pair in jax.tree_util.tree_flatten_with_path(tree)[0]]
    names = {id(leaf): path_str(path) for path, leaf in flattened if is_max_dtype(leaf)}
    for frame in reversed(frames):
        args = frame.f_locals.get("args")
        held = [*frame.f_locals.values(), *(args if isinstance(args, tuple) else ())]
        if found := dict.fromkeys(names[id(x)] for x in map(array_of, held) if id(x) in names):
            return list(found)
    return []

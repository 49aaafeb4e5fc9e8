"""The scaling state inside a tree of variables: where it lies, how it merges, what may replace it."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import GetAttrKey, KeyPath

from fp8flax._core.delayed import ScalingState, digests
from fp8flax._core.jax_rules import each_alike, kind_of
from fp8flax._core.max_dtype import (
    MaxArray,
    fp32_max_grad,
    from_max_dtype,
    is_max_dtype,
    packed,
    to_max_dtype,
)
from fp8flax._core.names import AMAX_HISTORY, OVERWRITE_WITH_GRADIENT, ROLES, SCALE

_LEAF_NAMES = frozenset(role + suffix for role in ROLES for suffix in (SCALE, AMAX_HISTORY))


def key_name(key: Any) -> Any:
    """Returns a dict key, an attribute's name or a position, whatever kind of node a path goes through."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key


def _names(path: KeyPath) -> tuple[Any, ...]:
    """Returns the names on a path; ``nnx.Variable`` and Linen's boxes have their array as ``value``."""
    if path and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return tuple(map(key_name, path))


def _partner(name: Any) -> str | None:
    """Returns the leaf name that must stand beside ``name`` for both to be scaling state."""
    if name not in _LEAF_NAMES:
        return None
    if name.endswith(SCALE):
        return name.removesuffix(SCALE) + AMAX_HISTORY
    return name.removesuffix(AMAX_HISTORY) + SCALE


def find_state(paths: list[KeyPath]) -> list[bool]:
    """Tells for each leaf whether it is scaling state.

    It is if it lies in the collection. So that the collection may also be an argument of its own, a pair
    of scale and amax history of the same role in one node counts too, except under ``params``.
    """
    names = set(map(_names, paths))

    def is_state(path: KeyPath) -> bool:
        *parent, name = _names(path) or (None,)
        if OVERWRITE_WITH_GRADIENT in parent:
            return True
        partner = _partner(name)
        return partner is not None and "params" not in parent and (*parent, partner) in names

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


def has_state(tree: Any) -> bool:
    """Tells whether any leaf of ``tree`` is scaling state."""
    return any(find_state([path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]))


def path_str(path: KeyPath) -> str:
    """Formats a tree path as ``a/b/c``."""
    return "/".join(map(str, _names(path)))


def check_state_dtype(path: KeyPath, leaf: Any) -> None:
    """Raises ``TypeError`` where a leaf of scaling state is not float32."""
    dtype = getattr(leaf, "dtype", None)
    if dtype != jnp.float32 and not is_max_dtype(leaf):
        raise TypeError(
            f"The scaling state at {path_str(path)} must be float32; got {dtype or type(leaf).__name__}. "
            f"Cast variables['params'] alone, or cast this leaf back with .astype(jnp.float32)."
        )


def merge_by_max(tree: Any, *, resolve: bool = True) -> Any:
    """Casts the scaling state in ``tree`` so that its gradients merge by maximum where it is used twice.

    Call it once, inside the differentiated function and before ``apply``; ``fp8flax.value_and_grad`` and
    ``TrainState.apply_fn`` do. Everything else in the tree is returned as it is.

    Args:
        tree: variables.
        resolve: whether the gradient is the state to keep. Otherwise it is what may be merged on with that
            of other calls: -inf where there was no contribution, inf for a NaN or an Inf.

    Raises:
        TypeError: a leaf of scaling state is not float32.
    """
    return merged_with_numbers(tree, resolve=resolve)[0]


def merged_with_numbers(tree: Any, *, resolve: bool = True) -> tuple[Any, list[jax.Array]]:
    """Returns what ``merge_by_max`` does, and numbers for ``differentiated_with``: none without state.

    Where the value that is differentiated goes through it, the gradient is the state to keep even if the
    value depends on no state at all.
    """
    paths, leaves, treedef = _flatten(tree)
    merged, numbers = list(leaves), []
    is_state = find_state(paths)
    for path, leaf, found in zip(paths, leaves, is_state):
        if found:
            check_state_dtype(path, leaf)
    places = {i for i, found in enumerate(is_state) if found and not is_max_dtype(leaves[i])}
    if resolve:
        pairs = {pair: history_axis(*(leaves[i] for i in pair)) for pair in find_pairs(paths)}
        pairs = {pair: axis for pair, axis in pairs.items() if axis is not None and places.issuperset(pair)}
        states = [ScalingState(leaves[i], leaves[j]) for i, j in pairs]
        made, number = digests(tuple(pairs.values()), states)
        numbers += [number] if pairs else []
        for (i, j), digest in zip(pairs, made):
            # Of the history only the shape is read.
            merged[i], merged[j] = digest, to_max_dtype(lax.stop_gradient(leaves[j]))
            places -= {i, j}
        for of_op in _stacked_ops(paths, {i: digest for (i, _), digest in zip(pairs, made)}):
            merged[of_op[0]] = packed([merged[i] for i in of_op])
    # What is left is state by its place alone, or a pair of which no axis is that of the history. In one
    # tree, by node and name, so that scale and history meet in its gradient.
    rest: dict[str, dict[str, Any]] = {}
    names = {i: path_str(paths[i]).rpartition("/") for i in sorted(places)}
    for i, (node, _, name) in names.items():
        rest.setdefault(node, {})[name] = leaves[i]
    if places:
        collection = {OVERWRITE_WITH_GRADIENT: rest}
        if resolve:
            collection, number = _cast_to_max(collection)
            numbers.append(number)
        else:
            collection = jax.tree.map(to_max_dtype, collection)
        rest = collection[OVERWRITE_WITH_GRADIENT]
    for i, (node, _, name) in names.items():
        merged[i] = rest[node][name]
    return treedef.unflatten(merged), numbers


def _stacked_ops(paths: list[KeyPath], digests: Mapping[int, jax.Array]) -> list[list[int]]:
    """Returns the places of the scales of each op whose layers are stacked, in the order of its roles."""
    nodes: dict[Any, dict[Any, int]] = {}
    for i, digest in digests.items():
        *node, name = _names(paths[i])
        if digest.ndim > 1:
            nodes.setdefault((*node, jax.typeof(digest)), {})[name] = i
    names = [role + SCALE for role in ROLES]
    return [[scales[name] for name in names] for scales in nodes.values() if scales.keys() >= set(names)]


@jax.custom_vjp
def _cast_to_max(state: Any) -> tuple[Any, jax.Array]:
    """Casts a collection to ``fp32_max_grad``; its gradient is the state to keep, poison resolved.

    The second result is a number, as that of ``digests``.
    """
    return jax.tree.map(to_max_dtype, state), jnp.zeros(())


def _cast_to_max_fwd(state: Any) -> Any:
    return _cast_to_max(state), state


def _cast_to_max_bwd(old: Any, cotangents: Any) -> Any:
    kept = next_state(old, cotangents[0])
    # A leaf that is no pair with another is not judged there; without a gradient it is -inf.
    return (jax.tree.map(lambda new, before: jnp.where(new == -jnp.inf, before, new), kept, old),)


_cast_to_max.defvjp(_cast_to_max_fwd, _cast_to_max_bwd)


def _flatten(tree: Any) -> tuple[list[KeyPath], list[Any], Any]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    return [path for path, _ in leaves], [leaf for _, leaf in leaves], treedef


def history_axis(scale: Any, history: Any) -> int | None:
    """Returns the axis of the history, wherever layers were stacked; None if the two do not fit."""
    if len(scale.shape) != len(history.shape):
        return None
    differing = [i for i, (one, length) in enumerate(zip(scale.shape, history.shape)) if one != length]
    axes = differing or [i for i, length in enumerate(history.shape) if length == 1]
    return axes[0] if axes and len(differing) <= 1 and scale.shape[axes[0]] == 1 else None


def alike(paths: list[KeyPath], *trees: Sequence[Any]) -> list[tuple[int | None, list[tuple[int, int]]]]:
    """Returns the pairs of ``find_pairs`` that can be one array, with the axis of their histories.

    Alike are those whose leaves in all of ``trees``, lists as ``paths``, have one type and one place.
    """
    groups: dict[Any, list[tuple[int, int]]] = {}
    for i, j in find_pairs(paths):
        kinds = tuple(kind_of(leaves[k]) for leaves in trees for k in (i, j))
        groups.setdefault((history_axis(trees[0][i], trees[0][j]), kinds), []).append((i, j))
    return [(axis, pairs) for (axis, _), pairs in groups.items()]


def map_state(f: Callable[..., Any], g: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps ``f`` over the leaves that are scaling state, and ``g`` over all others."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    is_state = find_state([path for path, _ in leaves])
    return treedef.unflatten(
        [(f if s else g)(leaf, *more) for s, (_, leaf), *more in zip(is_state, leaves, *others)]
    )


@contextmanager
def refusing_arithmetic(
    merged: Callable[[], Sequence[Any]], params: str, array_of: Callable[[Any], Any] = lambda x: x
) -> Iterator[None]:
    """A context in which arithmetic on scaling state raises a ``TypeError`` that names the leaf.

    JAX refuses the dtype, with many messages, all of which name the dtype or the class of arrays. None has
    the leaf: the leaf is looked up among the local variables of the functions that were running.

    Args:
        merged: returns trees, some of them of variables that ``merge_by_max`` has cast.
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


def unmerge(tree: Any) -> Any:
    """Casts every ``fp32_max_grad`` leaf of ``tree`` back to float32."""
    return jax.tree.map(from_max_dtype, tree)


@partial(jax.jit, static_argnums=2)
def _next_states(
    olds: Sequence[ScalingState], news: Sequence[ScalingState], poisonable: bool
) -> list[ScalingState]:
    """Returns ``_next_state`` of tensors of one shape, as one array: a GPU starts a few kernels for all."""
    return each_alike(partial(_next_state, poisonable=poisonable), olds, news, read_once=False)


def _next_state(old: ScalingState, new: ScalingState, poisonable: bool) -> ScalingState:
    """Returns ``new`` where it is a state that a step can produce, else ``old``.

    Shapes may have further axes (layers stacked by ``nn.scan``), each layer with a verdict of its own. A
    scale of 0, or one that is not finite, means that no gradient arrived. A newest amax that is not finite,
    which only a ``poisonable`` state can have, means that a NaN or Inf was seen. A finite scale below 0
    means that all gradients were negated, as for gradient ascent; the sign is undone.
    """
    is_negated = lax.is_finite(new.scale) & (new.scale < 0)
    new = ScalingState(*(jnp.where(is_negated, -leaf, leaf) for leaf in new))
    scale_ok = history_ok = lax.is_finite(new.scale) & (new.scale > 0)
    if poisonable:
        newest = new.amax_history
        for axis, (one, length) in enumerate(zip(new.scale.shape, new.amax_history.shape)):
            if one != length:  # the axis of the history, wherever the layers were stacked
                newest = lax.slice_in_dim(newest, 0, 1, axis=axis)
        history_ok = scale_ok & lax.is_finite(newest) & (newest >= 0)
    return ScalingState(
        jnp.where(scale_ok, new.scale, old.scale),
        jnp.where(history_ok, new.amax_history, old.amax_history),
    )


def next_state(old: Any, new: Any, *, poisonable: bool = True) -> Any:
    """Returns the scaling state to keep after a step, given the old state and its "gradient".

    Leaves that are not scaling state are taken from ``new``. State that got no gradient, or saw a NaN or
    an Inf, is taken from ``old``; so the result is always usable. The sign of negated state is undone.

    Args:
        old: a tree of variables (or a bare collection) as it was before the step.
        new: the gradient with respect to it: same structure, scaling state in float32 or
            ``fp32_max_grad``.
        poisonable: whether ``new`` may hold what a merge by maximum says of a NaN or Inf. The gradients of
            ``merge_by_max`` do not; those of a plain cast do.

    Raises:
        TypeError: a leaf of scaling state in ``new`` is not float32.
        ValueError: the structures or the shapes of the scaling state differ.
    """
    old_leaves, treedef = jax.tree_util.tree_flatten_with_path(old)
    new_leaves = treedef.flatten_up_to(new)
    index = {path: i for i, (path, _) in enumerate(old_leaves)}
    for (path, i), is_state in zip(index.items(), find_state(list(index))):
        if not is_state:
            continue
        old_leaf = old_leaves[i][1]
        check_state_dtype(path, new_leaves[i])
        new_leaves[i] = from_max_dtype(new_leaves[i])
        if new_leaves[i].shape != old_leaf.shape:
            raise ValueError(
                f"The scaling state at {path_str(path)} has shape {old_leaf.shape}, its new value "
                f"{new_leaves[i].shape}. Pass the gradient with respect to the same variables."
            )
    for _, pairs in alike(list(index), [leaf for _, leaf in old_leaves], new_leaves):
        olds = [ScalingState(old_leaves[i][1], old_leaves[j][1]) for i, j in pairs]
        news = [ScalingState(new_leaves[i], new_leaves[j]) for i, j in pairs]
        for (i, j), kept in zip(pairs, _next_states(olds, news, poisonable)):
            new_leaves[i], new_leaves[j] = kept
    return treedef.unflatten(new_leaves)


# By the id of a tracer, that of a leaf of scaling state after a step: it, and the leaf before the step.
_steps: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def remember_step(old: Any, new: Any) -> None:
    """Remembers, for as long as they are traced, that ``new`` is what a step leaves of ``old``.

    Args:
        old: a tree of variables.
        new: the gradient with respect to it, whose scaling state is the one to keep.
    """
    old_leaves, treedef = jax.tree_util.tree_flatten_with_path(old)
    is_state = find_state([path for path, _ in old_leaves])
    for (_, before), after, found in zip(old_leaves, treedef.flatten_up_to(new), is_state):
        if found and isinstance(before, jax.core.Tracer) and isinstance(after, jax.core.Tracer):
            place = id(after)
            forget = partial(_forget, place)
            _steps[place] = weakref.ref(after, forget), weakref.ref(before)


def _forget(place: int, _: Any) -> None:
    _steps.pop(place, None)


def is_step(old: Any, new: Any) -> bool:
    """Tells whether one leaf is known to be what a step leaves of the other."""
    after, before = _steps.get(id(new), (None, None))
    return after is not None and before is not None and after() is new and before() is old


def split_state(variables: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Returns ``(the other collections, the scaling state)``; the state is None where there is none."""
    others = {k: v for k, v in variables.items() if k != OVERWRITE_WITH_GRADIENT}
    return others, variables.get(OVERWRITE_WITH_GRADIENT)

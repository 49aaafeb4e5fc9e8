"""Checks whether a step can produce a scaling state, and detects what other arithmetic changed in it."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import vary_alike
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, STATE_LEAF_NAMES
from fp8flax._core.scaling import SMALLEST_SCALE, floor_power_of_two, push_amax
from fp8flax._core.state.batching import each_alike
from fp8flax._core.state.state import ScalingState
from fp8flax._core.state.tree import (
    Places,
    find_pairs,
    find_state,
    history_axis,
    is_step,
    kept_along,
    leaves_of_both,
    path_str,
)

WHAT_TO_CALL = (
    "Do not treat the scaling state as a gradient. Compute gradients with fp8flax.value_and_grad, scale "
    "the loss with fp8flax.DynamicScale, average over devices with fp8flax.pmean_gradients and over "
    "microbatches with fp8flax.accumulate_gradients, and clip with optax.clip_by_global_norm in tx. In "
    "your own arithmetic change the parameters only: grads = {**grads, 'params': …}."
)


def checked_next_state(old: Any, new: Any, owner: str, what_to_do: str) -> Any:
    """Returns the scaling state after a step, from ``overwrite``; raises an error if that refused a leaf.

    Args:
        old: the collection before the step.
        new: its "gradient".
        owner: what the old state belongs to, for errors.
        what_to_do: the end of errors, as sentences.

    Raises:
        TypeError: a leaf of ``new`` is not float32.
        ValueError: ``new`` is the state of other layers, or other arithmetic changed it.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "The gradient of the scaling state has another structure than the state: "
            f"{jax.tree.structure(new)} instead of {jax.tree.structure(old)}. {what_to_do}"
        )
    kept, refused = overwrite(old, new)
    if refused:
        raise ValueError(
            f"The gradient of {refused[0]} (and of {len(refused) - 1} more) is not the next state: its "
            f"past amaxes are not those of {owner}. It was scaled, clipped, averaged or added up with the "
            f"other gradients, or belongs to other variables. {what_to_do}"
        )
    return kept


def overwrite(old: Any, new: Any) -> tuple[Any, list[str]]:
    """Returns the next state as ``kept_tree`` does, but undoes a loss scale, and keeps no invalid state.

    A history is valid if it is one of these:

    * Moved: a step enters one amax. All other entries are entries of the old history, where ``push_amax``
      puts them. If the old history is all zeros, the step keeps the old scale, and the scales are compared,
      too.
    * Unmoved: the old history stays if no gradient arrived, or if the data held a NaN.
    * Merged: ``pmean_gradients`` returns the maximum of the first two if one device kept its history.

    Flax's ``DynamicScale`` divides all gradients by a power of two, and so also the state. Such a state is
    multiplied by this power again. If the new state is anything else, the old state is kept.

    Args:
        old: a tree of variables (or a bare collection) as it was before the step.
        new: the gradient with respect to ``old``; see ``kept_tree``.

    Returns:
        The tree, and the paths of the histories that were refused. None is reported under a trace, or if
        the values are not replicated on all devices.

    Raises:
        TypeError: a leaf of scaling state in ``new`` is not float32.
        ValueError: the structures or the shapes of the scaling state differ.
    """
    flat, treedef = jax.tree.flatten(old)
    if all(map(is_step, flat, treedef.flatten_up_to(new))):
        return new, []
    paths, old_leaves, leaves, treedef = leaves_of_both(old, new)
    places = Places.of(paths, old_leaves)
    olds, news = places.states(old_leaves), places.states(leaves)
    compared = each_alike(_compared, places.axes, olds, news, loops=True)
    befores, comparisons = zip(*compared) if compared else ((), ())
    afters = each_alike(_state_to_keep, places.axes, befores, news, comparisons, in_parts=True, loops=True)
    refused = []
    for (i, j), after, (factor, _) in zip(places.pairs, afters, comparisons):
        leaves[i], leaves[j] = after
        is_known = not isinstance(factor, jax.core.Tracer) and factor.is_fully_replicated
        if is_known and not np.all(np.asarray(factor) > 0):
            refused.append(path_str(paths[j]))
    return treedef.unflatten(leaves), refused


class _Comparison(NamedTuple):
    """Result of comparing the new state of one tensor with the old; both fields have shape ``(..., 1)``.

    Stacked layers have one result each.
    """

    factor: jax.Array
    """The factor that multiplied the new state; 0 if no step can produce the new state."""
    is_unmoved: jax.Array
    """Whether the new history is the old one, times the factor."""


def _compared(old: ScalingState, new: ScalingState, axis: int) -> tuple[ScalingState, _Comparison]:
    """Returns the old state, which a GPU then reads once (see ``each_alike``), and the comparison."""
    return old, _compare(_with_axis_last(old, axis), _with_axis_last(new, axis))


def _state_to_keep(
    old: ScalingState, new: ScalingState, comparison: _Comparison, axis: int
) -> ScalingState:
    """Returns the state of one tensor to keep after the step, given the comparison of ``new`` with ``old``.

    The state depends on the factor:

    * 0: the old state.
    * 1: the new state.
    * Any other factor: the new state, divided by the factor. Its past amaxes are taken from the old
      history, because the factor may have made those of the new history 0.
    """
    factor, is_unmoved = comparison
    old, new = _with_axis_last(old, axis), _with_axis_last(new, axis)
    new = kept_along(old, new, -1)
    before, after = _finite(old.amax_history, new.amax_history)
    divisor = jnp.where(factor > 0, factor, 1.0)
    moved = push_amax(after[..., 0] / divisor[..., 0], before)
    divided = jnp.where(is_unmoved, old.amax_history, moved)
    undone = ScalingState(new.scale / divisor, jnp.where(factor == 1, new.amax_history, divided))
    kept = (jnp.where(factor == 0, x, y) for x, y in zip(old, undone))
    return ScalingState(*(jnp.moveaxis(x, -1, axis) for x in kept))


def _with_axis_last(state: ScalingState, axis: int) -> ScalingState:
    """Returns a state whose history runs along the last axis."""
    return ScalingState(*(jnp.moveaxis(x, axis, -1) for x in state))


def _compare(old: ScalingState, new: ScalingState) -> _Comparison:
    """Compares the new state of one tensor with the old. Histories have shape ``(..., length)``.

    ``overwrite`` describes the valid histories: moved, unmoved and merged. The factor is 1 if the new
    history is one of them. It is smaller if a loss scale has divided a moved or an unmoved history, and the
    scale with it. It is 0 for any other state.
    """
    is_negative = _is_negative(new.scale) | jnp.any(_is_negative(new.amax_history), -1, keepdims=True)
    new = kept_along(old, new, -1)
    before, after = _finite(old.amax_history, new.amax_history)

    # Moved: past amaxes are those before, one entry on. The amax of the step, at index 0, can be any.
    is_past = lax.broadcasted_iota(np.int32, before.shape, before.ndim - 1) > 0
    moved = push_amax(jnp.zeros_like(before[..., 0]), before)
    factor_if_moved = _factor(moved, jnp.where(is_past, after, 0.0))
    # After a history of zeros, moved, unmoved and merged look alike, and no amax shows the factor. But the
    # step keeps the scale, so the scales show it. The other two cases are left out.
    is_first = jnp.max(before, -1, keepdims=True) < SMALLEST_SCALE
    kept_scale = jnp.where(lax.is_finite(old.scale) & (old.scale > 0), old.scale, 1.0)
    factor_if_moved *= jnp.where(is_first, _factor(kept_scale, new.scale), 1.0)

    # Unmoved: all entries are those before.
    factor_if_unmoved = _factor(before, after)
    is_unmoved = ~is_first & (factor_if_unmoved > 0)

    # Merged: all entries are the maximum of both, but the amax of the step can be larger.
    merged = jnp.maximum(moved, before)
    fits = jnp.where(is_past, _normal(after) == _normal(merged), after >= merged)
    is_merged = ~is_first & jnp.all(fits, -1, keepdims=True)

    factor = jnp.where(is_unmoved, factor_if_unmoved, factor_if_moved)
    factor = jnp.where((factor_if_moved == 1) | is_merged, 1.0, factor)
    return _Comparison(jnp.where(is_negative, 0.0, factor), is_unmoved)


def _is_negative(x: jax.Array) -> jax.Array:
    """Returns whether a scale or an amax is finite and negative, so that no step can produce it.

    A scale of 0, NaN or Inf means that no gradient arrived. An amax of NaN or Inf means a NaN or an Inf in
    the data, or no data.
    """
    return lax.is_finite(x) & (x < 0)


def _finite(*histories: jax.Array) -> list[jax.Array]:
    """Returns histories in which a NaN or an Inf counts as 0, and that vary over the same manual axes."""
    return [jnp.where(lax.is_finite(h), h, 0.0) for h in vary_alike(*histories)]


def _factor(before: jax.Array, after: jax.Array) -> jax.Array:
    """Returns the power of two, at most 1, that multiplied ``before``; 0 if there is none.

    The largest entries along the last axis determine the factor. All others must have it, too. The factor
    is 1 if all entries are 0.
    """
    before, after = _normal(before), _normal(after)
    largest, largest_after = (jnp.max(x, -1, keepdims=True) for x in (before, after))
    quotient = largest_after / jnp.where(largest > 0, largest, 1.0)
    power = floor_power_of_two(quotient)
    factor = jnp.where((largest == 0) & (largest_after == 0), 1.0, power)
    fits = jnp.all(_normal(before * factor) == after, -1, keepdims=True) & (factor <= 1)
    return jnp.where(fits, factor, 0.0)


def _normal(x: jax.Array) -> jax.Array:
    """Returns 0 in the place of subnormal numbers, which some devices flush to 0."""
    return jnp.where(x < SMALLEST_SCALE, 0.0, x)


def check_state(variables: Any, before: Any = None) -> None:
    """Raises ``ValueError`` if FP8 scaling state was changed by something other than training with FP8.

    Call it outside of ``jax.jit``, after one or two steps of a training loop that is not from this package.
    It detects state that never moved, that an optimizer or an average over steps changed, or that was cast,
    scaled or clipped. It does not detect an average over devices or microbatches, which changes the
    newest amax only: a mean instead of a maximum.

    Args:
        variables: a tree that holds the collection ``_overwrite_with_gradient``, such as
            ``TrainState.params``, or the collection itself, as JAX or NumPy arrays.
        before: the same tree before one step, with which past amaxes are compared; None checks
            ``variables`` alone.

    Raises:
        TypeError: the values are traced, or the arguments are not of one kind.
        ValueError: the state is wrong; the message lists five leaves at most, and says what to do.

    Warns:
        UserWarning: there is no state; or some histories are all zeros, or did not move, while others did.
            Those layers took no part in the step, or their output gradients are zero.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer, x = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp), jnp.ones((2, 4))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> grads = fp8.grad(lambda v: jnp.sum(layer.apply(v, x)))(variables)
        >>> fp8.check_state({**variables, "_overwrite_with_gradient": grads["_overwrite_with_gradient"]})
        >>> fp8.check_state(jax.tree.map(lambda v, g: v - 0.1 * g, variables, grads), before=variables)
        Traceback (most recent call last):
        ...
        ValueError: The FP8 scaling state is not what training leaves...
    """
    if before is not None and hasattr(before, "opt_state") != hasattr(variables, "opt_state"):
        got = f"{type(variables).__name__} and {type(before).__name__}"
        raise TypeError(
            f"variables and before must be trees of one kind; got {got}. Pass state.params of a TrainState."
        )
    state, pairs = _state_of(variables)
    old_state, _ = _state_of(before)
    if not (state or old_state):
        warnings.warn(
            "check_state found no FP8 scaling state, so nothing was checked. Pass variables with the "
            f"collection {OVERWRITE_WITH_GRADIENT!r}. (Recipes without delayed scaling have no state.)",
            stacklevel=2,
        )
    # A leaf that is not in `before` gets the shape (), which ``_wrong_shapes`` reports.
    earlier = dict.fromkeys(state, np.empty(())) | old_state
    paired = {path for pair in pairs for path in pair}
    problems = [
        f"{path} is {leaf.dtype}, not float32: cast variables['params'] alone."
        for path, leaf in state.items()
        if leaf.dtype != np.float32
    ]
    lost = [path for path in old_state if path not in state]
    problems += [f"{path} is in `before` only: the loop must keep it." for path in lost]
    problems += [f"{path} lacks its scale or history: keep both." for path in state if path not in paired]
    unmoved: list[str] = []
    partly_zero: list[str] = []
    for scale, history in pairs:
        new = ScalingState(state[scale], state[history])
        old = None if before is None else ScalingState(earlier[scale], earlier[history])
        if wrong := _wrong_shapes(new, old):
            problems.append(f"{history} {wrong}")
        elif new.scale.dtype == new.amax_history.dtype == np.float32:
            seen = jax.device_get(_inspect(new, old, history_axis(*new)))
            problems += [
                f"{path} {wrong}" for path, wrong in zip((scale, history), _wrong_values(seen)) if wrong
            ]
            if not seen.moves:
                unmoved.append(history)
            elif seen.zeros:
                partly_zero.append(f"{history} ({seen.zeros} of {seen.layers} layers)")
    if len(problems) > _LISTED:
        problems[_LISTED:] = [f"and {len(problems) - _LISTED} more."]
    if unmoved and len(unmoved) == len(pairs):
        problems.append(
            "No history has moved. The next state is the gradient of the old one, and the loop must keep "
            "it, as TrainState does. A mutable collection that `apply` returns holds the old state."
        )
    if problems:
        what = "\n- ".join(["The FP8 scaling state is not what training leaves:", *problems])
        raise ValueError(f"{what}\n{WHAT_TO_CALL}")
    if unmoved or partly_zero:
        warnings.warn(
            f"The FP8 scaling state {', '.join(unmoved + partly_zero)} did not move, or holds only zeros. "
            "Its layers took no part in the step, or their output gradients are zero.",
            stacklevel=2,
        )


def _wrong_shapes(new: ScalingState, old: ScalingState | None) -> str | None:
    """Returns the error in the shapes of a tensor's state, or None."""
    axis = history_axis(*new)
    if axis is None or new.amax_history.shape[axis] == 0:
        return (
            f"has shape {new.amax_history.shape}, but its scale has shape {new.scale.shape}: they must "
            "agree except for the length of the history. Restore both from one checkpoint."
        )
    if old is not None and [leaf.shape for leaf in old] != [leaf.shape for leaf in new]:
        return "is not in `before`, or has another shape there: pass the same variables."
    return None


_LISTED = 5
_NOT_A_STEP = "It was changed by something other than a step: an optimizer, an average or a loss scale."


def _wrong_values(seen: _Findings) -> tuple[str | None, str | None]:
    """Returns the error in the values of the scale and that of the history, each a sentence or None."""
    scale = None if seen.is_scale else f"is not positive and finite. {_NOT_A_STEP}"
    if not seen.is_history:
        return scale, f"has entries that are negative or not finite. {_NOT_A_STEP}"
    if seen.factor == 0:
        return scale, (
            f"has past entries other than those of `before`. {_NOT_A_STEP} Or more than one step was taken "
            "since `before`."
        )
    return scale, None if seen.factor == 1 else f"was multiplied by {seen.factor}. {_NOT_A_STEP}"


def _state_of(variables: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns the leaves of scaling state by path, and the paths of each scale and its history.

    Raises:
        TypeError: a leaf is traced, so it has no value.
    """
    leaves = jax.tree_util.tree_flatten_with_path(variables)[0]
    paths = [path for path, _ in leaves]
    state = {}
    for (path, leaf), is_state in zip(leaves, find_state(paths)):
        if is_state and path_str(path).rpartition("/")[-1] in STATE_LEAF_NAMES:
            state[path_str(path)] = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in state.values()):
        raise TypeError(
            "check_state needs values, and these are traced. Call it outside of jax.jit, on the result of "
            "a step."
        )
    return state, [(path_str(paths[i]), path_str(paths[j])) for i, j in find_pairs(paths)]


class _Findings(NamedTuple):
    """Facts about the state of one tensor in all of its layers, as scalars that every process can read."""

    is_scale: Any
    """Whether all scales are positive and finite."""
    is_history: Any
    """Whether all amaxes are finite and not negative."""
    layers: Any
    """The number of layers."""
    zeros: Any
    """The number of layers that have a history of zeros."""
    factor: Any
    """The smallest factor of ``_Comparison``."""
    moves: Any
    """Whether the history holds an amax and differs from the one before.

    A history that holds one amax everywhere counts as moved: a step may leave it unchanged."""


@partial(jax.jit, static_argnums=2)
def _inspect(new: ScalingState, old: ScalingState | None, axis: int) -> _Findings:
    """Returns the facts about a new state; ``old`` is the state before one step, or None if unknown."""
    scale, history = new
    largest, smallest = jnp.max(history, axis), jnp.min(history, axis)
    factor, moves = jnp.ones(()), jnp.any(largest > 0)
    if old is not None:
        factor = jnp.min(_compared(old, new, axis)[1].factor)
        moves &= jnp.any(history != old.amax_history) | jnp.all(largest == smallest)
    return _Findings(
        is_scale=jnp.all(lax.is_finite(scale) & (scale > 0)),
        is_history=jnp.all(lax.is_finite(history) & (history >= 0)),
        layers=np.int32(largest.size),
        zeros=jnp.sum((largest == 0) & (smallest == 0)),
        factor=factor,
        moves=moves,
    )

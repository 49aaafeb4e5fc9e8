"""Checks whether a training step can produce a scaling state; a wrong state is an error, or becomes NaN."""

from __future__ import annotations

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._compat.provenance import is_arithmetic, is_made_from
from fp8flax._core.axes import vary_alike
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.scaling import is_usable
from fp8flax._core.state.state import ScalingState, kept_state, next_state_of
from fp8flax._core.state.tree import StateTree, path_str
from fp8flax._core.types import PyTree

_WHAT_TO_CALL = (
    "Do not treat the scaling state as a gradient. Compute gradients with fp8flax.value_and_grad, scale "
    "the loss with fp8flax.DynamicScale, average over devices with fp8flax.pmean_gradients and over "
    "microbatches with fp8flax.accumulate_gradients, and clip with optax.clip_by_global_norm in tx. (NNX: "
    "fp8flax.nnx.) In your own arithmetic change only the gradients of the parameters: grads['params'] in "
    "Linen, nnx.split_state(grads, fp8flax.nnx.OverwriteWithGradient, ...)[1] in NNX, "
    "fp8flax.split_state(grads)[1] without Flax."
)


def checked_next_state(old: PyTree, new: PyTree) -> PyTree:
    """Returns the scaling state after a step; if no step can make it, raises an error or writes NaN.

    A step moves the past amaxes of a history on by one place, or leaves them (no gradient, or a NaN or an
    Inf in the data). ``pmean_gradients`` returns the maximum of both. So each past amax is the old one of
    its place, or the one that moves there; the newest can be any. The scale is the old one, or follows from
    the old history. NaN is written if values are not known, as under ``jax.jit``. There the program
    often shows that a step made the new state of the old one: then values are not looked at. Or it shows a
    sum over microbatches or devices, or a clip, whose values may be those of a step: then NaN is written.
    """
    shapes, new_shapes = (
        [(path_str(path), np.shape(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (old, new)
    )
    if shapes != new_shapes:
        raise ValueError(
            "The gradient of the scaling state has another structure than the state, or other shapes: "
            f"{new_shapes} instead of {shapes}. {_WHAT_TO_CALL}"
        )
    found, old_leaves = StateTree.of(new), jax.tree.leaves(old)
    # In a traced program most states are results of ``next_state_of`` the old ones, and need no check.
    name = next_state_of.__name__
    found = found.where(
        [not all(is_made_from(old_leaves[i], found.leaves[i], name) for i in pair) for pair in found.pairs]
    )
    olds, news = found.states(old_leaves), found.states()
    fits_of_all = [
        jnp.zeros_like(fits) if any(is_arithmetic(found.leaves[i]) for i in pair) else fits
        for pair, fits in zip(found.pairs, map(_can_follow, olds, news))
    ]
    wrong = [
        path
        for path, fits in zip(found.histories(), fits_of_all)
        if not (_is_unknown(fits) or np.all(fits))
    ]
    if wrong:
        raise ValueError(
            f"The gradient of {wrong[0]} (and of {len(wrong) - 1} more) is not the next state: one step "
            "cannot make it of the old state. It was scaled, clipped, averaged or added up with the other "
            f"gradients, or belongs to other variables. {_WHAT_TO_CALL}"
        )
    return found.replaced(list(map(_after, olds, news, fits_of_all)))


def _is_unknown(x: object) -> bool:
    """Returns whether this process does not know the value of an array."""
    if not isinstance(x, jax.Array):
        return not isinstance(x, np.ndarray)
    return isinstance(x, jax.core.Tracer) or not (x.is_fully_addressable or x.is_fully_replicated)


def _kept(old: ScalingState, new: ScalingState) -> ScalingState:
    """Returns ``new`` where it is valid, and ``old`` elsewhere."""
    return kept_state(old, new, new.amax_history[..., :1])


@jax.jit
def _after(old: ScalingState, new: ScalingState, fits: jax.Array) -> ScalingState:
    """Returns the next state of one tensor; the old one with a NaN scale if no step can make ``new``."""
    marked = old._replace(scale=jnp.full_like(old.scale, np.nan))
    return jax.tree.map(partial(jnp.where, fits), _kept(old, new), marked)


@jax.jit
def _can_follow(old: ScalingState, new: ScalingState) -> jax.Array:
    """Returns whether one step can make ``new`` of ``old``, see ``checked_next_state``.

    The result has the shape of the scale: stacked layers have one result each.
    """
    kept = _kept(old, new)
    before, after = vary_alike(_normal(old.amax_history), _normal(kept.amax_history))
    moved = jnp.roll(before, -1, -1)
    is_newest = lax.broadcasted_iota(np.int32, before.shape, before.ndim - 1) == 0
    is_next = is_newest | (after == before) | (after == moved)
    amaxes = jnp.concatenate([before.max(-1, keepdims=True), before[..., :1]], -1)
    old_scale = jnp.where(is_usable(old.scale), old.scale, 1.0)
    fits = (kept.scale == old_scale) | _is_scale_of(kept.scale, amaxes)
    # A number that is not finite says that there was no gradient, no data, or a NaN or an Inf in the data.
    is_negative = [lax.is_finite(x) & (x < 0) for x in (new.scale, new.amax_history[..., :1])]
    return fits.any(-1, keepdims=True) & is_next.all(-1, keepdims=True) & ~(is_negative[0] | is_negative[1])


def _normal(x: jax.Array) -> jax.Array:
    """Returns 0 in the place of a NaN, an Inf or a subnormal number, which some devices flush to 0."""
    return jnp.where(is_usable(x), x, 0.0)


def _is_scale_of(scale: jax.Array, amax: jax.Array) -> jax.Array:
    """Returns whether ``scale`` follows from ``amax``, for some FP8 dtype and margin.

    A scale is an amax divided by the largest value of an FP8 dtype, which is 1.75 or 1.875 times a power of
    two, and times a power of two, the margin. Or it is a power of two itself. A margin that would make it
    infinite makes it the largest number of float32.
    """
    # The quotient of the mantissas cannot overflow. It has the mantissa of ``amax / scale``.
    of_scale = _mantissa(scale)
    mantissa = _mantissa(_mantissa(amax) / jnp.where(of_scale == 0, 1.0, of_scale))
    # The mantissas are from 0.5 to 1. They may differ by eight units in the last place.
    follows = [jnp.abs(mantissa - x) <= np.float32(2**-21) for x in np.array([1.75, 1.875], np.float32) / 2]
    is_by_itself = (of_scale == 0.5) | (scale == jnp.finfo(jnp.float32).max)
    return (of_scale > 0) & (follows[0] | follows[1] | (is_by_itself & (amax > 0)))


def _mantissa(x: jax.Array) -> jax.Array:
    """Returns the mantissas of normal positive float32 numbers, from 0.5 to 1, and 0 for all others."""
    # 23 bits of the mantissa, and the exponent of 0.5. (``jnp.frexp`` compares with an Inf, to which
    # ``jax_debug_infs`` objects.)
    bits = lax.bitcast_convert_type(x, jnp.int32) & np.int32(2**23 - 1) | np.int32(126 << 23)
    return jnp.where(is_usable(x), lax.bitcast_convert_type(bits, jnp.float32), 0.0)


def check_state(variables: PyTree, before: PyTree = None) -> None:
    """Raises ``ValueError`` if something other than training with FP8 has changed the scaling state.

    Call it outside of ``jax.jit``, after a step of a loop of your own, or if a loss is NaN. It detects

    * a scale of NaN, which ``apply_gradients`` writes under ``jax.jit`` for a state that no step can make
    * a state that never moved, that was cast, or that an optimizer changed
    * with ``before``: past amaxes that were scaled, clipped or averaged over steps
    * a scale that does not follow from its history, such as the average of two; without ``before`` only in
      a young run, while the older half of the history is empty

    It cannot detect a change of the newest amax alone: a mean over devices or microbatches instead of the
    maximum (use ``pmean_gradients``, ``accumulate_gradients``), or ``jnp.clip`` of each element. (Under
    ``jax.jit``, ``apply_gradients`` and ``merge_state`` see them if the same program computes them.)

    Args:
        variables: an NNX module, or a tree that holds scaling state, such as ``TrainState.params``, the
            collection ``_overwrite_with_gradient``, or a model with states of ``init_state``.
        before: the same exactly one step earlier, for an NNX module its ``nnx.clone``.

    Raises:
        TypeError: scaling state is not float32.
        ValueError: the state is wrong; the message says what to do.

    Warns:
        UserWarning: there is no state; or some histories are all zeros, or did not move.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> fp8.check_state(layer.init(jax.random.key(0), jnp.ones((2, 4))))
        Traceback (most recent call last):
        ...
        ValueError: No history has moved...

    Source: ``flax.linen.fp8_ops``, for how a step changes the state.
    """
    new, old = _states(variables), _states(before)
    if not (new or old):
        warnings.warn(
            "check_state found no FP8 scaling state, so nothing was checked. Pass variables with the "
            f"collection {OVERWRITE_WITH_GRADIENT!r}. (Recipes without delayed scaling have no state.)",
            stacklevel=2,
        )
        return
    if before is not None and (others := new.keys() ^ old.keys()):
        raise ValueError(f"{min(others)} is not in both `variables` and `before`, one step earlier.")
    problem, moves = _inspected(new, old)
    if not problem and not any(map(np.any, moves.values())):
        problem = (
            "No history has moved. The next state is the gradient of the old one, and the loop must keep "
            "it, as fp8flax.TrainState and fp8flax.nnx.Optimizer do. (A mutable collection that `apply` "
            "returns holds the old state.)"
        )
    if problem:
        raise ValueError(f"{problem} {_WHAT_TO_CALL}")
    if unmoved := [path for path, moved in moves.items() if not np.all(moved)]:
        warnings.warn(
            f"The FP8 scaling state {', '.join(unmoved)} did not move, or holds only zeros. "
            "Its layers took no part in the step, or their output gradients are zero.",
            stacklevel=2,
        )


def warn_if_damaged(state: PyTree, advice: str, stacklevel: int) -> None:
    """Warns about a collection of scaling state that no training leaves, if its values are known."""
    if any(map(_is_unknown, jax.tree.leaves(state))):
        return
    with jax.ensure_compile_time_eval():  # jax.eval_shape may trace a freeze of known state
        problem, _ = _inspected(_states({OVERWRITE_WITH_GRADIENT: state}), {})
    if problem:
        warnings.warn(f"{problem} {advice}", stacklevel=stacklevel)


def _states(variables: PyTree) -> dict[str, ScalingState]:
    """Returns the state of each tensor, with past amaxes on the last axis, by the path of the history."""
    found = StateTree.of(variables)
    return dict(zip(found.histories(), found.states()))


_WRONG = {
    "is_no_number": "a scale is not positive and finite, or entries are negative or not finite. An "
    "optimizer or a NaN changed the state. Or under jax.jit no step could make the new state, because it "
    "was scaled, clipped, averaged or added up with the gradients: then the scale is NaN.",
    "is_no_step": "past entries are not those of `before`, or a scale does not follow from its history. "
    "`before` must be exactly one step earlier. If it is, an optimizer, arithmetic with gradients, or an "
    "average over steps changed the state. (If add_fp8_state has just changed its length, take a step.)",
}


def _inspected(
    new: dict[str, ScalingState], old: dict[str, ScalingState]
) -> tuple[str, dict[str, np.ndarray]]:
    """Returns a message about the first kind of wrong state, if any; and by path which histories moved."""
    found = {path: jax.device_get(_inspect(state, old.get(path))) for path, state in new.items()}
    problem = ""
    for kind, what in reversed(_WRONG.items()):
        if paths := [path for path, one in found.items() if np.any(one[kind])]:
            and_more = f" (and of {len(paths) - 1} more tensors)" if paths[1:] else ""
            problem = f"The FP8 scaling state {paths[0]}{and_more} is not what training leaves: {what}"
    return problem, {path: one["moves"] for path, one in found.items()}


@jax.jit
def _inspect(new: ScalingState, old: ScalingState | None) -> dict[str, jax.Array]:
    """Returns whether each kind of ``_WRONG`` is true of each stacked layer, and whether its history moved.

    A history has moved if it holds an amax and differs from the one before. A history that holds one amax
    everywhere counts as moved: a step may leave it unchanged.
    """
    scale, history = new
    entries_are_numbers = (lax.is_finite(history) & (history >= 0)).all(-1, keepdims=True)
    # The scale follows from the past amaxes. The oldest of them has left the history, so the scale may
    # follow from an amax that nobody sees any more. But in a run that is younger than the history it was 0,
    # and so is the older half of the others: after three steps, 8 entries are [a3, 0, 0, 0, 0, 0, a1, a2],
    # the newest first, then from the oldest on. It takes four zeros at least, because a tensor that is zero
    # for a few steps leaves zeros in an older run.
    past = _normal(history[..., 1:])
    half = (past.shape[-1] + 1) // 2
    is_young = (past[..., :half] == 0).all(-1, keepdims=True) & (past != 0).any(-1, keepdims=True)
    # The amax can be any: the newest after ``calibrate``, or an older one if those after it are 0.
    follows = ~is_young | (half <= 3) | _is_scale_of(scale, _normal(history)).any(-1, keepdims=True)
    largest = history.max(-1, keepdims=True, initial=0)
    moves = largest > 0
    if old is not None:
        follows &= _can_follow(old, new)
        # A NaN or an Inf in the data leaves the history, but not the scale.
        is_unchanged = (scale == old.scale) & (history == old.amax_history).all(-1, keepdims=True)
        moves = ~is_unchanged | (moves & (history == largest).all(-1, keepdims=True))
    is_number = lax.is_finite(scale) & (scale > 0) & entries_are_numbers
    return {"is_no_number": ~is_number, "is_no_step": ~follows, "moves": moves}

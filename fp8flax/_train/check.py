"""Checks whether a training step can produce a scaling state; a wrong state is an error, or becomes NaN."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import vary_alike
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.scaling import is_usable, push_amax
from fp8flax._core.state.batching import each_alike
from fp8flax._core.state.state import ScalingState, kept_state
from fp8flax._core.state.tree import (
    Places,
    flatten,
    new_leaves,
    path_str,
)

WHAT_TO_CALL = (
    "Do not treat the scaling state as a gradient. Compute gradients with fp8flax.value_and_grad, scale "
    "the loss with fp8flax.DynamicScale, average over devices with fp8flax.pmean_gradients and over "
    "microbatches with fp8flax.accumulate_gradients, and clip with optax.clip_by_global_norm in tx. In "
    "your own arithmetic change the parameters only: grads = {**grads, 'params': …}."
)


def checked_next_state(old: Any, new: Any, what_to_do: str) -> Any:
    """Returns the scaling state after a step; if no step can make it, raises an error or writes NaN.

    A step can leave three histories. In a moved one all entries are the old ones, where ``push_amax`` puts
    them, and only the amax of the step can be any. An unmoved one is the old history: no gradient arrived,
    or the data held a NaN or an Inf. The third is the maximum of both, which ``pmean_gradients`` returns if
    one device kept its history. The scale is the old one, or follows from the old history.

    If the values are known, any other state raises an error. Under ``jax.jit`` its scale becomes NaN, so
    that the next loss is NaN.

    Args:
        old: a tree of variables (or a bare collection) as it was before the step.
        new: the gradient with respect to ``old``: same structure, scaling state in float32.
        what_to_do: the end of errors, as sentences.

    Raises:
        TypeError: a leaf of ``new`` is not float32.
        ValueError: ``new`` has another structure or other shapes, or no step can make it.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "The gradient of the scaling state has another structure than the state: "
            f"{jax.tree.structure(new)} instead of {jax.tree.structure(old)}. {what_to_do}"
        )
    paths, old_leaves, treedef = flatten(old)
    places, leaves = Places.of(paths, old_leaves), new_leaves(old, new)
    news = places.states(leaves)
    compared = each_alike(_compared, places.states(old_leaves), news)
    wrong = [path_str(paths[j]) for (_, j), (_, fits) in zip(places.pairs, compared) if _is_false(fits)]
    if wrong:
        raise ValueError(
            f"The gradient of {wrong[0]} (and of {len(wrong) - 1} more) is not the next state: one step "
            "cannot make it of the old state. It was scaled, clipped, averaged or added up with the other "
            f"gradients, or belongs to other variables. {what_to_do}"
        )
    places.put(leaves, each_alike(_after, compared, news, in_parts=True))
    return treedef.unflatten(leaves)


def _is_false(x: jax.Array) -> bool:
    """Returns whether some element is False; False if this process does not know the values."""
    return not _is_unknown(x) and not np.all(np.asarray(x))


def _compared(old: ScalingState, new: ScalingState) -> tuple[ScalingState, jax.Array]:
    """Returns the old state, which a GPU then reads once (see ``each_alike``), and ``_can_follow``."""
    return old, _can_follow(old, new)


def _after(compared: tuple[ScalingState, jax.Array], new: ScalingState) -> ScalingState:
    """Returns the next state of one tensor; the old one with a NaN scale if no step can make ``new``."""
    old, fits = compared
    kept = kept_state(old, new)
    return ScalingState(
        jnp.where(fits, kept.scale, np.float32(np.nan)),
        jnp.where(fits, kept.amax_history, old.amax_history),
    )


def _can_follow(old: ScalingState, new: ScalingState) -> jax.Array:
    """Returns whether one step can make ``new`` of ``old``, see ``checked_next_state``.

    The result has the shape of the scale: stacked layers have one result each.
    """
    kept = kept_state(old, new)
    before, after = vary_alike(_normal(old.amax_history), _normal(kept.amax_history))
    moved = push_amax(after[..., 0], before)
    is_history = _all(after == before) | _all(after == moved) | _all(after == jnp.maximum(before, moved))
    amaxes = jnp.max(before, -1, keepdims=True), before[..., :1]
    old_scale = jnp.where(is_usable(old.scale), old.scale, 1.0)
    is_scale = (kept.scale == old_scale) | _is_scale_of(kept.scale, *amaxes)
    return is_history & is_scale & ~_is_negative(new.scale) & _all(~_is_negative(new.amax_history))


def _all(x: jax.Array) -> jax.Array:
    return jnp.all(x, -1, keepdims=True)


def _normal(x: jax.Array) -> jax.Array:
    """Returns 0 in the place of a NaN, an Inf or a subnormal number, which some devices flush to 0."""
    return jnp.where(is_usable(x), x, 0.0)


def _is_negative(x: jax.Array) -> jax.Array:
    """Returns whether a scale or an amax is finite and negative, so that no step can produce it.

    A scale of 0, NaN or Inf means that no gradient arrived. An amax of NaN or Inf means a NaN or an Inf in
    the data, or no data.
    """
    return lax.is_finite(x) & (x < 0)


def _is_scale_of(scale: jax.Array, *amaxes: jax.Array) -> jax.Array:
    """Returns whether a positive ``scale`` follows from one of ``amaxes``, for some FP8 dtype and margin.

    The largest values of all FP8 dtypes are 1.75 or 1.875, times powers of two, and so are the margins.
    """
    largest_scale = np.finfo(np.float32).max  # what ``compute_scale`` clips to; the smallest is 2**-126
    found = _is_power_of_two(scale) | (scale == largest_scale)
    for amax in amaxes:
        quotient = scale / jnp.where(amax > 0, amax, 1.0)
        is_quotient = _is_power_of_two(quotient * 1.75) | _is_power_of_two(quotient * 1.875)
        found |= is_quotient & (amax > 0)
    return found & jnp.any(jnp.stack([amax > 0 for amax in amaxes]), 0)


def _is_power_of_two(x: jax.Array) -> jax.Array:
    """Returns whether positive float32 numbers are powers of two, up to eight units in the last place."""
    return (lax.bitcast_convert_type(x, jnp.int32) + np.int32(8)) & np.int32(0x7FFFFF) <= np.int32(16)


def check_state(variables: Any, before: Any = None) -> None:
    """Raises ``ValueError`` if FP8 scaling state was changed by something other than training with FP8.

    Call it outside of ``jax.jit``, after one or two steps of a training loop that is not from this package,
    or if a loss is NaN. It detects

    * a scale of NaN, which ``apply_gradients`` writes under ``jax.jit`` for a state that no step can make
    * a state that never moved, that was cast, or that an optimizer changed
    * a scale that does not follow from its history, such as the average of two. Without ``before`` the
      history shows this only in young runs, while its older half is empty.
    * with ``before``: past amaxes other than those of ``before``, because they were scaled, clipped or
      averaged over steps

    It cannot detect a change of the newest amax alone: by a mean over devices or microbatches instead of
    the maximum, or by ``jnp.clip`` of each element. Use ``pmean_gradients``, ``accumulate_gradients``, and
    ``optax.clip`` in ``tx``.

    Args:
        variables: a tree that holds the collection ``_overwrite_with_gradient``, such as
            ``TrainState.params``, or the collection itself, as JAX or NumPy arrays.
        before: the same tree exactly one step earlier, with which past amaxes are compared; None checks
            ``variables`` alone.

    Raises:
        TypeError: the values are traced, or scaling state is not float32.
        ValueError: the state is wrong, or was donated; the message lists five tensors at most, and says
            what to do.

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
    new, old = _states(variables), _states(before)
    if not (new or old):
        warnings.warn(
            "check_state found no FP8 scaling state, so nothing was checked. Pass variables with the "
            f"collection {OVERWRITE_WITH_GRADIENT!r}. (Recipes without delayed scaling have no state.)",
            stacklevel=2,
        )
    problems = [f"{path} is in `before` only: the loop must keep it." for path in old if path not in new]
    unmoved, any_moves = [], not new
    for path, state in new.items():
        earlier = old.get(path)
        if before is not None and jax.tree.map(jnp.shape, earlier) != jax.tree.map(jnp.shape, state):
            problems.append(
                f"{path} is not in `before`, or has another shape there: pass the same variables."
            )
            continue
        wrong, some_move, all_move = jax.device_get(_inspect(state, earlier))
        problems += [f"{path} {what}" for what, is_wrong in zip(_WRONG, wrong) if is_wrong][:1]
        any_moves |= some_move
        unmoved += [] if all_move else [path]
    problems[5:] = [f"and {len(problems) - 5} more."] if len(problems) > 5 else []
    if not any_moves:
        problems.append(
            "No history has moved. The next state is the gradient of the old one, and the loop must keep "
            "it, as TrainState does. A mutable collection that `apply` returns holds the old state."
        )
    if problems:
        what = "\n- ".join(["The FP8 scaling state is not what training leaves:", *problems])
        raise ValueError(f"{what}\n{WHAT_TO_CALL}")
    if unmoved:
        warnings.warn(
            f"The FP8 scaling state {', '.join(unmoved)} did not move, or holds only zeros. "
            "Its layers took no part in the step, or their output gradients are zero.",
            stacklevel=2,
        )


def damaged_states(variables: Any) -> list[str]:
    """Returns the paths of the state that no training leaves, see ``check_state``.

    Without the state of the step before, only part of the damage is visible. State that is not known, such
    as that of ``jax.eval_shape``, does not count.
    """
    paths, leaves, _ = flatten(variables)
    if not all(isinstance(x, jax.Array | np.ndarray) for x in leaves) or any(map(_is_unknown, leaves)):
        return []
    places = Places.of(paths, leaves)
    return [
        path_str(paths[j])
        for (_, j), state in zip(places.pairs, places.states(leaves))
        if state.amax_history.shape[-1] and np.any(_inspect(state, None)[0])
    ]


def warn_if_damaged(state: Any, advice: str, stacklevel: int) -> None:
    """Warns about state that no training leaves.

    Args:
        state: the collection of the scaling state.
        advice: what to do, as a sentence.
        stacklevel: see ``warnings.warn``; 1 is this function.
    """
    if damaged := damaged_states({OVERWRITE_WITH_GRADIENT: state}):
        warnings.warn(
            f"The scaling state {damaged[0]} (and of {len(damaged) - 1} more tensors) is not what training "
            f"leaves: an optimizer or an average over steps changed it. {advice}",
            stacklevel=stacklevel,
        )


def _is_unknown(x: Any) -> bool:
    """Returns whether this process does not know the value of an array."""
    if isinstance(x, np.ndarray):
        return False
    return isinstance(x, jax.core.Tracer) or not (x.is_fully_addressable or x.is_fully_replicated)


def _states(variables: Any) -> dict[str, ScalingState]:
    """Returns the state of each tensor, with past amaxes on the last axis, by the path of the history."""
    paths, leaves, _ = flatten(variables)
    places = Places.of(paths, leaves)
    for i in {i for pair in places.pairs for i in pair}:
        if isinstance(leaves[i], jax.core.Tracer):
            raise TypeError("check_state needs values, and these are traced. Call it outside of jax.jit.")
        if isinstance(leaves[i], jax.Array) and leaves[i].is_deleted():
            raise ValueError(
                f"The value of {path_str(paths[i])} is lost, because a step took it by donate_argnums. "
                "Copy the variables before the step: jax.tree.map(jnp.copy, variables)."
            )
    return dict(zip((path_str(paths[j]) for _, j in places.pairs), places.states(leaves)))


_WRONG = (
    "has a scale of NaN. Under jax.jit, apply_gradients writes a NaN if no step can make the new state: it "
    "was scaled, clipped, averaged or added up with the gradients.",
    "has a scale that is not positive and finite, or entries that are negative or not finite. An optimizer "
    "or a NaN changed the state.",
    "has past entries other than those of `before`, or a scale that does not follow from them. `before` "
    "must be exactly one step earlier. If it is, the state was scaled, clipped, averaged or optimized.",
    "has a scale that does not follow from it. An optimizer or an average over steps changed the state. "
    "(If add_fp8_state has just changed the length of the history, take a step first.)",
)


@jax.jit
def _inspect(new: ScalingState, old: ScalingState | None) -> tuple[jax.Array, ...]:
    """Returns whether each sentence of ``_WRONG`` is true, and whether some and all histories have moved.

    A history has moved if it holds an amax and differs from the one before. A history that holds one amax
    everywhere counts as moved: a step may leave it unchanged.
    """
    scale, history = new
    follows, largest = jnp.ones((), bool), jnp.max(history, -1, keepdims=True)
    moves = largest > 0
    if old is not None:
        follows = _can_follow(old, new)
        moves &= ~_all(history == old.amax_history) | _all(history == largest)
    # The scale follows from the past amaxes. The oldest of them has left the history. It was 0 if the older
    # half of the others is empty, and if no further entry is 0: the run is younger than the history.
    past = _normal(history[..., 1:])
    half = (past.shape[-1] + 1) // 2
    is_empty = past == 0
    is_young = _all(is_empty[..., :half]) & _all(is_empty[..., :-1] | ~is_empty[..., 1:])
    is_known = (half > 3) & is_young & ~_all(is_empty)
    amaxes = past.max(-1, keepdims=True, initial=0), history[..., -1:], largest, history[..., :1]
    is_number = lax.is_finite(scale) & (scale > 0) & _all(lax.is_finite(history) & (history >= 0))
    scale_follows = ~is_known | _is_scale_of(scale, *map(_normal, amaxes))
    right = [jnp.all(x) for x in (scale == scale, is_number, follows, scale_follows)]
    return ~jnp.stack(right), jnp.any(moves), jnp.all(moves)

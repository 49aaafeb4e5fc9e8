"""Delayed scaling: the state of a tensor, the scale that follows from it, and its next value.

State may be that of several tensors, each with a scale of its own: it then has leading dimensions, as of
stacked experts, which the amax has too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fp8flax._core.formats import fp8_max
from fp8flax._core.jax_rules import apart, each_alike, kind_of, manual_axes, merge_amax
from fp8flax._core.max_dtype import (
    DIGEST_SIZE,
    digested,
    from_max_dtype,
    is_digest,
    is_max_dtype,
    is_packed,
    to_digest,
    to_max_dtype,
    unpacked,
)
from fp8flax._core.names import ROLES
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.scaling import (
    SMALLEST_SCALE,
    bounded_amax,
    compute_scale,
    is_newest,
    is_usable,
    power_of_two,
    push_amax,
    scale_exponent,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Shaped


class ScalingState(NamedTuple):
    """The delayed-scaling state of one tensor, or of several that are stacked."""

    scale: Shaped[jax.Array, "*scale"]
    """Shape ``(1,)``, float32 (or ``fp32_max_grad`` inside a differentiated function)."""
    amax_history: Shaped[jax.Array, "*stack length"]
    """Shape ``(amax_history_len,)``, newest entry at index 0; dtype as ``scale``."""


class Digest(NamedTuple):
    """What the scale of this step follows from; of each tensor one number, in the shape of the old scale.

    Inside of a step that has all states at hand the scale of each is an array of these six
    (``digest_dtype``), made of all histories at once. The cotangent of a digest is the scale of this step
    in the place of the old one, and the amax of this step in that of the largest; what the step leaves of
    all histories is then made at once, too.
    """

    scale: jax.Array
    largest: jax.Array
    """Of the history."""
    ordinary: jax.Array
    """The second largest of its newest, see ``bounded_amax``."""
    newest: jax.Array
    e4m3fn: jax.Array
    """The scale of this step, by the arithmetic of ``USUAL``; any other takes the numbers above."""
    e5m2: jax.Array
    """Likewise."""


class DelayedConfig(NamedTuple):
    """What a delayed-scaling cast must know statically (hashable)."""

    compute_dtype: Any
    q_dtype: Any
    margin: int = 0
    amax_compute_algo: str = "max"
    power_2: bool = False
    bounded: bool = True
    """Whether ``"max"`` is bounded by the newest amaxes, see ``bounded_amax``."""


USUAL = tuple(DelayedConfig(np.float32, np.dtype(d)) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2))
"""The arithmetic of ``DelayedScaling()``, for both of its dtypes."""


def delayed_config(quantizer: DelayedQuantizer) -> DelayedConfig:
    """Returns a quantizer as the arithmetic here takes it."""
    return DelayedConfig(
        jnp.float32,
        quantizer.dtype,
        quantizer.margin,
        quantizer.amax_compute_algo,
        quantizer.use_power_2_scales,
    )


def delayed_scale(config: DelayedConfig, state: ScalingState) -> Float32[jax.Array, "*scale"]:
    """Returns the float32 scale of this step, from the amaxes before it, of the shape of the old one."""
    return delayed_scales([config], [state])[0].reshape(state.scale.shape)


def delayed_scales(configs: Sequence[DelayedConfig], states: Sequence[ScalingState]) -> list[jax.Array]:
    """Returns the float32 scales of several tensors; those that are alike are computed as one.

    A GPU then starts fewer kernels. Alike are those that differ in dtype and rounding alone, with histories
    of one shape; of a history ``(..., length)`` the scale has shape ``(...)``.
    """
    if any(is_digest(state.scale) for state in states):
        return [_scale_from_digest(config, state) for config, state in zip(configs, states)]
    # Never differentiated, even where the rest is for a second time.
    histories = [lax.stop_gradient(from_max_dtype(state.amax_history)) for state in states]
    alike = defaultdict(list)
    for i, (config, history) in enumerate(zip(configs, histories)):
        alike[config.amax_compute_algo, config.bounded, history.shape].append(i)
    amaxes: dict[int, jax.Array] = {}
    for (algorithm, bounded, _), group in alike.items():
        of_group = [histories[i] for i in group]
        if algorithm == "most_recent":
            found = [history[..., 0] for history in of_group]
        elif bounded:
            found = _bounded_amaxes([configs[i].q_dtype for i in group], of_group)
        else:
            start = [np.float32(-np.inf)] * len(group)
            found = lax.reduce(of_group, start, _maxima, (of_group[0].ndim - 1,))
        amaxes.update(zip(group, found))
    return _of_one_array(
        [
            _scale_from_amax(config, amaxes[i], from_max_dtype(state.scale).reshape(amaxes[i].shape))
            for i, (config, state) in enumerate(zip(configs, states))
        ]
    )


def _of_one_array(scales: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns them as parts of one array, of which XLA computes all products by a kernel or two.

    Of the three of one matmul it does not, and the array is a kernel more.
    """
    alike = defaultdict(list)
    for i, scale in enumerate(scales):
        alike[scale.shape, manual_axes(scale)].append(i)
    found = dict(enumerate(scales))
    for group in alike.values():
        if len(group) > 3:
            whole = lax.optimization_barrier(jnp.stack([scales[i] for i in group]))
            found.update({i: lax.index_in_dim(whole, n, keepdims=False) for n, i in enumerate(group)})
    return [found[i] for i in range(len(scales))]


def _scale_from_digest(config: DelayedConfig, state: ScalingState) -> jax.Array:
    if not is_digest(state.scale):
        return delayed_scales([config], [state])[0]
    # Of the shape of the history but for its length, as below.
    digest = Digest(*(number.reshape(state.amax_history.shape[:-1]) for number in digested(state.scale)))
    if config in USUAL:
        return (digest.e4m3fn, digest.e5m2)[USUAL.index(config)]
    if config.amax_compute_algo == "most_recent":
        amax = digest.newest
    elif config.bounded:
        amax = bounded_amax(digest.largest, digest.ordinary, config.q_dtype)
    else:
        amax = digest.largest
    return _scale_from_amax(config, amax, digest.scale)


# Derivation. An array read in the place of another, which alone gets the cotangent.
@jax.custom_vjp
def _read_for(other: jax.Array, own: jax.Array) -> jax.Array:
    del own
    return other


_read_for.defvjp(lambda other, own: (other, None), lambda _, g: (None, g))


def with_scale_of(other: ScalingState, own: ScalingState) -> ScalingState:
    """Returns a state from which the scale of another follows, and whose gradient is that of ``own``."""
    if is_digest(own.scale):
        return ScalingState(_read_for(other.scale, own.scale), own.amax_history)
    return ScalingState(*map(_read_for, other, own))


def unpacked_states(states: Mapping[str, ScalingState]) -> dict[str, ScalingState]:
    """Returns the states of an op by their roles, each with its own digest.

    Of layers that are stacked, which ``lax.scan`` takes one by one, the state of the first role has the
    digests of all: what a step leaves of them is then written once in each iteration.
    """
    first = states.get(ROLES[0])
    if first is None or not is_packed(first.scale):
        return dict(states)
    digests = dict(zip(ROLES, unpacked(first.scale)))
    return {role: ScalingState(digests[role], state.amax_history) for role, state in states.items()}


# Derivation. Nothing of it is differentiated: the cotangents of the states are their next values.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def digests(axes: tuple[int, ...], states: Sequence[ScalingState]) -> tuple[list[jax.Array], jax.Array]:
    """Returns the digest of each state, whose history runs along this axis; the gradient is what to keep.

    States of one kind are one array here: a GPU starts a few kernels, not some for each. The second result
    is a number, 0, for ``differentiated_with``.
    """
    made: dict[int, jax.Array] = {}
    for group in _alike(axes, states):
        of_group = _digests_alike(axes[group[0]], [states[i] for i in group])
        made.update(zip(group, of_group))
    return [made[i] for i in range(len(states))], jnp.zeros(())


def _digests_fwd(axes: tuple[int, ...], states: Sequence[Any]) -> tuple[Any, Any]:
    states = [ScalingState(scale.value, history.value) for scale, history in states]
    return digests(axes, states), states


def _digests_bwd(axes: tuple[int, ...], states: Sequence[ScalingState], results: Any) -> Any:
    kept, (cotangents, _) = list(states), results
    # Of what nothing read there is no cotangent.
    used = [i for i, cotangent in enumerate(cotangents) if not isinstance(cotangent, SymbolicZero)]
    for group in _alike([axes[i] for i in used], [states[i] for i in used]):
        places = [used[i] for i in group]
        olds, new = [states[i] for i in places], [cotangents[i] for i in places]
        for i, state in zip(places, _next_states_alike(axes[places[0]], olds, new)):
            kept[i] = state
    return (kept,)


digests.defvjp(_digests_fwd, _digests_bwd, symbolic_zeros=True)


def _alike(axes: Sequence[int], states: Sequence[ScalingState]) -> list[list[int]]:
    groups = defaultdict(list)
    for i, (axis, state) in enumerate(zip(axes, states)):
        groups[axis, tuple(map(kind_of, state))].append(i)
    return list(groups.values())


# Derivation. An identity; the number has no say in the value.
@jax.custom_vjp
def differentiated_with(value: Any, number: jax.Array) -> Any:
    """Returns a value whose gradient goes to the states behind ``number``, too, be they used or not."""
    del number
    return value


differentiated_with.defvjp(lambda value, number: (value, None), lambda _, g: (g, jnp.zeros(())))


@partial(jax.jit, static_argnums=0)
def _digests_alike(axis: int, states: Sequence[ScalingState]) -> list[jax.Array]:
    def digest(state: ScalingState) -> Digest:
        history = state.amax_history
        newest = lax.expand_dims(is_newest(history.shape[axis]), range(1, history.ndim - axis))
        candidates = jnp.where(newest, history, np.float32(0))
        start = (np.float32(0),) * 3
        found = lax.reduce([(history, candidates, jnp.zeros_like(history))], [start], _largest_two, (axis,))
        largest, _, ordinary = (lax.expand_dims(x, (axis,)) for x in found[0])
        usual = (apart(partial(_bounded_scale, config))(largest, ordinary, state.scale) for config in USUAL)
        return Digest(state.scale, largest, ordinary, lax.slice_in_dim(history, 0, 1, axis=axis), *usual)

    # Not one array of all: XLA for GPUs would cut up that, each part by a kernel.
    return [to_digest(*each) for each in each_alike(digest, states)]


@partial(jax.jit, static_argnums=0)
def _next_states_alike(
    axis: int, olds: Sequence[ScalingState], cotangents: Sequence[jax.Array]
) -> list[ScalingState]:
    """Returns the states to keep, given the old ones and the cotangents of their digests.

    A scale that is not positive means that no gradient arrived; an amax of inf that a NaN or Inf was seen,
    of -inf that the tensor was empty. Stacked layers have a verdict each.
    """

    @apart
    def next_state(old: ScalingState, new_scale: jax.Array, amax: jax.Array) -> ScalingState:
        pushed = push_amax(lax.squeeze(amax, (axis,)), jnp.moveaxis(old.amax_history, axis, -1))
        scale_ok = lax.is_finite(new_scale) & (new_scale > 0)
        history_ok = scale_ok & lax.is_finite(amax) & (amax >= 0)
        return ScalingState(
            jnp.where(scale_ok, new_scale, old.scale),
            jnp.where(history_ok, jnp.moveaxis(pushed, -1, axis), old.amax_history),
        )

    new_scales, amaxes = zip(*(digested(cotangent, 2) for cotangent in cotangents))
    return each_alike(next_state, olds, new_scales, amaxes, in_parts=True)


def _bounded_amaxes(dtypes: Sequence[Any], histories: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the bounded maximum of each history, all by one reduction of many operands."""
    shape = histories[0].shape
    newest = jnp.broadcast_to(is_newest(shape[-1]), shape)
    none = jnp.zeros(shape, jnp.float32)
    operands = [(history, jnp.where(newest, history, none), none) for history in histories]
    start = [(np.float32(0),) * 3] * len(histories)
    found = lax.reduce(operands, start, _largest_two, (len(shape) - 1,))
    return [bounded_amax(largest, second, dtype) for dtype, (largest, _, second) in zip(dtypes, found)]


# What reduces is one function for all calls, or each call that is not jitted would compile anew.
def _maxima(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    return [lax.max(x, y) for x, y in zip(xs, ys)]


def _largest_two(xs: Sequence[Sequence[jax.Array]], ys: Sequence[Sequence[jax.Array]]) -> list[Any]:
    """Merges triples: the largest, and the largest and the second largest of the newest."""
    return [
        (lax.max(x, y), lax.max(x1, y1), lax.max(lax.min(x1, y1), lax.max(x2, y2)))
        for (x, x1, x2), (y, y1, y2) in zip(xs, ys)
    ]


def _bounded_scale(
    config: DelayedConfig, largest: jax.Array, ordinary: jax.Array, old_scale: jax.Array
) -> jax.Array:
    return _scale_from_amax(config, bounded_amax(largest, ordinary, config.q_dtype), old_scale)


def _scale_from_amax(config: DelayedConfig, amax: jax.Array, old_scale: jax.Array) -> jax.Array:
    scale = compute_scale(amax, old_scale, fp8_max(config.q_dtype), config.margin)
    if not config.power_2:
        return scale
    rounded = power_of_two(scale_exponent(amax, fp8_max(config.q_dtype), "up", config.margin))
    return jnp.where(is_usable(amax), rounded, scale)


def next_state_of(
    amax: Float[jax.Array, "*stack"],
    new_scale: Float32[jax.Array, "*scale"],
    state: ScalingState | None,
) -> Any:
    """Returns the cotangents of scale and amax history, in the dtype of ``state``.

    Args:
        amax: that of ``delayed_amax``, of shape ``(...)``.
        new_scale: the scale used, float32, as many elements.
        state: the state before this step, float32 or ``fp32_max_grad``, the history ``(..., length)``; None
            for one with a digest, of which no more is asked.
    """
    # That shares the data of the amax which is batched, and varies, as the state is.
    like = new_scale.reshape(amax.shape) if state is None else from_max_dtype(state.amax_history)[..., 0]
    amax = merge_amax(amax.astype(jnp.float32), like)
    # Of what other uses say a NaN or Inf anywhere must win over all, as it would in one call on the
    # concatenated data: its amax is inf. Whoever overwrites the state then keeps the old history. An empty
    # tensor has nothing to say: -inf leaves the word to the other uses.
    if state is None:
        numbers = new_scale.reshape(amax.shape), amax
        none = [jnp.zeros_like(amax)] * (DIGEST_SIZE - len(numbers))
        return ScalingState(to_digest(*(x[..., None] for x in (*numbers, *none))), None)  # type: ignore
    history, new_scale = from_max_dtype(state.amax_history), new_scale.reshape(state.scale.shape)
    if not is_max_dtype(state.scale):
        kept = jnp.where(lax.is_finite(amax)[..., None], push_amax(amax, history), history)
        return ScalingState(new_scale, kept)
    pushed = jnp.where((amax == -jnp.inf)[..., None], -jnp.inf, push_amax(amax, history))
    return ScalingState(to_max_dtype(new_scale), to_max_dtype(pushed))


def state_to_keep(state: ScalingState | None) -> ScalingState | None:
    """Returns what ``next_state_of`` must know of a state."""
    return None if state is None or is_digest(state.scale) else state


def calibrated_state(
    config: DelayedConfig, amax: Float[jax.Array, "*stack"], state: ScalingState
) -> ScalingState:
    """Returns ``next_state_of`` with the scale that follows from this amax as well."""
    history = from_max_dtype(state.amax_history)
    merged = merge_amax(amax.astype(jnp.float32), history[..., 0])
    seen = jnp.where(lax.is_finite(merged)[..., None], push_amax(merged, history), history)
    new_scale = delayed_scales([config], [ScalingState(state.scale, seen)])[0]
    # Where there is only zero no scale follows; the smallest one gives way to that of any other data.
    new_scale = jnp.where(is_usable(jnp.max(seen, axis=-1)), new_scale, SMALLEST_SCALE)
    return next_state_of(merged, new_scale, state_to_keep(state))


def report_calibrated(
    report: Callable[..., None], config: DelayedConfig, amax: jax.Array, state: ScalingState
) -> None:
    """Tells the host ``calibrated_state`` of a tensor, whose number stands in the place of its scale.

    Unlike a cotangent, a callback also comes out of a ``lax.while_loop``, and of forward mode.
    """
    scale, history = (to_max_dtype(lax.stop_gradient(leaf)) for leaf in state)
    new = calibrated_state(config, lax.stop_gradient(amax), ScalingState(scale, history))
    jax.debug.callback(report, state.scale, *map(from_max_dtype, new))


def check_state(scale: Any, amax_history: Any, stacked: tuple[int, ...] = ()) -> ScalingState:
    """Returns the two as arrays, or raises where their dtypes or shapes do not fit.

    Args:
        scale: that of the state.
        amax_history: likewise.
        stacked: leading dimensions, as of experts whose kernels have a scale each.
    """
    if is_packed(scale):  # by what reads the state of one tensor, and not that of an op
        scale = unpacked(scale)[0]
    scale = scale if is_max_dtype(scale) else jnp.asarray(scale)
    amax_history = amax_history if is_max_dtype(amax_history) else jnp.asarray(amax_history)
    for name, value in (("scale", scale), ("amax_history", amax_history)):
        if value.dtype != jnp.float32 and not is_max_dtype(value):
            raise TypeError(
                f"{name} must be float32 (or fp32_max_grad); got {value.dtype} of shape {value.shape}. "
                "Scaling state loses its meaning in a narrower dtype: keep it out of any cast of the "
                "variables."
            )
        if stacked and value.shape[:-1] != stacked:
            raise ValueError(
                f"The {name} of stacked kernels must have one row for each of the {stacked[0]} kernels; "
                f"got shape {value.shape}. Scales must have shape ({stacked[0]}, 1), and amax histories "
                f"({stacked[0]}, amax_history_len)."
            )
    if is_max_dtype(scale) != is_max_dtype(amax_history):
        raise TypeError(
            f"scale and amax_history must have the same dtype; got {scale.dtype} and {amax_history.dtype}. "
            "Cast neither of them, or both."
        )
    if scale.shape[len(stacked) :] not in ((), (1,)):
        raise ValueError(f"scale must be a scalar or have shape (1,); got shape {scale.shape}.")
    if amax_history.ndim != len(stacked) + 1 or amax_history.shape[-1] == 0:
        raise ValueError(
            f"amax_history must have shape (length,) with length 1 or more; got {amax_history.shape}."
        )
    return ScalingState(scale, amax_history)

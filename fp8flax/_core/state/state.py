"""The delayed-scaling state of one tensor: the scale that follows from it, and the next state.

A step uses the scale that follows from the amaxes of earlier steps. Then its own amax enters the history.
The next state leaves the backward pass as the "gradient" of the state.

State may also be that of several tensors that are stacked, such as the kernels of experts. Scale, history
and amax then have leading dimensions, and each tensor has a scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._compat.max_dtype import (
    DIGEST_SIZE,
    digested,
    from_max_dtype,
    is_digest,
    is_max_dtype,
    to_digest,
    to_max_dtype,
)
from fp8flax._compat.xla_metadata import apart
from fp8flax._core.axes import merge_amax
from fp8flax._core.formats import fp8_max
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
    """Shape ``(1,)``. Its dtype is float32, or ``fp32_max_grad`` inside a differentiated function.

    In a step that knows the states of all tensors it is a digest, see ``Digest``."""
    amax_history: Shaped[jax.Array, "*stack length"]
    """Shape ``(amax_history_len,)``, with the newest entry at index 0. It has the dtype of ``scale``."""


class DelayedConfig(NamedTuple):
    """The static options of a cast with delayed scaling (hashable)."""

    compute_dtype: Any
    q_dtype: Any
    margin: int = 0
    amax_compute_algo: str = "max"
    power_2: bool = False
    bounded: bool = True
    """Whether ``"max"`` is bounded by the newest amaxes, see ``bounded_amax``."""


USUAL = tuple(DelayedConfig(np.float32, np.dtype(d)) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2))
"""The options of ``DelayedScaling()``, for both of its dtypes."""


def delayed_config(quantizer: DelayedQuantizer) -> DelayedConfig:
    """Returns the options of a quantizer."""
    return DelayedConfig(
        jnp.float32,
        quantizer.dtype,
        quantizer.margin,
        quantizer.amax_compute_algo,
        quantizer.use_power_2_scales,
    )


class Digest(NamedTuple):
    """The six numbers from which the scale of this step follows, each in the shape of the old scale.

    A step that knows all states computes the digests of all tensors at once (``state.batching``), and puts
    them in the place of the scales, as arrays of ``digest_dtype``. The cotangent of a digest carries the
    scale of this step in the first number and the amax of this step in the second. From these the next
    states of all tensors are computed at once, too.
    """

    scale: jax.Array
    largest: jax.Array
    """The largest amax of the history."""
    ordinary: jax.Array
    """The second largest of the newest amaxes, see ``bounded_amax``."""
    newest: jax.Array
    e4m3fn: jax.Array
    """The scale of this step by the first options of ``USUAL``. Other options use the numbers above."""
    e5m2: jax.Array
    """The scale of this step by the second options of ``USUAL``."""


def digest_of(state: ScalingState, axis: int = -1) -> Digest:
    """Returns the digest of a float32 state whose history runs along ``axis``.

    The results have size 1 in that axis.
    """
    history = state.amax_history
    axis %= history.ndim
    newest = lax.expand_dims(is_newest(history.shape[axis]), range(1, history.ndim - axis))
    candidates = jnp.where(newest, history, np.float32(0))
    start = (np.float32(0),) * 3
    found = lax.reduce([(history, candidates, jnp.zeros_like(history))], [start], _largest_two, (axis,))
    largest, _, ordinary = (lax.expand_dims(x, (axis,)) for x in found[0])
    newest_amax = lax.slice_in_dim(history, 0, 1, axis=axis)
    scale = state.scale.reshape(largest.shape)
    usual = (scale_from(scale, largest, ordinary, newest_amax) for scale_from in _USUAL_SCALES)
    return Digest(scale, largest, ordinary, newest_amax, *usual)


# One function for all calls: otherwise each call that is not jitted would compile again. The same holds
# for ``_USUAL_SCALES``.
def _largest_two(xs: Sequence[Sequence[jax.Array]], ys: Sequence[Sequence[jax.Array]]) -> list[Any]:
    """Merges triples: the largest; the largest of the newest; the second largest of the newest."""
    return [
        (lax.max(x, y), lax.max(x1, y1), lax.max(lax.min(x1, y1), lax.max(x2, y2)))
        for (x, x1, x2), (y, y1, y2) in zip(xs, ys)
    ]


def scale_of(config: DelayedConfig, state: ScalingState) -> Float32[jax.Array, "*stack"]:
    """Returns the float32 scale of this step, which follows from the amaxes before it.

    Args:
        config: the options of the cast.
        state: the state, with a history of shape ``(..., length)``.

    Returns:
        Shape ``(...)``. It is never differentiated, not even by a second derivative.
    """
    if is_digest(state.scale):
        digest = Digest(*digested(state.scale))
    else:
        digest = digest_of(ScalingState(*(lax.stop_gradient(from_max_dtype(leaf)) for leaf in state)))
    digest = Digest(*(number.reshape(state.amax_history.shape[:-1]) for number in digest))
    if config in USUAL:
        return (digest.e4m3fn, digest.e5m2)[USUAL.index(config)]
    return _scale_from(config, *digest[:4])


def _scale_from(
    config: DelayedConfig, scale: jax.Array, largest: jax.Array, ordinary: jax.Array, newest: jax.Array
) -> jax.Array:
    """Returns the scale of this step from the first four numbers of a digest."""
    amax = largest
    if config.amax_compute_algo == "most_recent":
        amax = newest
    elif config.bounded:
        amax = bounded_amax(largest, ordinary, config.q_dtype)
    exact = compute_scale(amax, scale, fp8_max(config.q_dtype), config.margin)
    if not config.power_2:
        return exact
    rounded = power_of_two(scale_exponent(amax, fp8_max(config.q_dtype), "up", config.margin))
    return jnp.where(is_usable(amax), rounded, exact)


_USUAL_SCALES = [apart(partial(_scale_from, config)) for config in USUAL]


def kept_state(old: ScalingState, new: ScalingState, newest: jax.Array) -> ScalingState:
    """Returns the state after a step: the new one, where the step had something to say.

    A scale that is not positive and finite means that no gradient arrived: then the old state stays. An
    amax that is not finite means that the data held a NaN or an Inf, or were empty: then the old history
    stays. Each of several tensors that are stacked is decided by itself.

    Args:
        old: the state before the step, float32.
        new: the state that the step produced, of the same shapes.
        newest: the amax of the step. It broadcasts with scale and history.
    """
    has_gradient = lax.is_finite(new.scale) & (new.scale > 0)
    enters = has_gradient & lax.is_finite(newest) & (newest >= 0)
    return ScalingState(
        jnp.where(has_gradient, new.scale, old.scale),
        jnp.where(enters, new.amax_history, old.amax_history),
    )


def next_state(
    amax: Float[jax.Array, "*stack"],
    new_scale: Float32[jax.Array, "*scale"],
    state: ScalingState | None,
) -> ScalingState:
    """Returns the cotangents of scale and history: the next state, in the dtype of ``state``.

    Args:
        amax: the ``delayed_amax`` of this step, of shape ``(...)``.
        new_scale: the scale of this step, float32, with as many elements.
        state: the state before this step, with a history of shape ``(..., length)``. None stands for a
            state with a digest: its cotangent needs nothing of the state.
    """
    # The amax is merged over all data that share the state. The history tells which data those are.
    like = new_scale.reshape(amax.shape) if state is None else from_max_dtype(state.amax_history)[..., 0]
    amax = merge_amax(amax.astype(jnp.float32), like)
    # Several uses of one state merge by maximum. An amax of inf stands for a NaN or Inf in the data, and
    # wins over all other uses. An amax of -inf stands for empty data, and loses against all.
    if state is None:
        numbers = new_scale.reshape(amax.shape), amax
        none = [jnp.zeros_like(amax)] * (DIGEST_SIZE - len(numbers))
        return ScalingState(to_digest(*(x[..., None] for x in (*numbers, *none))), None)  # type: ignore
    history, new_scale = from_max_dtype(state.amax_history), new_scale.reshape(state.scale.shape)
    pushed = push_amax(amax, history)
    if not is_max_dtype(state.scale):
        return kept_state(
            ScalingState(new_scale, history), ScalingState(new_scale, pushed), amax[..., None]
        )
    pushed = jnp.where((amax == -jnp.inf)[..., None], -jnp.inf, pushed)
    return ScalingState(to_max_dtype(new_scale), to_max_dtype(pushed))


def state_to_keep(state: ScalingState | None) -> ScalingState | None:
    """Returns what ``next_state`` must know of a state, as a residual: nothing of one with a digest."""
    return None if state is None or is_digest(state.scale) else state


def calibrated_state(
    config: DelayedConfig, amax: Float[jax.Array, "*stack"], state: ScalingState
) -> ScalingState:
    """Returns ``next_state`` with the scale that follows from this amax as well."""
    history = from_max_dtype(state.amax_history)
    merged = merge_amax(amax.astype(jnp.float32), history[..., 0])
    seen = jnp.where(lax.is_finite(merged)[..., None], push_amax(merged, history), history)
    new_scale = scale_of(config, ScalingState(from_max_dtype(state.scale), seen))
    # No scale follows from zeros. The smallest one gives way to the scale of any other data.
    new_scale = jnp.where(is_usable(jnp.max(seen, axis=-1)), new_scale, SMALLEST_SCALE)
    return next_state(merged, new_scale, state_to_keep(state))


def report_calibrated(
    report: Callable[..., None], config: DelayedConfig, amax: jax.Array, state: ScalingState
) -> None:
    """Calls ``report`` on the host with the ``calibrated_state`` of a tensor.

    The scale of ``state`` is the number of the tensor, by which the host knows it. Unlike a cotangent, a
    callback also leaves a ``lax.while_loop``, and forward mode.
    """
    scale, history = (to_max_dtype(lax.stop_gradient(leaf)) for leaf in state)
    new = calibrated_state(config, lax.stop_gradient(amax), ScalingState(scale, history))
    jax.debug.callback(report, state.scale, *map(from_max_dtype, new))


def check_state(scale: Any, amax_history: Any, stacked: tuple[int, ...] = ()) -> ScalingState:
    """Returns the state as arrays.

    Args:
        scale: the scale of the state.
        amax_history: the amax history of the state.
        stacked: leading dimensions, as of experts whose kernels have a scale each.

    Raises:
        TypeError: the dtypes are wrong.
        ValueError: the shapes are wrong.
    """
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

"""Quantize-dequantize primitives that hand the next scaling state back as the state's gradient.

Derivation. Quantization has a derivative of zero almost everywhere, so the straight-through estimator
is used: the cotangent of the data passes unchanged. Scale and amax history are not differentiated at
all; their cotangent slots carry their *next values*, which a train state writes over the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._formats import as_fp8_dtype, fp8_max
from fp8flax._max_dtype import from_max_dtype, is_max_dtype, to_max_dtype
from fp8flax._quantize import as_float_array, dequantize, quantize, quantize_dequantize
from fp8flax._scaling import (
    SMALLEST_SCALE,
    bounded_amax,
    compute_scale,
    is_newest,
    power_of_two,
    push_amax,
    scale_exponent,
)
from fp8flax._state import ScalingState
from fp8flax._transforms import merge_amax


class DelayedConfig(NamedTuple):
    """What a delayed-scaling cast must know statically (hashable)."""

    compute_dtype: Any
    q_dtype: Any
    margin: int = 0
    amax_compute_algo: str = "max"
    power_2: bool = False
    bounded: bool = True
    """Whether ``"max"`` is bounded by the newest amaxes, see ``bounded_amax``."""


def _public_config(compute_dtype: Any, q_dtype: Any) -> DelayedConfig:
    return DelayedConfig(compute_dtype, as_fp8_dtype(q_dtype, "q_dtype"), bounded=False)


def delayed_scale(config: DelayedConfig, state: ScalingState) -> jax.Array:
    """Returns the float32 scale of this step, from the amaxes before it."""
    return delayed_scales((config,), (state,))[0].reshape(state.scale.shape)


def delayed_scales(
    configs: Sequence[DelayedConfig], states: Sequence[ScalingState]
) -> tuple[jax.Array, ...]:
    """Returns ``delayed_scale`` of several tensors, computed as one: a GPU starts fewer kernels.

    The configs differ in dtype and rounding alone, the histories have one length.
    """
    # Never differentiated, even where the rest is for a second time.
    histories = [lax.stop_gradient(from_max_dtype(state.amax_history)) for state in states]
    if configs[0].amax_compute_algo == "most_recent":
        amaxes = [history[0] for history in histories]
    elif not configs[0].bounded:  # one reduction of many operands, here and below
        amaxes = lax.reduce(histories, [np.float32(-np.inf)] * len(histories), _maxima, (0,))
    else:
        newest = is_newest(histories[0].shape[0])
        none = jnp.zeros(newest.shape, jnp.float32)
        operands = [(history, jnp.where(newest, history, none), none) for history in histories]
        start = [(np.float32(0),) * 3] * len(histories)
        found = lax.reduce(operands, start, _largest_two, (0,))
        amaxes = [
            bounded_amax(largest, second, config.q_dtype)
            for config, (largest, _, second) in zip(configs, found)
        ]
    return tuple(
        _scale_from_amax(config, amax, from_max_dtype(state.scale).reshape(()))
        for config, state, amax in zip(configs, states, amaxes)
    )


# What reduces is one function for all calls, or each call that is not jitted would compile anew.
def _maxima(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    return [lax.max(x, y) for x, y in zip(xs, ys)]


def _largest_two(xs: Sequence[Sequence[jax.Array]], ys: Sequence[Sequence[jax.Array]]) -> list[Any]:
    """Merges triples: the largest, and the largest and the second largest of the newest."""
    return [
        (lax.max(x, y), lax.max(x1, y1), lax.max(lax.min(x1, y1), lax.max(x2, y2)))
        for (x, x1, x2), (y, y1, y2) in zip(xs, ys)
    ]


def _scale_from_amax(config: DelayedConfig, amax: jax.Array, old_scale: jax.Array) -> jax.Array:
    scale = compute_scale(amax, old_scale, fp8_max(config.q_dtype), config.margin)
    if not config.power_2:
        return scale
    rounded = power_of_two(scale_exponent(amax, fp8_max(config.q_dtype), "up", config.margin))
    return jnp.where(lax.is_finite(amax) & (amax > 0), rounded, scale)


def inf_to_nan(g: jax.Array) -> jax.Array:
    """Returns a cotangent with NaN for Inf, which a cast to FP8 would saturate.

    A gradient that overflowed must be seen by whoever skips such steps (``optax.apply_if_finite``, a loss
    scale), and must not look like an amax to the layers before.
    """
    return jnp.where(lax.is_finite(g), g, np.array(np.nan, g.dtype))


def delayed_amax(x: jax.Array) -> jax.Array:
    """Returns what ``delayed_next_state`` must know of a tensor: its amax in its dtype.

    That is inf where it holds a NaN or an Inf, and -inf where it is empty. (A NaN would be lost in a
    maximum over devices, at least on CPUs.)
    """
    magnitude = jnp.where(jnp.isnan(x), np.array(np.inf, x.dtype), jnp.abs(x))
    return jnp.max(magnitude, initial=-jnp.inf)


def delayed_next_state(amax: jax.Array, new_scale: jax.Array, state: ScalingState) -> ScalingState:
    """Returns the cotangents of scale and amax history, in the dtype of ``state``.

    Args:
        amax: that of ``delayed_amax``, a scalar.
        new_scale: the scale used, float32, one element.
        state: the state before this step, float32 or ``fp32_max_grad``.
    """
    history = from_max_dtype(state.amax_history)
    amax = merge_amax(amax.astype(jnp.float32), history[0])
    new_scale = new_scale.reshape(state.scale.shape)
    if not is_max_dtype(state.scale):
        kept = jnp.where(lax.is_finite(amax), push_amax(amax, history), history)
        return ScalingState(new_scale, kept)
    # A NaN or Inf anywhere must win over all other uses, as it would in one call on the concatenated
    # data. Whoever overwrites the state then keeps the old history. An empty tensor has nothing to say:
    # -inf leaves the word to the other uses.
    empty = amax == -jnp.inf
    amax = jnp.where(lax.is_finite(amax), amax, jnp.inf)
    new_history = jnp.where(empty, -jnp.inf, push_amax(amax, history))
    return ScalingState(to_max_dtype(new_scale), to_max_dtype(new_history))


def measured_next_state(config: DelayedConfig, x: jax.Array, state: ScalingState) -> ScalingState:
    """Returns the cotangents of scale and amax history with the scale that follows from ``x`` as well."""
    history = from_max_dtype(state.amax_history)
    amax = merge_amax(delayed_amax(x).astype(jnp.float32), history[0])
    seen = jnp.where(lax.is_finite(amax), push_amax(amax, history), history)
    new_scale = delayed_scale(config, ScalingState(state.scale, seen))
    # Where there is only zero no scale follows; the smallest one gives way to that of any other data.
    new_scale = jnp.where(jnp.max(seen) > 0, new_scale, SMALLEST_SCALE)
    return delayed_next_state(amax, new_scale, state)


def report_measured(
    report: Callable[..., None], config: DelayedConfig, x: jax.Array, state: ScalingState
) -> None:
    """Tells the host ``measured_next_state`` of a tensor, whose number stands in the place of its scale.

    Unlike a cotangent, a callback also comes out of a ``lax.while_loop``, and of forward mode.
    """
    scale, history = (to_max_dtype(lax.stop_gradient(leaf)) for leaf in state)
    new = measured_next_state(config, lax.stop_gradient(x), ScalingState(scale, history))
    jax.debug.callback(report, state.scale, *map(from_max_dtype, new))


def check_state(scale: Any, amax_history: Any) -> ScalingState:
    """Returns the two as arrays, or raises where their dtypes or shapes do not fit."""
    scale = scale if is_max_dtype(scale) else jnp.asarray(scale)
    amax_history = amax_history if is_max_dtype(amax_history) else jnp.asarray(amax_history)
    for name, value in (("scale", scale), ("amax_history", amax_history)):
        if value.dtype != jnp.float32 and not is_max_dtype(value):
            raise TypeError(
                f"{name} must be float32 (or fp32_max_grad); got {value.dtype} of shape {value.shape}. "
                "Scaling state loses its meaning in a narrower dtype: keep it out of any cast of the "
                "variables."
            )
    if is_max_dtype(scale) != is_max_dtype(amax_history):
        raise TypeError(
            f"scale and amax_history must have the same dtype; got {scale.dtype} and {amax_history.dtype}."
        )
    if scale.shape not in ((), (1,)):
        raise ValueError(f"scale must be a scalar or have shape (1,); got shape {scale.shape}.")
    if amax_history.ndim != 1 or amax_history.shape[0] == 0:
        raise ValueError(
            f"amax_history must have shape (length,) with length 1 or more; got {amax_history.shape}."
        )
    return ScalingState(scale, amax_history)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_qdq(config: DelayedConfig, inp: jax.Array, scale: Any, amax_history: Any) -> jax.Array:
    return _in_qdq_fwd(config, inp, scale, amax_history)[0]


def _in_qdq_fwd(config: DelayedConfig, inp: jax.Array, scale: Any, amax_history: Any) -> Any:
    state = ScalingState(scale, amax_history)
    new_scale = delayed_scale(config, state)
    out = quantize_dequantize(inp, config.q_dtype, new_scale, config.compute_dtype)
    return out, delayed_next_state(delayed_amax(inp), new_scale, state)


def _in_qdq_bwd(config: DelayedConfig, next_state: Any, g: jax.Array) -> Any:
    del config
    return g, *next_state


_in_qdq.defvjp(_in_qdq_fwd, _in_qdq_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _out_qdq(config: DelayedConfig, out: jax.Array, scale: Any, amax_history: Any) -> jax.Array:
    del config, scale, amax_history
    return out


def _out_qdq_fwd(config: DelayedConfig, out: jax.Array, scale: Any, amax_history: Any) -> Any:
    del config
    return out, ScalingState(scale, amax_history)


def _out_qdq_bwd(config: DelayedConfig, state: ScalingState, g: jax.Array) -> Any:
    new_scale = delayed_scale(config, state)
    g = inf_to_nan(g)
    q_g = quantize_dequantize(g, config.q_dtype, new_scale, config.compute_dtype)
    return q_g, *delayed_next_state(delayed_amax(g), new_scale, state)


_out_qdq.defvjp(_out_qdq_fwd, _out_qdq_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_q(config: DelayedConfig, inp: jax.Array, scale: Any, amax_history: Any) -> Any:
    return _in_q_fwd(config, inp, scale, amax_history)[0]


def _in_q_fwd(config: DelayedConfig, inp: jax.Array, scale: Any, amax_history: Any) -> Any:
    state = ScalingState(scale, amax_history)
    new_scale = delayed_scale(config, state)
    q = quantize(inp, config.q_dtype, new_scale, config.compute_dtype)
    return (q, new_scale), delayed_next_state(delayed_amax(inp), new_scale, state)


def _in_q_bwd(config: DelayedConfig, next_state: Any, g: Any) -> Any:
    del config, g
    return None, *next_state


_in_q.defvjp(_in_q_fwd, _in_q_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _out_dq(dq_type: Any, out_dtype: Any, lhs_scale: Any, rhs_scale: Any, out: jax.Array) -> jax.Array:
    del out_dtype
    return dequantize(out, dq_type, from_max_dtype(lhs_scale) * from_max_dtype(rhs_scale))


def _out_dq_fwd(dq_type: Any, out_dtype: Any, lhs_scale: Any, rhs_scale: Any, out: jax.Array) -> Any:
    return _out_dq(dq_type, out_dtype, lhs_scale, rhs_scale, out), None


def _out_dq_bwd(dq_type: Any, out_dtype: Any, residuals: None, g: jax.Array) -> Any:
    del dq_type, residuals
    return None, None, g.astype(out_dtype)


_out_dq.defvjp(_out_dq_fwd, _out_dq_bwd)


def delayed_in_qdq(config: DelayedConfig, inp: Any, scale: Any, amax_history: Any) -> jax.Array:
    """``in_qdq`` with every option of a delayed-scaling recipe."""
    return _in_qdq(config, as_float_array(inp, "inp"), *check_state(scale, amax_history))


def delayed_out_qdq(config: DelayedConfig, out: Any, scale: Any, amax_history: Any) -> jax.Array:
    """``out_qdq`` with every option of a delayed-scaling recipe."""
    return _out_qdq(config, as_float_array(out, "out"), *check_state(scale, amax_history))


def in_qdq(compute_dtype: Any, q_dtype: Any, inp: Any, scale: Any, amax_history: Any) -> jax.Array:
    """Passes a GEMM operand through FP8 with delayed scaling.

    The scale used comes from ``amax_history`` as given. The "gradients" of ``scale`` and
    ``amax_history`` are their next values: the scale used, and the history with the amax of ``inp`` in
    it. The gradient of ``inp`` is the incoming cotangent (straight-through).

    Args:
        compute_dtype: dtype of the scaling arithmetic; see ``quantize``.
        q_dtype: FP8 dtype.
        inp: array of any shape, bfloat16, float16, float32 or float64.
        scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        amax_history: shape ``(length,)``, float32 or ``fp32_max_grad``.

    Returns:
        Array of ``inp``'s shape and dtype.

    Raises:
        TypeError: a dtype is not of the kind above.
        ValueError: ``scale`` or ``amax_history`` has another shape.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> def f(x, scale, history):
        ...     return jnp.sum(fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history))
        >>> x, scale, history = jnp.array([1.0, -3.0]), jnp.ones((1,)), jnp.zeros((4,))
        >>> jax.grad(f, argnums=(1, 2))(x, scale, history)
        (Array([1.], dtype=float32), Array([3., 0., 0., 0.], dtype=float32))

    Source: ``flax.linen.fp8_ops.in_qdq``.
    """
    return delayed_in_qdq(_public_config(compute_dtype, q_dtype), inp, scale, amax_history)


def out_qdq(compute_dtype: Any, q_dtype: Any, out: Any, scale: Any, amax_history: Any) -> jax.Array:
    """Returns ``out`` as it is, and passes its *cotangent* through FP8 with delayed scaling.

    The "gradients" of ``scale`` and ``amax_history`` are their next values, from the cotangent.

    Args:
        compute_dtype: dtype of the scaling arithmetic; see ``quantize``.
        q_dtype: FP8 dtype.
        out: array of any shape, bfloat16, float16, float32 or float64.
        scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        amax_history: shape ``(length,)``, float32 or ``fp32_max_grad``.

    Returns:
        ``out``.

    Raises:
        TypeError: a dtype is not of the kind above.
        ValueError: ``scale`` or ``amax_history`` has another shape.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> def f(y, scale, history):
        ...     return jnp.sum(5 * fp8.out_qdq(jnp.float32, jnp.float8_e5m2, y, scale, history))
        >>> jax.grad(f, argnums=(1, 2))(jnp.ones((2,)), jnp.ones((1,)), jnp.zeros((4,)))
        (Array([1.], dtype=float32), Array([5., 0., 0., 0.], dtype=float32))

    Source: ``flax.linen.fp8_ops.out_qdq``.
    """
    return delayed_out_qdq(_public_config(compute_dtype, q_dtype), out, scale, amax_history)


def in_q(
    compute_dtype: Any, q_dtype: Any, inp: Any, scale: Any, amax_history: Any
) -> tuple[jax.Array, jax.Array]:
    """Quantizes a GEMM operand with delayed scaling and returns ``(q, scale used)``.

    Like ``in_qdq`` without the way back: ``q`` is FP8, and no gradient reaches ``inp`` through it. The
    "gradients" of ``scale`` and ``amax_history`` are their next values.

    Args:
        compute_dtype: dtype of the scaling arithmetic; see ``quantize``.
        q_dtype: FP8 dtype.
        inp: array of any shape, bfloat16, float16, float32 or float64.
        scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        amax_history: shape ``(length,)``, float32 or ``fp32_max_grad``.

    Returns:
        ``q`` of ``inp``'s shape in ``q_dtype``, and the scale in float32, of the shape of ``scale``.

    Raises:
        TypeError: a dtype is not of the kind above.
        ValueError: ``scale`` or ``amax_history`` has another shape.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.in_q(jnp.float32, jnp.float8_e4m3fn, jnp.array([0.3]), jnp.ones((1,)), jnp.zeros((4,)))
        (Array([0.3125], dtype=float8_e4m3fn), Array([1.], dtype=float32))

    Source: ``flax.linen.fp8_ops.in_q``.
    """
    config = _public_config(compute_dtype, q_dtype)
    return _in_q(config, as_float_array(inp, "inp"), *check_state(scale, amax_history))


def out_dq(dq_type: Any, lhs_scale: Any, rhs_scale: Any, out: Any) -> jax.Array:
    """Rescales the result of an FP8 GEMM: ``out * (lhs_scale * rhs_scale)``.

    The cotangent passes to ``out`` unchanged: the backward GEMMs bring scales of their own.

    Args:
        dq_type: floating-point dtype of the result.
        lhs_scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        rhs_scale: likewise.
        out: array of any shape.

    Returns:
        Array of ``out``'s shape in ``dq_type``.

    Raises:
        TypeError: ``dq_type`` is not a wide float.
        ValueError: a scale does not fit ``out``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.out_dq(jnp.float32, jnp.float32(0.5), jnp.float32(4.0), jnp.array([3.0]))
        Array([6.], dtype=float32)

    Source: ``flax.linen.fp8_ops.out_dq``.
    """
    lhs_scale, rhs_scale = (s if is_max_dtype(s) else jnp.asarray(s) for s in (lhs_scale, rhs_scale))
    out = jnp.asarray(out)
    return _out_dq(dq_type, out.dtype, lhs_scale, rhs_scale, out)

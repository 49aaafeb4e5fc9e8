"""Quantize-dequantize functions that return the next scaling state as the gradient of the old one.

Derivation. Quantization has a derivative of zero almost everywhere, so the straight-through estimator
is used: the cotangent of the data passes unchanged. Scale and amax history are not differentiated at
all; their cotangent slots carry their *next values*, which a train state writes over the old ones.
Second derivatives differentiate the forward and backward rules, so the casts in these rules are
straight-through, too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from fp8flax._compat.max_dtype import from_max_dtype, is_max_dtype
from fp8flax._core.amax import delayed_amax
from fp8flax._core.formats import as_fp8_dtype
from fp8flax._core.quantize import (
    as_float_array,
    dequantize,
    inf_to_nan,
    quantize,
    quantize_dequantize,
)
from fp8flax._core.state.state import (
    DelayedConfig,
    ScalingState,
    check_state,
    next_state,
    scale_of,
    state_to_keep,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Shaped


def _public_config(compute_dtype: Any, q_dtype: Any) -> DelayedConfig:
    """Returns the options of the public functions. As in Flax, the effect of an outlier is not limited."""
    return DelayedConfig(compute_dtype, as_fp8_dtype(q_dtype, "q_dtype"), bounded=False)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _straight_through(config: DelayedConfig, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``x`` cast to FP8 and back. Its derivative is that of the identity; the scale has none."""
    return quantize_dequantize(x, config.q_dtype, scale, config.compute_dtype)


@_straight_through.defjvp
def _straight_through_jvp(config: DelayedConfig, primals: Any, tangents: Any) -> Any:
    return _straight_through(config, *primals), tangents[0]


# ``_in_qdq``, ``_out_qdq`` and ``_in_q`` return the next state as the cotangents of ``scale`` and
# ``amax_history``. ``_in_qdq`` and ``_in_q`` compute the next state from ``inp`` in the forward rule, and
# keep it as the residual ``new_state``. ``_out_qdq`` computes it from the cotangent in the backward rule.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_qdq(config: DelayedConfig, inp: jax.Array, scale: Any, amax_history: Any) -> jax.Array:
    """Returns ``inp`` cast to FP8 and back, under the scale of its state."""
    return _in_qdq_fwd(config, inp, scale, amax_history)[0]


def _in_qdq_fwd(config: DelayedConfig, inp: jax.Array, scale: Any, amax_history: Any) -> Any:
    state = ScalingState(scale, amax_history)
    new_scale = scale_of(config, state).reshape(state.scale.shape)
    out = _straight_through(config, inp, new_scale)
    return out, next_state(delayed_amax(inp), new_scale, state_to_keep(state))


def _in_qdq_bwd(config: DelayedConfig, new_state: Any, g: jax.Array) -> Any:
    del config
    return g, *new_state


_in_qdq.defvjp(_in_qdq_fwd, _in_qdq_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _out_qdq(config: DelayedConfig, out: jax.Array, scale: Any, amax_history: Any) -> jax.Array:
    """Returns ``out`` unchanged; its cotangent is cast to FP8 and back, under the scale of its state."""
    del config, scale, amax_history
    return out


def _out_qdq_fwd(config: DelayedConfig, out: jax.Array, scale: Any, amax_history: Any) -> Any:
    del config
    return out, ScalingState(scale, amax_history)


def _out_qdq_bwd(config: DelayedConfig, state: ScalingState, g: jax.Array) -> Any:
    new_scale = scale_of(config, state).reshape(state.scale.shape)
    g = inf_to_nan(g)
    q_g = _straight_through(config, g, new_scale)
    return q_g, *next_state(delayed_amax(g), new_scale, state_to_keep(state))


_out_qdq.defvjp(_out_qdq_fwd, _out_qdq_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_q(config: DelayedConfig, inp: jax.Array, scale: Any, amax_history: Any) -> Any:
    """Returns the FP8 codes of ``inp``, and the scale from its state that they were made with."""
    return _in_q_fwd(config, inp, scale, amax_history)[0]


def _in_q_fwd(config: DelayedConfig, inp: jax.Array, scale: Any, amax_history: Any) -> Any:
    state = ScalingState(scale, amax_history)
    new_scale = scale_of(config, state).reshape(state.scale.shape)
    q = quantize(inp, config.q_dtype, new_scale, config.compute_dtype)
    return (q, new_scale), next_state(delayed_amax(inp), new_scale, state_to_keep(state))


def _in_q_bwd(config: DelayedConfig, new_state: Any, g: Any) -> Any:
    del config, g
    return None, *new_state


_in_q.defvjp(_in_q_fwd, _in_q_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _out_dq(dq_type: Any, out_dtype: Any, lhs_scale: Any, rhs_scale: Any, out: jax.Array) -> jax.Array:
    """Returns ``out * (lhs_scale * rhs_scale)`` in ``dq_type``; the cotangent passes in ``out_dtype``."""
    del out_dtype
    return dequantize(out, dq_type, from_max_dtype(lhs_scale) * from_max_dtype(rhs_scale))


def _out_dq_fwd(dq_type: Any, out_dtype: Any, lhs_scale: Any, rhs_scale: Any, out: jax.Array) -> Any:
    return _out_dq(dq_type, out_dtype, lhs_scale, rhs_scale, out), None


def _out_dq_bwd(dq_type: Any, out_dtype: Any, residuals: None, g: jax.Array) -> Any:
    del dq_type, residuals
    return None, None, g.astype(out_dtype)


_out_dq.defvjp(_out_dq_fwd, _out_dq_bwd)


def in_qdq_as(config: DelayedConfig, inp: jax.Array, state: ScalingState) -> jax.Array:
    """Returns ``in_qdq`` of ``inp`` with the options of a delayed-scaling recipe, such as its margin."""
    return _in_qdq(config, inp, *state)


def out_qdq_as(config: DelayedConfig, out: jax.Array, state: ScalingState) -> jax.Array:
    """Returns ``out_qdq`` of ``out`` with the options of a delayed-scaling recipe, such as its margin."""
    return _out_qdq(config, out, *state)


def in_qdq(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    inp: Float[ArrayLike, "*dims"],
    scale: Shaped[ArrayLike, "*scale"],
    amax_history: Shaped[ArrayLike, " length"],
) -> Float[jax.Array, "*dims"]:
    """Passes a GEMM operand through FP8 with delayed scaling.

    The scale is computed from ``amax_history`` as given. The "gradients" of ``scale`` and ``amax_history``
    are their next values: the scale used, and the history with the amax of ``inp`` in it. The gradient of
    ``inp`` is the incoming cotangent (straight-through).

    Args:
        compute_dtype: dtype of the scaling arithmetic; see ``quantize``.
        q_dtype: FP8 dtype.
        inp: array of any shape, bfloat16, float16, float32 or float64.
        scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        amax_history: shape ``(length,)``, float32 or ``fp32_max_grad``.

    Returns:
        Array of ``inp``'s shape and dtype.

    Raises:
        TypeError: an argument has another dtype than those above.
        ValueError: ``scale`` or ``amax_history`` has another shape than those above.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> def f(x, scale, history):
        ...     return jnp.sum(fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history))
        >>> x, scale, history = jnp.array([1.0, -3.0]), jnp.ones((1,)), jnp.zeros((4,))
        >>> jax.grad(f, argnums=(1, 2))(x, scale, history)
        (Array([1.], dtype=float32), Array([3., 0., 0., 0.], dtype=float32))

    Source: ``flax.linen.fp8_ops.in_qdq``.
    """
    config = _public_config(compute_dtype, q_dtype)
    return _in_qdq(config, as_float_array(inp, "inp"), *check_state(scale, amax_history))


def out_qdq(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    out: Float[ArrayLike, "*dims"],
    scale: Shaped[ArrayLike, "*scale"],
    amax_history: Shaped[ArrayLike, " length"],
) -> Float[jax.Array, "*dims"]:
    """Returns ``out`` unchanged, and passes its *cotangent* through FP8 with delayed scaling.

    The "gradients" of ``scale`` and ``amax_history`` are their next values, computed from the cotangent.

    Args:
        compute_dtype: dtype of the scaling arithmetic; see ``quantize``.
        q_dtype: FP8 dtype.
        out: array of any shape, bfloat16, float16, float32 or float64.
        scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        amax_history: shape ``(length,)``, float32 or ``fp32_max_grad``.

    Returns:
        ``out``.

    Raises:
        TypeError: an argument has another dtype than those above.
        ValueError: ``scale`` or ``amax_history`` has another shape than those above.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> def f(y, scale, history):
        ...     return jnp.sum(5 * fp8.out_qdq(jnp.float32, jnp.float8_e5m2, y, scale, history))
        >>> jax.grad(f, argnums=(1, 2))(jnp.ones((2,)), jnp.ones((1,)), jnp.zeros((4,)))
        (Array([1.], dtype=float32), Array([5., 0., 0., 0.], dtype=float32))

    Source: ``flax.linen.fp8_ops.out_qdq``.
    """
    config = _public_config(compute_dtype, q_dtype)
    return _out_qdq(config, as_float_array(out, "out"), *check_state(scale, amax_history))


def in_q(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    inp: Float[ArrayLike, "*dims"],
    scale: Shaped[ArrayLike, "*scale"],
    amax_history: Shaped[ArrayLike, " length"],
) -> tuple[Float[jax.Array, "*dims"], Float32[jax.Array, "*scale"]]:
    """Quantizes a GEMM operand with delayed scaling and returns ``(q, scale used)``.

    It quantizes as ``in_qdq`` does, but ``q`` stays FP8, and no gradient reaches ``inp`` through it. The
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
        TypeError: an argument has another dtype than those above.
        ValueError: ``scale`` or ``amax_history`` has another shape than those above.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.in_q(jnp.float32, jnp.float8_e4m3fn, jnp.array([0.3]), jnp.ones((1,)), jnp.zeros((4,)))
        (Array([0.3125], dtype=float8_e4m3fn), Array([1.], dtype=float32))

    Source: ``flax.linen.fp8_ops.in_q``.
    """
    config = _public_config(compute_dtype, q_dtype)
    return _in_q(config, as_float_array(inp, "inp"), *check_state(scale, amax_history))


def out_dq(
    dq_type: DTypeLike,
    lhs_scale: Shaped[ArrayLike, "*lhs_scale"],
    rhs_scale: Shaped[ArrayLike, "*rhs_scale"],
    out: Float[ArrayLike, "*dims"],
) -> Float[jax.Array, "*dims"]:
    """Rescales the result of an FP8 GEMM: ``out * (lhs_scale * rhs_scale)``.

    The cotangent passes to ``out`` unchanged, because the backward GEMMs apply their own scales.

    Args:
        dq_type: floating-point dtype of the result.
        lhs_scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        rhs_scale: scalar or shape ``(1,)``, float32 or ``fp32_max_grad``.
        out: array of any shape.

    Returns:
        Array of ``out``'s shape in ``dq_type``.

    Raises:
        TypeError: ``dq_type`` is not bfloat16, float16, float32 or float64.
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

"""Quantize-dequantize functions that return the next scaling state as the gradient of the old one.

A cast to FP8 and back counts as the identity in derivatives of any order (straight-through). Scale and amax
history have no derivative: their "gradients" are their next values. The functions below return the amax of
this step as the cotangent of a scale of ``state.step_scales``, which computes the next values from it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from fp8flax._compat.max_dtype import from_max_dtype, is_max_dtype
from fp8flax._core.axes import merge_amax
from fp8flax._core.formats import as_fp8_dtype
from fp8flax._core.observe import is_calibrating, mode, report_amax
from fp8flax._core.quantize import (
    as_float_array,
    dequantize,
    inf_to_nan,
    on_cotangent,
    quantize,
    quantize_dequantize,
    straight_through,
)
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.scaling import delayed_amax
from fp8flax._core.shapes import Float, Float32, Shaped
from fp8flax._core.state.state import ScalingState, check_state_dtype, step_scales


def _checked(
    q_dtype: Any, x: Any, name: str, scale: Any, amax_history: Any
) -> tuple[DelayedQuantizer, jax.Array, ScalingState]:
    """Checks what a user passes; returns the quantizer, the tensor and its state."""
    quantizer, x = DelayedQuantizer(dtype=as_fp8_dtype(q_dtype, "q_dtype")), as_float_array(x, name)
    state = ScalingState(*(x if is_max_dtype(x) else jnp.asarray(x) for x in (scale, amax_history)))
    for field, value in state._asdict().items():
        check_state_dtype(field, value)
    if state.scale.shape not in ((), (1,)):
        raise ValueError(f"scale must be a scalar or have shape (1,); got shape {state.scale.shape}.")
    if state.amax_history.ndim != 1 or state.amax_history.size == 0:
        raise ValueError(
            f"amax_history must have shape (length,) with length 1 or more; got {state.amax_history.shape}."
        )
    return quantizer, x, state


# With a scale of ``step_scales``, as contractions in the quantize-dequantize form call them.


def _cast(q_dtype: Any, compute_dtype: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``x`` cast to FP8 and back, straight-through."""
    cast = lambda x, scale: quantize_dequantize(x, q_dtype, scale, compute_dtype)  # noqa: E731
    return straight_through(cast, x, scale)


def _with_amax(result: Any, inp: jax.Array, scale: jax.Array) -> Any:
    """Returns ``result``, an array or several; the "gradient" of ``scale`` is the amax of ``inp``."""
    amax = merge_amax(delayed_amax(jax.lax.stop_gradient(inp)), scale)
    # The cotangent of the scale is the amax; the amax itself has none.
    return on_cotangent(lambda g, args: (g, (args[1], None)), result, (scale, amax))


def in_qdq_with_scale(
    quantizer: DelayedQuantizer, inp: jax.Array, scale: jax.Array, compute_dtype: Any = jnp.float32
) -> jax.Array:
    """Returns ``inp`` cast to FP8 and back; the "gradient" of ``scale`` is the amax of ``inp``."""
    return _with_amax(_cast(quantizer.dtype, compute_dtype, inp, scale), inp, scale)


def out_qdq_with_scale(
    quantizer: DelayedQuantizer, out: jax.Array, scale: jax.Array, compute_dtype: Any = jnp.float32
) -> jax.Array:
    """Returns ``out``, whose cotangent is cast; the "gradient" of ``scale`` is the cotangent's amax."""

    def backward(g: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        g = inf_to_nan(g)
        return _cast(quantizer.dtype, compute_dtype, g, scale), merge_amax(delayed_amax(g), scale)

    return on_cotangent(backward, out, scale)


# With a scaling state, as users call them.


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
    quantizer, inp, state = _checked(q_dtype, inp, "inp", scale, amax_history)
    if is_calibrating():
        return report_amax(quantizer, inp, delayed_amax(inp), state)
    (new_scale,) = step_scales([quantizer], [state])
    return in_qdq_with_scale(quantizer, inp, new_scale, compute_dtype)


def out_qdq(
    compute_dtype: DTypeLike,
    q_dtype: DTypeLike,
    out: Float[ArrayLike, "*dims"],
    scale: Shaped[ArrayLike, "*scale"],
    amax_history: Shaped[ArrayLike, " length"],
) -> Float[jax.Array, "*dims"]:
    """Returns ``out`` unchanged, and passes its *cotangent* through FP8 with delayed scaling.

    The "gradients" of ``scale`` and ``amax_history`` are their next values, computed from the cotangent.

    The arguments and the errors are those of ``in_qdq``.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> def f(y, scale, history):
        ...     return jnp.sum(5 * fp8.out_qdq(jnp.float32, jnp.float8_e5m2, y, scale, history))
        >>> jax.grad(f, argnums=(1, 2))(jnp.ones((2,)), jnp.ones((1,)), jnp.zeros((4,)))
        (Array([1.], dtype=float32), Array([5., 0., 0., 0.], dtype=float32))

    Source: ``flax.linen.fp8_ops.out_qdq``.
    """
    quantizer, out, state = _checked(q_dtype, out, "out", scale, amax_history)
    (new_scale,) = step_scales([quantizer], [state])
    if not is_calibrating():
        return out_qdq_with_scale(quantizer, out, new_scale, compute_dtype)

    def report(g: jax.Array, scale_and_state: Any) -> Any:
        """Reports the amax of the cotangent, which the "gradient" of the state depends on."""
        scale, state = scale_and_state
        amax = delayed_amax(g)
        return g, (merge_amax(report_amax(quantizer, amax, amax, state), scale), None)

    return on_cotangent(report, out, (new_scale, state)) if mode.value.backward else out


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

    The arguments and the errors are those of ``in_qdq``.

    Returns:
        ``q`` of ``inp``'s shape in ``q_dtype``, and the scale in float32, of the shape of ``scale``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.in_q(jnp.float32, jnp.float8_e4m3fn, jnp.array([0.3]), jnp.ones((1,)), jnp.zeros((4,)))
        (Array([0.3125], dtype=float8_e4m3fn), Array([1.], dtype=float32))

    Source: ``flax.linen.fp8_ops.in_q``.
    """
    quantizer, inp, state = _checked(q_dtype, jax.lax.stop_gradient(inp), "inp", scale, amax_history)
    if is_calibrating():
        inp = report_amax(quantizer, inp, delayed_amax(inp), state)
        state = state._replace(scale=jnp.ones_like(state.scale))  # it was the number of the tensor
    (new_scale,) = step_scales([quantizer], [state])
    used = jax.lax.stop_gradient(new_scale)
    q = quantize(inp, quantizer.dtype, used, compute_dtype)
    return _with_amax((q, used.reshape(jnp.shape(scale))), inp, new_scale)


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
    factor = from_max_dtype(lhs_scale) * from_max_dtype(rhs_scale)
    return straight_through(lambda out, factor: dequantize(out, dq_type, factor), jnp.asarray(out), factor)

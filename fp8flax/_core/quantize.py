"""Casts between wide floats and scaled FP8: ``x ≈ q * scale``."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8flax._core.formats import as_fp8_dtype, fp8_max, is_wide_float
from fp8flax._core.shapes import Float

T = TypeVar("T")
Arrays = tuple[jax.Array, ...]


def as_float_array(x: ArrayLike, name: str) -> Float[jax.Array, "*dims"]:
    """Returns ``x`` as an array of a wide float dtype, or raises ``TypeError``."""
    x = jnp.asarray(x)
    if not is_wide_float(x.dtype):
        raise TypeError(
            f"{name} must have a floating-point dtype of 16 bits or more (bfloat16, float16, float32, "
            f"float64); got {x.dtype} of shape {x.shape}. Cast it before the FP8 operation."
        )
    return x


def _match_rank(scale: ArrayLike, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns ``scale`` in ``dtype``, in a shape that broadcasts with ``x``.

    A scale with one element becomes a scalar. Any other scale must have the rank of ``x``, and in each
    dimension size 1 or the size of ``x``.
    """
    scale = jnp.asarray(scale)
    if scale.size == 1:
        scale = scale.reshape(())
    elif scale.ndim != x.ndim or any(s not in (1, d) for s, d in zip(scale.shape, x.shape)):
        raise ValueError(
            f"scale of shape {scale.shape} does not fit x of shape {x.shape}: pass one element, or one "
            "scale per slice with the reduced dimensions kept at size 1."
        )
    return scale.astype(dtype)


def quantize(
    x: Float[jax.Array, "*dims"],
    q_dtype: DTypeLike,
    scale: Float[ArrayLike, "*scale"],
    compute_dtype: DTypeLike = jnp.float32,
) -> Float[jax.Array, "*dims"]:
    """Casts ``x / scale`` to FP8; values beyond the range of FP8 saturate.

    ``q = round_to_nearest_even(clip(x / scale, -fp8_max, fp8_max))``. An Inf saturates like any other large
    value; NaN stays NaN.

    Args:
        x: array of any shape, bfloat16, float16, float32 or float64.
        q_dtype: FP8 dtype of the result.
        scale: positive; one element, or per slice with the reduced dimensions kept at size 1.
        compute_dtype: dtype of the division: float32 is accurate, float64, or bfloat16, which reproduces
            the rounding of Flax for a bfloat16 ``x``. In float16 small scales would become zero.

    Returns:
        Array of ``x``'s shape in ``q_dtype``.

    Raises:
        TypeError: an argument has another dtype than those above.
        ValueError: ``scale`` does not fit ``x``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.quantize(jnp.array([0.3, 100.0, 2000.0]), jnp.float8_e4m3fn, jnp.float32(2.0))
        Array([0.15625, 48, 448], dtype=float8_e4m3fn)

    Source: OCP 8-bit Floating Point Specification (OFP8) v1.0, section 5.2 (saturating conversion).
    """
    q_dtype = as_fp8_dtype(q_dtype, "q_dtype")
    if not is_wide_float(compute_dtype) or jnp.dtype(compute_dtype) == jnp.float16:
        raise TypeError(
            f"compute_dtype must be bfloat16, float32 or float64; got {compute_dtype!r}. (x may be "
            "float16; small scales would be zero in it.)"
        )
    x = as_float_array(x, "x")
    return saturated(quotient(x.astype(compute_dtype), _match_rank(scale, x, compute_dtype)), q_dtype)


def divided(x: Float[jax.Array, "*dims"], scale: Float[jax.Array, "*#dims"]) -> Float[jax.Array, "*dims"]:
    """Returns ``x / scale``, written so that XLA for CPUs divides.

    XLA would multiply by the reciprocal of a scale that many elements share, if it is a constant or is used
    nowhere else. This rounds some ties between two FP8 codes the other way, so that codes would depend on
    whether a model is jitted, or frozen. Both branches of ``where`` are equal, but XLA cannot see that.
    """
    dividend = lax.stop_gradient(x)  # the select must not add to the derivative with respect to x
    return x / jnp.where(dividend == scale, dividend, scale)


@partial(jax.jit, inline=True)
def quotient(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``x / scale``: a plain division on GPUs, and ``divided`` on CPUs."""
    return lax.platform_dependent(x, scale, cpu=divided, default=operator.truediv)


def over_power_of_two(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns ``x / scale``, for float32 scales that are powers of two: ``x`` times their reciprocals."""
    bits = np.int32(254 << 23) - lax.bitcast_convert_type(scale, jnp.int32)
    return x * lax.bitcast_convert_type(bits, jnp.float32)


def saturated(x: Float[jax.Array, "*dims"], q_dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
    """Casts a wide array, already divided by its scale, to FP8; values out of range saturate."""
    limit = jnp.asarray(fp8_max(q_dtype), x.dtype)
    return lax.clamp(-limit, x, limit).astype(q_dtype)


def dequantize(
    x: Float[jax.Array, "*dims"], dq_dtype: DTypeLike, scale: Float[ArrayLike, "*scale"]
) -> Float[jax.Array, "*dims"]:
    """Casts FP8 codes back: ``x * scale``, in the dtype of ``scale``, then cast to ``dq_dtype``.

    Args:
        x: array of any shape; usually FP8. The wide result of an FP8 GEMM is rescaled in the same way.
        dq_dtype: dtype of the result: bfloat16, float16, float32 or float64.
        scale: as in ``quantize``. Float32 is accurate, and bfloat16 reproduces the rounding of Flax; an
            integer, or E8M0, becomes float32.

    Returns:
        Array of ``x``'s shape in ``dq_dtype``.

    Raises:
        TypeError: ``dq_dtype`` is another dtype than those above.
        ValueError: ``scale`` does not fit ``x``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> q = fp8.quantize(jnp.array([0.3, 100.0]), jnp.float8_e4m3fn, jnp.float32(2.0))
        >>> fp8.dequantize(q, jnp.bfloat16, jnp.float32(2.0))
        Array([0.3125, 96], dtype=bfloat16)

    Source: OCP 8-bit Floating Point Specification (OFP8) v1.0.
    """
    x, factor = jnp.asarray(x), jnp.asarray(scale)
    if not is_wide_float(factor.dtype):
        factor = factor.astype(jnp.float32)
    if not is_wide_float(dq_dtype):
        raise TypeError(f"dq_dtype must be bfloat16, float16, float32 or float64; got {dq_dtype!r}.")
    return (x.astype(factor.dtype) * _match_rank(factor, x, factor.dtype)).astype(dq_dtype)


def quantize_dequantize(
    x: Float[jax.Array, "*dims"],
    q_dtype: DTypeLike,
    scale: Float[ArrayLike, "*scale"],
    compute_dtype: DTypeLike = jnp.float32,
) -> Float[jax.Array, "*dims"]:
    """Casts ``x`` to FP8 and back ("fake quantization"); returns an array of the shape and dtype of ``x``.

    Arguments and errors: as in ``quantize``. The multiplication is in ``compute_dtype``, too.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.quantize_dequantize(jnp.array([0.3, 100.0]), jnp.float8_e4m3fn, jnp.float32(2.0))
        Array([ 0.3125, 96.    ], dtype=float32)

    Source: the pattern of the Flax FP8 guide.
    """
    # On GPUs XLA removes a cast to a narrower float and back. The barrier keeps both casts.
    q = lax.optimization_barrier(quantize(x, q_dtype, scale, compute_dtype))
    return dequantize(q, jnp.asarray(x).dtype, jnp.asarray(scale).astype(compute_dtype))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def straight_through(f: Callable[..., jax.Array], x: jax.Array, *constants: jax.Array) -> jax.Array:
    """Returns ``f(x, *constants)``; its derivative with respect to ``x`` is that of the identity.

    The derivative of rounding is zero almost everywhere. The constants have no derivative.
    """
    return f(x, *constants)


@straight_through.defjvp
def _straight_through_jvp(
    f: Callable[..., jax.Array], primals: Arrays, tangents: Arrays
) -> tuple[jax.Array, jax.Array]:
    result = straight_through(f, *primals)
    return result, tangents[0].astype(result.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def on_cotangent(f: Callable[..., Any], x: Any, args: Any, kept: Any) -> Any:
    """Returns ``x``, an array or a tree. The backward pass calls ``f(g, kept)`` with its cotangent ``g``.

    ``f`` returns the cotangents of ``x`` and of ``args``, a tree of arrays. ``kept`` are the residuals.
    If a model takes a gradient inside its forward pass, ``f`` is called for the innermost gradient only.
    """
    return x


on_cotangent.defvjp(lambda f, x, args, kept: (x, kept), lambda f, kept, g: (*f(g, kept), None))


def no_derivative(f: Callable[..., T]) -> Callable[..., T]:
    """Returns ``f``, a function of arrays, so that ``TypeError`` is raised if JAX differentiates it.

    The rules of a contraction call such functions: a second derivative would silently be zero.
    """
    wrapped = jax.custom_jvp(f)

    @wrapped.defjvp
    def refuse(primals: object, tangents: object) -> NoReturn:
        raise TypeError(
            "The direct form of an FP8 matmul can be differentiated once, in reverse mode. For second "
            "derivatives pass form='qdq' to the op, or to quantize_model, with delayed scaling. "
            "(Fp8RaggedDotOp has no second derivative.) Or turn FP8 off for this part with "
            "fp8flax.autocast(enabled=False)."
        )

    return wrapped


def cast_to_representable(
    x: Float[jax.Array, "*dims"],
    q_dtype: DTypeLike = jnp.float8_e4m3fn,
    scale: Float[ArrayLike, "*scale"] = 1.0,
) -> Float[jax.Array, "*dims"]:
    """Rounds ``x`` to values that FP8 represents exactly under ``scale``.

    A tensor prepared in this way loses nothing when it is quantized with the same scale, or with a scale
    that is a power of two away from it and in range. An FP8 product of such tensors then differs from the
    float32 product only by its accumulation, see ``fp8flax.GemmRecipe``.

    Arguments, errors and result: as in ``quantize_dequantize`` in float32.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.cast_to_representable(jnp.array([0.3, 100.0]))
        Array([ 0.3125, 96.    ], dtype=float32)

    Source: Transformer Engine, "Using FP8 with Transformer Engine".
    """
    return quantize_dequantize(x, q_dtype, jnp.asarray(scale, jnp.float32))


def inf_to_nan(g: Float[jax.Array, "*dims"]) -> Float[jax.Array, "*dims"]:
    """Returns a cotangent in which each Inf is replaced by a NaN.

    A cast to FP8 would make an Inf finite. But a gradient that overflowed must stay non-finite, so that
    ``optax.apply_if_finite`` or a loss scale skips the step, and no history gets its amax.
    """
    return jnp.where(lax.is_finite(g), g, np.array(np.nan, g.dtype))

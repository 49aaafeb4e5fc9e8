"""Computes the amax of a tensor, updates its amax history, and computes its scale from an amax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from fp8flax._core.shapes import Bool, Float, Float32

Rounding: TypeAlias = Literal["up", "floor"]
"""How a scale becomes a power of two: by rounding up, or by the rule of the MX specification."""

# Scales stay in the normal range of float32: XLA flushes subnormals to zero, and a scale of zero or
# infinity turns every value into NaN.
SMALLEST_SCALE = np.finfo(np.float32).tiny
_LARGEST = np.finfo(np.float32).max
_ONE, _LARGEST_ENCODING = np.float32(1), 1 / SMALLEST_SCALE


def finite_amax(
    x: Float[jax.Array, "*dims"], axes: Sequence[int] | None = None
) -> Float32[jax.Array, "*reduced"]:
    """Returns the largest finite magnitude over ``axes`` (kept, with size 1), or of all of ``x``; float32.

    The result is 0 if no value is finite. Current scaling takes its scales from this amax, so that the
    values beside a NaN or an Inf keep their precision.
    """
    magnitude = jnp.where(lax.is_finite(x), jnp.abs(x), jnp.zeros((), x.dtype))
    amax = jnp.max(magnitude, axis=axes, keepdims=axes is not None, initial=0)
    return jnp.minimum(amax.astype(jnp.float32), _LARGEST)  # float64 may hold more


def delayed_amax(
    x: Float[jax.Array, "*dims"], where: Bool[jax.Array, "*#dims"] | None = None
) -> Float[jax.Array, ""]:
    """Returns the amax of a tensor, in its wide dtype, as the update of the scaling state needs it.

    The amax is inf if the tensor holds a NaN or an Inf. It is -inf if no element is ``where`` the mask is
    True, and then loses every maximum. (A NaN is encoded as inf, because a maximum over devices can lose a
    NaN, at least on CPUs.)
    """
    magnitude = jnp.where(jnp.isnan(x), np.array(np.inf, x.dtype), jnp.abs(x))
    if x.dtype == jnp.float64:  # may hold more than float32, in which the history is
        magnitude = jnp.where(lax.is_finite(x), jnp.minimum(magnitude, np.float64(_LARGEST)), magnitude)
    if where is not None:
        magnitude = jnp.where(where, magnitude, np.array(-np.inf, x.dtype))
    return jnp.max(magnitude, initial=-jnp.inf)


def is_usable(amax: Float32[jax.Array, "*dims"]) -> Bool[jax.Array, "*dims"]:
    """Returns whether a scale can be computed from ``amax``: True for a finite, normal, positive number.

    A subnormal amax counts as 0, because XLA flushes subnormals to zero in some of its kernels. Its scale
    would also be too small for all other data.
    """
    return (amax >= SMALLEST_SCALE) & (amax <= _LARGEST)


def encode_scale(
    amax: Float32[jax.Array, "*dims"], largest: Float[ArrayLike, "*#dims"], limit: np.float32
) -> Float32[jax.Array, "*dims"]:
    """Returns the factor that maps ``amax`` onto ``largest``, at most ``limit``; 1 if it is not usable."""
    usable = is_usable(amax)
    factor = largest / jnp.where(usable, amax, _ONE)
    return jnp.where(usable, jnp.minimum(factor, limit), _ONE)


def amax_to_scale(
    amax: Float32[jax.Array, "*#dims"],
    fp8_max: Float[ArrayLike, "*#dims"],
    rounding: Rounding | None = None,
    margin: int = 0,
    default: Float32[ArrayLike, "*#dims"] = _ONE,
) -> Float32[jax.Array, "*dims"]:
    """Returns the scale of an amax, a normal float32 number; ``default`` if the amax is not usable.

    Without a rounding the scale is that of ``compute_scale``. ``"up"`` takes the smallest power of two with
    which nothing saturates, and ``"floor"`` the binary exponent of ``amax`` minus that of ``fp8_max``.

    Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.3, for ``"floor"``.
    """
    usable = is_usable(amax)
    if rounding is not None:
        # A normal float32 number has its exponent plus 127 in bits 23 to 30, and its mantissa below.
        bits, max_bits = lax.bitcast_convert_type(amax, jnp.int32), np.float32(fp8_max).view(np.int32)
        exponent = lax.shift_right_logical(bits, np.int32(23)) - np.int32((max_bits >> 23) - margin)
        if rounding == "up":
            mantissa, mantissa_of_max = (x & np.int32(0x7FFFFF) for x in (bits, max_bits))
            exponent = exponent + (mantissa > mantissa_of_max).astype(jnp.int32)
        exponent = jnp.clip(exponent, np.int32(-126), np.int32(127)) + np.int32(127)
        power = lax.bitcast_convert_type(lax.shift_left(exponent, np.int32(23)), jnp.float32)
        return jnp.where(usable, power, default)
    # Powers of two change no bits. The margin is applied before the division, which could overflow.
    reciprocal = encode_scale(amax, jnp.asarray(fp8_max, jnp.float32) / 2.0**margin, _LARGEST_ENCODING)
    # Under jit XLA would turn 1 / (fp8_max / amax) into amax / fp8_max, which differs in the last bit, but
    # for what is between the two divisions. The second division comes last: XLA for CPUs copies all that
    # follows it into each operation that reads the scale.
    scale = jnp.where(usable, 1.0, default) / reciprocal
    return jnp.minimum(scale, _LARGEST) if margin > 0 else scale  # only a margin can make it infinite


def compute_scale(
    amax: Float[ArrayLike, "*#dims"],
    scale: Float[ArrayLike, "*#dims"],
    fp8_max: Float[ArrayLike, "*#dims"],
    margin: int = 0,
) -> Float32[jax.Array, "*dims"]:
    """Returns the scale that maps ``amax`` onto the largest FP8 value.

    ``scale = amax * 2**margin / fp8_max``, so that ``x ≈ q * scale`` with ``|q| <= fp8_max / 2**margin``,
    clipped to the normal range of float32. As in Flax and Transformer Engine it is computed through the
    reciprocal, so the last bit can differ from this quotient.

    Args:
        amax: largest magnitude, any shape; cast to float32.
        scale: the scale to keep if ``amax`` is subnormal, or not a positive finite number; broadcasts with
            ``amax``. If the same holds for ``scale``, the result is 1.
        fp8_max: largest finite value of the FP8 dtype, ``jnp.finfo(dtype).max``.
        margin: headroom in powers of two.

    Returns:
        The new scale, float32, of the broadcast shape.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> scale = fp8.compute_scale(jnp.float32(896.0), jnp.ones((1,)), 448.0)
        >>> scale
        Array([2.], dtype=float32)

    Source: Transformer Engine, delayed scaling (its ``scale`` is the reciprocal of this one).
    """
    amax, scale = (jnp.asarray(x, jnp.float32) for x in (amax, scale))
    return amax_to_scale(amax, fp8_max, margin=margin, default=jnp.where(is_usable(scale), scale, 1.0))


def push_amax(
    amax: Float32[jax.Array, "*stack"], amax_history: Float32[jax.Array, "*stack length"]
) -> Float32[jax.Array, "*stack length"]:
    """Returns ``amax_history`` of shape ``(..., length)`` rolled by -1, with ``amax`` at index 0.

    If the entry at index 0 of the old history is not finite, it becomes 0: so an inf that another library
    has just recorded does not stay in the history.
    """
    # The order is that of Flax, so that checkpoints fit: the oldest entry, at index 1, leaves the history,
    # and the entry at index 0 moves to the end. The code has a pad and selects instead of ``jnp.roll``,
    # because XLA fuses them with the operations around them.
    shape = amax_history.shape
    position = lax.broadcasted_iota(np.int32, shape, len(shape) - 1)
    newest = amax_history[..., :1]
    newest = jnp.where(lax.is_finite(newest), newest, 0.0)
    padding = [*((0, 0, 0) for _ in shape[1:]), (-1, 1, 0)]
    rolled = lax.pad(amax_history, jnp.zeros((), amax_history.dtype), padding)
    rolled = jnp.where(position == shape[-1] - 1, newest, rolled)
    return jnp.where(position == 0, amax.reshape(*shape[:-1], 1), rolled)


def apply_scales(
    total: Float32[jax.Array, "*dims"],
    lhs_scale: Float32[jax.Array, "*#dims"],
    rhs_scale: Float32[jax.Array, "*#dims"],
) -> Float32[jax.Array, "*dims"]:
    """Returns ``total * lhs_scale * rhs_scale`` in float32, without an intermediate overflow.

    The product of two of them can overflow or underflow even if the result does not. So if ``lhs_scale`` is
    very large or very small, a power of two, which changes no rounding, is taken out of it and multiplied
    last.

    ``total`` holds sums of products of FP8 codes, in magnitude 0 or from 2**-32 to 2**47. Smaller sums,
    which only ``float8_e5m2fnuz`` has, may become 0 if a scale is below 2**-92 or above 2**80. The scales
    are normal numbers.
    """
    # The first product, total * (lhs_scale / last), is always 0 or a normal number. If ``last`` is 2**48,
    # this product is 0 or at least 1, so rhs_scale cannot make it underflow. If ``last`` is 2**-32, it is
    # less than 2**-15, so rhs_scale cannot make it overflow.
    last = jnp.where(lhs_scale >= 2.0**80, 2.0**48, jnp.where(lhs_scale < 2.0**-94, 2.0**-32, 1.0))
    return total * (lhs_scale / last) * rhs_scale * last

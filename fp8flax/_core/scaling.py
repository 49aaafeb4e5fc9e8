"""From a tensor to its scale: amax, amax history, and amax -> scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from fp8flax._core.formats import fp8_limits

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Int32, Shaped

# Scales stay in the normal range of float32: XLA flushes subnormals to zero, and a scale of zero or
# infinity turns every value into NaN.
SMALLEST_SCALE = np.finfo(np.float32).tiny
_LARGEST_SCALE = np.finfo(np.float32).max


def compute_amax(x: Float[jax.Array, "*dims"]) -> Float32[jax.Array, ""]:
    """Returns the largest magnitude in ``x``, a float32 scalar; NaN where ``x`` holds one, 0 if empty."""
    return jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)


def finite_amax(
    x: Float[jax.Array, "*dims"], axes: Sequence[int] | None = None
) -> Float32[jax.Array, "*reduced"]:
    """Returns the largest finite magnitude over ``axes`` (kept, with size 1), or of all of ``x``; float32.

    What is not finite has no say in a scale that is used at once: an Inf then saturates and a NaN stays
    one, and the values beside them keep their precision. 0 where there is nothing finite.
    """
    magnitude = jnp.where(lax.is_finite(x), jnp.abs(x), jnp.zeros((), x.dtype))
    amax = jnp.max(magnitude, axis=axes, keepdims=axes is not None, initial=0)
    return jnp.minimum(amax.astype(jnp.float32), _LARGEST_SCALE)  # float64 may hold more


def is_usable(amax: Float32[jax.Array, "*dims"]) -> Bool[jax.Array, "*dims"]:
    """Returns whether a scale follows from ``amax``: True where it is finite and a normal number.

    A subnormal amax counts as 0. XLA flushes it to zero in some kernels and not in others, and its scale
    would be too small for all other data.
    """
    return lax.is_finite(amax) & (amax >= SMALLEST_SCALE)


def _exponent_and_mantissa(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits positive normal float32 numbers into ``mantissa * 2**exponent``, the mantissa as its bits."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.shift_right_logical(bits, np.int32(23)) - np.int32(127), bits & np.int32(0x7FFFFF)


def scale_exponent(
    amax: Float32[jax.Array, "*dims"], fp8_max: float, rounding: str, margin: int = 0
) -> Int32[jax.Array, "*dims"]:
    """Returns the exponent of the power of two that scales ``amax``, int32; 0 where ``amax`` is 0.

    Args:
        amax: largest magnitudes, float32, finite and not negative. Subnormals count as 0.
        fp8_max: largest finite value of the FP8 dtype.
        rounding: ``"up"`` for the smallest ``n`` with ``amax <= fp8_max * 2**n``, so that nothing
            saturates; ``"floor"`` for the difference of the two binary exponents.
        margin: headroom in powers of two.

    Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.3, for ``"floor"``.
    """
    exponent, mantissa = _exponent_and_mantissa(amax)
    limit = np.float32(fp8_max).view(np.int32)
    result = exponent - np.int32((limit >> 23) - 127 - margin)
    if rounding == "up":
        result = result + (mantissa > np.int32(limit & 0x7FFFFF)).astype(jnp.int32)
    return jnp.where(amax >= SMALLEST_SCALE, result, np.int32(0))


def power_of_two(exponent: Int32[jax.Array, "*dims"]) -> Float32[jax.Array, "*dims"]:
    """Returns ``2**exponent``, float32; the exponent is clipped to -126 to 127."""
    exponent = jnp.clip(exponent, np.int32(-126), np.int32(127))
    return lax.bitcast_convert_type(lax.shift_left(exponent + np.int32(127), np.int32(23)), jnp.float32)


def current_scale(
    amax: Float32[jax.Array, "*dims"], fp8_max: float, *, power_2: bool = False
) -> Float32[jax.Array, "*dims"]:
    """Returns the float32 scale of a tensor, row or block with this ``finite_amax``; 1 where that is 0."""
    if power_2:
        return power_of_two(scale_exponent(amax, fp8_max, "up"))
    return compute_scale(amax, 1.0, fp8_max)


def e8m0_scale(exponent: Int32[jax.Array, "*dims"]) -> Shaped[jax.Array, "*dims"]:
    """Returns ``2**exponent`` in ``float8_e8m0fnu``; the exponent is clipped to -127 to 127."""
    exponent = jnp.clip(exponent, np.int32(-127), np.int32(127))
    return lax.bitcast_convert_type((exponent + np.int32(127)).astype(jnp.uint8), jnp.float8_e8m0fnu)


def e8m0_factors(
    scale: Shaped[jax.Array, "*dims"],
) -> tuple[Float32[jax.Array, "*dims"], Float32[jax.Array, "*dims"]]:
    """Returns two float32 powers of two whose product is an E8M0 scale; NaN for its NaN.

    One would not do: the smallest scale, 2**-127, is a subnormal float32, which XLA may flush to zero.
    """
    code = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    exponent = code - np.int32(127)
    half = lax.shift_right_arithmetic(exponent, np.int32(1))
    rest = power_of_two(exponent - half)
    return power_of_two(half), jnp.where(code == np.int32(255), jnp.float32(np.nan), rest)


def compute_scale(
    amax: Float[ArrayLike, "*#dims"],
    scale: Float[ArrayLike, "*#dims"],
    fp8_max: Float[ArrayLike, "*#dims"],
    margin: int = 0,
) -> Float32[jax.Array, "*dims"]:
    """Returns the scale that maps ``amax`` onto the largest FP8 value.

    ``scale = amax * 2**margin / fp8_max``, so that ``x ≈ q * scale`` with ``|q| <= fp8_max / 2**margin``.
    The result is clipped to the normal range of float32. The arithmetic is that of Flax and Transformer
    Engine, through the reciprocal, so the last bit can differ from the quotient above.

    If ``amax`` is subnormal, or not a positive finite number, the old ``scale`` is returned. If the old
    scale is not a positive finite number either, the result is 1.

    Args:
        amax: largest magnitude, any shape; cast to float32.
        scale: the scale to keep if there is no usable amax; broadcasts with ``amax``.
        fp8_max: largest finite value of the FP8 dtype (see ``fp8flax.fp8_max``).
        margin: headroom in powers of two.

    Returns:
        The new scale, float32, of the broadcast shape.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> scale = fp8.compute_scale(jnp.float32(896.0), jnp.ones((1,)), fp8.fp8_max(jnp.float8_e4m3fn))
        >>> scale
        Array([2.], dtype=float32)

    Source: Transformer Engine, delayed scaling (its ``scale`` is the reciprocal of this one).
    """
    amax = jnp.asarray(amax, jnp.float32)
    scale = jnp.asarray(scale, jnp.float32)
    usable = is_usable(amax)
    reciprocal = (jnp.asarray(fp8_max, jnp.float32) / jnp.where(usable, amax, 1.0)) / 2.0**margin
    # Under jit XLA would turn 1 / (fp8_max / amax) into amax / fp8_max, which differs in the last bit;
    # the select between the two divisions keeps the result the same with and without jit.
    new_scale = lax.clamp(SMALLEST_SCALE, 1.0 / jnp.where(usable, reciprocal, 1.0), _LARGEST_SCALE)
    kept_scale = jnp.where(lax.is_finite(scale) & (scale > 0), scale, 1.0)
    return jnp.where(usable, new_scale, kept_scale)


def push_amax(
    amax: Float32[jax.Array, "*stack"], amax_history: Float32[jax.Array, "*stack length"]
) -> Float32[jax.Array, "*stack length"]:
    """Rolls ``amax_history`` of shape ``(..., length)`` by one and writes ``amax`` at index 0.

    A newest entry that is not finite becomes 0 on its way: a loop that stores what a merge by maximum
    says of a NaN or Inf, and does not ask whether to keep the old state, heals at the next step.
    """
    # The entry that leaves is at index 1 (the oldest), the one at index 0 moves to the end: the order
    # of Flax, which a checkpoint carries. Written with selects, which XLA fuses with their neighbours.
    shape = amax_history.shape
    position = lax.broadcasted_iota(np.int32, shape, len(shape) - 1)
    newest = amax_history[..., :1]
    newest = jnp.where(lax.is_finite(newest), newest, 0.0)
    padding = [*((0, 0, 0) for _ in shape[1:]), (-1, 1, 0)]
    rolled = lax.pad(amax_history, jnp.zeros((), amax_history.dtype), padding)
    rolled = jnp.where(position == shape[-1] - 1, newest, rolled)
    return jnp.where(position == 0, amax.reshape(*shape[:-1], 1), rolled)


_NEWEST = 16
_PRECISE = 64.0


def is_newest(length: int) -> Bool[jax.Array, " length"]:
    """Tells for each entry of an amax history whether it is one of the 16 newest."""
    position = lax.iota(np.int32, length)
    return (position == 0) | (position > length - _NEWEST)


def bounded_amax(
    largest: Float32[jax.Array, "*stack"], ordinary: Float32[jax.Array, "*stack"], dtype: DTypeLike
) -> Float32[jax.Array, "*stack"]:
    """Returns the largest amax of a history, but no more than what ordinary data can bear as a scale.

    A single outlier would else set the scale for as long as the history remembers it, and flush all other
    data to zero. What is ordinary is the second largest of the newest amaxes: an outlier stands alone,
    while data that have become larger come again. With the bound their code is 64 times the smallest normal
    number or more, and all values down to 1/64 of them keep their precision. In e4m3fn it holds what is
    larger than 448 times the ordinary, in e5m2 1.5e7 times; all else has the scale that it has anyway.

    Args:
        largest: of the whole history, float32.
        ordinary: the second largest among ``is_newest``; where it is not ``is_usable`` there is no bound.
        dtype: the FP8 dtype.

    Source: none.
    """
    limits = fp8_limits(dtype)
    bound = ordinary * np.float32(limits.max / (_PRECISE * limits.smallest_normal))
    return jnp.where(lax.is_finite(largest) & is_usable(ordinary), jnp.minimum(largest, bound), largest)


def compute_amax_history(
    x: Float[jax.Array, "*dims"], amax_history: Float32[jax.Array, " length"]
) -> Float32[jax.Array, " length"]:
    """Returns ``amax_history`` with the amax of ``x`` entered at index 0.

    The history rolls by -1, and the newest amax replaces the entry that arrives at index 0. After index 0
    come the older amaxes, from the oldest to the second newest. The history stays unchanged if ``x`` is
    empty, or holds a NaN or an Inf.

    Args:
        x: a floating-point array of any shape.
        amax_history: past amaxes, shape ``(length,)``, float32.

    Returns:
        The new history, shape and dtype of ``amax_history``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> history = jnp.zeros((4,))
        >>> for amax in (1.0, 2.0, 3.0):
        ...     history = fp8.compute_amax_history(jnp.array([0.5, -amax]), history)
        ...     print(history)
        [1. 0. 0. 0.]
        [2. 0. 0. 1.]
        [3. 0. 1. 2.]

    Source: the layout of ``flax.linen.fp8_ops``.
    """
    x = jnp.asarray(x)
    if x.size == 0:
        return amax_history
    # A NaN would be lost in a maximum over devices, at least on CPUs.
    amax = compute_amax(jnp.where(jnp.isnan(x), np.array(np.inf, x.dtype), x))
    pushed = push_amax(amax.astype(amax_history.dtype), amax_history)
    return jnp.where(jnp.isfinite(amax), pushed, amax_history)


def apply_scales(
    total: Float32[jax.Array, "*dims"],
    lhs_scale: Float32[jax.Array, "*#dims"],
    rhs_scale: Float32[jax.Array, "*#dims"],
) -> Float32[jax.Array, "*dims"]:
    """Returns ``total * lhs_scale * rhs_scale`` in float32, right wherever that is in its range.

    Not so the product of the scales, nor a sum times the larger of them, such as 1e6 times 1e34. Of a very
    large or very small first scale a power of two therefore comes last; that changes no bit of the rest.

    Args:
        total: sums of products of FP8 codes, in magnitude 0 or from 2**-32 to 2**47.
        lhs_scale: float32, as normal numbers; broadcasts with it.
        rhs_scale: likewise.
    """
    # With what is left for last, the first product is in the range; and where that is not 1, it is far from
    # the end to which the second scale could take it only to be brought back.
    left = jnp.where(lhs_scale >= 2.0**80, 2.0**48, jnp.where(lhs_scale < 2.0**-94, 2.0**-32, 1.0))
    return total * (lhs_scale / left) * rhs_scale * left

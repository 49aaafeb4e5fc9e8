"""Measures the quantization error of one tensor, and merges what was measured in several calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.formats import fp8_max
from fp8flax._core.qtensor import Dims
from fp8flax._core.quantizers import Quantizer
from fp8flax._core.scaling import floor_power_of_two
from fp8flax._core.shapes import Float, Float32

_TINY, _HUGE = np.finfo(np.float32).tiny, np.finfo(np.float32).max
_ROUNDING = 1 + 2.0**-20
"""A value counts as saturated if it exceeds the largest value of its scale by more than this factor.

The factor allows for the rounding of float32 arithmetic."""

_PROBE = np.float32(128)
"""An FP8 code from which the scale of an element is computed; every format represents 128 exactly."""


class Numbers(NamedTuple):
    """Numbers that describe the quantization of one tensor, and that ``merged`` can merge over calls."""

    values: Any
    """Count of the finite elements that are not zero."""
    underflowed: Any
    """Count of the ``values`` that FP8 rounds to zero."""
    saturated: Any
    """Count of the ``values`` that are clipped to the largest FP8 value."""
    signal: Any
    """Sum of the squares of the ``values``, divided by the square of ``_unit(amax)``."""
    noise: Any
    """Sum of the squares of the quantization errors of the ``values``, divided by the same number."""
    nonfinite: Any
    """Count of the NaN and Inf elements."""
    amax: Any
    """The largest finite magnitude."""
    scale: Any
    """The largest scale. Scales of blocks that hold only zeros do not count, unless all blocks do so."""
    headroom: Any
    """The minimum, over all ``values``, of ``fp8_max * scale / abs(value)``. Below 1, a value saturates."""


@partial(jax.jit, static_argnums=(0, 1))
def numbers_of(
    quantizer: Quantizer, dims: Dims, x: Float[jax.Array, "*dims"], delayed_scale: Any = None
) -> Float32[jax.Array, " numbers"]:
    """Returns the ``Numbers`` of one tensor under one quantizer, as one array.

    The caller stops the gradients of ``x`` and of the scale. The counts have the precision of float32, for
    fewer than 2**32 elements.

    Args:
        quantizer: the quantizer of the tensor for one GEMM.
        dims: the tensor's dimensions in that GEMM.
        x: the tensor, a wide float.
        delayed_scale: the scale of delayed scaling; None if the quantizer computes the scale from ``x``.
    """
    q = quantizer.quantize(x, dims, delayed_scale)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    finite = lax.is_finite(x)
    # Subnormal float32 numbers count as zero, as everywhere in this package.
    is_value = finite & (jnp.abs(x.astype(wide)) >= np.asarray(_TINY, wide))

    def dequantized_codes(codes: jax.Array) -> jax.Array:
        """Returns the values of FP8 codes."""
        return dataclasses.replace(q, codes=codes.astype(q.codes.dtype)).dequantize(wide)

    is_zero = q.codes.astype(jnp.float32) == 0
    # Dequantizing a tensor of one code gives the scale of each element, whatever the layout of the scales.
    # The smallest scales are subnormal, but their products with this code are normal.
    probe = jnp.full(q.codes.shape, _PROBE)
    probe_values = dequantized_codes(probe)
    scale = probe_values / np.asarray(_PROBE, wide)
    largest_values = jnp.minimum(
        probe_values * np.asarray(fp8_max(q.codes.dtype) / float(_PROBE), wide), np.asarray(_HUGE, wide)
    )
    magnitude = jnp.where(is_value, jnp.abs(x.astype(wide)), np.asarray(0, wide))
    headrooms = jnp.where(
        is_value, largest_values / jnp.maximum(magnitude, np.asarray(_TINY, wide)), np.inf
    )
    # The scale of a block that holds only zeros is arbitrary, so it is left out.
    scale_of_values = jnp.where(is_value, scale, np.asarray(0, wide))
    is_saturated = magnitude > largest_values * np.asarray(_ROUNDING, wide)
    counted = [m.astype(jnp.uint32) for m in (is_value, is_value & is_zero, is_saturated, ~finite)]
    # One reduction computes all eight numbers, so XLA compiles and starts one kernel.
    operands = [*counted, magnitude, scale_of_values, scale, headrooms]
    starts = [np.full((), start, array.dtype) for (_, start), array in zip(_REDUCTIONS, operands)]
    *counts, amax, scale_of_values, scale, headroom = lax.reduce(
        operands, starts, _reduce_step, tuple(range(x.ndim))
    )
    # A factor that is a power of two changes no bits. It is applied before the subtraction, because the
    # difference of the unscaled numbers could be subnormal.
    inverse = (1 / _unit(amax)).astype(wide)
    error = x.astype(wide) * inverse - q.dequantize(wide) * inverse
    error = jnp.where(is_value, error, np.asarray(0, wide))
    values, underflowed, saturated, nonfinite = counts
    numbers = Numbers(
        values=values,
        underflowed=underflowed,
        saturated=saturated,
        # Without the barrier the sum was NaN for values below 1e-19 or beyond 1e19 (XLA on CPUs).
        signal=jnp.sum(jnp.square(lax.optimization_barrier(magnitude * inverse))),
        noise=jnp.sum(jnp.square(error)),
        nonfinite=nonfinite,
        amax=amax,
        scale=jnp.where(values > 0, scale_of_values, scale),
        headroom=headroom,
    )
    return jnp.stack([number.astype(jnp.float32) for number in numbers])


_REDUCTIONS: Any = (*[(lax.add, 0)] * 4, *[(lax.max, 0)] * 3, (lax.min, np.inf))
"""The function and the start value for four counts, for the amax, for two scales and for the headroom."""


# This is a function of the module, not a lambda, so that calls outside of jit compile the reduction once.
def _reduce_step(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    """Combines two elements of the reduction in ``numbers_of``."""
    return [f(x, y) for (f, _), x, y in zip(_REDUCTIONS, xs, ys)]


def _unit(amax: jax.Array) -> jax.Array:
    """Returns the largest power of two that is not above ``amax``, at most 2**126; 1 if ``amax`` is 0.

    Values are divided by this number before they are squared, so that the sum of squares fits into float32.
    The inverse of 2**127 would be subnormal.
    """
    return jnp.minimum(floor_power_of_two(amax.astype(jnp.float32)), np.float32(2.0**126))


def merged(records: np.ndarray) -> Numbers:
    """Returns the numbers of several calls together, as float64 numbers on the host.

    The squares in ``signal`` and ``noise`` are no longer divided.

    Args:
        records: arrays of ``numbers_of``, stacked along the first axis.
    """
    each = Numbers(*np.asarray(records, np.float64).T)
    # As ``_unit``: ``frexp`` returns twice the power of two.
    unit = np.where(each.amax > 0, np.minimum(np.ldexp(0.5, np.frexp(each.amax)[1]), 2.0**126), 1.0)
    return Numbers(
        values=np.sum(each.values),
        underflowed=np.sum(each.underflowed),
        saturated=np.sum(each.saturated),
        signal=np.sum(each.signal * unit**2),
        noise=np.sum(each.noise * unit**2),
        nonfinite=np.sum(each.nonfinite),
        amax=np.max(each.amax),
        scale=np.max(each.scale),
        headroom=np.min(each.headroom),
    )

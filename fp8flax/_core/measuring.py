"""Measures the quantization error of one tensor, and computes statistics of several calls."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.formats import fp8_max
from fp8flax._core.nvfp4 import hadamard
from fp8flax._core.qtensor import Dims, Quantizer
from fp8flax._core.quantizers import NVFP4Quantizer
from fp8flax._core.shapes import Float, Float32

Number: TypeAlias = jax.Array | np.ndarray


class Numbers(NamedTuple):
    """Numbers that describe the quantization of one tensor in one call, or in several calls (arrays)."""

    values: Number
    """Count of the finite elements that are not zero. Subnormal float32 numbers count as zero."""
    underflowed: Number
    """Count of the ``values`` that FP8 rounds to zero."""
    saturated: Number
    """Count of the ``values`` that are clipped to the largest FP8 value."""
    signal: Number
    """Root mean square of the ``values``."""
    noise: Number
    """Root mean square of the quantization errors of the ``values``."""
    nonfinite: Number
    """Count of the NaN and Inf elements."""
    amax: Number
    """The largest finite magnitude; 0 if it is subnormal."""
    scale: Number
    """The largest scale. Scales of blocks that hold only zeros do not count, unless all blocks do so."""
    headroom: Number
    """The minimum, over all ``values``, of ``fp8_max * scale / abs(value)``. Below 1, a value saturates."""
    fourth: Number
    """Fourth root of the mean fourth power of the ``values``."""


@partial(jax.jit, static_argnums=(0, 1))
def numbers_of(
    quantizer: Quantizer, dims: Dims, x: Float[jax.Array, "*dims"], delayed_scale: jax.Array | None = None
) -> Float32[jax.Array, " numbers"]:
    """Returns the ``Numbers`` of a tensor under the quantizer of one GEMM, as one array.

    The caller stops the gradients of ``x`` and of the scale. The counts have the precision of float32, for
    fewer than 2**32 elements.
    """
    tensor = x
    if isinstance(quantizer, NVFP4Quantizer):
        x = hadamard(x, dims.contract[-1]) if quantizer.rotation and dims.contract else x.astype(np.float32)
        quantizer = dataclasses.replace(quantizer, rotation=False)
    key = jax.random.key(0) if quantizer.stochastic_rounding else None  # any random numbers
    q = quantizer.quantize(x, dims, delayed_scale, key)
    # A number of NumPy, so that float64 stays float64 under strict promotion.
    number = np.float64 if x.dtype == jnp.float64 else np.float32
    tiny, huge = (number(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    wide, tensor = x.astype(number), tensor.astype(number)

    def magnitude_of(x: jax.Array) -> jax.Array:
        return jnp.where(lax.is_finite(x) & (jnp.abs(x) >= tiny), jnp.abs(x), number(0))

    magnitude = magnitude_of(wide)
    is_value = magnitude > 0

    # The values of the largest code show the scale of each element, whatever the layout of the scales.
    largest_of_dtype = fp8_max(quantizer.dtype)
    largest_code = jnp.full(q.shape, largest_of_dtype, q.codes.dtype)
    largest = jnp.minimum(dataclasses.replace(q, codes=largest_code).dequantize(number), huge)
    largest_of_values = jnp.max(jnp.where(is_value, largest, number(0)), initial=0)
    headroom = jnp.where(is_value, largest / jnp.maximum(magnitude, tiny), number(np.inf))

    # The squares need values of about 1. A unit that is a power of two changes no bits. Without the barrier
    # XLA for CPUs squares the unit, too.
    unit = jnp.clip(jnp.max(magnitude, initial=0), tiny, number(2.0**126))
    unit = lax.reduce_precision(unit, exponent_bits=8, mantissa_bits=0)
    value, rounded = lax.optimization_barrier((wide / unit, q.dequantize(number) / unit))

    def count(mask: jax.Array) -> jax.Array:
        return jnp.sum(mask, dtype=np.uint32)

    def root_mean_square(x: jax.Array) -> jax.Array:
        total = jnp.sum(jnp.where(is_value, jnp.square(x), number(0)))
        return jnp.sqrt(total / jnp.maximum(count(is_value), np.uint32(1)).astype(number))

    numbers = Numbers(
        values=count(is_value),
        underflowed=count(is_value & (q.codes.astype(np.float32) == 0)),
        # The factor allows for the rounding of float32 arithmetic.
        saturated=count(magnitude > largest * number(1 + 2.0**-20)),
        signal=root_mean_square(value) * unit,
        noise=root_mean_square(value - rounded) * unit,
        # A rotation changes the amax, and a NaN or Inf spreads over its group.
        nonfinite=count(~lax.is_finite(tensor)),
        amax=jnp.max(magnitude_of(tensor), initial=0),
        scale=jnp.where(jnp.any(is_value), largest_of_values, jnp.max(largest, initial=0))
        / number(largest_of_dtype),
        headroom=jnp.min(headroom, initial=np.inf),
        fourth=jnp.sqrt(root_mean_square(jnp.square(value))) * unit,
    )
    return jnp.stack([number.astype(np.float32) for number in numbers])


def statistics_of(records: np.ndarray) -> dict[str, float]:
    """Returns what ``fp8flax.statistics`` returns, from the stacked ``numbers_of`` each call."""
    each = Numbers(*np.asarray(records, np.float64).T)
    count = max(np.sum(each.values), 1)
    signal, noise = (np.sum(each.values * np.square(size)) for size in (each.signal, each.noise))
    fourth = np.sum(each.values * each.fourth**4)
    found = {
        "underflow": np.sum(each.underflowed) / count,
        "saturation": np.sum(each.saturated) / count,
        "sqnr": 10 * np.log10(signal / noise) if noise else np.inf,
        "headroom": np.min(each.headroom),
        "amax": np.max(each.amax),
        "scale": np.max(each.scale),
        "kurtosis": count * fourth / signal**2 if signal else 0,
        "nonfinite": np.sum(each.nonfinite),
    }
    return {name: float(number) for name, number in found.items()}

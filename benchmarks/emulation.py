"""FP8 matmuls written from the specification alone, in float32; nothing of fp8flax is used.

Source: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, section 5; current scaling per tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


class Fp8(NamedTuple):
    """An FP8 format of the specification, as numbers."""

    mantissa_bits: int
    lowest_exponent: int
    """The lowest exponent of normal numbers; subnormal numbers have its quantum."""
    largest: float


E4M3 = Fp8(mantissa_bits=3, lowest_exponent=-6, largest=448.0)
E5M2 = Fp8(mantissa_bits=2, lowest_exponent=-14, largest=57344.0)


def rounded(x: jax.Array, fp8: Fp8) -> jax.Array:
    """Rounds float32 numbers to the nearest numbers of the format, ties to even; clips large ones."""
    _, exponent = jnp.frexp(x)  # x is its mantissa, 0.5 to 1, times 2**exponent
    quantum = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 1, fp8.lowest_exponent) - fp8.mantissa_bits)
    return jnp.clip(jnp.round(x / quantum) * quantum, -fp8.largest, fp8.largest)


def quantized(x: jax.Array, fp8: Fp8) -> jax.Array:
    """Returns the tensor as FP8 codes and one scale represent it, in float32."""
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x))
    scale = jnp.where(amax > 0, amax / fp8.largest, 1.0)
    return rounded(x / scale, fp8) * scale


class EmulatedDotGeneral(nn.Module):
    """A ``dot_general_cls`` whose three GEMMs take FP8 operands: e4m3, and e5m2 for gradients.

    Called as ``lax.dot_general`` is; the result has the dtype of the left operand.
    """

    @nn.compact
    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *args: Any, **kwargs: Any
    ) -> jax.Array:
        """Multiplies as ``lax.dot_general`` does, in FP8 and with two operands."""

        def dot(a: jax.Array, b: jax.Array) -> jax.Array:
            return lax.dot_general(a, b, dimension_numbers)

        @jax.custom_vjp
        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return forward(lhs, rhs)[0]

        def forward(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
            operands = quantized(lhs, E4M3), quantized(rhs, E4M3)
            return dot(*operands).astype(lhs.dtype), operands

        def backward(operands: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
            _, pull = jax.vjp(dot, *operands)
            dlhs, drhs = pull(quantized(gradient, E5M2))
            return dlhs.astype(lhs.dtype), drhs.astype(rhs.dtype)

        product.defvjp(forward, backward)
        return product(lhs, rhs)

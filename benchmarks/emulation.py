"""FP8 matmuls written from the specification alone, in float32; nothing of fp8flax is used.

Sources: OCP 8-bit Floating Point Specification (OFP8), revision 1.0, section 5; current scaling per tensor.
Sums as Hopper keeps them, with 13 bits after the leading one: DeepSeek-V3, arXiv:2412.19437, section 3.5.2.
"""

from __future__ import annotations

import math
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


def summed_in_bits(a: jax.Array, b: jax.Array, bits: int) -> jax.Array:
    """Multiplies ``(m, k)`` by ``(k, n)`` and cuts the mantissa of the sum after each 32 products.

    A tensor core also cuts each product before it adds it, which this leaves out.
    """
    mask = jnp.uint32(0xFFFFFFFF << (23 - bits) & 0xFFFFFFFF)
    depth = -(-a.shape[1] // 32) * 32
    a, b = jnp.pad(a, ((0, 0), (0, depth - a.shape[1]))), jnp.pad(b, ((0, depth - b.shape[0]), (0, 0)))
    parts = a.reshape(len(a), -1, 32).swapaxes(0, 1), b.reshape(-1, 32, b.shape[1])

    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        kept = lax.bitcast_convert_type(total + part[0] @ part[1], jnp.uint32) & mask
        return lax.bitcast_convert_type(kept, jnp.float32), None

    return lax.scan(add, jnp.zeros((len(a), b.shape[1]), jnp.float32), parts)[0]


class EmulatedDotGeneral(nn.Module):
    """A ``dot_general_cls`` whose three GEMMs take FP8 operands: e4m3, and e5m2 for gradients.

    Called as ``lax.dot_general`` is, by layers that contract the last dimensions of the input with the
    first ones of the kernel; the result has the dtype of the left operand.
    """

    bits_of_sums: int | None = None
    """Bits of the mantissa of the sums of dgrad and wgrad, 13 in Hopper's tensor cores; None is all."""

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
            gradient = quantized(gradient, E5M2)
            if (bits := self.bits_of_sums) is not None:
                depth = math.prod(rhs.shape[: len(dimension_numbers[0][1])])
                x, w = operands[0].reshape(-1, depth), operands[1].reshape(depth, -1)
                g = gradient.reshape(len(x), -1)
                dlhs = summed_in_bits(g, w.T, bits).reshape(lhs.shape)
                drhs = summed_in_bits(x.T, g, bits).reshape(rhs.shape)
            else:
                _, pull = jax.vjp(dot, *operands)
                dlhs, drhs = pull(gradient)
            return dlhs.astype(lhs.dtype), drhs.astype(rhs.dtype)

        product.defvjp(forward, backward)
        return product(lhs, rhs)

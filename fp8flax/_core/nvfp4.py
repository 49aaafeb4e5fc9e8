"""The arithmetic of NVFP4: its two scales, stochastic rounding, and the randomized Hadamard transform.

A value is about ``code * block_scale * tensor_scale``. The code has 4 bits (e2m1): 0, 0.5, 1, 1.5, 2, 3, 4,
6 and their negatives. Each block, such as 16 contracted values, has a scale in e4m3, at most 448. The
tensor has a scale in float32.

For example, a tensor with the amax 12 has the scale 12 / (6 * 448). A block of it with the amax 3 then has
the scale 112, because 112 * 12 / (6 * 448) = 3 / 6. The value 1.5 in this block has the code 3.
"""

from __future__ import annotations

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from fp8flax._compat.choice_at_lowering import row_major
from fp8flax._core.axes import manual_axes
from fp8flax._core.formats import E2M1, fp8_max
from fp8flax._core.gemm.on_shards import NamedDims, in_parts_on_gpus
from fp8flax._core.qtensor import Given, join_blocks, padded, round_up, split_blocks
from fp8flax._core.quantize import quotient
from fp8flax._core.scaling import encode_scale, finite_amax
from fp8flax._core.shapes import Float, Float32, UInt8

GROUP = 16
"""The number of contracted elements that share a scale, and that a Hadamard transform mixes."""

_E2M1_MAX, _E4M3_MAX = (np.float32(fp8_max(dtype)) for dtype in (E2M1, jnp.float8_e4m3fn))
_LARGEST_FACTOR = np.float32(2.0**117)
"""The largest 1 / tensor_scale, so that the smallest product of both scales is a normal number."""


# Codes and scales.


def quantized(
    x: Float[jax.Array, "*dims"],
    block: tuple[int, ...],
    axis: int | None = None,
    bits: UInt8[jax.Array, "*dims"] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the codes (e2m1), the scales of blocks (e4m3), and the scale of the tensor (float32).

    The scale of the tensor maps its amax onto the largest product of a code and a scale. A block with a NaN
    or an Inf has the scale NaN, and does not count in the amax. Codes are rounded to the nearest, or
    stochastically by the random bits. ``axis`` is that of a Hadamard transform before the cast.

    Source: arXiv:2509.25149; Transformer Engine, ``NVFP4BlockScaling``.
    """
    # On several GPUs each quantizes its part: devices split no dimension that ends in a partial block.
    is_whole = [n % width == 0 for n, width in zip(x.shape, block)]
    of_x = NamedDims(tuple(i if whole else None for i, whole in enumerate(is_whole)))
    of_blocks, of_tensor = NamedDims(of_x.names, decides=False), NamedDims(())
    amax_of_blocks = in_parts_on_gpus(partial(_amax_of_blocks, block, axis), [of_x], [of_blocks])
    # Without the barrier XLA would read the tensor once more for the amax of the tensor. Without row_major
    # it would transpose the tensor, and not its codes, where a GEMM needs one of them transposed.
    amax = row_major(lax.optimization_barrier(amax_of_blocks(x)))
    factor = encode_scale(finite_amax(amax), _E2M1_MAX * _E4M3_MAX, _LARGEST_FACTOR)
    args, names = [x, amax, factor], [of_x, of_blocks, of_tensor]
    if bits is not None:
        args, names = [*args, bits], [*names, of_x]
    codes, scale = in_parts_on_gpus(partial(_cast, block, axis), names, [of_x, of_blocks])(*args)
    return codes, scale, np.float32(1) / factor


def _amax_of_blocks(block: tuple[int, ...], axis: int | None, x: jax.Array) -> jax.Array:
    """Returns the amax of each block of ``x``, or of ``hadamard(x, axis)``; inf or NaN for a NaN."""

    def by_blocks(x: jax.Array) -> jax.Array:
        blocks, within = split_blocks(x if axis is None else hadamard(x, axis), block)
        # A NaN counts as inf, because a maximum can lose a NaN, at least on CPUs.
        magnitude = jnp.where(jnp.isnan(blocks), np.array(np.inf, blocks.dtype), jnp.abs(blocks))
        return jnp.max(magnitude, axis=within, initial=0)

    if axis is None:
        return by_blocks(x)
    return lax.platform_dependent(x, cuda=partial(amax_of_hadamard, axis=axis), default=by_blocks)


def _cast(
    block: tuple[int, ...],
    axis: int | None,
    x: jax.Array,
    amax: jax.Array,
    tensor_factor: jax.Array,
    bits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns codes and scales of blocks, from the amaxes of blocks and 1 / tensor_scale."""
    amax = amax.astype(jnp.float32)
    amax = jnp.where(lax.is_finite(amax), amax, np.float32(np.nan))
    exact_scale = quotient(amax, jnp.full_like(amax, _E2M1_MAX)) * tensor_factor
    scale = row_major(jnp.minimum(exact_scale, _E4M3_MAX).astype(jnp.float8_e4m3fn))
    wide = scale.astype(jnp.float32)
    # This is 1 / (scale * tensor_scale), as XLA would write it in a jitted program: at most 2**126. The
    # values of a block whose scale is zero are zero, and so are its codes.
    factor = jnp.where(wide == 0, np.float32(0), tensor_factor / wide)
    x = x.astype(jnp.float32) if axis is None else hadamard(x, axis)
    blocks, within = split_blocks(x, block)
    values = lax.clamp(-_E2M1_MAX, blocks * lax.expand_dims(factor, within), _E2M1_MAX)
    if bits is not None:
        values = _rounded_stochastically(values, split_blocks(bits, block)[0])
    return row_major(join_blocks(values.astype(jnp.float4_e2m1fn), x.shape, block)), scale


# Stochastic rounding.


def _rounded_stochastically(
    x: Float32[jax.Array, "*dims"], bits: UInt8[jax.Array, "*dims"]
) -> Float32[jax.Array, "*dims"]:
    """Rounds values of at most 6 to one of the two neighbors in e2m1, the nearer one more often.

    In float16, ``x / 2**14`` has the exponents of e2m1, with subnormal numbers below 1, and 9 more bits. A
    random number below one step is added to these bits, which are then cut off. Its last bit is one that
    the byte has, so that the mean has no bias. (Each value is used once, or XLA for GPUs would keep the
    transformed tensor in float32.)
    """
    near = lax.bitcast_convert_type((x * np.float32(2.0**-14)).astype(jnp.float16), jnp.uint16)
    byte = bits.astype(jnp.uint16)
    random = byte * np.uint16(2) + (byte & np.uint16(1))
    cut = lax.bitcast_convert_type((near + random) & np.uint16(0xFE00), jnp.float16)
    return cut.astype(jnp.float32) * np.float32(2.0**14)


def random_bits(key: Given, x: jax.Array) -> UInt8[jax.Array, "*dims"]:
    """Returns a random byte for each element of ``x``.

    Inside ``jax.shard_map`` each device has bytes of its own, over the axes that ``x`` varies over; so has
    each element of a batch of ``x`` under ``jax.vmap``, also if all share the key: with the same bytes,
    their rounding errors would not cancel in a sum over the batch.
    """
    if key is None:
        raise ValueError(
            "Stochastic rounding, by which NVFP4BlockScaling quantizes gradients, needs a random key named "
            "'fp8', and there is none. In Linen pass model.apply(variables, x, rngs={'fp8': key}), with a "
            "new key at each step, and name it in split_rngs={'fp8': True} of nn.scan and nn.vmap. In NNX "
            "give rngs=nnx.Rngs(fp8=0) to the op or to quantize_model, under the recipe of the calls. Give "
            "fp8flax.dot_general key=. Or set disable_stochastic_rounding=True."
        )
    for axis in sorted(manual_axes(x)):
        key = jax.random.fold_in(key, lax.axis_index(axis))
    return _bytes_like(key, x)


@custom_vmap
def _bytes_like(keys: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a random byte for each element of ``x``, whose first dimensions are those of ``keys``.

    One key for ``x`` of shape ``(8, 32)`` draws 8 * 32 bytes; keys of shape ``(8,)`` draw 32 bytes each.
    """
    shape = x.shape[_num_dims(keys) :]

    def draw(key: jax.Array) -> jax.Array:
        # Four neighbors share the bytes of a word, because JAX computes each word by some 80 operations:
        # in the last dimension, because a GPU often has few elements of the first ones.
        *others, columns = shape or (1,)
        words = jax.random.bits(key, (*others, -(-columns // 4)), np.uint32)
        parts = [(words >> np.uint32(shift)).astype(jnp.uint8) for shift in (0, 8, 16, 24)]
        return jnp.stack(parts, -1).reshape(*others, -1)[..., :columns].reshape(shape)

    for _ in range(_num_dims(keys)):
        draw = jax.vmap(draw)
    return draw(keys)


def _num_dims(keys: jax.Array) -> int:
    """Returns the number of dimensions of an array of keys; JAX's old kind of key is a uint32 vector."""
    return keys.ndim - (keys.dtype == np.uint32)


@_bytes_like.def_vmap
def _bytes_like_rule(
    size: int, is_batched: list[bool], keys: jax.Array, x: jax.Array
) -> tuple[jax.Array, bool]:
    """Draws for each element of the batch with its own key, or for all of them with the same key."""
    keys_batched, x_batched = is_batched
    x = x if x_batched else jnp.broadcast_to(x, (size, *x.shape))
    place = 0 if keys_batched else _num_dims(keys)  # the dimensions of the keys come first
    return jnp.moveaxis(_bytes_like(keys, jnp.moveaxis(x, 0, place)), place, 0), True


# The randomized Hadamard transform, which spreads an outlier over the 16 values of its group.

_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The signs of the transform: fixed, as in Transformer Engine, because both operands must have the same."""


def hadamard(x: Float[jax.Array, "*dims"], axis: int) -> Float32[jax.Array, "*padded"]:
    """Returns the randomized Hadamard transform of each 16 elements of ``x`` along an axis, in float32.

    Zeros fill up the last 16. The matrix is orthogonal, so a product stays the same if both operands are
    transformed along the axis that it sums over.
    """
    x = filled(x, axis)
    # XLA for GPUs fuses the sum into the pass that makes the codes. XLA for CPUs may sum in another order
    # where jax.checkpoint computes the codes again.
    by_sum, by_dot = (partial(f, axis=axis + 1) for f in (hadamard_by_sum, hadamard_by_dot))
    out: jax.Array = lax.platform_dependent(_groups(x, axis), cuda=by_sum, default=by_dot)
    return out.reshape(x.shape)


def filled(x: Float[jax.Array, "*dims"], axis: int) -> Float[jax.Array, "*padded"]:
    """Returns ``x`` with zeros at the end of an axis, up to a multiple of 16."""
    return padded(x, [round_up(n, GROUP) if i == axis else n for i, n in enumerate(x.shape)])


def _groups(x: jax.Array, axis: int) -> jax.Array:
    """Splits a filled axis into groups of 16, in float32: ``(3, 48)`` becomes ``(3, 3, 16)``."""
    shape = *x.shape[:axis], x.shape[axis] // GROUP, GROUP, *x.shape[axis + 1 :]
    return x.reshape(shape).astype(jnp.float32)


def _matrix() -> jax.Array:
    """Returns the orthogonal matrix with ``_SIGNS[i] * (-1)**popcount(i & j) / 4`` in row i and column j.

    It is computed, because a function in ``custom_partitioning`` can have no constant arrays.
    """
    row, column = (lax.broadcasted_iota(np.int32, (GROUP, GROUP), dim) for dim in (0, 1))
    negative = sum(1 << i for i, sign in enumerate(_SIGNS) if sign < 0)
    is_odd = (lax.population_count(row & column) ^ (np.int32(negative) >> row)) & np.int32(1)
    return jnp.where(is_odd == 1, np.float32(-0.25), np.float32(0.25))


def hadamard_by_sum(groups: jax.Array, axis: int) -> jax.Array:
    """Returns groups of 16 along an axis, transformed, by products and sums of elements."""
    dims = [*range(axis), *range(axis + 2, groups.ndim + 1)]
    return jnp.sum(lax.expand_dims(groups, [axis + 1]) * lax.expand_dims(_matrix(), dims), axis)


def hadamard_by_dot(groups: jax.Array, axis: int) -> jax.Array:
    """Returns groups of 16 along an axis, transformed, by a product of matrices."""
    dims = ((axis,), (0,)), ((), ())
    out = lax.dot_general(groups, _matrix(), dims, lax.Precision.HIGHEST)
    return jnp.moveaxis(out, -1, axis)


def amax_of_hadamard(x: jax.Array, axis: int) -> jax.Array:
    """Returns the amax of each group of ``hadamard(x, axis)``, in one pass over ``x`` on a GPU."""
    groups = _groups(x, axis)
    parts = [np.float32(sign / 4) * lax.index_in_dim(groups, i, axis + 1) for i, sign in enumerate(_SIGNS)]
    # The fast Hadamard transform: four rounds add and subtract the parts whose indices differ in one bit.
    for bit in (1, 2, 4):
        parts = [parts[i ^ bit] - x if i & bit else x + parts[i ^ bit] for i, x in enumerate(parts)]
    # The amax needs no last round: max(|a + b|, |a - b|) = |a| + |b|.
    amax = functools.reduce(jnp.maximum, [abs(a) + abs(b) for a, b in zip(parts[:8], parts[8:])])
    return lax.squeeze(amax, [axis + 1])

"""Multiplies the rows of a ragged dot by the kernels of their experts in tiles, on any device.

The tiles are multiplied one after the other, each once for every expert that has rows in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm.cublaslt import MULTIPLE
from fp8flax._core.gemm.emulated import multiply_wide
from fp8flax._core.gemm.gemm import AnyTensor, Gemm, sum_dtype_of
from fp8flax._core.names import DEQUANTIZED, KEPT_WIDE
from fp8flax._core.qtensor import Dims, QTensor, dequantized, padded, round_up

Multiply: TypeAlias = Callable[[Gemm, AnyTensor, AnyTensor], jax.Array]
"""A function that multiplies two operands, such as ``dispatch.multiply``."""

Arrays: TypeAlias = tuple[jax.Array, ...]


# Which tiles hold rows of which expert. Tiles are cut at multiples of their size, so a tile may hold rows
# of several experts. Each of them visits the tile once.


class Visits(NamedTuple):
    """The visits of all experts to the tiles of their rows, in the order of the rows: int32 arrays.

    For example, the experts 0 and 1 have 100 and 156 rows, in two tiles of 128 rows. Expert 0 visits the
    first tile, expert 1 visits both. The number of visits is an upper bound, as JAX needs a fixed one. The
    last visits may be unused; they have no rows.
    """

    row: jax.Array
    """For each visit, the first row of its tile, ``[0, 0, 128]``; 0 if the visit is unused."""
    expert: jax.Array
    """For each visit, the index of its expert, ``[0, 1, 1]``."""
    low: jax.Array
    """For each visit, the first row of the expert in the tile, counted from its start: ``[0, 100, 0]``."""
    high: jax.Array
    """For each visit, the row after the expert's last row, ``[100, 128, 128]``; 0 if it is unused."""
    first: jax.Array
    """For each expert, the index of its first visit, ``[0, 1]``."""
    number: jax.Array
    """For each expert, the number of its visits, ``[1, 2]``."""


def visits_of(rows: int, tile: int, group_sizes: jax.Array) -> Visits:
    """Returns the visits of all experts to tiles of ``tile`` rows; ``rows`` is a multiple of ``tile``."""
    experts, size = group_sizes.size, np.int32(tile)
    ends = ends_of_groups(group_sizes, rows)
    starts = lax.pad(ends, np.int32(0), [(1, -1, 0)])
    number = jnp.where(ends > starts, (ends - 1) // size - starts // size + 1, 0)
    after = _sums_up_to(number)
    first = after - number
    visit = lax.iota(np.int32, rows // tile + experts - 1)
    is_used = visit < after[-1]
    expert = jnp.sum(visit[:, None] >= after[None, :], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, np.int32(experts - 1))
    row = jnp.where(is_used, (starts[expert] // size + visit - first[expert]) * size, 0)
    low = jnp.maximum(starts[expert] - row, 0)
    high = jnp.where(is_used, jnp.minimum(ends[expert] - row, size), 0)
    return Visits(row, expert, low, high, first, number)


def is_of_expert(tile: int, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns masks ``(..., tile)`` of the rows of visits that belong to the expert of the visit."""
    row = lax.broadcasted_iota(np.int32, (*low.shape, tile), low.ndim)
    return (row >= low[..., None]) & (row < high[..., None])


def ends_of_groups(group_sizes: jax.Array, rows: int) -> jax.Array:
    """Returns the end of each group, int32 of the shape of ``group_sizes``: the row after its last row.

    A size below 0 counts as 0. An end is at most ``rows``.
    """
    clipped = jnp.clip(group_sizes, 0, min(rows, jnp.iinfo(group_sizes.dtype).max)).astype(jnp.int32)
    return lax.min(_sums_up_to(clipped), np.int32(rows))


def _sums_up_to(numbers: jax.Array) -> jax.Array:
    """Returns for each number the sum of the numbers up to and with it, int32."""
    # Masked sums instead of cumsum, because XLA fuses them into one kernel.
    shape = numbers.size, numbers.size
    is_up_to = lax.broadcasted_iota(np.int32, shape, 0) >= lax.broadcasted_iota(np.int32, shape, 1)
    return jnp.sum(jnp.where(is_up_to, numbers, 0), axis=1, dtype=jnp.int32)


# A tile is multiplied once by the kernel of each expert that has rows in it. Small tiles waste fewer rows.
# Large tiles read each kernel less often, and use more of a GPU. The tile size is a heuristic: half the
# average group size, rounded down to a power of two, within these bounds.
_SMALLEST_TILE, _LARGEST_TILE = 128, 512


def tile_of(rows: int, experts: int) -> int:
    """Returns the number of rows in a tile."""
    half = max(1, rows // (2 * experts))
    tile = min(max(1 << (half.bit_length() - 1), _SMALLEST_TILE), _LARGEST_TILE)
    return min(tile, max(MULTIPLE, round_up(rows, MULTIPLE)))


# Jitted, because otherwise each call outside of jit would compile the loop again. Inside of jit,
# ``inline=True`` makes it a part of the surrounding program.
@partial(jax.jit, static_argnums=(0, 1), inline=True)
def compute(
    multiply: Multiply, gemm: Gemm, a: AnyTensor, b: AnyTensor, group_sizes: jax.Array
) -> jax.Array:
    """Multiplies rows by the kernels of their experts, or sums over the rows of each expert."""
    rows, tile = a.shape[0], tile_of(a.shape[0], group_sizes.size)
    multiply, gemm, a, b = _without_blocks(multiply, gemm, a, b)
    visits = visits_of(max(tile, round_up(rows, tile)), tile, group_sizes)
    a = _in_whole_tiles(tile, a)
    if b.ndim == 2:
        return _sums(multiply, gemm, tile, a, _in_whole_tiles(tile, b), visits)
    return _products(multiply, gemm, tile, a, b, visits)[:rows]


def _products(
    multiply: Multiply, gemm: Gemm, tile: int, a: AnyTensor, kernels: AnyTensor, visits: Visits
) -> jax.Array:
    """Returns each row times the kernel of its expert, ``(rows, columns)``."""
    if gemm.rhs.contract == (1,):  # FP8 units sum over the last dimension; swapped once, not at each visit
        kernels = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2) if x.ndim == 3 else x, kernels)
    gemm = gemm._replace(rhs=Dims(2, (1,)))

    def step(out: jax.Array, visit: Arrays) -> tuple[jax.Array, None]:
        row, expert, low, high = visit
        kernel = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, expert, keepdims=False), kernels)
        if isinstance(kernel, QTensor) and kernel.scale.size == 1:
            kernel = dataclasses.replace(kernel, scale=kernel.scale.reshape(()))
        product = multiply(gemm, _tile_at(row, tile, a), kernel)
        before = lax.dynamic_slice_in_dim(out, row, tile)
        of_tile = jnp.where(is_of_expert(tile, low, high)[:, None], product, before)
        return lax.dynamic_update_slice_in_dim(out, of_tile, row, 0), None

    zeros = jnp.zeros((a.shape[0], kernels.shape[1]), gemm.out_dtype)
    out, *_ = vary_alike(zeros, *jax.tree.leaves((a, kernels, visits)))
    return lax.scan(step, out, visits[:4])[0]


def _sums(
    multiply: Multiply, gemm: Gemm, tile: int, a: AnyTensor, b: AnyTensor, visits: Visits
) -> jax.Array:
    """Returns the sums over each expert's rows, ``(experts, depth, columns)``."""
    wide = gemm._replace(out_dtype=sum_dtype_of(gemm.out_dtype))

    def step(carry: Arrays, visit: Arrays) -> tuple[Arrays, None]:
        (total, out), (row, expert, low, high, is_first) = carry, visit
        # Rows of other experts are set to zero in both operands: zero times a NaN would be NaN.
        keep = is_of_expert(tile, low, high)[:, None]
        product = multiply(wide, _tile_at(row, tile, a, keep), _tile_at(row, tile, b, keep))
        total = jnp.where(is_first, jnp.zeros_like(total), total) + product
        # All visits of an expert follow each other, so its last visit writes its whole sum.
        return (total, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), expert, 0)), None

    is_first = lax.iota(np.int32, visits.row.size) == visits.first[visits.expert]
    shape = a.shape[1], b.shape[1]
    zeros = jnp.zeros(shape, wide.out_dtype), jnp.zeros((visits.first.size, *shape), gemm.out_dtype)
    total, out, *_ = vary_alike(*zeros, *jax.tree.leaves((a, b, visits)))
    return lax.scan(step, (total, out), (*visits[:4], is_first))[0][1]


def _without_blocks(
    multiply: Multiply, gemm: Gemm, a: AnyTensor, b: AnyTensor
) -> tuple[Multiply, Gemm, AnyTensor, AnyTensor]:
    """Returns how tiles are multiplied, and the operands, dequantized if scales are per block.

    Tiles do not begin where blocks do.
    """
    quantized = [x for x in (a, b) if isinstance(x, QTensor)]
    blocks = [x for x in quantized if x.block]
    if not blocks:
        return multiply, gemm, a, b
    scope = DEQUANTIZED if len(quantized) == 2 else KEPT_WIDE
    if scope == DEQUANTIZED and not all(x.quantizer.is_exact_in_bfloat16 for x in blocks):
        wide = sum_dtype_of(gemm.lhs_dtype, gemm.rhs_dtype)
        gemm = gemm._replace(lhs_dtype=wide, rhs_dtype=wide, precision=lax.Precision.HIGHEST)
    a, b = dequantized(a, gemm.lhs_dtype), dequantized(b, gemm.rhs_dtype)
    return partial(multiply_wide, scope), gemm, a, b


def _in_whole_tiles(tile: int, x: AnyTensor) -> AnyTensor:
    """Returns rows that zeros fill up to whole tiles, at least one; scales that all rows share stay."""
    rows, size = x.shape
    filled = max(tile, round_up(rows, tile))
    if not isinstance(x, QTensor):
        return padded(x, (filled, size))
    is_per_row = x.scale.shape == (rows, 1) != (1, 1)
    scale = padded(x.scale, (filled, 1)) if is_per_row else x.scale
    return dataclasses.replace(x, codes=padded(x.codes, (filled, size)), scale=scale)


def _tile_at(row: jax.Array, tile: int, x: AnyTensor, keep: jax.Array | None = None) -> AnyTensor:
    """Returns the tile of an operand that starts at ``row``, with zeros in rows that ``keep`` excludes."""

    def cut(array: jax.Array) -> jax.Array:
        if array.ndim != 2 or array.shape[0] != x.shape[0]:
            return array  # scales that all rows share
        array = lax.dynamic_slice_in_dim(array, row, tile)
        return array if keep is None else jnp.where(keep, array, np.zeros((), array.dtype))

    return jax.tree.map(cut, x)

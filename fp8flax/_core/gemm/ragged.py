"""Multiplies the rows of a ragged dot by the kernels of their experts.

The rows are multiplied in tiles, each once for every expert that has rows in it. On Hopper one GPU kernel
multiplies all tiles of a device. On other devices one tile is multiplied after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap

from fp8flax._compat.choice_at_lowering import unless_partitioned
from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm.gemm import (
    CUBLASLT_MULTIPLE,
    AnyTensor,
    Gemm,
    multiply,
    multiply_wide,
    sum_dtype_of,
)
from fp8flax._core.gemm.gpus import are_positive, compute_capability, is_hopper, multiplies_on_hopper
from fp8flax._core.gemm.on_shards import on_shards
from fp8flax._core.gemm.tiled_gemm_hopper import Block, tiled_gemm
from fp8flax._core.names import DEQUANTIZED, GROUPED_GEMM, KEPT_WIDE
from fp8flax._core.qtensor import BLOCK, TILE, Dims, QTensor, dequantized, padded, round_up
from fp8flax._core.quantize import no_derivative


def multiply_ragged(gemm: Gemm, a: AnyTensor, b: AnyTensor, group_sizes: jax.Array) -> jax.Array:
    """Returns the product of rows in groups of these sizes, one group for each expert.

    If ``b`` holds kernels, each row ``(rows, depth)`` of ``a`` is multiplied by the kernel of its expert,
    with the result ``(rows, columns)``. Rows that belong to no expert become zero. If ``b`` has rows
    ``(rows, columns)``, the outer products of the rows of ``a`` and ``b`` are summed for each expert, with
    the result ``(experts, depth, columns)``.

    The kernels are ``(experts, depth, columns)`` or ``(experts, columns, depth)``, as ``gemm`` says. Its
    ``out_dtype`` is the dtype of the result. Under ``jax.vmap`` the batch runs in a loop.
    """
    run = no_derivative(sequential_vmap(partial(_multiply, gemm)))
    return run(a, b, group_sizes)


def _columns_first(gemm: Gemm, kernels: AnyTensor) -> tuple[Gemm, Any]:
    """Returns the kernels as ``(experts, columns, depth)``, because FP8 units sum over the last dimension.

    Also returns the GEMM of a tile and such a kernel.
    """
    of_tile = gemm._replace(rhs=Dims(2, (1,)))
    if gemm.rhs.contract == (2,):
        return of_tile, kernels
    swapped = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2) if x.ndim == 3 else x, kernels)
    if isinstance(swapped, QTensor) and swapped.block:
        stack, depth, columns = swapped.block
        swapped = dataclasses.replace(swapped, block=(stack, columns, depth))
    return of_tile, swapped


def _multiply(gemm: Gemm, a: AnyTensor, b: AnyTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies in the way of the device that the program is for."""
    is_sum = len(b.shape) == 2
    in_tiles = partial(_sums_in_tiles if is_sum else _products_in_tiles, gemm)
    if not (
        compute_capability()
        and isinstance(a, QTensor)
        and isinstance(b, QTensor)
        and bool(a.block) == bool(b.block)
        and are_positive((*a.shape, *b.shape))
    ):
        return in_tiles(a, b, group_sizes)
    one, name = in_tiles, ""
    if (
        is_hopper(compute_capability())
        and multiplies_on_hopper(a.codes.dtype, b.codes.dtype)
        and gemm.out_dtype.itemsize <= 4
        and all(x.quantizer.scale_columns == BLOCK for x in (a, b) if x.block)
    ):
        one, name = partial(grouped_sums if is_sum else grouped_products, gemm), GROUPED_GEMM

    def of_part(a: QTensor, b: QTensor, group_sizes: jax.Array, rows: jax.Array) -> jax.Array:
        """Multiplies a part of the rows; ``rows`` are their places among all rows."""
        ends = jnp.clip(ends_of_groups(group_sizes, num_rows) - rows[0], 0, a.shape[0])
        return one(a, b, jnp.diff(ends, prepend=np.int32(0)))

    def of_parts(a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
        # Rows m, depth k and columns n may be split, but not the experts.
        kernels = "-kn" if gemm.rhs.contract == (1,) else "-nk"
        operands, result = (("mk", "mn"), "-kn") if is_sum else (("mk", kernels), "mn")
        run = on_shards(of_part, (*operands, "-", "M"), result, name)
        return run(a, b, group_sizes, lax.iota(np.int32, num_rows))

    num_rows = a.shape[0]
    on_gpu = partial(unless_partitioned, one, of_parts, in_tiles)
    return lax.platform_dependent(a, b, group_sizes, cuda=on_gpu, default=in_tiles)


# Which tiles hold rows of which expert. Expert e owns the rows from ``ends[e - 1]`` up to, but without,
# ``ends[e]``. Tiles are cut at multiples of their size, so a tile may hold rows of several experts. Each of
# them visits the tile once.


class Visits(NamedTuple):
    """The visits of all experts to the tiles of their rows, in the order of the rows: int32 arrays.

    The number of visits is an upper bound. The last visits may be unused; they have no rows.
    """

    row: jax.Array
    """For each visit, the first row of its tile; 0 if the visit is unused."""
    expert: jax.Array
    """For each visit, the index of its expert."""
    low: jax.Array
    """For each visit, the first row of the expert in the tile, counted from the start of the tile."""
    high: jax.Array
    """For each visit, the row after the expert's last row in the tile; 0 if the visit is unused."""
    first: jax.Array
    """For each expert, the index of its first visit."""
    number: jax.Array
    """For each expert, the number of its visits."""


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
    """Returns masks ``(..., tile, 1)`` of the rows of visits that belong to the expert of the visit."""
    row = lax.broadcasted_iota(np.int32, (*low.shape, tile, 1), low.ndim)
    low, high = (x[..., None, None] for x in (low, high))
    return (row >= low) & (row < high)


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


# In tiles, on any device.

# A tile is multiplied once by the kernel of each expert that has rows in it. Small tiles waste fewer rows.
# Large tiles read each kernel less often, and use more of a GPU. The tile size is a heuristic: half the
# average group size, rounded down to a power of two, within these bounds.
_SMALLEST_TILE, _LARGEST_TILE = 128, 512


def tile_of(rows: int, experts: int) -> int:
    """Returns the number of rows in a tile."""
    half = max(1, rows // (2 * experts))
    tile = min(max(1 << (half.bit_length() - 1), _SMALLEST_TILE), _LARGEST_TILE)
    return min(tile, max(CUBLASLT_MULTIPLE, round_up(rows, CUBLASLT_MULTIPLE)))


# Jitted, because otherwise each call outside of jit would compile the loop again. Inside of jit,
# ``inline=True`` makes it a part of the surrounding program.
@partial(jax.jit, static_argnums=0, inline=True)
def _products_in_tiles(gemm: Gemm, a: Any, kernels: Any, group_sizes: jax.Array) -> jax.Array:
    """Returns each row times the kernel of its expert, ``(rows, columns)``, in plain JAX."""
    gemm, kernels = _columns_first(gemm, kernels)  # once, not at each visit
    rows, tile = a.shape[0], tile_of(a.shape[0], group_sizes.size)
    multiply_tile, a, kernels = _without_blocks(gemm, a, kernels)
    a = _in_whole_tiles(tile, a)

    def step(out: jax.Array, visit: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        row, expert, low, high = visit
        kernel = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, expert, keepdims=False), kernels)
        if isinstance(kernel, QTensor) and kernel.scale.size == 1:
            kernel = dataclasses.replace(kernel, scale=kernel.scale.reshape(()))
        product = multiply_tile(_tile_at(row, tile, a), kernel)
        before = lax.dynamic_slice_in_dim(out, row, tile)
        of_tile = jnp.where(is_of_expert(tile, low, high), product, before)
        return lax.dynamic_update_slice_in_dim(out, of_tile, row, 0), None

    visits = visits_of(a.shape[0], tile, group_sizes)
    zeros = jnp.zeros((a.shape[0], kernels.shape[1]), gemm.out_dtype)
    out, *_ = vary_alike(zeros, *jax.tree.leaves((a, kernels, visits)))
    return lax.scan(step, out, visits[:4])[0][:rows]


@partial(jax.jit, static_argnums=0, inline=True)
def _sums_in_tiles(gemm: Gemm, a: Any, b: Any, group_sizes: jax.Array) -> jax.Array:
    """Returns the sums over each expert's rows, ``(experts, depth, columns)``, in plain JAX."""
    tile, wide = tile_of(a.shape[0], group_sizes.size), sum_dtype_of(gemm.out_dtype)
    multiply_tile, a, b = _without_blocks(gemm._replace(out_dtype=wide), a, b)
    a, b = _in_whole_tiles(tile, a), _in_whole_tiles(tile, b)

    def step(carry: tuple[jax.Array, jax.Array], visit: tuple[jax.Array, ...]) -> tuple[Any, None]:
        (total, out), (row, expert, low, high, is_first) = carry, visit
        # Rows of other experts are set to zero in both operands: zero times a NaN would be NaN.
        keep = is_of_expert(tile, low, high)
        product = multiply_tile(_tile_at(row, tile, a, keep), _tile_at(row, tile, b, keep))
        total = jnp.where(is_first, jnp.zeros_like(total), total) + product
        # All visits of an expert follow each other, so its last visit writes its whole sum.
        return (total, lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), expert, 0)), None

    visits = visits_of(a.shape[0], tile, group_sizes)
    is_first = lax.iota(np.int32, visits.row.size) == visits.first[visits.expert]
    shape = a.shape[1], b.shape[1]
    zeros = jnp.zeros(shape, wide), jnp.zeros((group_sizes.size, *shape), gemm.out_dtype)
    total, out, *_ = vary_alike(*zeros, *jax.tree.leaves((a, b, visits)))
    return lax.scan(step, (total, out), (*visits[:4], is_first))[0][1]


def _without_blocks(gemm: Gemm, a: AnyTensor, b: AnyTensor) -> tuple[Callable[..., jax.Array], Any, Any]:
    """Returns the function that multiplies tiles, and the operands, dequantized if scales are per block."""
    quantized = [x for x in (a, b) if isinstance(x, QTensor)]
    blocks = [x for x in quantized if x.block]
    if not blocks:
        return partial(multiply, gemm), a, b
    scope = DEQUANTIZED if len(quantized) == 2 else KEPT_WIDE
    if scope == DEQUANTIZED and not all(x.quantizer.is_exact_in_bfloat16 for x in blocks):
        wide = sum_dtype_of(gemm.lhs_dtype, gemm.rhs_dtype)
        gemm = gemm._replace(lhs_dtype=wide, rhs_dtype=wide, precision=lax.Precision.HIGHEST)
    a, b = dequantized(a, gemm.lhs_dtype), dequantized(b, gemm.rhs_dtype)
    return partial(multiply_wide, scope, gemm), a, b


def _in_whole_tiles(tile: int, x: AnyTensor) -> AnyTensor:
    """Returns rows that zeros fill up to whole tiles, at least one; scales that all rows share stay."""
    rows, size = x.shape
    filled = max(tile, round_up(rows, tile))
    if not isinstance(x, QTensor):
        return padded(x, (filled, size))
    is_per_row = x.scale.shape == (rows, 1) != (1, 1)
    scale = padded(x.scale, (filled, 1)) if is_per_row else x.scale
    return dataclasses.replace(x, codes=padded(x.codes, (filled, size)), scale=scale)


def _tile_at(row: jax.Array, tile: int, x: AnyTensor, keep: jax.Array | None = None) -> Any:
    """Returns the tile of an operand that starts at ``row``, with zeros in rows that ``keep`` excludes."""

    def cut(array: jax.Array) -> jax.Array:
        if array.ndim != 2 or array.shape[0] != x.shape[0]:
            return array  # scales that all rows share
        array = lax.dynamic_slice_in_dim(array, row, tile)
        return array if keep is None else jnp.where(keep, array, np.zeros((), array.dtype))

    return jax.tree.map(cut, x)


# By our GPU kernel for Hopper, which knows scales per block only: other scales are repeated.


def grouped_products(gemm: Gemm, a: QTensor, kernels: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each row by its expert's kernel, ``(rows, columns)``, by one GPU kernel.

    A tile of the result is a sum over the visits to the tile. In each visit the scales of the rows of other
    experts are zero, and the GPU kernel skips these rows: zero times a NaN of the expert would be NaN.
    """
    gemm, kernels = _columns_first(gemm, kernels)
    (rows, depth), (experts, columns, _) = a.shape, kernels.shape
    filled_rows, filled_depth, filled_columns = map(round_up, (rows, depth, columns))
    num_blocks, num_columns = np.int32(filled_depth // BLOCK), np.int32(filled_columns // TILE)
    visits = visits_of(filled_rows, TILE, group_sizes)
    keep, index = is_of_expert(TILE, visits.low, visits.high), visits.row // np.int32(TILE)

    left_scale = _scales(a, (filled_rows, filled_depth), (1, BLOCK)).reshape(-1, TILE, num_blocks)
    left_scale = jnp.where(keep, jnp.take(left_scale, index, axis=0, mode="clip"), np.float32(0))
    right = padded(kernels.codes, (experts, filled_columns, filled_depth))
    right_scale = _scales(kernels, right.shape, (1, 1, BLOCK))

    tile = lax.broadcasted_iota(np.int32, (filled_rows // TILE, index.size), 0)
    is_before, is_of_tile = index[None] < tile, index[None] == tile
    is_used = visits.high[None] > 0
    first, number = (jnp.sum(x & is_used, axis=1, dtype=jnp.int32) for x in (is_before, is_of_tile))

    def block(t: Any, b: Any, first: Any, number: Any, experts: Any) -> Block:
        visit = first[t] + lax.div(b, num_blocks)
        return Block(t, experts[visit] * num_columns, lax.rem(b, num_blocks), visit)

    out = tiled_gemm(
        padded(a.codes, (filled_rows, filled_depth)),
        right.reshape(-1, filled_depth),
        left_scale.reshape(-1, num_blocks).T,
        right_scale.reshape(-1, num_blocks).T,
        first,
        number,
        visits.expert,
        num_blocks=lambda t, first, number, experts: number[t] * num_blocks,
        block=block,
        shape=(filled_rows, filled_columns),
        out_dtype=gemm.out_dtype,
        name=GROUPED_GEMM,
        skips_rows=True,
    )
    return out[:rows, :columns]


def grouped_sums(gemm: Gemm, a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Sums the outer products of the rows of each expert, ``(experts, depth, columns)``, by one GPU kernel.

    XLA first puts the tiles of all visits side by side, so that the sum of an expert runs over whole tiles.
    """
    (rows, depth), columns = a.shape, b.shape[1]
    filled_rows, filled_depth, filled_columns = map(round_up, (rows, depth, columns))
    visits = visits_of(filled_rows, TILE, group_sizes)
    keep, index = is_of_expert(TILE, visits.low, visits.high), visits.row // np.int32(TILE)
    # Codes are copied as 32-bit words: XLA's kernel moves four elements at once, whether bytes or words.
    mask = jnp.where(keep, np.uint8(255), np.uint8(0)).reshape(-1, TILE // 4, 4)
    mask = lax.bitcast_convert_type(mask, jnp.uint32)

    def side_by_side(x: QTensor, size: int) -> tuple[jax.Array, jax.Array]:
        """Returns codes with the rows of all visits as columns, zeros in rows of others, and scales."""
        # Without the barrier XLA would gather single bytes of the codes that are not transposed.
        codes = lax.optimization_barrier(padded(x.codes, (filled_rows, size)).T)
        words = lax.bitcast_convert_type(codes.reshape(size, -1, TILE // 4, 4), jnp.uint32)
        words = jnp.take(words, index, axis=1, mode="clip") & mask[None]
        codes = lax.bitcast_convert_type(words, codes.dtype).reshape(size, -1)
        return codes, jnp.take(_scales(x, (filled_rows, size), (TILE, 1)), index, axis=0, mode="clip")

    left, left_scale = side_by_side(a, filled_depth)
    right, right_scale = side_by_side(b, filled_columns)
    num_tiles = np.int32(filled_depth // TILE)

    def block(t: Any, b: Any, first: Any, number: Any) -> Block:
        row = lax.rem(t, num_tiles)
        return Block(row, 0, first[lax.div(t, num_tiles)] + b, row)

    out = tiled_gemm(
        left,
        right,
        left_scale,
        right_scale,
        visits.first,
        visits.number,
        num_blocks=lambda t, first, number: number[lax.div(t, num_tiles)],
        block=block,
        shape=(group_sizes.size * filled_depth, filled_columns),
        out_dtype=gemm.out_dtype,
        name=GROUPED_GEMM,
    )
    return out.reshape(-1, filled_depth, filled_columns)[:, :depth, :columns]


def _scales(x: QTensor, sizes: tuple[int, ...], units: tuple[int, ...]) -> jax.Array:
    """Returns the float32 scale of each unit of a tensor that is padded to ``sizes``.

    ``units`` are the numbers of elements of a unit along each dimension.
    """
    scale = x.scale.astype(jnp.float32).reshape(x.scale.shape or (1,) * x.ndim)
    for axis, (size, unit) in enumerate(zip(sizes, units)):
        width = x.block[axis] if x.block else x.shape[axis] // scale.shape[axis]
        index = lax.iota(np.int32, size // unit) * np.int32(unit) // np.int32(width)
        scale = jnp.take(scale, index, axis=axis, mode="clip")
    return scale

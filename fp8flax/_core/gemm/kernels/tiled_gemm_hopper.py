"""A GEMM in tiles: a GPU kernel in Mosaic GPU for Hopper's FP8 units.

A ``Tiling`` says which rows of the operands each tile of the result is computed from. ``block_gemm_hopper``
has the tiling of a stack of matrices, ``gemm.ragged`` those of a ragged dot.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm.gpus import num_cores
from fp8flax._core.qtensor import BLOCK, TILE
from fp8flax._core.scaling import apply_scales

_IS_0_11 = jax.__version_info__ >= (0, 11)
"""Whether JAX is 0.11 or later. From 0.11 on ``wgmma`` takes operands of two different FP8 dtypes."""

_HALF = TILE // 2
"""The number of rows of a tile of the result that one warpgroup multiplies.

A thread block has three warpgroups. Two multiply. One warp of the third fetches the operands."""

_STRIP = 8
"""The width, in tiles, of a strip of columns. The cores compute one strip after the other, because the
tiles of a strip share what they read. The width changes the time only. It is a guess, not measured."""

# Bytes of shared memory for operands and results: a thread block has 227 KiB; barriers take some of it.
_SHARED_MEMORY = 226 * 1024


def multiplies_dtypes(lhs: Any, rhs: Any) -> bool:
    """Returns whether the GPU kernel can multiply operands of these dtypes."""
    known = {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)}
    return {jnp.dtype(lhs), jnp.dtype(rhs)} <= known and (lhs == rhs or _IS_0_11)


class Tile(NamedTuple):
    """A row of tiles of the result, described by its first tile, in columns 0 to 127, as int32 scalars.

    The first tile is the product of ``TILE`` rows of the left operand and ``TILE`` rows of the right
    operand, summed over ``num_blocks`` blocks of 128 columns of both. The tiles to its right in the result
    use the same rows of the left operand, and the following rows of the right operand.
    """

    lhs_row: Any
    """The first row of the left operand, a multiple of 8."""
    rhs_row: Any
    """The row of the right operand for the first column of the result. A multiple of 8, or of 128 if 128
    rows of the right operand share a scale."""
    block: Any
    """The first block of the contraction."""
    num_blocks: Any
    """The number of blocks of the contraction; with 0 the tile is zero.

    It and ``block`` are Python ints if they are the same for all tiles."""
    out_row: Any
    """The first row of the result, a multiple of 8."""
    low: Any
    """The first row of the tile, relative to ``out_row``, that is written."""
    high: Any
    """One more than the last row of the tile, relative to ``out_row``, that is written."""


class Tiling(NamedTuple):
    """Says which rows of the operands each tile of the result is computed from (hashable)."""

    rows: int
    """The number of rows of the result."""
    columns: int
    """The number of columns of the result; a multiple of 128."""
    num_tiles: int
    """The number of tiles in the first 128 columns of the result."""
    is_whole: bool
    """Whether all rows of every tile are written. Otherwise a tile writes the rows ``low`` to ``high``."""
    tile: Callable[[Any, Any], Tile]
    """Called with the table of ``tiled_gemm`` and the index of a tile; returns the tile. All its rows,
    also those that are not written, must lie within the operands and the result."""


def tiled_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    table: jax.Array | None,
    *,
    tiling: Tiling,
    out_dtype: Any,
    name: str,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies the tiles of ``tiling`` and returns the result, ``(tiling.rows, tiling.columns)``.

    Rows of the result that no tile writes are undefined. The FP8 units sum the products of each block; the
    sums of the blocks are added in float32. Scales per block multiply the sum of each block. The two scales
    of a block are multiplied first. If their product is below 2**-126, the block adds zero. If it overflows
    float32, the result is not finite. Other scales multiply the sum over all blocks.

    Args:
        lhs: FP8 codes, ``(R, D)`` with R at least 128 and D a multiple of 128.
        rhs: FP8 codes, ``(S, D)``.
        lhs_scale: float32, ``(R,)`` or ``(1,)``; scales per block ``(D / 128, R)``.
        rhs_scale: float32, ``(S,)``, or ``(P,)`` with a scale for every S / P rows; scales per block
            ``(D / 128, S)``, or ``(D / 128, S / 128)`` if 128 rows share a scale.
        table: int32, two-dimensional; passed to ``tiling.tile``. None if the tiling needs no table.
        tiling: the tiles of the result.
        out_dtype: ``bfloat16``, ``float16`` or ``float32``.
        name: the name of the GPU kernel.
        interpret: parameters of Pallas's GPU interpreter, to run on any device, for tests.

    Source: the scheme of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section
    3.5.2: sums of 128 products are promoted to float32 outside of the tensor cores.
    """
    sizes = lhs.shape[0], rhs.shape[0]
    is_per_block, is_square = lhs_scale.ndim == 2, rhs_scale.shape[-1] < rhs.shape[0]
    kernel = _kernel(tiling, jnp.dtype(out_dtype), *sizes, is_per_block, is_square, name, interpret)
    if interpret is not None:  # the interpreter cannot multiply by a transposed reference
        rhs = rhs.T
    tables = () if table is None else (table,)
    out = kernel(*vary_alike(lhs, rhs, lhs_scale, rhs_scale, *tables))
    return vary_alike(out, lhs, rhs)[0]  # the kernel's result has lost the manual axes of the mesh


def _kernel(
    tiling: Tiling,
    out_dtype: Any,
    lhs_rows: int,
    rhs_rows: int,
    is_per_block: bool,
    is_square: bool,
    name: str,
    interpret: Any,
) -> Any:
    """Returns the GPU kernel of ``tiled_gemm`` for a tiling and these numbers of operand rows.

    Args:
        tiling: see ``tiled_gemm``.
        out_dtype: see ``tiled_gemm``.
        lhs_rows: number of rows of the left operand.
        rhs_rows: number of rows of the right operand.
        is_per_block: whether the scales are per block.
        is_square: whether several rows of the right operand share a scale.
        name: see ``tiled_gemm``.
        interpret: see ``tiled_gemm``.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # Shared memory holds blocks of both operands with their scales, and one or two tiles of the result.
    num_scales = (2 - is_square) if is_per_block else 0
    stage_bytes = 2 * TILE * BLOCK + 4 * num_scales * TILE
    result_bytes = (2 - tiling.is_whole) * TILE * TILE * out_dtype.itemsize
    stages = (_SHARED_MEMORY - result_bytes) // stage_bytes
    layout, is_interpreted = plgpu.Layout.WGMMA, interpret is not None
    swizzle, n = 128, tiling.columns // TILE
    of_codes = (plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle))
    of_result = (
        plgpu.TilingTransform((8, swizzle // out_dtype.itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )

    def kernel(
        lhs: Any,
        rhs: Any,
        lhs_scale: Any,
        rhs_scale: Any,
        *table_and_out: Any,
        whole: Any,
        part: Any = None,
    ) -> None:
        *tables, out = table_and_out
        table = tables[0] if tables else None

        def loaded(ref: Any, index: Any, axis: int, **options: Any) -> Any:
            """Loads a vector of scales, in the layout of a tile of the result reduced over ``axis``."""
            if is_interpreted:
                return ref[index]
            return _load(ref, index, layout=layout.reduce(axis), **options)

        def broadcast(scale: Any, axis: int) -> Any:
            """Repeats a vector of scales along ``axis`` of a warpgroup's half of a tile."""
            return lax.broadcast_in_dim(scale, (_HALF, TILE), (1 - axis,))

        def scale_of(ref: Any, of_rows: int, start: Any, size: int, axis: int) -> Any:
            """Returns the scale of an operand's rows from ``start`` on, as it multiplies a tile.

            Args:
                ref: the scales: one per row, or one for each of several equal parts of the rows.
                of_rows: number of rows of the operand.
                start: the first row.
                size: number of rows.
                axis: the axis of the tile that the scale is broadcast along.
            """
            count = ref.shape[0]
            if count < of_rows:
                return ref[lax.div(start, np.int32(of_rows // count))]
            return broadcast(loaded(ref, (pl.ds(start, size),), axis, optimized=False), axis)

        def pipeline(body: Any, context: Any, first: Any, count: Any) -> Any:
            """Returns a pipeline over ``count`` blocks from ``first`` on; calls ``body`` for each."""
            of_rhs = lambda k: (first + k, 0) if is_interpreted else (0, first + k)  # noqa: E731
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(count,),
                memory_registers=40,
                in_specs=[
                    plgpu.BlockSpec((TILE, BLOCK), lambda k: (0, first + k), transforms=of_codes),
                    plgpu.BlockSpec((TILE, BLOCK), of_rhs, transforms=of_codes),
                    *[plgpu.BlockSpec((1, TILE), lambda k: (first + k, 0))] * num_scales,
                ],
                wg_axis="warpgroup",
                num_compute_wgs=2,
                max_concurrent_steps=stages,
                compute_context=context,
            )

        # The body of a pipeline that never runs: it gives the allocations that all tiles then share.
        def nothing(*_: Any, **__: Any) -> None:
            return None

        fetched = lhs, rhs, *(lhs_scale, rhs_scale)[:num_scales]
        first_tile = tiling.tile(table, jnp.int32(0))
        unused = pipeline(nothing, nothing, first_tile.block, first_tile.num_blocks)
        allocations = unused.get_allocations(*fetched)

        @partial(pl.run_scoped, allocations=allocations, collective_axes="warpgroup")
        def _(allocations: Any) -> None:
            warpgroup = lax.axis_index("warpgroup")
            start = warpgroup * _HALF
            mine = pl.ds(start, _HALF)

            @plgpu.nd_loop((tiling.num_tiles * n,), collective_axes="core")
            def _(loop: Any) -> None:
                # This order lets neighbouring cores share most of what they read.
                t, j = plgpu.planar_snake(loop.index[0], (tiling.num_tiles, n), 1, _STRIP)
                tile = tiling.tile(table, t)
                column = tile.rhs_row + j * TILE

                def add_block(index: Any, lhs_tile: Any, rhs_tile: Any, *rest: Any) -> Any:
                    *scales, total = rest

                    def multiply(sums: Any) -> Any:
                        right = rhs_tile if is_interpreted else rhs_tile.transpose((1, 0))
                        plgpu.wgmma(sums, lhs_tile.at[mine], right)
                        plgpu.wgmma_wait(0)
                        return sums[...]

                    sums = pl.run_scoped(multiply, plgpu.ACC((_HALF, TILE), jnp.float32))
                    return total + (sums * factor_of(index[0], *scales) if is_per_block else sums)

                def factor_of(k: Any, lhs_s: Any, rhs_s: Any = None) -> Any:
                    """Returns the product of the scales of both operands for block ``k`` of this tile."""
                    scale = loaded(lhs_s, (0, mine), 1)
                    if is_square:
                        return broadcast(
                            scale * rhs_scale[tile.block + k, lax.div(column, np.int32(TILE))], 1
                        )
                    return broadcast(scale, 1) * broadcast(loaded(rhs_s, (0,), 0), 0)

                def compute(run: Any) -> None:
                    """Writes this warpgroup's half of a tile. ``run`` adds each block to a sum."""
                    shape = _HALF, TILE
                    zeros = jnp.zeros(shape, jnp.float32)
                    total = run(zeros if is_interpreted else plgpu.layout_cast(zeros, layout))
                    if not is_per_block:
                        left = scale_of(lhs_scale, lhs_rows, tile.lhs_row + start, _HALF, 1)
                        right = scale_of(rhs_scale, rhs_rows, column, TILE, 0)
                        total = apply_scales(total, left, right)
                    result = total.astype(out_dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                    def target(first: Any, size: int) -> Any:
                        """Returns the reference to ``size`` rows of this half of the tile in the result."""
                        return out.at[pl.ds(tile.out_row + start + first, size), pl.ds(j * TILE, TILE)]

                    def write_all() -> None:
                        whole[warpgroup] = result
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(whole.at[warpgroup], target(0, _HALF))

                    if tiling.is_whole:
                        write_all()
                        return
                    low = jnp.clip(tile.low - start, 0, _HALF)
                    count = jnp.clip(tile.high - start, 0, _HALF) - low
                    pl.when(count == _HALF)(write_all)

                    @pl.when((count > 0) & (count < _HALF))
                    def _() -> None:
                        if is_interpreted:
                            part[warpgroup] = result
                        else:
                            _store_with_conflicts(part, warpgroup, result)
                        plgpu.commit_smem()
                        # A copy has a static size. So each set bit of the count copies that many rows.
                        first, size = low, _HALF // 2
                        while size:
                            bit = count & size

                            @pl.when(bit != 0)
                            def _(first: Any = first, size: int = size) -> None:
                                plgpu.copy_smem_to_gmem(
                                    part.at[warpgroup, pl.ds(first, size)], target(first, size)
                                )

                            first, size = first + bit, size // 2

                left = lhs.at[pl.ds(tile.lhs_row, TILE)]
                right = rhs.at[:, pl.ds(column, TILE)] if is_interpreted else rhs.at[pl.ds(column, TILE)]
                fetched = [left, right]
                for scale, row in ((lhs_scale, tile.lhs_row), (rhs_scale, column))[:num_scales]:
                    fetched.append(scale.at[:, pl.ds(row, TILE)])
                pipeline(add_block, compute, tile.block, tile.num_blocks)(*fetched, allocations=allocations)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # ``whole`` is stored in units of 8 rows and copied at once. ``part`` is stored row by row, so that any
    # of its rows can be copied.
    scratch = {"whole": plgpu.SMEM((2, _HALF, TILE), out_dtype, transforms=of_result)}
    if not tiling.is_whole:
        scratch["part"] = plgpu.SMEM((2, _HALF, TILE), out_dtype)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((tiling.rows, tiling.columns), out_dtype),
        grid=(min(num_cores(), tiling.num_tiles * n),),
        grid_names=("core",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=name,
        # The default of JAX 0.10. The default of JAX 0.11 requires proofs of where partial tiles begin.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types=scratch,
        interpret=interpret,
    )


def _load(ref: Any, index: Any, **options: Any) -> Any:
    """Loads ``ref[index]`` into registers; the kernel calls it.

    Args:
        ref: a reference of a Mosaic GPU kernel.
        index: the index of the part to load.
        **options: options of ``plgpu.load``, such as the register layout.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # JAX 0.10 requires the index as a separate argument, which JAX 0.11 deprecates.
    args = (ref.at[index],) if _IS_0_11 else (ref, index)
    return plgpu.load(*args, **options)


def _store_with_conflicts(ref: Any, index: Any, value: Any) -> None:
    """Stores a value as ``ref[index]``, also if its registers conflict in the banks of shared memory.

    Args:
        ref: a reference to shared memory of a Mosaic GPU kernel.
        index: the index of the part to store.
        value: the value, in registers.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref.at[index], value, optimized=False)
    else:  # JAX 0.10 does not refuse conflicts
        ref[index] = value

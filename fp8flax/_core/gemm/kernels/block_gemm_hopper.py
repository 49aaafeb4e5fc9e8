"""A GEMM whose scales change along the contraction: a GPU kernel in Mosaic GPU for Hopper's FP8 units."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import vary_alike
from fp8flax._core.names import BLOCK_GEMM_HOPPER
from fp8flax._core.qtensor import BLOCK

# A thread block has three warpgroups. Two multiply, each 64 rows of a tile of the result. One warp of the
# third fetches the operands.
_ROWS = 64
_TILE = 2 * _ROWS
HAS_MOSAIC = jax.__version_info__ >= (0, 10)
"""Whether Pallas's Mosaic GPU has the interface that the kernel uses."""

_IS_0_11 = jax.__version_info__ >= (0, 11)
"""Whether JAX is 0.11 or later. From 0.11 on ``wgmma`` takes operands of two different FP8 dtypes."""

CORES = 132
"""The number of cores of an H100 or H200. On a GPU with fewer some tiles wait for a second round."""

# The next two values change the time, not the result. They are guesses and were not measured on a GPU.
_STAGES = 5
"""The number of blocks of each operand in shared memory, including the blocks that are being fetched."""

STRIP = 8
"""The width, in tiles, of a strip of columns. The cores compute one strip after the other, because the
tiles of a strip share what they read."""


def multiplies_dtypes(lhs: Any, rhs: Any) -> bool:
    """Returns whether our GPU kernels for Hopper's FP8 units can multiply operands of these dtypes."""
    known = {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)}
    return HAS_MOSAIC and {jnp.dtype(lhs), jnp.dtype(rhs)} <= known and (lhs == rhs or _IS_0_11)


def load(ref: Any, index: Any, **options: Any) -> Any:
    """Loads ``ref[index]`` into registers; kernels call it.

    Args:
        ref: a reference of a Mosaic GPU kernel.
        index: the index of the part to load.
        **options: options of ``plgpu.load``, such as the register layout.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # JAX 0.10 requires the index as a separate argument, which JAX 0.11 deprecates.
    args = (ref.at[index],) if _IS_0_11 else (ref, index)
    return plgpu.load(*args, **options)


def hopper_block_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    *,
    out_dtype: Any,
    interpret: Any = None,
) -> jax.Array:
    """Returns the product of two block-scaled stacks of matrices, ``(batch, M, N)``.

    The formula is that of ``block_gemm``, but the two scales of a block are multiplied first. If their
    product is below 2**-126, the block adds zero. If it overflows float32, the result is not finite.
    (``block_gemm`` avoids both for each element. Here that would take longer than the multiplication.)

    Args:
        lhs: FP8 codes, ``(batch, M, K)``; K is a multiple of 128.
        rhs: FP8 codes, ``(batch, N, K)``. ``multiplies_dtypes`` must be True for both dtypes.
        lhs_scale: float32, ``(batch, M, K / 128)``.
        rhs_scale: float32, ``(batch, N, K / 128)``, or ``(batch, ceil(N / 128), K / 128)`` if 128 rows
            share a scale.
        out_dtype: ``bfloat16``, ``float16`` or ``float32``.
        interpret: parameters of Pallas's GPU interpreter, to run on any device, for tests.

    Source: the scheme of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section
    3.5.2: sums of 128 products are promoted to float32 outside of the tensor cores.
    """
    batch, rows, depth = lhs.shape
    columns, num_blocks = rhs.shape[1], depth // BLOCK
    is_square = rhs_scale.shape[1] != columns
    codes = [_padded_rows(x) for x in (lhs, rhs)]
    # The scales get the shape (blocks, rows), so that the scales that the kernel fetches are contiguous.
    scales = [_padded_rows(lhs_scale), rhs_scale if is_square else _padded_rows(rhs_scale)]
    scales = [jnp.moveaxis(x, 2, 0).reshape(num_blocks, -1) for x in scales]
    m, n = (x.shape[1] // _TILE for x in codes)
    kernel = _kernel(batch, m, n, num_blocks, jnp.dtype(out_dtype), is_square, interpret)
    codes = [x.reshape(-1, depth) for x in codes]
    if interpret is not None:  # the interpreter cannot multiply by a transposed reference
        codes[1] = codes[1].T
    out = kernel(*vary_alike(*codes, *scales))
    out = vary_alike(out, lhs, rhs)[0]  # the kernel loses the axes
    return out.reshape(batch, m * _TILE, n * _TILE)[:, :rows, :columns]


def _padded_rows(x: jax.Array) -> jax.Array:
    """Pads the rows of a stack of matrices with zeros, so that the last tile is whole."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (0, -x.shape[1] % _TILE, 0), (0, 0, 0)))


def _kernel(
    batch: int,
    m: int,
    n: int,
    num_blocks: int,
    out_dtype: Any,
    is_square: bool,
    interpret: Any,
) -> Any:
    """Returns the GPU kernel whose result is a stack of ``batch`` matrices of ``m`` by ``n`` tiles."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # Shared memory also holds the tile of the result. A float32 tile takes the memory of one more stage.
    stages = min(_STAGES if out_dtype.itemsize < 4 else _STAGES - 1, num_blocks)
    layout, is_interpreted = plgpu.Layout.WGMMA, interpret is not None
    swizzle = 128
    of_codes = (plgpu.TilingTransform((8, swizzle)), plgpu.SwizzleTransform(swizzle))
    of_result = (
        plgpu.TilingTransform((8, swizzle // out_dtype.itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )

    def kernel(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, out: Any, written: Any) -> None:
        def loaded(ref: Any, index: Any, axis: int) -> Any:
            """Loads a vector of scales, in the layout of a tile of the result reduced over ``axis``."""
            return ref[index] if is_interpreted else load(ref, index, layout=layout.reduce(axis))

        def pipeline(body: Any, context: Any) -> Any:
            """Returns a pipeline that fetches the blocks of a tile, and calls ``body`` for each."""
            of_columns = lambda k: (k, 0) if is_interpreted else (0, k)  # noqa: E731
            specs = [
                plgpu.BlockSpec((_TILE, BLOCK), lambda k: (0, k), transforms=of_codes),
                plgpu.BlockSpec((_TILE, BLOCK), of_columns, transforms=of_codes),
                plgpu.BlockSpec((1, _TILE), lambda k: (k, 0)),
                plgpu.BlockSpec((1, _TILE), lambda k: (k, 0)),
            ]
            return plgpu.emit_pipeline_warp_specialized(
                body,
                grid=(num_blocks,),
                memory_registers=40,
                in_specs=specs[: 4 - is_square],
                wg_axis="warpgroup",
                num_compute_wgs=2,
                max_concurrent_steps=stages,
                compute_context=context,
            )

        # The body of a pipeline that never runs: it gives the allocations that all tiles then share.
        def nothing(*_: Any, **__: Any) -> None:
            return None

        fetched = (lhs, rhs, lhs_scale) if is_square else (lhs, rhs, lhs_scale, rhs_scale)
        allocations = pipeline(nothing, nothing).get_allocations(*fetched)

        @partial(pl.run_scoped, allocations=allocations, collective_axes="warpgroup")
        def _(allocations: Any) -> None:
            warpgroup = lax.axis_index("warpgroup")
            mine = pl.ds(warpgroup * _ROWS, _ROWS)

            @plgpu.nd_loop((batch * m * n,), collective_axes="core")
            def _(loop: Any) -> None:
                num_tiles = np.int32(m * n)
                which, tile = lax.div(loop.index[0], num_tiles), lax.rem(loop.index[0], num_tiles)
                # This order lets neighbouring cores share what they read.
                i, j = plgpu.planar_snake(tile, (m, n), 1, STRIP)
                of_rows = pl.ds((which * m + i) * _TILE, _TILE)
                of_columns = pl.ds((which * n + j) * _TILE, _TILE)

                def add_block(index: Any, lhs_tile: Any, rhs_tile: Any, lhs_s: Any, *rest: Any) -> Any:
                    total = rest[-1]

                    def multiply(sums: Any) -> Any:
                        right = rhs_tile if is_interpreted else rhs_tile.transpose((1, 0))
                        plgpu.wgmma(sums, lhs_tile.at[mine], right)
                        plgpu.wgmma_wait(0)
                        return sums[...]

                    sums = pl.run_scoped(multiply, plgpu.ACC((_ROWS, _TILE), jnp.float32))
                    shape = _ROWS, _TILE
                    scale = loaded(lhs_s, (0, mine), 1)
                    if is_square:
                        scale *= rhs_scale[index[0], which * n + j]
                        factor = lax.broadcast_in_dim(scale, shape, (0,))
                    else:
                        other = loaded(rest[0], (0,), 0)
                        factor = lax.broadcast_in_dim(scale, shape, (0,))
                        factor *= lax.broadcast_in_dim(other, shape, (1,))
                    return total + sums * factor

                def compute(run: Any) -> None:
                    """Writes this warpgroup's half of a tile. ``run`` adds each block to a sum."""
                    zeros = jnp.zeros((_ROWS, _TILE), jnp.float32)
                    total = run(zeros if is_interpreted else plgpu.layout_cast(zeros, layout))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    written[warpgroup] = total.astype(out_dtype)
                    plgpu.commit_smem()
                    result = out.at[of_rows, pl.ds(j * _TILE, _TILE)]
                    plgpu.copy_smem_to_gmem(written.at[warpgroup], result.at[mine])

                right = rhs.at[:, of_columns] if is_interpreted else rhs.at[of_columns]
                tiles = [lhs.at[of_rows], right, lhs_scale.at[:, of_rows]]
                if not is_square:
                    tiles.append(rhs_scale.at[:, of_columns])
                pipeline(add_block, compute)(*tiles, allocations=allocations)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch * m * _TILE, n * _TILE), out_dtype),
        grid=(min(CORES, batch * m * n),),
        grid_names=("core",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=BLOCK_GEMM_HOPPER,
        scratch_types={"written": plgpu.SMEM((2, _ROWS, _TILE), out_dtype, transforms=of_result)},
        interpret=interpret,
    )

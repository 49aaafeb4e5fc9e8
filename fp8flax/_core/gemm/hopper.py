"""Our GPU kernel for Hopper's FP8 units, which multiplies codes with a float32 scale per 128 columns.

Each element of the result is a sum over blocks of 128 contracted columns::

    out[i, j] = sum over blocks s:  scale_a[i, s] * scale_b[j, s] * (sum over k in s:  a[i, k] * b[j, k])

The FP8 units compute the inner sums. The GPU adds the outer one in float32. ``hopper_experts`` uses the
kernel for the products of experts, too. So a caller says where the operands of each block lie (``Step``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.axes import vary_alike
from fp8flax._core.formats import OCP_DTYPES
from fp8flax._core.gemm.gemm import (
    SCALE_COLUMNS,
    TILE,
    Gemm,
    GemmSizes,
    Ref,
    are_positive,
    as_matrices,
    from_matrices,
)
from fp8flax._core.gemm.gpus import fits_kernels, is_hopper, num_cores
from fp8flax._core.gemm.mosaic import HALF, in_units, load, repeated
from fp8flax._core.names import BLOCK_GEMM_HOPPER
from fp8flax._core.qtensor import Dims, QTensor, Quantizer, padded, round_up

Operand: TypeAlias = tuple[jax.Array, jax.Array]
"""The codes of an operand, and their scales, as ``operand`` makes them and ``tiled_gemm`` takes them."""

Index: TypeAlias = Any
"""An int, an int32 scalar, or a reference to a table of int32 numbers."""


def supports(lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes, capability: float) -> bool:
    """Returns whether the GPU kernel multiplies codes of two quantizers."""
    if not (lhs.scale_columns == rhs.scale_columns == SCALE_COLUMNS and are_positive(sizes)):
        return False
    m, k, n = (round_up(size, TILE) for size in sizes[1:])
    shapes = (sizes.batch, m, k), (sizes.batch, n, k), (sizes.batch, m, n)
    return multiplies(lhs, rhs, capability) and fits_kernels(*shapes)


def multiplies(lhs: Quantizer, rhs: Quantizer, capability: float) -> bool:
    """Returns whether the units of a GPU multiply codes of two quantizers by ``wgmma``."""
    # From JAX 0.11 on ``wgmma`` takes operands of two different FP8 dtypes.
    is_one_dtype = lhs.dtype == rhs.dtype or jax.__version_info__ >= (0, 11)
    return is_hopper(capability) and {lhs.dtype, rhs.dtype} <= OCP_DTYPES and is_one_dtype


def compute(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies by the GPU kernel. In the right operand 128 rows share a scale, or each has its own."""
    left = operand(a, gemm.lhs)
    right = operand(b, gemm.rhs, TILE if b.quantizer.block[0] % TILE == 0 else 1)
    batch = gemm.sizes(a, b).batch
    rows, columns = (codes.shape[0] // batch for codes, _ in (left, right))

    def step(t: Index, s: Index) -> Step:
        # All matrices of a stack lie one below the other, in both operands and in the result.
        matrix = lax.div(t, np.int32(rows // TILE))
        return Step(lhs=t, rhs=matrix * np.int32(columns // TILE), depth=s, scale=t)

    out = tiled_gemm(
        left,
        right,
        num_steps=lambda t: left[0].shape[1] // SCALE_COLUMNS,
        step=step,
        shape=(batch * rows, columns),
        out_dtype=jnp.float32 if gemm.out_dtype == jnp.float64 else gemm.out_dtype,
        name=BLOCK_GEMM_HOPPER,
    )
    return from_matrices(gemm, a, b, out.reshape(batch, rows, columns))


def operand(x: QTensor, dims: Dims, rows_per_scale: int = 1) -> Operand:
    """Returns an operand as the GPU kernel takes it: its matrices one below the other, and their scales.

    The codes are ``(batch * rows, columns)``, filled up with zeros to multiples of 128. The scales are
    ``(columns / 128, batch * rows / rows_per_scale)``: the scales of the rows of a tile, which the kernel
    fetches at once, are neighbors. Scales of larger blocks, or of whole slices, are repeated.

    For example, codes ``(2, 200, 256)`` with scales ``(2, 200, 2)`` become ``(512, 256)`` and ``(2, 512)``.
    """
    height = x.block[dims.free[-1]] if x.block and dims.free else 1
    codes = as_matrices(x.codes, dims)
    scale = as_matrices(x.scale.astype(jnp.float32).reshape(x.scale.shape or (1,) * x.ndim), dims)
    batch, rows, columns = codes.shape
    rows, columns = round_up(rows, TILE), round_up(columns, SCALE_COLUMNS)
    scale_rows, scale_columns = rows // rows_per_scale, columns // SCALE_COLUMNS
    if scale.shape[1] > 1:
        scale = jnp.repeat(scale, height // rows_per_scale, axis=1)
        scale = padded(scale, (scale.shape[0], scale_rows, scale.shape[2]))
    scale = jnp.moveaxis(jnp.broadcast_to(scale, (batch, scale_rows, scale_columns)), 2, 0)
    return padded(codes, (batch, rows, columns)).reshape(-1, columns), scale.reshape(scale_columns, -1)


# The GPU kernel, in Mosaic GPU.


class Step(NamedTuple):
    """Where the operands of one step lie; all four numbers count tiles of 128.

    The result has tiles ``(t, j)`` of 128 rows and columns. Each is a sum over steps. In a step, 128 rows
    of the left operand are multiplied by 128 rows of the right operand, over 128 columns of both.

    For example, the product of codes ``(256, 384)`` and ``(512, 384)`` has 2 × 4 tiles, and each has
    ``num_steps(t) = 3`` steps. With ``step(t, s) = Step(lhs=t, rhs=0, depth=s, scale=t)``, step 2 of the
    tile (1, 3) multiplies the rows 128 to 255 of the left operand by the rows 384 to 511 of the right one
    (``rhs + j``), over the columns 256 to 383.
    """

    lhs: Index
    """The rows of the left operand."""
    rhs: Index
    """The rows of the right operand for the tile with j = 0; a tile further right takes ``rhs + j``."""
    depth: Index
    """The columns of both operands."""
    scale: Index
    """The scales of the rows of the left operand, which ``hopper_experts`` stores more than once."""


STRIP = 8
"""The width, in tiles, of a strip of columns. The cores compute one strip after the other, because the
tiles of a strip share what they read. The width changes the time only. It is a guess, not measured."""

# Bytes of shared memory for operands and results: a thread block has 227 KiB; barriers take some of it.
_SHARED_MEMORY = 226 * 1024


def tiled_gemm(
    left: Operand,
    right: Operand,
    *tables: jax.Array,
    num_steps: Callable[..., Index],
    step: Callable[..., Step],
    shape: tuple[int, int],
    out_dtype: DTypeLike,
    name: str,
    skips_rows: bool = False,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies in tiles, each a sum over steps (``Step``), and returns the result, of the given shape.

    The two scales of a step are multiplied first. If their product is below 2**-126, the step adds zero. If
    it overflows float32, the result is not finite.

    Args:
        left: FP8 codes ``(R, D)``, and float32 scales ``(D / 128, P)``. All sizes are multiples of 128.
        right: FP8 codes ``(S, D)``, and float32 scales ``(D / 128, S)``, or ``(D / 128, S / 128)`` if 128
            rows share a scale.
        *tables: int32 arrays, to which ``num_steps`` and ``step`` get references as last arguments: a GPU
            kernel cannot close over arrays.
        num_steps: a function of the index t of a row of tiles of the result, which returns the number of
            steps of its tiles. A tile without steps is zero.
        step: a function of the index t of a row of tiles of the result, and of the index of a step.
        shape: both sizes are multiples of 128.
        out_dtype: ``bfloat16``, ``float16`` or ``float32``.
        name: of the GPU kernel.
        skips_rows: whether rows of the result get nothing from a step in which their scale is zero, also
            if codes or scales of the right operand are NaN.
        interpret: parameters of Pallas's GPU interpreter, to run on any device, for tests.

    Source: the scheme of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section
    3.5.2: sums of 128 products are promoted to float32 outside of the tensor cores.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (lhs, lhs_scale), (rhs, rhs_scale) = left, right
    out_dtype, is_interpreted = jnp.dtype(out_dtype), interpret is not None
    m, n = shape[0] // TILE, shape[1] // TILE
    # If 128 rows of the right operand share a scale, a step needs one number, and reads it in place.
    # Otherwise the 128 scales are one more operand, which the pipeline copies to shared memory.
    is_square = rhs_scale.shape[1] < rhs.shape[0]
    num_scales = 1 if is_square else 2
    # Shared memory holds operands of several steps with their scales, and a tile of the result.
    stage_bytes = 2 * TILE * SCALE_COLUMNS + 4 * num_scales * TILE
    stages = (_SHARED_MEMORY - TILE * TILE * out_dtype.itemsize) // stage_bytes
    layout = plgpu.Layout.WGMMA
    # The interpreter cannot multiply by a transposed reference, so it gets the right operand transposed.
    order = -1 if is_interpreted else 1

    def pipeline(add_step: Any, compute: Any, t: Index, j: Index, tables: Any) -> Any:
        """Returns the pipeline that computes the tile ``(t, j)``.

        A thread block has three warpgroups. From left to right, for a tile of three steps::

            2, one warp   copies 0   copies 1   copies 2      to shared memory, up to ``stages`` ahead
            0 and 1                  adds 0     adds 1     adds 2     writes    each half of the tile

        Warpgroups 0 and 1 call ``compute(run)``. ``run(zeros)`` adds by ``add_step``, and returns the sum.
        """

        def spec(shape: tuple[int, int], at: Callable[[Step], Any], **options: Any) -> Any:
            return plgpu.BlockSpec(shape, lambda s: at(step(t, s, *tables)), **options)

        codes = partial(spec, (TILE, SCALE_COLUMNS), transforms=in_units(1))
        specs = [
            codes(lambda place: (place.lhs, place.depth)),
            codes(lambda place: (place.rhs + j, place.depth)[::order]),
            spec((1, TILE), lambda place: (place.depth, place.scale)),
            spec((1, TILE), lambda place: (place.depth, place.rhs + j)),
        ]
        return plgpu.emit_pipeline_warp_specialized(
            add_step,
            grid=(num_steps(t, *tables),),
            memory_registers=40,
            in_specs=specs[: 2 + num_scales],
            wg_axis="warpgroup",
            num_compute_wgs=2,
            max_concurrent_steps=stages,
            compute_context=compute,
        )

    def add_step(mine: Any, scale_at: Any, index: Any, lhs: Ref, rhs: Ref, scales: Ref, *more: Any) -> Any:
        """Returns the sum of the rows ``mine`` after a step: the sum before, and scaled products."""
        *column_scales, total = more  # the scales of columns only if they are an operand

        def multiply(sums: Ref) -> jax.Array:
            plgpu.wgmma(sums, lhs.at[mine], rhs if is_interpreted else rhs.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return sums[...]

        # A load before the product is hidden behind it. The scales of all columns are loaded after it,
        # because before it there are no registers left for them.
        of_rows = load(scales, (0, mine), layout.reduce(1), interpret)
        if is_square:
            scale = repeated(of_rows * scale_at(index[0]), 1)
        sums = pl.run_scoped(multiply, plgpu.ACC((HALF, TILE), jnp.float32))
        if not is_square:
            scale = repeated(of_rows, 1)
            scale *= repeated(load(column_scales[0], (0,), layout.reduce(0), interpret), 0)
        new = total + sums * scale
        return jnp.where(repeated(of_rows, 1) != 0, new, total) if skips_rows else new

    def kernel(lhs: Ref, rhs: Ref, lhs_scale: Ref, rhs_scale: Ref, *refs: Ref, result: Ref) -> None:
        *tables, out = refs
        fetched = [lhs, rhs, lhs_scale, rhs_scale][: 2 + num_scales]

        # A pipeline that never runs gives the shared memory and the barriers that all tiles then use.
        first, nothing = jnp.int32(0), lambda *_: None
        allocations = pipeline(nothing, nothing, first, first, tables).get_allocations(*fetched)

        @partial(pl.run_scoped, allocations=allocations, collective_axes="warpgroup")
        def _(allocations: Any) -> None:
            warpgroup = lax.axis_index("warpgroup")
            mine = pl.ds(warpgroup * HALF, HALF)

            @plgpu.nd_loop((m * n,), collective_axes="core")
            def _(loop: Any) -> None:
                # This order lets neighbouring cores share most of what they read.
                t, j = plgpu.planar_snake(loop.index[0], (m, n), 1, STRIP)

                def scale_at(s: Index) -> Any:  # if 128 rows of the right operand share a scale
                    place = step(t, s, *tables)
                    return rhs_scale[place.depth, place.rhs + j]

                def compute(run: Any) -> None:
                    zeros = jnp.zeros((HALF, TILE), jnp.float32)
                    total = run(zeros if is_interpreted else plgpu.layout_cast(zeros, layout))
                    # The copy of the last tile runs while this tile is computed, and must end here.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    result[warpgroup] = total.astype(out_dtype)
                    plgpu.commit_smem()
                    rows = pl.ds(t * TILE + warpgroup * HALF, HALF)
                    plgpu.copy_smem_to_gmem(result.at[warpgroup], out.at[rows, pl.ds(j * TILE, TILE)])

                add = partial(add_step, mine, scale_at)
                pipeline(add, compute, t, j, tables)(*fetched, allocations=allocations)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(shape, out_dtype),
        grid=(min(num_cores(), m * n),),
        grid_names=("core",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=name,
        # The default of JAX 0.10.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        scratch_types={
            "result": plgpu.SMEM((2, HALF, TILE), out_dtype, transforms=in_units(out_dtype.itemsize))
        },
        interpret=interpret,
    )
    operands = vary_alike(lhs, rhs.T if is_interpreted else rhs, lhs_scale, rhs_scale, *tables)
    # Pallas's pipeline divides an int32 by Python integers, which would be int64 under jax_enable_x64.
    with jax.named_scope(name), jax.enable_x64(False):
        out = run(*operands)
    return vary_alike(out, *operands)[0]  # the kernel's result has lost the manual axes of the mesh

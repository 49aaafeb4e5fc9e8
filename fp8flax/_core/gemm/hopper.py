"""Our GPU kernel for Hopper's FP8 units: for float32 scales per 128 columns, and for experts."""

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
from fp8flax._core.gemm.ragged import Visits, is_of_expert, visits_of
from fp8flax._core.names import BLOCK_GEMM_HOPPER, GROUPED_GEMM
from fp8flax._core.qtensor import Dims, QTensor, Quantizer, padded, round_up

Operand: TypeAlias = tuple[jax.Array, jax.Array]
"""The codes of an operand, and their scales, as ``tiled_gemm`` takes them."""

Index: TypeAlias = Any
"""An int, an int32 scalar, or a reference to a table of int32 numbers."""


def supports(gemm: Gemm, lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes, capability: float) -> bool:
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
    ``(columns / 128, batch * rows / rows_per_scale)``: the kernel fetches the scales of the rows of a tile.
    Scales of larger blocks, or of whole slices, are repeated.
    """
    height = x.block[dims.free[-1]] if x.block and dims.free else 1
    codes = as_matrices(x.codes, dims)
    scale = as_matrices(x.scale.astype(jnp.float32).reshape(x.scale.shape or (1,) * x.ndim), dims)
    batch, rows, columns = codes.shape
    filled = round_up(rows, TILE), round_up(columns, SCALE_COLUMNS)
    num_scales = filled[0] // rows_per_scale, filled[1] // SCALE_COLUMNS
    if scale.shape[1] > 1:
        scale = jnp.repeat(scale, height // rows_per_scale, axis=1)
        scale = padded(scale, (scale.shape[0], num_scales[0], scale.shape[2]))
    scale = jnp.moveaxis(jnp.broadcast_to(scale, (batch, *num_scales)), 2, 0)
    return padded(codes, (batch, *filled)).reshape(-1, filled[1]), scale.reshape(num_scales[1], -1)


# The products of all experts of a ragged dot at once.


def supports_experts(
    gemm: Gemm, lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes, capability: float
) -> bool:
    """Returns whether the GPU kernel multiplies codes of two quantizers."""
    has_scales = all(x.block is None or x.scale_columns == SCALE_COLUMNS for x in (lhs, rhs))
    has_dtypes = multiplies(lhs, rhs, capability) and gemm.out_dtype.itemsize <= 4
    return has_scales and has_dtypes and are_positive(sizes)


def compute_experts(gemm: Gemm, a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies rows by the kernels of their experts, or sums over the rows of each expert."""
    return (grouped_sums if b.ndim == 2 else grouped_products)(gemm, a, b, group_sizes)


def grouped_products(gemm: Gemm, a: QTensor, kernels: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies each row by its expert's kernel, ``(rows, columns)``.

    A tile of the result is a sum over the visits to the tile. In each visit the scales of the rows of other
    experts are zero, and the GPU kernel skips these rows: zero times a NaN of the expert would be NaN.
    """
    left, left_scale = operand(a, gemm.lhs)
    (filled_rows, depth), columns = left.shape, gemm.sizes(a, kernels).n
    filled_columns = round_up(columns, TILE)
    num_steps, num_columns = np.int32(depth // SCALE_COLUMNS), np.int32(filled_columns // TILE)
    visits = visits_of(filled_rows, TILE, group_sizes)
    index = visits.row // np.int32(TILE)
    of_visits = jnp.take(left_scale.reshape(-1, filled_rows // TILE, TILE), index, axis=1, mode="clip")
    of_visits = jnp.where(is_of_expert(TILE, visits.low, visits.high)[None], of_visits, np.float32(0))

    tile = lax.broadcasted_iota(np.int32, (filled_rows // TILE, index.size), 0)
    is_before, is_of_tile = index[None] < tile, index[None] == tile
    is_used = visits.high[None] > 0
    first, number = (jnp.sum(x & is_used, axis=1, dtype=jnp.int32) for x in (is_before, is_of_tile))

    def step(t: Index, s: Index, first: Index, number: Index, experts: Index) -> Step:
        visit = first[t] + lax.div(s, num_steps)
        return Step(t, experts[visit] * num_columns, lax.rem(s, num_steps), visit)

    out = tiled_gemm(
        (left, of_visits.reshape(num_steps, -1)),
        operand(kernels, gemm.rhs),
        first,
        number,
        visits.expert,
        num_steps=lambda t, first, number, experts: number[t] * num_steps,
        step=step,
        shape=(filled_rows, filled_columns),
        out_dtype=gemm.out_dtype,
        name=GROUPED_GEMM,
        skips_rows=True,
    )
    return out[: a.shape[0], :columns]


def grouped_sums(gemm: Gemm, a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
    """Sums the outer products of the rows of each expert, ``(experts, depth, columns)``.

    XLA first puts the tiles of all visits side by side, so that the sum of an expert runs over whole tiles.
    """
    visits = visits_of(round_up(a.shape[0], TILE), TILE, group_sizes)
    left, right = (_side_by_side(*operand(x, dims), visits) for x, dims in ((a, gemm.lhs), (b, gemm.rhs)))
    filled_depth, filled_columns = len(left[0]), len(right[0])
    num_tiles = np.int32(filled_depth // TILE)

    def step(t: Index, s: Index, first: Index, number: Index) -> Step:
        row = lax.rem(t, num_tiles)
        return Step(row, 0, first[lax.div(t, num_tiles)] + s, row)

    out = tiled_gemm(
        left,
        right,
        visits.first,
        visits.number,
        num_steps=lambda t, first, number: number[lax.div(t, num_tiles)],
        step=step,
        shape=(group_sizes.size * filled_depth, filled_columns),
        out_dtype=gemm.out_dtype,
        name=GROUPED_GEMM,
    )
    return out.reshape(-1, filled_depth, filled_columns)[:, : a.shape[1], : b.shape[1]]


def _side_by_side(codes: jax.Array, scale: jax.Array, visits: Visits) -> Operand:
    """Returns codes with the rows of all visits as columns, zeros in rows of others, and their scales."""
    index = visits.row // np.int32(TILE)
    # Codes are copied as 32-bit words: XLA's kernel moves four elements at once, whether bytes or words.
    mask = is_of_expert(TILE, visits.low, visits.high).reshape(-1, TILE // 4, 4)
    mask = jnp.where(mask, np.uint8(255), np.uint8(0))
    # Without the barrier XLA would gather single bytes of the codes that are not transposed.
    codes = lax.optimization_barrier(codes)
    words = lax.bitcast_convert_type(codes.reshape(len(codes), -1, TILE // 4, 4), jnp.uint32)
    words = jnp.take(words, index, axis=1, mode="clip") & lax.bitcast_convert_type(mask, jnp.uint32)[None]
    codes = lax.bitcast_convert_type(words, codes.dtype).reshape(len(codes), -1)
    return codes, jnp.take(scale, index, axis=0, mode="clip")


# The GPU kernel, in Mosaic GPU. Its callers say which rows each tile of the result is computed from.

_HALF = TILE // 2
"""The number of rows of a tile of the result that one warpgroup multiplies.

A thread block has three warpgroups. Two multiply. One warp of the third fetches the operands."""

_STRIP = 8
"""The width, in tiles, of a strip of columns. The cores compute one strip after the other, because the
tiles of a strip share what they read. The width changes the time only. It is a guess, not measured."""

# Bytes of shared memory for operands and results: a thread block has 227 KiB; barriers take some of it.
_SHARED_MEMORY = 226 * 1024


class Step(NamedTuple):
    """Where the operands of one step of a tile lie: the indices of tiles.

    A tile of the result is a sum over steps. In a step, ``TILE`` rows of the left operand are multiplied by
    ``TILE`` rows of the right operand, over ``SCALE_COLUMNS`` columns of both. The places are those for the
    first 128 columns of the result. The tiles to the right in the result use the same rows of the left
    operand, and the following rows of the right operand.
    """

    lhs: Index
    """The rows of the left operand: the index of their first row is ``TILE`` times this."""
    rhs: Index
    """The rows of the right operand."""
    depth: Index
    """The columns of both operands."""
    scale: Index
    """The scales of the rows of the left operand, which may have several scales."""


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
    """Multiplies in tiles and returns the result, of the given shape.

    The FP8 units sum the products of each step. The sum of a step is multiplied by the scales of the step,
    and the sums of the steps are added in float32. The two scales of a step are multiplied first. If their
    product is below 2**-126, the step adds zero. If it overflows float32, the result is not finite.

    Args:
        left: FP8 codes ``(R, D)``, and float32 scales ``(D / 128, P)``. All sizes are multiples of 128.
        right: FP8 codes ``(S, D)``, and float32 scales ``(D / 128, S)``, or ``(D / 128, S / 128)`` if 128
            rows share a scale.
        *tables: int32 arrays, to which ``num_steps`` and ``step`` get references as last arguments.
        num_steps: a function of the index of a row of tiles of the result, which returns the number of
            steps of its tiles. A tile without steps is zero.
        step: a function of the index of a row of tiles of the result, and of the index of a step.
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
    is_square = rhs_scale.shape[1] < rhs.shape[0]
    m, n = shape[0] // TILE, shape[1] // TILE
    # Shared memory holds operands of several steps with their scales, and a tile of the result.
    num_scales = 1 if is_square else 2
    stage_bytes = 2 * TILE * SCALE_COLUMNS + 4 * num_scales * TILE
    stages = (_SHARED_MEMORY - TILE * TILE * out_dtype.itemsize) // stage_bytes
    layout = plgpu.Layout.WGMMA
    # The interpreter cannot multiply by a transposed reference, so it gets the right operand transposed.
    order = -1 if is_interpreted else 1

    def in_units(itemsize: int) -> tuple[Any, ...]:
        """Returns how shared memory stores a tile: in units of 8 rows and 128 bytes."""
        return plgpu.TilingTransform((8, 128 // itemsize)), plgpu.SwizzleTransform(128)

    def loaded(ref: Ref, index: Any, axis: int) -> jax.Array:
        """Loads a vector of scales, in the layout of a tile of the result reduced over ``axis``."""
        if is_interpreted:
            return ref[index]
        # JAX 0.10 requires the index as a separate argument, which JAX 0.11 deprecates.
        args = (ref.at[index],) if jax.__version_info__ >= (0, 11) else (ref, index)
        return plgpu.load(*args, layout=layout.reduce(axis))

    def repeated(scale: jax.Array, axis: int) -> jax.Array:
        """Repeats a vector of scales along ``axis`` of a warpgroup's half of a tile."""
        return lax.broadcast_in_dim(scale, (_HALF, TILE), (1 - axis,))

    def pipeline(body: Any, context: Any, t: Index, j: Index, tables: Any) -> Any:
        """Returns a pipeline over the steps of a tile; calls ``body`` for each."""

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
            body,
            grid=(num_steps(t, *tables),),
            memory_registers=40,
            in_specs=specs[: 2 + num_scales],
            wg_axis="warpgroup",
            num_compute_wgs=2,
            max_concurrent_steps=stages,
            compute_context=context,
        )

    def kernel(lhs: Ref, rhs: Ref, lhs_scale: Ref, rhs_scale: Ref, *refs: Ref, result: Ref) -> None:
        *tables, out = refs
        fetched = [lhs, rhs, lhs_scale, rhs_scale][: 2 + num_scales]

        # A pipeline that never runs gives the allocations that all tiles then share.
        first, nothing = jnp.int32(0), lambda *_: None
        allocations = pipeline(nothing, nothing, first, first, tables).get_allocations(*fetched)

        @partial(pl.run_scoped, allocations=allocations, collective_axes="warpgroup")
        def _(allocations: Any) -> None:
            warpgroup = lax.axis_index("warpgroup")
            mine = pl.ds(warpgroup * _HALF, _HALF)

            @plgpu.nd_loop((m * n,), collective_axes="core")
            def _(loop: Any) -> None:
                # This order lets neighbouring cores share most of what they read.
                t, j = plgpu.planar_snake(loop.index[0], (m, n), 1, _STRIP)

                def add_step(index: Any, lhs_tile: Ref, rhs_tile: Ref, lhs_s: Ref, *rest: Any) -> Any:
                    """Adds the products of one step, times its scales, to the sum."""
                    *rhs_s, total = rest

                    def multiply(sums: Ref) -> jax.Array:
                        columns = rhs_tile if is_interpreted else rhs_tile.transpose((1, 0))
                        plgpu.wgmma(sums, lhs_tile.at[mine], columns)
                        plgpu.wgmma_wait(0)
                        return sums[...]

                    # Loads before the product are hidden behind it; for all columns there are no registers.
                    of_rows = loaded(lhs_s, (0, mine), 1)
                    if is_square:
                        place = step(t, index[0], *tables)
                        scale = repeated(of_rows * rhs_scale[place.depth, place.rhs + j], 1)
                    sums = pl.run_scoped(multiply, plgpu.ACC((_HALF, TILE), jnp.float32))
                    if not is_square:
                        scale = repeated(of_rows, 1) * repeated(loaded(rhs_s[0], (0,), 0), 0)
                    new = total + sums * scale
                    return jnp.where(repeated(of_rows, 1) != 0, new, total) if skips_rows else new

                def compute(run: Any) -> None:
                    """Writes this warpgroup's half of a tile. ``run`` adds each step to a sum."""
                    zeros = jnp.zeros((_HALF, TILE), jnp.float32)
                    total = run(zeros if is_interpreted else plgpu.layout_cast(zeros, layout))
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    result[warpgroup] = total.astype(out_dtype)
                    plgpu.commit_smem()
                    rows = pl.ds(t * TILE + warpgroup * _HALF, _HALF)
                    plgpu.copy_smem_to_gmem(result.at[warpgroup], out.at[rows, pl.ds(j * TILE, TILE)])

                pipeline(add_step, compute, t, j, tables)(*fetched, allocations=allocations)

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
            "result": plgpu.SMEM((2, _HALF, TILE), out_dtype, transforms=in_units(out_dtype.itemsize))
        },
        interpret=interpret,
    )
    operands = vary_alike(lhs, rhs.T if is_interpreted else rhs, lhs_scale, rhs_scale, *tables)
    # Pallas's pipeline divides an int32 by Python integers, which would be int64 under jax_enable_x64.
    with jax.named_scope(name), jax.enable_x64(False):
        out = run(*operands)
    return vary_alike(out, *operands)[0]  # the kernel's result has lost the manual axes of the mesh

"""A GEMM in tiles, with scales per 128 columns: a GPU kernel in Mosaic GPU for Hopper's FP8 units.

Its caller says which rows of the operands each tile of the result is computed from.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm.gemm import SCALE_COLUMNS, TILE
from fp8flax._core.gemm.gpus import num_cores

Index: TypeAlias = Any
"""An int, an int32 scalar, or a reference to a table of int32 numbers."""

Ref: TypeAlias = Any
"""A reference to memory of the GPU, in Pallas."""

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
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
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
        lhs: FP8 codes, ``(R, D)``; both are multiples of 128.
        rhs: FP8 codes, ``(S, D)``; S is a multiple of 128.
        lhs_scale: float32, ``(D / 128, P)``, where P is a multiple of 128.
        rhs_scale: float32, ``(D / 128, S)``, or ``(D / 128, S / 128)`` if 128 rows share a scale.
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
                        right = rhs_tile if is_interpreted else rhs_tile.transpose((1, 0))
                        plgpu.wgmma(sums, lhs_tile.at[mine], right)
                        plgpu.wgmma_wait(0)
                        return sums[...]

                    sums = pl.run_scoped(multiply, plgpu.ACC((_HALF, TILE), jnp.float32))
                    left = loaded(lhs_s, (0, mine), 1)
                    if is_square:
                        place = step(t, index[0], *tables)
                        scale = repeated(left * rhs_scale[place.depth, place.rhs + j], 1)
                    else:
                        scale = repeated(left, 1) * repeated(loaded(rhs_s[0], (0,), 0), 0)
                    new = total + sums * scale
                    return jnp.where(repeated(left, 1) != 0, new, total) if skips_rows else new

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

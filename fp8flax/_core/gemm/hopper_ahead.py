"""Another GPU kernel for scales per 128 columns on Hopper. No GPU has run it: only a switch chooses it.

The kernel of ``hopper`` waits at the end of each tile until all copies have arrived, and each core reads
all operands by itself. Here one warp copies operands ahead, across tiles, two cores side by side share the
rows of the left operand, and a tile has 256 rows.

Shared memory is a ring of slots, each for the operands of one step, a block of 128 contracted columns. One
warp of each core copies (``copy_all``), and the warpgroups 0 and 1 multiply, each half of the rows of a
tile (``multiply_all``). Two barriers per slot keep them apart::

    barrier     who arrives              after                            who waits    before
    full[slot]  the 3 or 4 copies        their bytes came, of both cores  warpgroups   they read the slot
    free[slot]  warpgroups of all cores  the start, and reading the slot  the warp     a copy, and the end

Each completes once per step. There is no deadlock, because each wait is for something earlier: a step waits
for its copies, and they wait until the step that had the slot before was read.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.axes import vary_alike
from fp8flax._core.gemm import hopper
from fp8flax._core.gemm.gemm import SCALE_COLUMNS, TILE, Gemm, GemmSizes, Ref, from_matrices
from fp8flax._core.gemm.gpus import new_kernels, num_cores
from fp8flax._core.gemm.hopper import Index, Operand
from fp8flax._core.gemm.mosaic import HALF, in_units, load, repeated
from fp8flax._core.names import BLOCK_GEMM_HOPPER
from fp8flax._core.qtensor import QTensor, Quantizer, round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What can be tuned. The device script tries several; the defaults are a guess."""

    waves: int = 2
    """A warpgroup multiplies 64 rows of a tile as many times per step: a tile has 128 rows times this."""
    stages: int = 4
    """The number of slots."""
    cluster: int = 2
    """The cores side by side that share the rows of the left operand."""


CONFIG = Config()


def supports(lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes, capability: float) -> bool:
    """Returns whether the GPU kernel multiplies codes of two quantizers, and the switch is on."""
    if not (new_kernels.value and hopper.supports(lhs, rhs, sizes, capability) and sizes.batch == 1):
        return False
    rows, columns = round_up(sizes.m, TILE), round_up(sizes.n, TILE)
    return rows % (TILE * CONFIG.waves) == columns % (TILE * CONFIG.cluster) == 0


def compute(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies by the GPU kernel. In the right operand 128 rows share a scale, or each has its own."""
    right = hopper.operand(b, gemm.rhs, TILE if b.quantizer.block[0] % TILE == 0 else 1)
    dtype = jnp.float32 if gemm.out_dtype == jnp.float64 else gemm.out_dtype
    return from_matrices(gemm, a, b, block_gemm(hopper.operand(a, gemm.lhs), right, dtype)[None])


def block_gemm(
    left: Operand, right: Operand, out_dtype: DTypeLike, config: Config = CONFIG, interpret: Any = None
) -> jax.Array:
    """Returns the product of operands ``(M, K)`` and ``(N, K)``, with scales as ``hopper.operand`` makes.

    Each sum of 128 products is multiplied by its two scales and added in float32, as in ``hopper``. M is a
    multiple of ``128 * waves``, and N of ``128 * cluster``. ``interpret`` are parameters of Pallas's GPU
    interpreter, which knows neither clusters nor single threads.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (lhs, lhs_scale), (rhs, rhs_scale), out_dtype = left, right, jnp.dtype(out_dtype)
    (m, depth), n, stages, waves = lhs.shape, rhs.shape[0], config.stages, config.waves
    rows, steps = TILE * waves, depth // SCALE_COLUMNS  # of a tile of the result
    is_square = rhs_scale.shape[1] < n  # 128 rows of the right operand share a scale
    tiles = m // rows, n // (TILE * config.cluster)  # the latter side by side, in a cluster
    grid = min(num_cores() // config.cluster, math.prod(tiles))
    width = next(w for w in range(min(hopper.STRIP, tiles[1]), 0, -1) if tiles[1] % w == 0)  # of a strip
    piece = 128 // out_dtype.itemsize  # the columns, 128 bytes, that a warpgroup writes at once
    layout = plgpu.Layout.WGMMA
    multicast = {"collective_axes": "cluster"} if config.cluster > 1 else {}

    def for_tiles(core: tuple[Index, Index], body: Callable[[Index, Index, Index], None]) -> None:
        """Calls ``body(tiles before, row of tiles, column of tiles)`` for each tile of a core.

        The core is given by the index of its cluster, and its own in the cluster.
        """
        index, rank = core

        def one(count: Index, _: None) -> None:
            # The order of ``plgpu.planar_snake``, which a single warp cannot compute: in strips of columns,
            # every other one from below.
            strip, rest = (f(index + count * grid, tiles[0] * width) for f in (lax.div, lax.rem))
            t, j = lax.div(rest, width), strip * width + lax.rem(rest, width)
            t += lax.rem(strip, 2) * (tiles[0] - 1 - 2 * t)
            body(count, t, j * config.cluster + rank)

        lax.fori_loop(0, lax.div(math.prod(tiles) - index + grid - 1, grid), one, None)

    def for_steps(count: Index, body: Callable[[Index, Index, Any], Any], carry: Any) -> Any:
        """Calls ``body(step, slot, carry)`` for each step of a tile, after ``count`` tiles."""
        slot = lambda k: lax.rem(count * steps + k, stages)  # noqa: E731
        return lax.fori_loop(0, steps, lambda k, carry: body(k, slot(k), carry), carry)

    def copy_all(
        core: Any,
        lhs: Ref,
        rhs: Ref,
        lhs_scale: Ref,
        rhs_scale: Ref,
        *,
        full: Ref,
        free: Ref,
        **shared: Ref,
    ) -> None:
        """Copies the operands of each step of each tile to a slot, as soon as the slot is free."""

        def copy_tile(count: Index, t: Index, j: Index) -> None:
            down, across = pl.ds(t * rows, rows), pl.ds(j * TILE, TILE)

            def copy_step(k: Index, slot: Index, carry: int) -> int:
                def copy(source: Ref, name: str, **options: Any) -> None:
                    plgpu.copy_gmem_to_smem(source, shared[name].at[slot], full.at[slot], **options)

                plgpu.barrier_wait(free.at[slot])
                deep = pl.ds(k * SCALE_COLUMNS, SCALE_COLUMNS)
                copy(lhs.at[down, deep], "codes", **multicast)
                copy(rhs.at[(deep, across) if interpret else (across, deep)], "columns")
                copy(lhs_scale.at[k, down], "row_scales")
                if not is_square:
                    copy(rhs_scale.at[k, across], "column_scales")
                return carry

            for_steps(count, copy_step, 0)

        for_tiles(core, copy_tile)
        # The warpgroups of another core may still arrive here, so this core must not end before.
        for slot in range(stages):
            plgpu.barrier_wait(free.at[slot])

    def multiply_all(
        core: Any, rhs_scale: Ref, out: Ref, *, result: Ref, full: Ref, free: Ref, **shared: Ref
    ) -> None:
        """Computes and writes the half of each tile that belongs to this warpgroup."""
        warpgroup = lax.axis_index("warpgroup")
        first = warpgroup * HALF * waves  # this warpgroup's rows of a tile
        mine = [pl.ds(first + wave * HALF, HALF) for wave in range(waves)]
        for slot in range(stages):
            plgpu.barrier_arrive(free.at[slot])

        def compute_tile(count: Index, t: Index, j: Index) -> None:
            def add_step(k: Index, slot: Index, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                scale: Any = rhs_scale[k, j] if is_square else None
                plgpu.barrier_wait(full.at[slot])
                of_rows = [
                    load(shared["row_scales"], (slot, at), layout.reduce(1), interpret) for at in mine
                ]
                new = []
                for wave, (place, total) in enumerate(zip(mine, totals)):

                    def multiply(sums: Ref, place: Any = place) -> jax.Array:
                        right = shared["columns"].at[slot]
                        right = right if interpret else plgpu.transpose_ref(right, (1, 0))
                        plgpu.wgmma(sums, shared["codes"].at[slot, place], right)
                        return sums[...]

                    sums = pl.run_scoped(multiply, plgpu.ACC((HALF, TILE), jnp.float32))
                    if is_square:
                        factor = repeated(of_rows[wave] * scale, 1)
                    else:
                        of_columns = load(shared["column_scales"], (slot,), layout.reduce(0), interpret)
                        factor = repeated(of_rows[wave], 1) * repeated(of_columns, 0)
                    if wave == waves - 1:
                        if not (is_square or interpret):
                            # All threads of the warpgroup have read the scales of the columns.
                            plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()
                        plgpu.barrier_arrive(free.at[slot])
                    new.append(total + sums * factor)
                return tuple(new)

            zeros = jnp.zeros((HALF, TILE), jnp.float32)
            zeros = zeros if interpret else plgpu.layout_cast(zeros, layout)
            for place, total in zip(mine, for_steps(count, add_step, (zeros,) * waves)):
                for start in range(0, TILE, piece):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    result[warpgroup] = total[:, start : start + piece].astype(out_dtype)
                    plgpu.commit_smem()
                    to = pl.ds(t * rows + place.start, HALF), pl.ds(j * TILE + start, piece)
                    plgpu.copy_smem_to_gmem(result.at[warpgroup], out.at[to])

        for_tiles(core, compute_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def kernel(*refs: Ref, result: Ref, **shared: Ref) -> None:
        *operands, out = refs
        warpgroup = lax.axis_index("warpgroup")
        core = lax.axis_index("core"), lax.axis_index("cluster") if multicast else 0
        copy = partial(copy_all, core, *operands, **shared)

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            if interpret:  # knows no warps
                copy()
            else:
                plgpu.warp_map(lambda warp: pl.when(warp == 0)(copy))

        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            multiply_all(core, operands[-1], out, result=result, **shared)

    # All 128 threads of a warpgroup arrive at a barrier of one core, and one of them at that of a cluster.
    arrivals: dict[str, Any] = {"num_arrivals": 2, "num_barriers": stages}
    of_cluster = plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(grid,),
        grid_names=("core",),
        cluster=(config.cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=BLOCK_GEMM_HOPPER,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        scratch_types={
            "codes": plgpu.SMEM((stages, rows, SCALE_COLUMNS), lhs.dtype, transforms=in_units(1)),
            "columns": plgpu.SMEM((stages, TILE, SCALE_COLUMNS), rhs.dtype, transforms=in_units(1)),
            "row_scales": plgpu.SMEM((stages, rows), jnp.float32),
            **({} if is_square else {"column_scales": plgpu.SMEM((stages, TILE), jnp.float32)}),
            "result": plgpu.SMEM((2, HALF, piece), out_dtype, transforms=in_units(out_dtype.itemsize)),
            "full": plgpu.Barrier(num_arrivals=3 if is_square else 4, num_barriers=stages),
            "free": plgpu.Barrier(**arrivals) if interpret else of_cluster,
        },
        interpret=interpret,
    )
    # The interpreter cannot multiply by a transposed reference.
    operands = vary_alike(lhs, rhs.T if interpret else rhs, lhs_scale, rhs_scale)
    with jax.named_scope(BLOCK_GEMM_HOPPER), jax.enable_x64(False):
        product = run(*operands)
    return vary_alike(product, *operands)[0]  # the kernel's result has lost the manual axes of the mesh

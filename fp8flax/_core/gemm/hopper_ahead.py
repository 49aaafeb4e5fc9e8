"""Another GPU kernel for scales per 128 columns on Hopper. No GPU has run it: only a switch chooses it.

The kernel of ``hopper`` waits at the end of each tile until all copies have arrived, and each core reads
all operands by itself. Here one warp copies operands ahead, across tiles, two cores side by side share the
rows of the left operand, and a tile has 256 rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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

_PIECE = 64
"""The columns of a result that a warpgroup writes at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What can be tuned. The device script tries several; the defaults are a guess."""

    waves: int = 2
    """A warpgroup multiplies 64 rows of a tile as many times per step: a tile has 128 rows times this."""
    stages: int = 4
    """The steps whose operands shared memory holds."""
    cluster: int = 2
    """The cores side by side that share the rows of the left operand."""
    staggers: bool = True
    """Whether the second warpgroup starts each tile one wave later."""
    one_releases: bool = True
    """Whether one thread of a warpgroup says that operands were read, not all; always in a cluster."""
    strip: int = 8
    """The width, in tiles, of a strip of columns that the cores compute after one another."""


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
    staggers = config.staggers and steps >= stages  # see ``turn`` below
    num_m, num_n = m // rows, n // (TILE * config.cluster)
    grid = min(num_cores() // config.cluster, num_m * num_n)
    strip_width = next(w for w in range(min(config.strip, num_n), 0, -1) if num_n % w == 0)
    layout, is_cluster = plgpu.Layout.WGMMA, config.cluster > 1
    # One thread of a warpgroup arrives at a barrier of a cluster; all 128 arrive at any other barrier. So
    # ``free`` is a barrier of a cluster, also of one core, if one thread alone is to arrive.
    one_releases = config.one_releases or is_cluster
    multicast = {"collective_axes": "cluster"} if is_cluster else {}

    # Shared memory is a ring of ``stages`` slots. A slot holds the operands of one step. One warp of each
    # core copies, and the warpgroups 0 and 1 multiply:
    #
    #   barrier     who arrives              after                              who waits    before
    #   full[slot]  the 3 or 4 copies        their bytes came, of both cores    warpgroups   they read it
    #   free[slot]  warpgroups of all cores  the start, and reading the slot    the warp     a copy, the end
    #   turn        warpgroup 0              multiplying wave 0 of its step 0   warpgroup 1  the same tile
    # ``full`` and ``free`` complete once per step, ``turn`` once per tile. Two facts rule out a deadlock:
    # * Each wait is for something earlier. A step waits for its copies. They wait until the step that had
    #   the slot before was read. A tile of warpgroup 1 waits for step 0 of warpgroup 0.
    # * No barrier completes twice before a wait, because the wait would miss that. The copies are at most
    #   ``stages`` steps ahead of the slower warpgroup. So if a tile has at least ``stages`` steps,
    #   warpgroup 1 has started a tile when warpgroup 0 arrives at ``turn`` in the next one.
    def kernel(*refs: Ref, result: Ref, full: Ref, free: Ref, turn: Ref, **shared: Ref) -> None:
        lhs, rhs, lhs_scale, rhs_scale, out = refs
        codes, columns, row_scales = shared["codes"], shared["columns"], shared["row_scales"]
        warpgroup, core = lax.axis_index("warpgroup"), lax.axis_index("core")
        rank = lax.axis_index("cluster") if is_cluster else 0

        def for_tiles(body: Callable[[Index, Index, Index], None]) -> None:
            """Calls ``body(tiles before, row of tiles, column of tiles)`` for each tile of this core."""

            def one(count: Index, _: None) -> None:
                index = core + count * grid
                strip, rest = lax.div(index, num_m * strip_width), lax.rem(index, num_m * strip_width)
                t, j = lax.div(rest, strip_width), strip * strip_width + lax.rem(rest, strip_width)
                t += lax.rem(strip, 2) * (num_m - 1 - 2 * t)  # every other strip from below
                body(count, t, j * config.cluster + rank)

            lax.fori_loop(0, lax.div(num_m * num_n - core + grid - 1, grid), one, None)

        def for_steps(count: Index, body: Callable[[Index, Index, Any], Any], carry: Any) -> Any:
            """Calls ``body(step, slot, carry)`` for each step of a tile."""
            slot = lambda k: lax.rem(count * steps + k, stages)  # noqa: E731
            return lax.fori_loop(0, steps, lambda k, carry: body(k, slot(k), carry), carry)

        def fetch_all() -> None:
            def fetch_tile(count: Index, t: Index, j: Index) -> None:
                down, across = pl.ds(t * rows, rows), pl.ds(j * TILE, TILE)

                def fetch(k: Index, slot: Index, carry: int) -> int:
                    plgpu.barrier_wait(free.at[slot])
                    deep = pl.ds(k * SCALE_COLUMNS, SCALE_COLUMNS)
                    plgpu.copy_gmem_to_smem(lhs.at[down, deep], codes.at[slot], full.at[slot], **multicast)
                    # The interpreter cannot multiply by a transposed reference.
                    place = (deep, across) if interpret else (across, deep)
                    plgpu.copy_gmem_to_smem(rhs.at[place], columns.at[slot], full.at[slot])
                    plgpu.copy_gmem_to_smem(lhs_scale.at[k, down], row_scales.at[slot], full.at[slot])
                    if not is_square:
                        scales = rhs_scale.at[k, across]
                        plgpu.copy_gmem_to_smem(scales, shared["column_scales"].at[slot], full.at[slot])
                    return carry

                for_steps(count, fetch, 0)

            for_tiles(fetch_tile)
            # The warpgroups of another core may still arrive here, so this core must not end before.
            for slot in range(stages):
                plgpu.barrier_wait(free.at[slot])

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            if interpret:  # knows no warps
                fetch_all()
            else:
                plgpu.warp_map(lambda warp: pl.when(warp == 0)(fetch_all))

        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            first = warpgroup * HALF * waves  # this warpgroup's rows of a tile
            mine = [pl.ds(first + wave * HALF, HALF) for wave in range(waves)]
            for slot in range(stages):
                plgpu.barrier_arrive(free.at[slot])

            def compute_tile(count: Index, t: Index, j: Index) -> None:
                def add_step(k: Index, slot: Index, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                    scale: Any = rhs_scale[k, j] if is_square else None
                    plgpu.barrier_wait(full.at[slot])
                    of_rows = [load(row_scales, (slot, at), layout.reduce(1), interpret) for at in mine]
                    new = []
                    for wave, (place, total) in enumerate(zip(mine, totals)):

                        def multiply(sums: Ref, place: Any = place) -> jax.Array:
                            right = columns.at[slot]
                            right = right if interpret else plgpu.transpose_ref(right, (1, 0))
                            plgpu.wgmma(sums, codes.at[slot, place], right)
                            return sums[...]

                        sums = pl.run_scoped(multiply, plgpu.ACC((HALF, TILE), jnp.float32))
                        if staggers and wave == 0:
                            pl.when((k == 0) & (warpgroup == 0))(lambda: plgpu.barrier_arrive(turn))
                        if is_square:
                            factor = repeated(of_rows[wave] * scale, 1)
                        else:
                            of_columns = load(shared["column_scales"], (slot,), layout.reduce(0), interpret)
                            factor = repeated(of_rows[wave], 1) * repeated(of_columns, 0)
                        if wave == waves - 1:
                            if one_releases and not is_square:
                                # All threads of the warpgroup have read the scales of the columns.
                                plgpu.inline_mgpu()(lambda _: mgpu.warpgroup_barrier())()
                            plgpu.barrier_arrive(free.at[slot])
                        new.append(total + sums * factor)
                    return tuple(new)

                if staggers:
                    pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(turn))
                zeros = jnp.zeros((HALF, TILE), jnp.float32)
                zeros = zeros if interpret else plgpu.layout_cast(zeros, layout)
                for place, total in zip(mine, for_steps(count, add_step, (zeros,) * waves)):
                    for start in range(0, TILE, _PIECE):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        result[warpgroup] = total[:, start : start + _PIECE].astype(out_dtype)
                        plgpu.commit_smem()
                        to = pl.ds(t * rows + place.start, HALF), pl.ds(j * TILE + start, _PIECE)
                        plgpu.copy_smem_to_gmem(result.at[warpgroup], out.at[to])

            for_tiles(compute_tile)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

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
            "result": plgpu.SMEM((2, HALF, _PIECE), out_dtype, transforms=in_units(out_dtype.itemsize)),
            "full": plgpu.Barrier(num_arrivals=3 if is_square else 4, num_barriers=stages),
            "free": of_cluster if one_releases else plgpu.Barrier(**arrivals),
            "turn": plgpu.Barrier(),
        },
        interpret=interpret,
    )
    operands = vary_alike(lhs, rhs.T if interpret else rhs, lhs_scale, rhs_scale)
    with jax.named_scope(BLOCK_GEMM_HOPPER), jax.enable_x64(False):
        product = run(*operands)
    return vary_alike(product, *operands)[0]  # the kernel's result has lost the manual axes of the mesh

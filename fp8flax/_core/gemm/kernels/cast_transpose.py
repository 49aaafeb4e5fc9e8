"""Casts the results of an elementwise function to FP8 and transposes the codes: one GPU kernel.

On Hopper the contracted dimension of an FP8 operand must be contiguous in memory. A tensor that enters two
GEMMs is contracted over another dimension in each, so its codes are needed in both orders. XLA computes the
function, the amax and the cast in one kernel, and transposes the codes in a second one. This kernel does
all of it.

It uses Pallas's Triton backend, which JAX calls deprecated from 0.11 on. Without that backend the reference
runs, with the same values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.varying import shape_varying_as
from fp8flax._core.amax import magnitudes
from fp8flax._core.axes import vary_alike
from fp8flax._core.formats import fp8_max
from fp8flax._core.gemm.request import CAST_TILE, Cast, CastTranspose, cast_grid
from fp8flax._core.names import CAST_TRANSPOSE
from fp8flax._core.quantize import clipped, divided


def cast_by_kernel(
    request: CastTranspose, scales: Sequence[jax.Array], *args: jax.Array, interpret: bool = False
) -> list[Cast]:
    """Returns the FP8 codes of each result of ``request.f(*args)``, also transposed, with amaxes and sums.

    The kernel reads each tile of the arguments once, and writes its codes twice.

    Args:
        request: the function, and the FP8 dtype of each of its results.
        scales: the scale of each result, a float32 scalar.
        *args: the arguments of the function. The first has shape ``(M, N)``; M and N are multiples of 64.
        interpret: whether to run the kernel step by step on any device, for tests.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, columns = args[0].shape
    grid = cast_grid(rows, columns)
    assert grid is not None
    width = columns // grid[1]
    num_tiles = width // CAST_TILE
    num_args, num_results = len(args), len(request.dtypes)
    is_row = [arg.shape[0] != rows for arg in args]
    inputs = vary_alike(*args, *(scale.reshape(1) for scale in scales))

    def kernel(*refs: Any) -> None:
        num_inputs = num_args + num_results
        wide_refs, scale_refs = refs[:num_args], refs[num_args:num_inputs]
        out_refs = refs[num_inputs:]
        of_each = [out_refs[i : i + len(outs)] for i in range(0, len(out_refs), len(outs))]

        def cast_tile(i: jax.Array, amaxes: list[jax.Array]) -> list[jax.Array]:
            here = pl.ds(i * CAST_TILE, CAST_TILE)
            results = request.f(*(ref[:, here].astype(jnp.float32) for ref in wide_refs))
            new = []
            for x, dtype, scale, (codes, transposed, _, *sums), amax in zip(
                results, request.dtypes, scale_refs, of_each, amaxes
            ):
                q = clipped(divided(x, scale[0]), fp8_max(dtype)).astype(dtype)  # as quantize does
                codes[:, here], transposed[here, :] = q, q.T
                new.append(jnp.maximum(amax, jnp.max(magnitudes(x))))
                if sums:
                    sums[0][0, here] = jnp.sum(x, axis=0)
            return new

        amaxes = lax.fori_loop(0, num_tiles, cast_tile, [jnp.float32(0)] * num_results)
        for amax, (_, _, ref, *_) in zip(amaxes, of_each):
            ref[0, 0] = amax

    def block(height: int, width: int, index: Any = lambda i, j: (i, j)) -> Any:
        return pl.BlockSpec((height, width), index)

    # Shape, dtype (None for the FP8 dtype) and block of each output: codes, transposed codes, amaxes, sums.
    outs = [((rows, columns), None, block(CAST_TILE, width))]
    outs += [((columns, rows), None, block(width, CAST_TILE, lambda i, j: (j, i)))]
    outs += [(grid, jnp.float32, block(1, 1))]
    if request.has_sums:
        outs += [((grid[0], columns), jnp.float32, block(1, width))]
    in_specs = [block(1, width, lambda i, j: (0, j)) if row else block(CAST_TILE, width) for row in is_row]
    params = {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=1)}
    results = pl.pallas_call(
        kernel,
        out_shape=[
            shape_varying_as(inputs[0], shape, dtype or of_codes)
            for of_codes in request.dtypes
            for shape, dtype, _ in outs
        ],
        grid=grid,
        in_specs=[*in_specs, *[pl.BlockSpec((1,), lambda i, j: (0,))] * num_results],
        out_specs=[spec for _ in request.dtypes for _, _, spec in outs],
        name=CAST_TRANSPOSE,
        interpret=interpret,
        **params,
    )(*inputs)
    return [
        Cast(codes, transposed, amaxes.reshape(-1), jnp.sum(sums[0], axis=0) if sums else None)
        for codes, transposed, amaxes, *sums in (
            results[i : i + len(outs)] for i in range(0, len(results), len(outs))
        )
    ]

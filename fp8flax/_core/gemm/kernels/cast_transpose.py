"""What an elementwise function makes, cast to FP8 as it is and transposed: one kernel, and its plain twin.

A GEMM of NVIDIA's Hopper reads FP8 along what it sums over, so a tensor that enters two of them is needed
in both orders. XLA computes the function, the amax and the cast in one kernel, and transposes the codes in
another; one of our own writes both.

The kernel is one of Pallas's Triton backend, which JAX calls deprecated from 0.11 on. Where that is gone
the twin runs, with the same values: nothing but speed hangs on the kernel, so another backend can wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._core.amax import amaxes_of_parts, magnitudes
from fp8flax._core.formats import fp8_max
from fp8flax._core.gemm.gpus import NATIVE_FP8, NATIVE_MX, compute_capability, has_triton
from fp8flax._core.jax_rules import shape_varying_as, unless_partitioned, vary_alike
from fp8flax._core.names import CAST_TRANSPOSE
from fp8flax._core.quantize import clipped, divided, quantize


class Cast(NamedTuple):
    """One matrix of ``(M, N)``, cast."""

    codes: jax.Array
    """Of shape ``(M, N)``."""
    transposed: jax.Array
    """The same codes, of shape ``(N, M)``."""
    amaxes: jax.Array
    """Float32 vector, for ``largest_of``: of parts of the matrix, inf where one holds a NaN or an Inf, and
    -inf where it is empty."""
    sums: jax.Array | None
    """Over the rows, of what was cast: ``(N,)``, float32; where they are asked for."""


class Casting(NamedTuple):
    """What is cast, and to what (hashable)."""

    f: Callable[..., Sequence[jax.Array]]
    """Elementwise: takes float32 arrays whose shapes broadcast, returns float32 arrays of that shape."""
    dtypes: tuple[Any, ...]
    """FP8 dtype of each result."""
    has_sums: bool = False
    fits_kernel: bool = True
    """Whether Pallas's Triton backend has all that ``f`` computes with."""


def cast_transposed(casting: Casting, scales: Sequence[jax.Array], *args: jax.Array) -> list[Cast]:
    """Returns ``f(*args)``, cast: by the kernel where a GPU has it, else by what XLA makes of the twin.

    Args:
        casting: what is computed.
        scales: of each result, a float32 scalar.
        *args: wide floats; of shape ``(M, N)``, or ``(1, N)`` for what all rows have.
    """
    twin = partial(_cast_in_jax, casting)

    def on_cuda(scales: Sequence[jax.Array], *args: jax.Array) -> list[Cast]:
        if not (casting.fits_kernel and _has_kernel(args)):
            return twin(scales, *args)
        return unless_partitioned(partial(cast_by_kernel, casting), twin, scales, *args)

    return lax.platform_dependent(list(scales), *args, cuda=on_cuda, default=twin)


def _has_kernel(args: Sequence[jax.Array]) -> bool:
    """Tells whether there is a kernel, and whether it is of use: Blackwell's GEMMs read either order."""
    rows, columns = args[0].shape
    return (
        NATIVE_FP8 <= compute_capability() < NATIVE_MX
        and has_triton()
        and _grid(rows, columns) is not None
        # Triton counts elements in 32 bits, and computes in no more.
        and rows * columns < 2**31
        and all(arg.dtype.itemsize <= 4 for arg in args)
    )


def _cast_in_jax(casting: Casting, scales: Sequence[jax.Array], *args: jax.Array) -> list[Cast]:
    """The twin of ``cast_by_kernel``, for any device."""
    results = []
    grid = _grid(*args[0].shape)
    num_parts = None if grid is None else math.prod(grid)  # as of the kernel
    wide = casting.f(*(arg.astype(jnp.float32) for arg in args))
    for x, dtype, scale in zip(wide, casting.dtypes, scales):
        amaxes, codes = amaxes_of_parts(x, None, quantize(x, dtype, scale), num_parts=num_parts)
        sums = jnp.sum(x, axis=0) if casting.has_sums else None
        results.append(Cast(codes, codes.T, amaxes, sums))
    return results


_TILE = 64
"""Rows and columns that a block of threads has at a time: 64 bytes of codes in a row, either way."""

_TILES = 4
"""How many of them, one beside the other, it takes if the columns allow: fewer maxima are to merge."""


def _grid(rows: Any, columns: Any) -> tuple[int, int] | None:
    """Returns how many blocks of threads go down and across a matrix; None where tiles do not fill it."""
    if not all(isinstance(size, int) and size > 0 and size % _TILE == 0 for size in (rows, columns)):
        return None
    num_tiles = _TILES if columns % (_TILE * _TILES) == 0 else 1
    return rows // _TILE, columns // (num_tiles * _TILE)


def cast_by_kernel(
    casting: Casting, scales: Sequence[jax.Array], *args: jax.Array, interpret: bool = False
) -> list[Cast]:
    """Returns ``f(*args)``, cast: each tile is read once, and written twice.

    Args:
        casting: as of ``cast_transposed``.
        scales: likewise.
        *args: likewise; M and N are multiples of 64, and the first is of shape ``(M, N)``.
        interpret: whether to run the kernel step by step on any device, for tests.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, columns = args[0].shape
    grid = _grid(rows, columns)
    assert grid is not None
    width = columns // grid[1]
    num_tiles = width // _TILE
    num_args, num_results = len(args), len(casting.dtypes)
    is_row = [arg.shape[0] != rows for arg in args]
    args = tuple(vary_alike(*args, *(scale.reshape(1) for scale in scales)))

    def kernel(*refs: Any) -> None:
        wide_refs, scale_refs, out_refs = (refs[:num_args], refs[num_args : len(args)], refs[len(args) :])
        of_each = [out_refs[i : i + len(outs)] for i in range(0, len(out_refs), len(outs))]

        def cast_tile(i: jax.Array, amaxes: list[jax.Array]) -> list[jax.Array]:
            here = pl.ds(i * _TILE, _TILE)
            results = casting.f(*(ref[:, here].astype(jnp.float32) for ref in wide_refs))
            new = []
            for x, dtype, scale, (codes, transposed, _, *sums), amax in zip(
                results, casting.dtypes, scale_refs, of_each, amaxes
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

    # Codes, transposed codes, amax, and sums.
    outs = [((rows, columns), None, block(_TILE, width))]
    outs += [((columns, rows), None, block(width, _TILE, lambda i, j: (j, i)))]
    outs += [(grid, jnp.float32, block(1, 1))]
    if casting.has_sums:
        outs += [((grid[0], columns), jnp.float32, block(1, width))]
    in_specs = [block(1, width, lambda i, j: (0, j)) if row else block(_TILE, width) for row in is_row]
    params = {} if interpret else {"compiler_params": triton.CompilerParams(num_warps=4, num_stages=1)}
    results = pl.pallas_call(
        kernel,
        out_shape=[
            shape_varying_as(args[0], shape, dtype or of_codes)
            for of_codes in casting.dtypes
            for shape, dtype, _ in outs
        ],
        grid=grid,
        in_specs=[*in_specs, *[pl.BlockSpec((1,), lambda i, j: (0,))] * num_results],
        out_specs=[spec for _ in casting.dtypes for _, _, spec in outs],
        name=CAST_TRANSPOSE,
        interpret=interpret,
        **params,
    )(*args)
    return [
        Cast(codes, transposed, amaxes.reshape(-1), jnp.sum(sums[0], axis=0) if sums else None)
        for codes, transposed, amaxes, *sums in (
            results[i : i + len(outs)] for i in range(0, len(results), len(outs))
        )
    ]

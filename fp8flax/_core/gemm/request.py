"""Requests: the static descriptions of what a device is asked to compute. All are hashable."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.quantizers import Quantizer
from fp8flax._core.recipes import GemmRecipe


class Gemm(NamedTuple):
    """One GEMM. The operands are a ``QTensor`` or a wide array each; the result is an array."""

    recipe: GemmRecipe
    dimension_numbers: Any
    lhs: View
    rhs: View
    lhs_dtype: np.dtype
    """The dtype of the left operand before it was quantized."""
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    precision: Any = None
    """The ``precision`` of ``lax.dot_general``, if the GEMM does not run in FP8."""
    out_sharding: Any = None
    """The sharding of the result on a mesh with explicit axes; None if JAX can derive it."""
    dequantized: bool = False
    """Whether every device multiplies in the wide dtypes, for the quantize-dequantize form."""
    name: str = ""
    """``"forward"``, ``"dgrad"`` or ``"wgrad"``; empty for a part of one of them."""
    is_packed: bool = False
    """Whether the codes of the right operand are stored, as in a frozen model, not made at each call."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Returns M, K and N of one product."""
        return (
            math.prod(self.lhs.sizes(self.lhs.free)),
            math.prod(self.lhs.sizes(self.lhs.contract)),
            math.prod(self.rhs.sizes(self.rhs.free)),
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Returns the shape of the result."""
        lhs, rhs = self.lhs, self.rhs
        return (*lhs.sizes(lhs.batch), *lhs.sizes(lhs.free), *rhs.sizes(rhs.free))

    def of_transposed(self, *, lhs: bool = False, rhs: bool = False) -> Gemm:
        """Returns the GEMM of the same two matrices, given that one or both come transposed."""
        views = [self.lhs, self.rhs]
        for i, is_transposed in enumerate((lhs, rhs)):
            if is_transposed:
                assert len(views[i].shape) == 2
                views[i] = View(views[i].shape[::-1], tuple(1 - axis for axis in views[i].contract), ())
        dims = tuple(view.contract for view in views), tuple(view.batch for view in views)
        return self._replace(lhs=views[0], rhs=views[1], dimension_numbers=dims)

    def of_columns(self) -> tuple[Gemm, tuple[bool, bool]] | None:
        """Returns the GEMM of two matrices whose columns are contracted, and which operands to transpose.

        Returns None if an operand cannot be such a matrix by a reshape and a transpose: its contracted
        dimensions must come before or behind all others, and there must be no batch.
        """
        (contracts, batches), views = self.dimension_numbers, (self.lhs, self.rhs)
        rows, depth, columns = self.sizes
        before = [contract == tuple(range(len(contract))) for contract in contracts]
        behind = [
            contract == tuple(range(len(view.shape)))[-len(contract) :]
            for contract, view in zip(contracts, views)
        ]
        if any(batches) or not all(map(operator.or_, before, behind)):
            return None
        lhs, rhs = (View((size, depth), (1,), ()) for size in (rows, columns))
        gemm = self._replace(lhs=lhs, rhs=rhs, dimension_numbers=(((1,), (1,)), ((), ())))
        return gemm, (not behind[0], not behind[1])


class ExpertProducts(NamedTuple):
    """Each row of the input times the kernel of the expert that the row belongs to.

    The operands are rows ``(rows, depth)``, kernels ``(experts, columns, depth)``, and the number of rows
    of each expert ``(experts,)``.
    """

    shape: tuple[int, int]
    """Rows and columns of the result. A row that belongs to no expert is zeros."""
    dtype: np.dtype
    """Of the result."""
    dequantized: bool = False
    """As of ``Gemm``."""


class ExpertSums(NamedTuple):
    """For each expert the sum of the outer products of its rows.

    The operands are ``(rows, depth)``, ``(rows, columns)``, and the number of rows of each expert
    ``(experts,)``.
    """

    shape: tuple[int, int, int]
    """Experts, depth and columns of the result."""
    dtype: np.dtype
    """Of the result."""
    dequantized: bool = False
    """As of ``Gemm``."""


class CastPair(NamedTuple):
    """A tensor, quantized for each of the two GEMMs that it enters.

    The operands are the tensor, of shape ``view.shape``, and its scale, which is None without delayed
    scaling. The result is the operand of the first GEMM, and that of the second one.
    """

    first: Quantizer | None
    """For the first GEMM; None leaves the tensor wide."""
    view: View
    """As the first GEMM sees the tensor."""
    second: Quantizer | None
    """For the second GEMM."""
    other_view: View
    """As the second GEMM sees the tensor."""
    inf_is_nan: bool = False
    """Whether an Inf becomes a NaN. Otherwise it saturates."""
    stack: int = 1
    """How many such tensors ``jax.vmap`` stacks, such as the kernels of experts."""


class CastTranspose(NamedTuple):
    """Matrices that an elementwise function makes, cast to FP8 in both orders, with their amaxes.

    The operands are a list with the scale of each result, a float32 scalar, and the arguments of the
    function: wide floats of shape ``(M, N)``, or ``(1, N)`` for what all rows have. The result is a list of
    ``Cast``.
    """

    f: Callable[..., Sequence[jax.Array]]
    """Elementwise: takes float32 arrays whose shapes broadcast, returns float32 arrays of that shape."""
    dtypes: tuple[Any, ...]
    """FP8 dtype of each result."""
    has_sums: bool = False
    """Whether to return sums over the rows."""
    fits_kernel: bool = True
    """Whether Pallas's Triton backend has all that ``f`` computes with."""


class Cast(NamedTuple):
    """One matrix of shape ``(M, N)``, cast."""

    codes: jax.Array
    """Of shape ``(M, N)``."""
    transposed: jax.Array
    """The same codes, of shape ``(N, M)``."""
    amaxes: jax.Array
    """Float32 vector, for ``largest_of``: the amaxes of parts of the matrix. An amax is inf if its part
    holds a NaN or an Inf, and -inf if the part is empty."""
    sums: jax.Array | None
    """Sums over the rows before the cast, ``(N,)``, float32; None if they were not asked for."""


CAST_TILE = 64
"""Rows and columns that a block of threads casts at a time: 64 bytes of codes in a row, either way."""

_TILES = 4
"""How many tiles, one beside the other, it takes if the columns allow: fewer maxima are to merge."""


def cast_grid(rows: Any, columns: Any) -> tuple[int, int] | None:
    """Returns how many parts of a matrix, down and across, have an amax; None if tiles do not fill it."""
    if not all(isinstance(size, int) and size > 0 and size % CAST_TILE == 0 for size in (rows, columns)):
        return None
    num_tiles = _TILES if columns % (CAST_TILE * _TILES) == 0 else 1
    return rows // CAST_TILE, columns // (num_tiles * CAST_TILE)


def is_of_codes(gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether a GEMM multiplies FP8 codes: both operands are quantized, with one kind of scales."""
    return (
        not gemm.dequantized
        and isinstance(lhs, QTensor)
        and isinstance(rhs, QTensor)
        and lhs.quantizer.scales_along_contraction == rhs.quantizer.scales_along_contraction
    )

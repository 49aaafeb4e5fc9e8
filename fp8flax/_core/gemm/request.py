"""Requests: hashable descriptions of a GEMM or a cast. ``lowering`` chooses how a device computes it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.quantizers import Quantizer

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""The dimension numbers of ``lax.dot_general``: contracted axes, and batch axes, of both operands."""


class Gemm(NamedTuple):
    """One GEMM. Each operand is a ``QTensor`` or a wide array; the result is an array."""

    dimension_numbers: Any
    lhs: View
    rhs: View
    lhs_dtype: np.dtype
    """The dtype of the left operand before it was quantized."""
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    accumulation: str = "exact"
    """``GemmRecipe.accumulation``, for operands with scales per tensor or slice."""
    precision: Any = None
    """The ``precision`` of ``lax.dot_general``, if the GEMM does not run in FP8."""
    out_sharding: Any = None
    """The sharding of the result on a mesh with explicit axes; None if JAX can derive it."""
    dequantized: bool = False
    """Whether the operands are dequantized and multiplied in their wide dtypes on every device, as the
    quantize-dequantize form requires."""
    name: str = ""
    """``"forward"``, ``"dgrad"`` or ``"wgrad"``; empty for a part of one of them."""
    is_packed: bool = False
    """Whether the codes of the right operand are stored, as in a frozen model. Otherwise each call
    quantizes the right operand."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Returns M, K and N of one matrix product of the batch."""
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

    def of_parts(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Gemm:
        """Returns the GEMM of parts of the operands, with the given shapes."""
        views = self.lhs._replace(shape=lhs), self.rhs._replace(shape=rhs)
        return self._replace(lhs=views[0], rhs=views[1], out_sharding=None)

    def of_matrices(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> Gemm:
        """Returns the GEMM of two stacks of matrices, ``(batch, M, K)`` times ``(batch, N, K)``."""
        dims = ((2,), (2,)), ((0,), (0,))
        views = View(lhs, (2,), (0,)), View(rhs, (2,), (0,))
        return self._replace(lhs=views[0], rhs=views[1], dimension_numbers=dims, out_sharding=None)

    def unpadded(self, out: jax.Array) -> jax.Array:
        """Turns a product ``(batch, rows, columns)`` of padded matrices into the result of the GEMM.

        Returns the product without its padding, in the shape and dtype of the result.
        """
        _, rows, _ = self.lhs.matrix_shape
        _, columns, _ = self.rhs.matrix_shape
        return out[:, :rows, :columns].reshape(self.out_shape).astype(self.out_dtype)

    def of_transposed(self, *, lhs: bool = False, rhs: bool = False) -> Gemm:
        """Returns the GEMM with the same result, for callers that pass one or both operands transposed.

        Args:
            lhs: whether the left operand, a matrix, is passed transposed.
            rhs: whether the right operand, a matrix, is passed transposed.
        """
        views = [self.lhs, self.rhs]
        for i, is_transposed in enumerate((lhs, rhs)):
            if is_transposed:
                assert len(views[i].shape) == 2
                views[i] = View(views[i].shape[::-1], tuple(1 - axis for axis in views[i].contract), ())
        dims = tuple(view.contract for view in views), tuple(view.batch for view in views)
        return self._replace(lhs=views[0], rhs=views[1], dimension_numbers=dims)

    def of_columns(self) -> OfColumns | None:
        """Returns the same GEMM as ``(M, K)`` times ``(N, K)``, and which operands to transpose for that.

        Returns None if there are batch dimensions, or if the contracted dimensions of an operand are
        neither its first nor its last ones.
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
        return OfColumns(gemm, not behind[0], not behind[1])


class OfColumns(NamedTuple):
    """A GEMM of two matrices ``(M, K)`` and ``(N, K)``, and how to get them from the operands.

    Each operand is reshaped to a matrix. The matrix is then transposed if K is not its last dimension.
    """

    gemm: Gemm
    transposes_lhs: bool
    transposes_rhs: bool


class ExpertProducts(NamedTuple):
    """Each row of the input, multiplied by the kernel of the expert that the row belongs to.

    The operands are rows ``(rows, depth)``, kernels ``(experts, columns, depth)``, and the number of rows
    of each expert ``(experts,)``.
    """

    shape: tuple[int, int]
    """Rows and columns of the result. The result is zero in rows that belong to no expert."""
    dtype: np.dtype
    """The dtype of the result."""
    in_tiles: Callable[..., jax.Array]
    """Multiplies in plain JAX, one tile of rows after the other. It is called with the operands, and with
    ``is_part=True`` if these are the parts of one device of a mesh."""
    dequantized: bool = False
    """Whether every device multiplies in the wide dtypes; see ``Gemm.dequantized``."""
    is_transposed: bool = False
    """Whether the kernels come as ``(experts, depth, columns)``, and each device transposes its own. Codes
    with scales per block are transposed already."""


class ExpertSums(NamedTuple):
    """For each expert, the sum of the outer products of its rows of both operands.

    The operands are ``(rows, depth)``, ``(rows, columns)``, and the number of rows of each expert
    ``(experts,)``.
    """

    shape: tuple[int, int, int]
    """Experts, depth and columns of the result."""
    dtype: np.dtype
    """The dtype of the result."""
    in_tiles: Callable[..., jax.Array]
    """Multiplies in plain JAX, see ``ExpertProducts.in_tiles``."""
    dequantized: bool = False
    """Whether every device multiplies in the wide dtypes; see ``Gemm.dequantized``."""


class CastPair(NamedTuple):
    """A tensor, quantized for each of the two GEMMs that it enters.

    The operands are the tensor, of shape ``view.shape``, and its scale, which is None without delayed
    scaling. The result is a pair: the tensor as operand of the first GEMM and of the second GEMM.
    """

    first: Quantizer | None
    """The quantizer for the first GEMM; None leaves the tensor wide."""
    view: View
    """The view of the tensor in the first GEMM."""
    second: Quantizer | None
    """The quantizer for the second GEMM; None leaves the tensor wide."""
    other_view: View
    """The view of the tensor in the second GEMM."""
    inf_is_nan: bool = False
    """Whether an Inf becomes a NaN. Otherwise it saturates."""
    stack: int = 1
    """Number of tensors that ``jax.vmap`` stacks, such as the kernels of experts."""
    has_barrier: bool = False
    """Whether the codes are returned behind a barrier, so that XLA does not cast the tensor again for a
    GEMM that takes it transposed."""


class CastTranspose(NamedTuple):
    """The results of an elementwise function, cast to FP8 and also transposed, with their amaxes.

    The operands are a list with one float32 scalar scale per result, and the arguments of the function. An
    argument is a wide float of shape ``(M, N)``, or ``(1, N)`` if it is the same for all rows. The result
    is a list with one ``Cast`` per result of the function.
    """

    f: Callable[..., Sequence[jax.Array]]
    """The elementwise function. It takes float32 arrays whose shapes broadcast, and returns a sequence of
    float32 arrays of the broadcast shape."""
    dtypes: tuple[Any, ...]
    """FP8 dtype of each result."""
    has_sums: bool = False
    """Whether to also return the sum of each result over its rows."""
    fits_kernel: bool = True
    """Whether Pallas's Triton backend supports all operations of ``f``."""


class Cast(NamedTuple):
    """The FP8 codes of one matrix of shape ``(M, N)``, its amaxes and its sums."""

    codes: jax.Array
    """FP8 codes of shape ``(M, N)``."""
    transposed: jax.Array
    """The same codes, of shape ``(N, M)``."""
    amaxes: jax.Array
    """Float32 vector, for ``largest_of``: the amaxes of parts of the matrix. An amax is inf if its part
    holds a NaN or an Inf, and -inf if the part is empty."""
    sums: jax.Array | None
    """Sums over the rows before the cast, ``(N,)``, float32; None without ``CastTranspose.has_sums``."""


CAST_TILE = 64
"""Rows and columns of the tile that a thread block casts at a time. A row of a tile is 64 bytes of codes,
before and after the transpose."""

_TILES = 4
"""Number of adjacent tiles that one thread block casts, if they divide the columns; otherwise it casts one.
Each thread block returns one amax, so more tiles mean fewer amaxes to merge."""


def cast_grid(rows: Any, columns: Any) -> tuple[int, int] | None:
    """Returns the grid of thread blocks, ``(down, across)``, that cast a matrix of this size.

    Each thread block returns the amax of its part of the matrix. Returns None if a size is not a positive
    multiple of ``CAST_TILE``, or not known.
    """
    if not all(isinstance(size, int) and size > 0 and size % CAST_TILE == 0 for size in (rows, columns)):
        return None
    num_tiles = _TILES if columns % (CAST_TILE * _TILES) == 0 else 1
    return rows // CAST_TILE, columns // (num_tiles * CAST_TILE)


def is_of_codes(gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether a GEMM can multiply FP8 codes.

    Both operands must be quantized, and their scales must either both change along the contraction or both
    not change. The GEMM must not be one of the quantize-dequantize form (``gemm.dequantized``).
    """
    return (
        not gemm.dequantized
        and isinstance(lhs, QTensor)
        and isinstance(rhs, QTensor)
        and lhs.quantizer.scales_along_contraction == rhs.quantizer.scales_along_contraction
    )

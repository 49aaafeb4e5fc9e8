"""Requests: the static descriptions of what a device is asked to compute. All are hashable."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import numpy as np

from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.recipes import GemmRecipe


class Gemm(NamedTuple):
    """What a GEMM must know statically (hashable)."""

    recipe: GemmRecipe
    dimension_numbers: Any
    lhs: View
    rhs: View
    lhs_dtype: np.dtype
    """Of the wide operand that was quantized."""
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    precision: Any = None
    """For a GEMM that does not run in FP8."""
    out_sharding: Any = None
    """Of the result, on a mesh with explicit axes, where JAX may not be able to tell."""
    dequantized: bool = False
    """Whether to multiply in the operands' wide dtypes on every device, as a reference."""
    name: str = ""
    """Which of a contraction's three it is: ``"forward"``, ``"dgrad"`` or ``"wgrad"``; empty for a part of
    one."""
    is_packed: bool = False
    """Whether the codes of the right operand lie in memory, and are not made for this GEMM."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, K and N of one product."""
        return (
            math.prod(self.lhs.sizes(self.lhs.free)),
            math.prod(self.lhs.sizes(self.lhs.contract)),
            math.prod(self.rhs.sizes(self.rhs.free)),
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the result."""
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
        """Returns it as the GEMM of matrices that it sums along, and which of the two are then transposed.

        Dimensions must lie together in memory, those that are summed over before or behind all others;
        None if they do not.
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


def is_of_codes(gemm: Gemm, lhs: Any, rhs: Any) -> bool:
    """Returns whether a GEMM multiplies FP8 codes: both operands are quantized, with one kind of scales."""
    return (
        not gemm.dequantized
        and isinstance(lhs, QTensor)
        and isinstance(rhs, QTensor)
        and lhs.quantizer.scales_along_contraction == rhs.quantizer.scales_along_contraction
    )

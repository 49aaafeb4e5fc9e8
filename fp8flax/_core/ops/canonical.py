"""Writes any contraction of two tensors as ``(*B, *M, K) · (*B, K, *N)``, by transposes and reshapes.

B are the batch dimensions, M the free dimensions of the input, N those of the kernel; there is one
contracted dimension K. A Dense layer is canonical already. M and N stay as they are, because devices may
split each of them. Then there are exactly three products, and none of their results needs a transpose::

    forward   x (*B, *M, K) · kernel (*B, K, *N)  over K   ->  (*B, *M, *N)
    dgrad     g (*B, *M, *N) · kernel (*B, K, *N)  over *N  ->  (*B, *M, K)
    wgrad     x (*B, *M, K) · g (*B, *M, *N)  over *M       ->  (*B, K, *N)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from fp8flax._core.qtensor import Dims

Shape = tuple[int, ...]

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""The dimension numbers of ``lax.dot_general``: contracted axes, and batch axes, of both operands."""


class Layout(NamedTuple):
    """How one tensor is made canonical: by a transpose and a reshape (hashable)."""

    shape: Shape
    """The shape of the tensor itself."""
    order: tuple[int, ...]
    """The permutation of its dimensions."""
    canonical: Shape
    """The shape after the permutation and the reshape."""
    dims: tuple[Dims, ...] = ()
    """What the first and the second product of the tensor contract."""

    @classmethod
    def of(cls, shape: Shape, dims: tuple[Dims, ...]) -> Layout:
        """Returns the layout of a tensor that is canonical."""
        return cls(shape, tuple(range(len(shape))), shape, dims)

    def to(self, x: jax.Array) -> jax.Array:
        """Returns a tensor after the permutation and the reshape."""
        return lax.reshape(lax.transpose(x, self.order), self.canonical)

    def back(self, x: jax.Array) -> jax.Array:
        """Returns the tensor itself, from what ``to`` returns."""
        permuted = lax.reshape(x, [self.shape[i] for i in self.order])
        return lax.transpose(permuted, np.argsort(self.order).tolist())


def canonical(
    lhs: Shape, rhs: Shape, dimension_numbers: DimensionNumbers, blocks: Sequence[int]
) -> dict[str, Layout]:
    """Returns the layout of each tensor of ``lax.dot_general``, by its role, for operands of these shapes.

    ``blocks`` are the sizes of blocks that share a scale. M or N is merged to one dimension if its last
    dimension is not a multiple of all of them.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_free, rhs_free = (
        tuple(i for i in range(len(shape)) if i not in (*contract, *batch))
        for shape, contract, batch in ((lhs, lhs_contract, lhs_batch), (rhs, rhs_contract, rhs_batch))
    )
    batch, m, n = (
        tuple(shape[i] for i in places)
        for shape, places in ((lhs, lhs_batch), (lhs, lhs_free), (rhs, rhs_free))
    )
    rows, columns = _whole_blocks(m, blocks), _whole_blocks(n, blocks)
    k, out = math.prod(lhs[i] for i in lhs_contract), (*batch, *m, *n)
    b, r, c = len(batch), len(rows), len(columns)

    def layout(shape: Shape, order: Shape, canonical: Shape, *contracted: range) -> Layout:
        dims = [Dims(len(canonical), tuple(places), b) for places in contracted]
        return Layout(shape, order, canonical, tuple(dims))

    # The last two arguments are what the first and the second product contract.
    of_x = (*lhs_batch, *lhs_free, *lhs_contract), (*batch, *rows, k)
    of_w = (*rhs_batch, *rhs_contract, *rhs_free), (*batch, k, *columns)
    of_g = tuple(range(len(out))), (*batch, *rows, *columns)
    return {
        "input": layout(lhs, *of_x, range(b + r, b + r + 1), range(b, b + r)),
        "kernel": layout(rhs, *of_w, range(b, b + 1), range(b + 1, b + 1 + c)),
        "output_grad": layout(out, *of_g, range(b + r, b + r + c), range(b, b + r)),
    }


def _whole_blocks(sizes: Shape, blocks: Sequence[int]) -> Shape:
    """Returns sizes as they are, or merged, so that a block never reaches over several dimensions."""
    if len(sizes) < 2 or all(isinstance(sizes[-1], int) and sizes[-1] % block == 0 for block in blocks):
        return sizes
    return (math.prod(sizes),)

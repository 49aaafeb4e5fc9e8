"""The table of ops: a row holds all that the rest of the package needs to know about an op.

The Linen ops, the NNX ops, conversion, reports and freezing read the rows, which ``ops.ops`` defines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from fp8flax._core.ops.calls import Called

if TYPE_CHECKING:
    from fp8flax._core.ops.contract import Contraction

Shape = tuple[int, ...]


class GemmSizes(NamedTuple):
    """A contraction as ``batch`` matmuls of (M, K) by (K, N)."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass."""
        return 2 * self.batch * self.m * self.k * self.n


class Swapped(NamedTuple):
    """An op whose kernel is its left operand, computed with the operands in the other order."""

    arguments: tuple[Any, ...]
    """The arguments of the op for the operands in the other order."""
    restore: Callable[[jax.Array], jax.Array]
    """Returns the result of the op, given the result for the operands in the other order."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpRow:
    """A row of the table of ops.

    An op has two operands, ``lhs`` (the input) and ``rhs`` (the kernel), and further arguments. Functions
    of a row that take ``*arguments`` take these further arguments, in the order of ``plain``.

    Attributes:
        name: name of the class of the op, in Linen and in NNX.
        plain: ``plain(lhs, rhs, *arguments)`` computes the op without FP8.
        in_fp8: ``in_fp8(lhs, rhs, *arguments, states=, recipe=, is_frozen=)`` computes the op in FP8. It
            also takes ``form=`` if the row ``has_form``. If the row has a ``plan``, it takes
            ``stored_kernel=`` and ``input_scale=``, see ``modes.run``.
        sizes: ``sizes(lhs_shape, rhs_shape, *arguments)`` returns the ``GemmSizes`` of the op.
        call: the signature of the op.
        plan: ``plan(lhs, rhs, *arguments, recipe=)`` returns the plan of the op. The recipe is in parts, a
            ``CustomRecipe``. A frozen model then stores the FP8 codes of the kernel, and multiplies by
            them. If None, a frozen model stores codes of kernels with delayed scaling only, and dequantizes
            them.
        has_form: whether the op has the option ``form``, see ``Fp8DotGeneralOp``.
        primitive: name of the JAX primitive that a converted Linen model computes by this op; None if a
            model is not converted to it.
        arguments: ``arguments(params)`` returns the arguments of the op from the parameters of the
            primitive.
        unsupported: ``unsupported(params)`` returns why the op cannot compute this primitive, or None.
        swapped: ``swapped(lhs, rhs, *arguments)`` returns the op with its operands in the other order; None
            if the left operand cannot be a kernel.
        linen_field: the field of Linen layers that takes the class of the op, or None.
        nnx_field: the field of NNX layers that takes an instance of the op, or None.
        stacked: roles whose state has a leading dimension, the first dimension of the kernel.
        is_matmul: ``is_matmul(lhs, rhs, *arguments)`` returns whether GEMMs compute the op.
    """

    name: str
    plain: Callable[..., jax.Array]
    in_fp8: Callable[..., jax.Array]
    sizes: Callable[..., GemmSizes]
    call: type[Called]
    plan: Callable[..., Contraction] | None = None
    has_form: bool = False
    primitive: str | None = None
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]] = lambda params: ()
    unsupported: Callable[[Mapping[str, Any]], str | None] = lambda params: None
    swapped: Callable[..., Swapped] | None = None
    linen_field: str | None = None
    nnx_field: str | None = None
    stacked: tuple[str, ...] = ()
    is_matmul: Callable[..., bool] = lambda lhs, rhs, *arguments: True

    def __reduce__(self) -> Any:
        return _row_named, (self.name,)  # copies and pickles are the row itself

    def leading(self, kernel: Shape) -> dict[str, Shape]:
        """Returns the leading dimensions of the state, by role, for a kernel of this shape."""
        return dict.fromkeys(self.stacked, kernel[:1])


_rows: dict[str, OpRow] = {}


def add_rows(*added: OpRow) -> None:
    """Adds rows to the table."""
    _rows.update({row.name: row for row in added})


def _row_named(name: str) -> OpRow:
    return _rows[name]


def row_of(primitive: Any) -> OpRow | None:
    """Returns the row for a JAX primitive, or None."""
    return next((row for row in _rows.values() if row.primitive == primitive.name), None)

"""The FP8 matmul: a plan of three GEMMs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.flax_names import qdq_plan
from fp8flax._core.gemm.dispatch import multiply
from fp8flax._core.gemm.gemm import GemmSizes
from fp8flax._core.ops.canonical import DimensionNumbers, Layout, Shape, canonical
from fp8flax._core.ops.contract import traced
from fp8flax._core.ops.op import Op, Plans
from fp8flax._core.ops.stored import StoredContraction
from fp8flax._core.qtensor import STATIC
from fp8flax._core.recipes import Recipe
from fp8flax._core.shapes import Float
from fp8flax._core.types import OutSharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DotContraction(StoredContraction):
    """The three products of ``lax.dot_general``."""

    dimension_numbers: DimensionNumbers = dataclasses.field(metadata=STATIC)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        blocks = {n for q in self.recipe.quantizers if q and q.block for n in q.block}
        return canonical(self.lhs.shape, self.rhs.shape, self.dimension_numbers, sorted(blocks))

    def product(self, name: str, is_stored: bool = False) -> Callable[..., jax.Array]:
        gemm, order = self.gemm(name), self.layouts["kernel"].order
        is_in_order = order == tuple(range(len(order)))
        return partial(multiply, gemm._replace(is_stored=is_stored and is_in_order))

    def wide(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        dims, precision = self.dimension_numbers, self.precision
        return lax.dot_general(lhs, rhs, dims, precision, preferred_element_type=self.out.dtype)


def dot_plan(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe,
    out_sharding: OutSharding = None,
) -> DotContraction:
    """Returns the plan of a matmul of operands, or of their shapes and dtypes."""
    arguments = dimension_numbers, precision, preferred_element_type
    found = traced(lax.dot_general, (lhs, rhs), *arguments, out_sharding=out_sharding)
    dims = found[1]["dimension_numbers"]
    return DotContraction.of((lhs, rhs), found, recipe, precision, dimension_numbers=dims)


class DotGeneral(Op):
    """``lax.dot_general``."""

    name = "Fp8DotGeneralOp"
    plain = staticmethod(lax.dot_general)
    plans: ClassVar[Plans] = {"direct": dot_plan, "qdq": qdq_plan}
    stores_kernel = True
    primitive: ClassVar[str | None] = "dot_general"
    params = ("dimension_numbers", "precision", "preferred_element_type")
    nnx_field = "dot_general"

    def __call__(
        self: Any,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: OutSharding = None,
    ) -> Float[jax.Array, "*output"]:
        """Multiplies the operands in FP8, as ``lax.dot_general`` does in their own dtypes.

        The arguments are those of ``lax.dot_general``. ``lhs`` is the input and ``rhs`` the kernel, of any
        shape, in bfloat16, float16, float32 or float64.

        Args:
            precision: None takes the accumulation of the recipe (by default fast forward, exact gradients).
                ``DEFAULT`` accumulates fast, ``HIGH`` and ``HIGHEST`` exactly, in all three GEMMs.
            preferred_element_type: None for the dtype that ``lax.dot_general`` returns. (For operands of
                two dtypes this is the wider one; Flax's op casts the input to the kernel's dtype.)
        """
        arguments = dimension_numbers, precision, preferred_element_type
        return self._run(lhs, rhs, *arguments, out_sharding=out_sharding)

    @staticmethod
    def sizes(lhs: Shape, rhs: Shape, dimension_numbers: DimensionNumbers, *rest: object) -> GemmSizes:
        (lhs_contract, _), (lhs_batch, _) = dimension_numbers
        batch, k = (math.prod(lhs[i] for i in axes) for axes in (lhs_batch, lhs_contract))
        m, n = (math.prod(shape) // max(1, batch * k) for shape in (lhs, rhs))
        return GemmSizes(batch, m, k, n)

    @staticmethod
    def swapped(
        lhs: jax.Array, rhs: jax.Array, dims: DimensionNumbers, precision: object, *rest: object
    ) -> tuple[tuple[object, ...], Callable[[jax.Array], jax.Array]]:
        if isinstance(precision, tuple):  # one precision for each operand
            precision = precision[::-1]
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
        num_batch, num_left = len(lhs_batch), lhs.ndim - len(lhs_batch) - len(lhs_contract)

        def restore(out: jax.Array) -> jax.Array:
            axes, split = list(range(out.ndim)), out.ndim - num_left
            return lax.transpose(out, (*axes[:num_batch], *axes[split:], *axes[num_batch:split]))

        return (((rhs_contract, lhs_contract), (rhs_batch, lhs_batch)), precision, *rest), restore

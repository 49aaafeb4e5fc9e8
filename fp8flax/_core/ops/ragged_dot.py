"""The FP8 matmul of a mixture of experts: multiplies each row by the kernel of its expert."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.axes import explicit_axes
from fp8flax._core.formats import E2M1
from fp8flax._core.gemm.dispatch import multiply_ragged
from fp8flax._core.gemm.gemm import GemmSizes
from fp8flax._core.gemm.ragged import ends_of_groups
from fp8flax._core.names import ROLES
from fp8flax._core.ops.canonical import DimensionNumbers, Layout, Shape
from fp8flax._core.ops.contract import traced
from fp8flax._core.ops.op import Op, Plans
from fp8flax._core.ops.stored import StoredContraction
from fp8flax._core.qtensor import STATIC, Dims
from fp8flax._core.recipes import Recipe
from fp8flax._core.scaling import delayed_amax
from fp8flax._core.shapes import Float, Integer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RaggedContraction(StoredContraction):
    """The three products of ``lax.ragged_dot``.

    The shapes are ``(rows, depth)`` for the input x, ``(experts, depth, columns)`` for the kernels w, and
    ``(rows, columns)`` for the result. Row m of the result is x[m] . w[e], where e is the expert of row m.
    So dx[m] = q(g[m]) . q(w[e]).T, and dw[e] is the sum of the outer products q(x[m]) q(g[m]) over the rows
    of expert e.
    """

    group_sizes: jax.Array
    dimension_numbers: DimensionNumbers = dataclasses.field(
        default=(((1,), (1,)), ((), (0,))), metadata=STATIC
    )
    """Those of the kernels, whose experts are a batch dimension."""

    @property
    def layouts(self) -> dict[str, Layout]:
        rows = Dims(2, (1,)), Dims(2, (0,))
        kernel = Dims(3, (1,), 1, is_stack=True), Dims(3, (2,), 1, is_stack=True)
        tensors = zip((self.lhs, self.rhs, self.out), (rows, kernel, rows))
        return {role: Layout.of(x.shape, dims) for role, (x, dims) in zip(ROLES, tensors)}

    def canonical(self, role: str, x: jax.Array) -> jax.Array:
        """Returns input or output gradient with rows of no expert set to zero."""
        return x if role == "kernel" else jnp.where(self._has_expert, x, np.zeros((), x.dtype))

    def amax(self, role: str, x: jax.Array) -> jax.Array:
        """Returns the ``delayed_amax`` of the rows that belong to experts; -inf if there are none."""
        if role == "kernel":
            return super().amax(role, x)
        return delayed_amax(x, self._has_expert)

    @property
    def _has_expert(self) -> jax.Array:
        """Returns a mask ``(rows, 1)`` of the rows that belong to an expert."""
        rows = self.lhs.shape[0]
        return lax.broadcasted_iota(np.int32, (rows, 1), 0) < ends_of_groups(self.group_sizes, rows)[-1]

    def product(self, name: str, is_stored: bool = False) -> Callable[..., jax.Array]:
        gemm = self.gemm(name)._replace(has_barrier=False)  # XLA fuses what follows inside of the loop
        # FP8 units get the kernels transposed; only a wide input is multiplied by them as they are stored.
        gemm = gemm._replace(is_stored=is_stored and self.recipe.forward.lhs is None)
        return partial(multiply_ragged, gemm, group_sizes=self.group_sizes)

    def wide(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.ragged_dot(lhs, rhs, self.group_sizes, self.precision, self.out.dtype)


def ragged_plan(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: Integer[jax.Array, " experts"],
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    recipe: Recipe,
) -> RaggedContraction:
    """Returns the plan of a ragged dot of operands, or of their shapes and dtypes.

    In wgrad, a block of 128 rows with one scale may hold rows of several experts.
    """
    if explicit_axes(lhs) or explicit_axes(rhs):
        raise NotImplementedError(
            "The FP8 ragged dot does not run on explicit axes of a mesh. Call it inside jax.shard_map, "
            "where each device has its own rows and experts, or inside jax.sharding.auto_axes."
        )
    if any(quantizer and quantizer.dtype == E2M1 for quantizer in recipe.gemms.quantizers):
        raise ValueError(
            "The FP8 ragged dot does not multiply in NVFP4. Give this layer a recipe of its own, such as "
            f"MXFP8BlockScaling(); got {recipe!r}."
        )
    if len(lhs.shape) != 2 or len(rhs.shape) != 3 or lhs.shape[1] != rhs.shape[1] or rhs.shape[0] == 0:
        raise ValueError(
            "The FP8 ragged dot takes lhs of shape (rows, K) and rhs of shape (experts, K, N), with one "
            f"expert or more; got {lhs.shape} and {rhs.shape}. Flatten the dimensions of the tokens, sort "
            "the rows by expert, and stack the kernels."
        )
    found = traced(lax.ragged_dot, (lhs, rhs, group_sizes), precision, preferred_element_type)
    return RaggedContraction.of((lhs, rhs), found, recipe, precision, group_sizes=group_sizes)


class RaggedDot(Op):
    """``lax.ragged_dot``, the matmul of a mixture of experts."""

    name = "Fp8RaggedDotOp"
    plain = staticmethod(lax.ragged_dot)
    plans: ClassVar[Plans] = {"direct": ragged_plan}
    stores_kernel = True
    primitive = "ragged_dot_general"
    params = ("precision", "preferred_element_type")
    nnx_field = "ragged_dot"
    is_stack = True

    def __call__(
        self: Any,
        lhs: Float[jax.Array, "rows depth"],
        rhs: Float[jax.Array, "experts depth columns"],
        group_sizes: Integer[jax.Array, " experts"],
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Float[jax.Array, "rows columns"]:
        """Multiplies each row by the kernel of its expert, in FP8.

        The arguments are those of ``lax.ragged_dot``; ``precision`` is as for ``Fp8DotGeneralOp``.

        Args:
            lhs: the input, ``(rows, K)``, sorted by expert; bfloat16, float16, float32 or float64.
            rhs: the kernels, ``(experts, K, N)``; bfloat16, float16, float32 or float64.
            group_sizes: rows of each expert, ``(experts,)``, integers.
        """
        return self._run(lhs, rhs, jnp.asarray(group_sizes), precision, preferred_element_type)

    @staticmethod
    def sizes(lhs: Shape, rhs: Shape, *_: object) -> GemmSizes:
        return GemmSizes(math.prod(lhs[:-2]), lhs[-2], *rhs[-2:])

    @staticmethod
    def unsupported(params: Mapping[str, Any]) -> str | None:
        numbers = params["ragged_dot_dimension_numbers"]
        dims = jax.tree.map(int, numbers.dot_dimension_numbers)
        places = (*numbers.lhs_ragged_dimensions, *numbers.rhs_group_dimensions)
        # Axis 1 of both operands is contracted, and there is no batch.
        is_plain = (
            jax.tree.leaves(dims) == [1, 1] and places == (0, 0) and params.get("group_offset") is None
        )
        return None if is_plain else "it contracts or groups other dimensions than lax.ragged_dot"

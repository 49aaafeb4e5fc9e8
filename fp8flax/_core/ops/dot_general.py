"""The FP8 matmul: a plan of three GEMMs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.gemm.gemm import multiply
from fp8flax._core.names import FORWARD
from fp8flax._core.ops.canonical import Canonical, DimensionNumbers, Layout, canonical
from fp8flax._core.ops.contract import (
    STATELESS,
    Contraction,
    Extra,
    Operand,
    States,
    explicit_axes,
    explicit_sharding,
)
from fp8flax._core.ops.modes import FakeQuantized, check_operands, run, traced
from fp8flax._core.qtensor import Dims, QTensor
from fp8flax._core.quantizers import BlockQuantizer, DelayedQuantizer, Quantizer
from fp8flax._core.recipes import CustomRecipe, Recipe
from fp8flax._core.shapes import Float, Float32

FORMS = ("direct", "qdq")
"""The forms in which an FP8 matmul is written for the compiler: GEMMs of FP8 operands, or
quantize-dequantize around GEMMs of wide operands."""


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def dot_general_with_precision(
    lhs: Float[jax.Array, "*lhs"],
    rhs: Float[jax.Array, "*rhs"],
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[jax.Array, "*output"]:
    """Computes ``lax.dot_general`` with fast accumulation forward and exact accumulation in both gradients.

    Args:
        lhs: left operand, any shape.
        rhs: right operand, any shape.
        dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
        precision: None takes ``DEFAULT`` forward and ``HIGHEST`` backward. Another value is used for all
            three GEMMs.
        preferred_element_type: dtype of the result, or None for the dtype of the operands.

    Returns:
        The product, shaped like that of ``lax.dot_general``.

    Raises:
        TypeError: the operands do not fit the dimension numbers.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.dot_general_with_precision(jnp.ones((2, 3)), jnp.ones((3,)), (((1,), (0,)), ((), ())))
        Array([3., 3.], dtype=float32)

    Source: ``flax.linen.fp8_ops.dot_general_with_precision``, which ignores the last two arguments.
    """
    precision = lax.Precision.DEFAULT if precision is None else precision
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type=preferred_element_type
    )


@dot_general_with_precision.defjvp
def _dot_general_with_precision_jvp(
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: Any,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs), (lhs_dot, rhs_dot) = primals, tangents
    out = dot_general_with_precision(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    dot = partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=lax.Precision.HIGHEST if precision is None else precision,
        preferred_element_type=preferred_element_type,
    )
    return out, dot(lhs_dot, rhs) + dot(lhs, rhs_dot)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotContraction(Contraction):
    """The three products of ``lax.dot_general``."""

    dimension_numbers: DimensionNumbers

    @cached_property
    def form(self) -> Canonical:
        """The canonical form of the contraction."""
        quantizers = self.recipe.quantizers
        blocks = {n for q in quantizers if isinstance(q, BlockQuantizer) for n in q.block}
        return canonical(self.lhs.shape, self.rhs.shape, self.dimension_numbers, sorted(blocks))

    @property
    def dims(self) -> dict[str, tuple[Dims, Dims]]:
        return self.form.dims

    def canonical(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        del extra
        return self.form.layout(role).to(x)

    def original(self, role: str, x: jax.Array) -> jax.Array:
        return self.form.layout(role).back(x)

    def product(self, name: str) -> Callable[..., jax.Array]:
        gemm, order = self.gemm(name, self.form.products[name]), self.form.layout("kernel").order
        is_in_order = not self.form.num_batch and order == tuple(range(len(order)))
        is_stored = self.is_stored and name == FORWARD and is_in_order
        return partial(multiply, gemm._replace(is_stored=is_stored))

    def wide(self, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
        del extra
        dims, precision = self.dimension_numbers, self.precision
        return lax.dot_general(lhs, rhs, dims, precision, preferred_element_type=self.out_dtype)

    def stored(self, kernel: QTensor) -> QTensor:
        """Returns a canonical kernel as a frozen model stores it, with codes in the shape of the kernel.

        The scales are as inference servers read them: scales per slice have the dimensions of the kernel,
        scales per block the shape ``(batch, output blocks, contracted blocks)``.
        """
        scale, quantizer = kernel.scale, kernel.quantizer
        scale = self._stored_scales(quantizer).back(scale) if scale.ndim else scale
        return QTensor(self.original("kernel", kernel.codes), scale, quantizer)

    def restored(self, kernel: QTensor) -> QTensor:
        """Returns a stored kernel in canonical form."""
        scale, quantizer = kernel.scale, kernel.quantizer
        # Codes in another dtype would give the same values, and run wide.
        assert kernel.codes.dtype == quantizer.dtype
        scale = self._stored_scales(quantizer).to(scale) if scale.ndim else scale
        is_block = isinstance(quantizer, BlockQuantizer)
        block = quantizer.block_of(self.dims["kernel"][0]) if is_block else ()
        return QTensor(self.canonical("kernel", kernel.codes, ()), scale, quantizer, block)

    def _stored_scales(self, quantizer: Quantizer) -> Layout:
        """Returns the layout of several scales of a kernel: its shape is that of the stored scales."""
        kernel, dims = self.form.layout("kernel"), self.dims["kernel"][0]
        (depth,) = dims.contract  # the dimensions before it are batch dimensions
        if isinstance(quantizer, BlockQuantizer):
            block = quantizer.block_of(dims)
            counts = tuple(-(-size // width) for size, width in zip(kernel.canonical, block))
            stored = math.prod(counts[:depth]), math.prod(counts[depth + 1 :]), counts[depth]
            return Layout(stored, (0, 2, 1), counts)
        (_, contract), _ = self.dimension_numbers
        shape = tuple(1 if i in contract else size for i, size in enumerate(kernel.shape))
        canonical = (*kernel.canonical[:depth], 1, *kernel.canonical[depth + 1 :])
        return Layout(shape, kernel.order, canonical)


def dot_plan(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: CustomRecipe,
    out_sharding: Any = None,
) -> DotContraction:
    """Returns the plan of a matmul.

    The operands are arrays, or their shapes and dtypes. The recipe is in parts, as ``Recipe.gemms`` returns
    it. For the other arguments see ``fp8_dot_general``.
    """
    out, params = traced(
        lambda lhs, rhs: lax.dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        ),
        lhs,
        rhs,
    )
    return DotContraction(
        recipe=recipe,
        lhs=Operand.of(lhs),
        rhs=Operand.of(rhs),
        out_dtype=out.dtype,
        out_sharding=out.sharding,
        precision=None if precision is None else params["precision"],
        dimension_numbers=params["dimension_numbers"],
    )


def _qdq_plan(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: Any,
    *,
    recipe: CustomRecipe,
    out_sharding: Any,
) -> FakeQuantized:
    """Returns the plan of a matmul in the quantize-dequantize form."""
    if not all(isinstance(quantizer, DelayedQuantizer) for quantizer in recipe.quantizers):
        raise ValueError(
            f"form='qdq' takes DelayedScaling, for input, kernel and output gradient; got {recipe!r}. Give "
            "the op this recipe, or leave form='qdq' out."
        )
    arguments = dimension_numbers, precision, preferred_element_type

    def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return dot_general_with_precision(lhs, rhs, *arguments)

    sharding = explicit_sharding(lhs)
    if out_sharding is not None and sharding is not None:
        axes = explicit_axes(sharding.mesh)
        product = jax.sharding.auto_axes(product, axes=axes, out_sharding=out_sharding)
    return FakeQuantized.of(product, lhs, rhs, recipe)


def fp8_dot_general(
    lhs: Float[jax.Array, "*input"],
    rhs: Float[jax.Array, "*kernel"],
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    states: States = STATELESS,
    recipe: Recipe,
    form: str = "direct",
    is_frozen: bool = False,
    stored_kernel: QTensor | None = None,
    input_scale: Float32[jax.Array, "*scale"] | None = None,
    out_sharding: Any = None,
) -> Float[jax.Array, "*output"]:
    """Multiplies in FP8: ``lhs`` as the input, ``rhs`` as the kernel, and the cotangent on the way back.

    The arguments up to ``preferred_element_type``, ``out_sharding`` and the result are those of
    ``DotGeneralCall``, the errors and ``form`` those of ``Fp8DotGeneralOp``. ``modes.run`` explains the
    others. The "gradients" of the states are their next values.
    """
    lhs, rhs = check_operands(lhs, rhs, preferred_element_type)
    make_plan = dot_plan if form == "direct" else _qdq_plan
    plan = make_plan(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        recipe=recipe.gemms,
        out_sharding=out_sharding,
    )
    return run(
        plan,
        lhs,
        rhs,
        states=states,
        is_frozen=is_frozen,
        stored_kernel=stored_kernel,
        input_scale=input_scale,
    )

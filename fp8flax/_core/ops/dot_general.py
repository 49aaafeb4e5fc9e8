"""The FP8 matmul: a plan of three GEMMs."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.gemm.gemm import multiply
from fp8flax._core.gemm.gpus import warn_if_emulated
from fp8flax._core.mode import is_calibrating
from fp8flax._core.names import DGRAD, FORWARD
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
from fp8flax._core.ops.modes import FakeQuantized, check_operands, run
from fp8flax._core.options import check_choice
from fp8flax._core.qtensor import Dims, QTensor
from fp8flax._core.quantizers import BlockQuantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe, Recipe
from fp8flax._core.shapes import Float, Float32

FORMS = ("direct", "qdq")
"""The forms in which an FP8 matmul is written for the compiler: GEMMs of FP8 operands, or
quantize-dequantize around GEMMs of wide operands."""

_Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


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

    dimension_numbers: _Dims
    out_shape: tuple[int, ...]
    has_given_sharding: bool = False
    """Whether the caller has passed ``out_sharding``. If not, JAX derived it from the operands."""

    @cached_property
    def form(self) -> Canonical:
        """The canonical form of the contraction."""
        quantizers = [q for q in self.recipe.quantizers if q is not None]
        blocks = {n for q in quantizers if isinstance(q, BlockQuantizer) for n in q.block}
        return canonical(self.lhs.shape, self.rhs.shape, self.dimension_numbers, sorted(blocks))

    @property
    def is_automatic(self) -> bool:
        """Returns whether XLA chooses the shardings inside, because JAX cannot derive them.

        JAX cannot derive the sharding of a reshape. It also cannot derive the sharding of the result if the
        operands do not determine it; callers then pass ``out_sharding``.
        """
        has_blocks = any(q is not None and q.scales_along_contraction for q in self.recipe.quantizers)
        is_explicit = self.lhs.sharding is not None
        return is_explicit and (has_blocks or self.has_given_sharding or self.form.is_merged)

    @property
    def dims(self) -> dict[str, tuple[Dims, Dims]]:
        return self.form.dims

    def canonical(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        del extra
        if role == "output_grad":
            return x if x.shape == self.form.output_shape else x.reshape(self.form.output_shape)
        return self._layout(role).to(x)

    def original(self, role: str, x: jax.Array) -> jax.Array:
        if role == "output":
            return x if x.shape == self.out_shape else x.reshape(self.out_shape)
        return self._layout(role).back(x)

    def canonical_sharding(self, role: str) -> Any:
        operand = self.lhs if role == "input" else self.rhs
        return self._layout(role).sharding(operand.sharding)

    def _layout(self, role: str) -> Layout:
        return self.form.x if role == "input" else self.form.kernel

    def stored(self, kernel: QTensor) -> QTensor:
        """Returns a canonical kernel as a frozen model stores it, with codes in the shape of the kernel.

        The scales are as inference servers read them: scales per slice have the dimensions of the kernel,
        scales per block the shape ``(batch, output blocks, contracted blocks)``.
        """
        scale, dims, layout = kernel.scale, self.dims["kernel"][0], self.form.kernel
        if kernel.block:
            batch, depth = scale.shape[: dims.num_batch], scale.shape[dims.num_batch]
            scale = lax.transpose(scale, dims.in_order).reshape(math.prod(batch), -1, depth)
        elif scale.ndim:
            (_, contract), _ = self.dimension_numbers
            sizes = [1 if i in contract else layout.shape[i] for i in layout.order]
            scale = lax.transpose(scale.reshape(sizes), np.argsort(layout.order))
        return QTensor(layout.back(kernel.codes), scale, kernel.quantizer)

    def restored(self, kernel: QTensor) -> QTensor:
        """Returns a stored kernel in canonical form."""
        scale, quantizer, dims = kernel.scale, kernel.quantizer, self.dims["kernel"][0]
        # Codes in another dtype would give the same values, and run wide.
        assert kernel.codes.dtype == quantizer.dtype
        codes = self.form.kernel.to(kernel.codes)
        block: tuple[int, ...] = ()
        if isinstance(quantizer, BlockQuantizer):
            block = quantizer.block_of(dims)
            counts = [-(-size // width) for size, width in zip(codes.shape, block)]
            scale = scale.reshape([counts[i] for i in dims.in_order])
            scale = lax.transpose(scale, np.argsort(dims.in_order))
        elif scale.ndim:
            scale = lax.transpose(scale, self.form.kernel.order)
            sizes = [1 if i in dims.contract else size for i, size in enumerate(codes.shape)]
            scale = scale.reshape(sizes)
        return QTensor(codes, scale, quantizer, block)

    def product(self, name: str, a: Any, b: Any, extra: Extra = ()) -> jax.Array:
        del extra
        gemm, order = self.gemm(name, self.form.products[name]), self.form.kernel.order
        if name != FORWARD:
            sharding = self.canonical_sharding("input" if name == DGRAD else "kernel")
            return multiply(gemm._replace(out_sharding=sharding), a, b)
        is_in_order = not self.form.num_batch and order == tuple(range(len(order)))
        return multiply(gemm._replace(is_stored=self.is_stored and is_in_order), a, b)

    def wide(self, lhs: jax.Array, rhs: jax.Array, extra: Extra = ()) -> jax.Array:
        del extra
        dims, precision = self.dimension_numbers, self.precision
        return lax.dot_general(lhs, rhs, dims, precision, preferred_element_type=self.out_dtype)

    def warn(self, *recipes: GemmRecipe) -> None:
        warn_if_emulated(*recipes)


def _hashable_dims(dimension_numbers: DimensionNumbers) -> _Dims:
    """Returns dimension numbers as tuples of int."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    return (
        (tuple(map(int, lhs_contract)), tuple(map(int, rhs_contract))),
        (tuple(map(int, lhs_batch)), tuple(map(int, rhs_batch))),
    )


def hashable_precision(precision: Any) -> Any:
    """Returns a precision in hashable form: a pair in a list becomes a tuple."""
    return tuple(precision) if isinstance(precision, list) else precision


def with_precision(recipe: CustomRecipe, precision: Any) -> CustomRecipe:
    """Returns the recipe with the accumulation that ``precision`` asks for, in all three GEMMs.

    The recipe is returned unchanged if nothing is multiplied in FP8: while calibrating, and for a recipe
    without quantizers. ``lax`` then interprets the precision.

    Raises:
        TypeError: ``precision`` is not None, a ``lax.Precision``, its name, or a pair of them.
    """
    if precision is None or is_calibrating() or not any(recipe.quantizers):
        return recipe
    pair = precision if isinstance(precision, tuple | list) else (precision, precision)
    try:
        both = [lax.Precision(p) for p in pair]
        if len(both) != 2 or None in pair:
            raise ValueError
    except (ValueError, TypeError):
        raise TypeError(
            "precision of an FP8 matmul must be None (the recipe's accumulation), a lax.Precision, its "
            f"name, or a pair of them; got {precision!r}. For more control set accumulation in the "
            "recipe, for instance DelayedScaling(accumulation=('exact', 'exact', 'exact'))."
        ) from None
    accumulation = "fast" if all(p == lax.Precision.DEFAULT for p in both) else "exact"
    gemms = {name: getattr(recipe, name) for name in ("forward", "dgrad", "wgrad")}
    return CustomRecipe(
        **{name: dataclasses.replace(gemm, accumulation=accumulation) for name, gemm in gemms.items()}
    )


def _check_form(form: str, recipe: CustomRecipe) -> None:
    """Raises ``ValueError`` if an op cannot compute a recipe in this form."""
    check_choice("form", form, FORMS)
    is_delayed = all(quantizer is not None and quantizer.needs_state for quantizer in recipe.quantizers)
    if form == "qdq" and not is_delayed:
        raise ValueError(
            f"form='qdq' takes DelayedScaling, for input, kernel and output gradient; got {recipe!r}. Give "
            "the op this recipe, or leave form='qdq' out."
        )


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
    # ``lax.dot_general`` raises its own errors if the shapes do not fit, and determines the result's dtype.
    out = jax.eval_shape(
        partial(
            lax.dot_general,
            dimension_numbers=dimension_numbers,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        ),
        lhs,
        rhs,
    )
    return DotContraction(
        recipe=with_precision(recipe, precision),
        lhs=Operand.of(lhs),
        rhs=Operand.of(rhs),
        out_dtype=out.dtype,
        out_sharding=getattr(out, "sharding", None),
        precision=hashable_precision(precision),
        dimension_numbers=_hashable_dims(dimension_numbers),
        out_shape=out.shape,
        has_given_sharding=out_sharding is not None,
    )


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

    The operands and the result are those of ``DotGeneralCall``, the errors those of ``Fp8DotGeneralOp``.

    Args:
        lhs: the input.
        rhs: the kernel.
        dimension_numbers: as for ``lax.dot_general``.
        precision: as for ``DotGeneralCall``.
        preferred_element_type: as for ``DotGeneralCall``.
        states: scaling states of the roles that have delayed scaling; their "gradients" are their next
            values.
        recipe: how the tensors are scaled.
        form: see ``Fp8DotGeneralOp``.
        is_frozen: whether the states do not change. JAX can then differentiate the op any number of times,
            in forward and reverse mode. Tangents and cotangents are multiplied in wide dtypes, with the
            values of the quantized operands.
        stored_kernel: the kernel as a frozen model stores it, see ``modes.packed_kernel``. The values of
            ``rhs`` are then not read, and the op is frozen.
        input_scale: the scale of the input for a stored kernel; None without delayed scaling.
        out_sharding: as for ``lax.dot_general``.
    """
    _check_form(form, recipe.gemms)
    lhs, rhs = check_operands(lhs, rhs, preferred_element_type)
    if form == "qdq":
        dims, more = (
            _hashable_dims(dimension_numbers),
            (hashable_precision(precision), preferred_element_type),
        )

        def product(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return dot_general_with_precision(lhs, rhs, dims, *more)

        if out_sharding is not None and (sharding := explicit_sharding(lhs)) is not None:
            axes = explicit_axes(sharding.mesh)
            product = jax.sharding.auto_axes(product, axes=axes, out_sharding=out_sharding)
        out = jax.eval_shape(product, lhs, rhs)  # lax raises its own errors
        qdq = FakeQuantized(
            recipe=recipe.gemms,
            lhs=Operand.of(lhs),
            rhs=Operand.of(rhs),
            out_dtype=out.dtype,
            multiply=product,
        )
        return run(qdq, lhs, rhs, states=states, is_frozen=is_frozen)
    plan = dot_plan(
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

"""The FP8 matmul: a plan of three GEMMs."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8flax._core.gemm.lowering import lowered
from fp8flax._core.gemm.request import DimensionNumbers, Gemm
from fp8flax._core.gemm.units import warn_if_emulated
from fp8flax._core.mode import is_calibrating
from fp8flax._core.plans.contraction import (
    STATELESS,
    Contraction,
    States,
    check_operands,
    on_automatic_axes,
)
from fp8flax._core.plans.modes import contract
from fp8flax._core.plans.plan import Extra, Operand
from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.recipes import CustomRecipe, GemmRecipe, Recipe
from fp8flax._core.shapes import Float, Float32

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


class _Gemms(NamedTuple):
    """The three GEMMs of a matmul. The results of dgrad and wgrad still need a transpose."""

    forward: Gemm
    dgrad: Gemm
    dgrad_axes: tuple[int, ...]
    """For each axis of the result of dgrad, the corresponding axis of ``lhs``."""
    wgrad: Gemm
    wgrad_axes: tuple[int, ...]
    """For each axis of the result of wgrad, the corresponding axis of ``rhs``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DotPlan(Contraction):
    """The three GEMMs of ``lax.dot_general``."""

    dimension_numbers: _Dims
    has_given_sharding: bool = False
    """Whether the caller has passed ``out_sharding``. If not, JAX derived it from the operands."""

    @cached_property
    def gemms(self) -> _Gemms:
        """The GEMMs of forward, dgrad and wgrad, for ``out = dot_general(lhs, rhs)``.

        The axes of ``out``, and so of its cotangent ``g``, are ``(batch, free of lhs, free of rhs)``.

        * dgrad contracts ``g`` with ``rhs`` over the free axes of ``rhs``. The axes of its result are
          ``(batch, free of lhs, contracted axes in the order of rhs)``.
        * wgrad contracts ``lhs`` with ``g`` over the free axes of ``lhs``. The axes of its result are
          ``(batch, contracted axes in the order of lhs, free of rhs)``. For a Dense layer this is the
          kernel's order.

        A transpose then puts the axes of each result into the order of ``lhs`` or ``rhs``.
        """
        forward = self.gemm("forward", self.dimension_numbers, self.lhs, self.rhs, self.out_dtype)
        lhs, rhs = forward.lhs, forward.rhs
        axes = iter(range(len(forward.out_shape)))
        g_batch, g_lhs_free, g_rhs_free = (
            tuple(itertools.islice(axes, len(dims))) for dims in (lhs.batch, lhs.free, rhs.free)
        )
        g = Operand(forward.out_shape, self.out_dtype, None, frozenset())
        partner_in_lhs = dict(zip(rhs.contract, lhs.contract))
        partner_in_rhs = dict(zip(lhs.contract, rhs.contract))
        dgrad_axes = (*lhs.batch, *lhs.free, *(partner_in_lhs[i] for i in sorted(rhs.contract)))
        wgrad_axes = (*rhs.batch, *(partner_in_rhs[i] for i in sorted(lhs.contract)), *rhs.free)
        dgrad_dims = (g_rhs_free, rhs.free), (g_batch, rhs.batch)
        wgrad_dims = (lhs.free, g_lhs_free), (lhs.batch, g_batch)
        dgrad = self.gemm("dgrad", dgrad_dims, g, self.rhs, self.lhs.dtype)
        wgrad = self.gemm("wgrad", wgrad_dims, self.lhs, g, self.rhs.dtype)
        return _Gemms(
            forward,
            dgrad._replace(out_sharding=_permuted(self.lhs.sharding, dgrad_axes)),
            dgrad_axes,
            wgrad._replace(out_sharding=_permuted(self.rhs.sharding, wgrad_axes)),
            wgrad_axes,
        )

    @cached_property
    def views(self) -> dict[str, tuple[View, View]]:
        forward, dgrad, _, wgrad, _ = self.gemms
        return {
            "input": (forward.lhs, wgrad.lhs),
            "kernel": (forward.rhs, dgrad.rhs),
            "output_grad": (dgrad.lhs, wgrad.rhs),
        }

    @property
    def is_automatic(self) -> bool:
        """Whether XLA chooses the shardings inside of the matmul, because JAX cannot derive them.

        JAX cannot derive the sharding of a reshape that makes blocks. It also cannot derive the sharding of
        the result if the operands do not determine it; callers then pass ``out_sharding``.
        """
        per_block = any(q is not None and q.scales_along_contraction for q in self.recipe.quantizers)
        return self.lhs.sharding is not None and (per_block or self.has_given_sharding)

    def product(self, lhs: Any, rhs: Any, extra: Extra = ()) -> jax.Array:
        del extra
        return lowered(self.gemms.forward, lhs, rhs)

    def dgrad(self, g: Any, rhs: Any, extra: Extra = ()) -> jax.Array:
        del extra
        out = lowered(self.gemms.dgrad, g, rhs)
        return lax.transpose(out, np.argsort(self.gemms.dgrad_axes))

    def wgrad(self, lhs: Any, g: Any, extra: Extra = ()) -> jax.Array:
        del extra
        out = lowered(self.gemms.wgrad, lhs, g)
        return lax.transpose(out, np.argsort(self.gemms.wgrad_axes))

    def wide(self, lhs: jax.Array, rhs: jax.Array, extra: Extra = ()) -> jax.Array:
        del extra
        return self.gemms.forward.reference(lhs, rhs)

    def fake_quantized(self, lhs: jax.Array, rhs: jax.Array, extra: Extra = ()) -> jax.Array:
        del extra
        return on_automatic_axes(self, _fake_quantized, self.out_sharding)(lhs, rhs)

    def warn(self, *recipes: GemmRecipe) -> None:
        warn_if_emulated(*recipes)


def _fake_quantized(plan: DotPlan, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns the forward product of wide operands, which JAX differentiates."""
    return dot_general_with_precision(lhs, rhs, plan.dimension_numbers, plan.precision, plan.out_dtype)


def _permuted(sharding: Any, axes: tuple[int, ...]) -> Any:
    """Returns the sharding of ``lax.transpose(x, axes)``, given the sharding of ``x`` or None."""
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[i] for i in axes)))


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


def with_precision(recipe: CustomRecipe, precision: Any, form: str) -> CustomRecipe:
    """Returns the recipe with the accumulation that ``precision`` asks for, in all three GEMMs.

    The recipe is returned unchanged if nothing is multiplied in FP8: in the quantize-dequantize form, while
    calibrating, and for a recipe without quantizers. ``lax`` then interprets the precision.

    Raises:
        TypeError: ``precision`` is not None, a ``lax.Precision``, its name, or a pair of them.
    """
    if precision is None or form == "qdq" or is_calibrating() or not any(recipe.quantizers):
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


def dot_plan(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    recipe: CustomRecipe,
    form: str = "direct",
    out_sharding: Any = None,
) -> DotPlan:
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
    return DotPlan(
        recipe=with_precision(recipe, precision, form),
        lhs=Operand.of(lhs),
        rhs=Operand.of(rhs),
        out_dtype=out.dtype,
        out_sharding=getattr(out, "sharding", None),
        precision=hashable_precision(precision),
        dequantized=form == "qdq",
        dimension_numbers=_hashable_dims(dimension_numbers),
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

    Args:
        lhs: the input, any shape, a wide float.
        rhs: the kernel, any shape, a wide float.
        dimension_numbers: the dimension numbers of ``lax.dot_general``.
        precision: None for the recipe's accumulation; ``DEFAULT`` for fast and ``HIGH`` or ``HIGHEST``
            for exact accumulation in all three GEMMs. A GEMM of wide operands gets ``precision`` itself.
        preferred_element_type: dtype of the result; None for what ``lax.dot_general`` gives.
        states: scaling states of the roles that have delayed scaling; their "gradients" are their next
            values.
        recipe: how the tensors are scaled.
        form: ``"direct"`` puts FP8 operands into the GEMMs; ``"qdq"`` quantizes and dequantizes around
            GEMMs in the dtype of the operands.
        is_frozen: whether the states do not change. JAX can then differentiate the op any number of times,
            in forward and reverse mode. Tangents and cotangents are multiplied in wide dtypes, with the
            values of the quantized operands.
        stored_kernel: the kernel as a frozen model stores it, see ``modes.packed_kernel``. The values of
            ``rhs`` are then not read, and the op is frozen.
        input_scale: the scale of the input for a stored kernel; None without delayed scaling.
        out_sharding: the sharding of the result, as for ``lax.dot_general``, on a mesh with explicit axes.

    Returns:
        The product, shaped like that of ``lax.dot_general``.

    Raises:
        TypeError: an operand or ``preferred_element_type`` is not a wide float, ``precision`` is none of
            the above, or the operands do not fit the dimension numbers.
    """
    lhs, rhs = check_operands(lhs, rhs, preferred_element_type)
    plan = dot_plan(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        recipe=recipe.gemms,
        form=form,
        out_sharding=out_sharding,
    )
    return contract(
        plan,
        lhs,
        rhs,
        states=states,
        is_frozen=is_frozen,
        stored_kernel=stored_kernel,
        input_scale=input_scale,
    )

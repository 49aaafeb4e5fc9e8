"""``contract`` chooses how a contraction runs: in FP8, frozen, wide, or observed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from fp8flax._core.measuring import Numbers, numbers_of
from fp8flax._core.mode import is_calibrating, mode
from fp8flax._core.names import KEPT_WIDE, ROLES
from fp8flax._core.observe import Tensor, number_of, observed, on_cotangent
from fp8flax._core.plans.contraction import (
    STATELESS,
    Contraction,
    Extra,
    Scales,
    States,
    explicit_axes,
    explicit_sharding,
    on_automatic_axes,
    quantized_product,
)
from fp8flax._core.plans.engine import run
from fp8flax._core.qdq import in_qdq_with_scale, out_qdq_with_scale
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantize import inf_to_nan
from fp8flax._core.quantizers import quantized, quantized_and_back, serves
from fp8flax._core.state.state import as_state, scales_of, step_scales
from fp8flax._core.tracing import traced_once


def contract(
    plan: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    *extra: jax.Array,
    states: States = STATELESS,
    is_frozen: bool = False,
    stored_kernel: QTensor | None = None,
    input_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns the result of a contraction, in the ambient ``mode``.

    Args:
        plan: the contraction.
        lhs: the input, a wide float.
        rhs: the kernel, a wide float.
        *extra: the further arrays of the op, such as the group sizes of a ragged dot.
        states: scaling states of the roles that have delayed scaling.
        is_frozen: whether the states do not change. Tangents and cotangents are then multiplied in wide
            dtypes, with the values of the quantized operands.
        stored_kernel: a packed kernel, which makes the contraction a frozen one. The values of ``rhs`` are
            then not read.
        input_scale: the scale of the input for a packed kernel; None without delayed scaling.
    """
    if not any(plan.recipe.quantizers):
        with jax.named_scope(KEPT_WIDE):
            return _wide(plan, lhs, rhs, extra)
    if stored_kernel is not None:
        plan.warn(plan.recipe.forward)
        plan = dataclasses.replace(plan, is_packed=True)
        fixed = _Fixed({} if input_scale is None else {"input": input_scale}, stored_kernel)
        return _frozen(plan, lhs, lax.stop_gradient(rhs), extra, fixed)
    checked = {}
    for role in plan.configs:
        scale, amax_history = getattr(states, role)
        checked[role] = as_state(scale, amax_history, int(role in plan.stacked))
    if is_frozen:
        plan.warn(plan.recipe.forward)
        fixed = _Fixed(scales_of(plan.configs, checked), None)
        return (_frozen_qdq if plan.is_qdq else _frozen)(plan, lhs, rhs, extra, fixed)
    scales = step_scales(plan.configs, checked)
    if is_calibrating():
        tensors = _tensors(plan, checked, scales)
        return observed(lambda x, w: _wide(plan, x, w, extra), tensors, lhs, rhs, *extra)
    plan.warn(plan.recipe.forward, plan.recipe.dgrad, plan.recipe.wgrad)
    compute: Callable[..., jax.Array] = _run_qdq if plan.is_qdq else run

    def multiply(*operands: jax.Array) -> jax.Array:
        return compute(plan, operands, extra, scales)

    if mode.value is not None:
        return observed(multiply, _tensors(plan, checked, scales), lhs, rhs, *extra)
    return multiply(lhs, rhs)


def _wide(plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
    """Returns ``plan.wide`` of the operands, with the sharding that the caller gave."""
    product = on_automatic_axes(plan, lambda plan, *operands: plan.wide(*operands), plan.out_sharding)
    return product(lhs, rhs, extra)


# FP8.


def _run_qdq(
    plan: Contraction, operands: tuple[jax.Array, jax.Array], extra: Extra, scales: Scales
) -> jax.Array:
    """Returns the quantize-dequantize form: ``in_qdq`` of both operands, the product, and ``out_qdq``.

    JAX differentiates the product, any number of times. Both uses of a tensor have the same quantizer.
    """
    lhs = _in_qdq(plan, "input", operands[0], scales.get("input"))
    rhs = _in_qdq(plan, "kernel", operands[1], scales.get("kernel"))
    out = plan.fake_quantized(lhs, rhs, extra)
    if "output_grad" in scales:
        return out_qdq_with_scale(plan.configs["output_grad"], out, scales["output_grad"])
    return on_cotangent(partial(_cast_output_grad, plan), out, (), innermost_only=True)


def _in_qdq(plan: Contraction, role: str, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns an operand cast to FP8 and back; unchanged if the recipe does not quantize the operand."""
    if scale is not None:
        return in_qdq_with_scale(plan.configs[role], x, scale)
    _, quantizer, view = plan.uses(role).first
    return quantized_and_back(quantizer, view, x, None)


def _cast_output_grad(plan: Contraction, g: jax.Array, args: Any) -> Any:
    """Casts the output gradient to FP8 and back, without delayed scaling."""
    _, quantizer, view = plan.uses("output_grad").first
    return quantized_and_back(quantizer, view, inf_to_nan(g), None), args


# Frozen.


class _Fixed(NamedTuple):
    """The constants of a frozen contraction."""

    scales: dict[str, jax.Array]
    """The delayed scales, by role."""
    kernel: QTensor | None
    """The packed kernel; None if each call quantizes a wide kernel."""


def packed_kernel(plan: Contraction, kernel: jax.Array, scale: Any) -> QTensor:
    """Returns a kernel as a frozen model stores it: quantized, with codes in the shape of the kernel.

    Args:
        plan: the plan of the op; its recipe must quantize the kernel in the forward product.
        kernel: the kernel, a wide float.
        scale: the scale for delayed scaling; ignored otherwise.
    """
    _, quantizer, view = plan.uses("kernel").first

    def pack(kernel: jax.Array) -> QTensor:
        operand = quantized(quantizer, kernel, view, scale)
        return operand.quantizer.pack(operand, view)

    sharding = explicit_sharding(kernel)
    if sharding is None or quantizer is None or not quantizer.scales_along_contraction:
        return pack(kernel)
    # JAX cannot derive the sharding of a reshape that makes blocks.
    mesh = sharding.mesh
    out_sharding = QTensor(sharding, NamedSharding(mesh, PartitionSpec()), quantizer)
    return jax.sharding.auto_axes(pack, axes=explicit_axes(mesh), out_sharding=out_sharding)(kernel)


# With straight-through quantization q, the derivative of q(x) . q(w) in the direction (dx, dw) is
# dx . q(w) + q(x) . dw. Tangents and cotangents have no scales, so they stay wide.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
@traced_once
def _frozen(plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, fixed: _Fixed) -> jax.Array:
    """Returns the forward product of quantized operands; states do not change."""
    return on_automatic_axes(plan, quantized_product, plan.out_sharding)(lhs, rhs, extra, *fixed)


def _along_lhs(
    plan: Contraction, tangent: jax.Array, rhs: jax.Array, extra: Extra, fixed: _Fixed
) -> jax.Array:
    """Returns dx . q(w): the wide product of the input's tangent and the dequantized kernel."""
    _, quantizer, view = plan.uses("kernel").first
    if fixed.kernel is not None:
        unpacked = fixed.kernel.quantizer.unpack(fixed.kernel, view)
        return plan.wide(tangent, unpacked.dequantize(view, plan.rhs.dtype), extra)
    quantize = partial(quantized_and_back, quantizer, view)
    scale = fixed.scales.get("kernel")
    return plan.wide(tangent, plan.each("kernel", quantize, rhs, scale), extra)


def _along_rhs(
    plan: Contraction, tangent: jax.Array, lhs: jax.Array, extra: Extra, fixed: _Fixed
) -> jax.Array:
    """Returns q(x) . dw: the wide product of the dequantized input and the kernel's tangent."""
    lhs = plan.prepared("input", lhs, extra)
    _, quantizer, view = plan.uses("input").first
    return plan.wide(quantized_and_back(quantizer, view, lhs, fixed.scales.get("input")), tangent, extra)


def _frozen_jvp(plan: Contraction, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the result of ``_frozen`` and its tangent, dx . q(w) + q(x) . dw."""
    (lhs, rhs, extra, fixed), (lhs_dot, rhs_dot, *_) = primals, tangents
    with jax.named_scope(KEPT_WIDE):
        terms = [
            on_automatic_axes(plan, along, plan.out_sharding)(tangent, other, extra, fixed)
            for along, tangent, other in ((_along_lhs, lhs_dot, rhs), (_along_rhs, rhs_dot, lhs))
            if not isinstance(tangent, SymbolicZero)
        ]
    out = _frozen(plan, lhs, rhs, extra, fixed)
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


_frozen.defjvp(_frozen_jvp, symbolic_zeros=True)


def _frozen_qdq(
    plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, fixed: _Fixed
) -> jax.Array:
    """Returns the quantize-dequantize form of ``_frozen``; JAX differentiates the product."""
    x, w = (
        quantized_and_back(use.quantizer, use.view, operand, fixed.scales.get(use.role))
        for use, operand in ((plan.uses("input").first, lhs), (plan.uses("kernel").first, rhs))
    )
    return plan.fake_quantized(x, w, extra)


# Observing.


def _tensors(plan: Contraction, states: Mapping[str, Any], scales: Scales) -> dict[str, Tensor]:
    """Returns the tensors that a product quantizes, by role, as ``observed`` needs them."""
    return {
        role: Tensor(
            partial(_amax_of_role, role, plan),
            partial(_measure_role, role, plan),
            plan.configs.get(role),
            scales.get(role),
            number_of(states[role]) if role in states else None,
        )
        for role in ROLES
        if any(plan.recipe.of_role(role))
    }


def _amax_of_role(role: str, plan: Contraction, x: jax.Array, *extra: jax.Array) -> jax.Array:
    """Returns the amax of a tensor, or the amaxes of a stack."""
    return plan.amax(role, plan.prepared(role, lax.stop_gradient(x), extra), extra)


def _measure_role(
    role: str, plan: Contraction, x: jax.Array, scale: jax.Array | None, *extra: jax.Array
) -> list[jax.Array]:
    """Returns the records of a tensor under each of its quantizers, at least one of which is not None."""

    def records(plan: Contraction, x: jax.Array, extra: Extra, scale: jax.Array | None) -> list[jax.Array]:
        x = plan.prepared(role, x, extra)
        first, second = plan.uses(role)
        uses = (first,) if serves(first.quantizer, second.quantizer, first.view) else (first, second)
        return [
            plan.each(role, partial(numbers_of, use.quantizer, use.view), x, scale)
            for use in uses
            if use.quantizer is not None
        ]

    first, *rest = on_automatic_axes(plan, records, None)(x, extra, scale)
    # ``nonfinite`` counts elements of the tensor; the other counts are per cast.
    place = Numbers._fields.index("nonfinite")
    return [first, *(record.at[..., place].set(0) for record in rest)]

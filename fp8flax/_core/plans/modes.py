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

from fp8flax._compat.report_primitive import with_report
from fp8flax._core.measuring import Numbers, merged, merged_calls, numbers_of
from fp8flax._core.mode import Observing, is_calibrating, mode
from fp8flax._core.names import KEPT_WIDE
from fp8flax._core.observe import observed, report_amax, report_cotangent
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
    if is_calibrating():
        return _observed(lambda x, w: _wide(plan, x, w, extra), plan, lhs, rhs, extra, checked)
    plan.warn(plan.recipe.forward, plan.recipe.dgrad, plan.recipe.wgrad)
    compute: Callable[..., jax.Array] = _run_qdq if plan.is_qdq else run
    scales = step_scales(plan.configs, checked)

    def multiply(*operands: jax.Array) -> jax.Array:
        return compute(plan, operands, extra, scales)

    if mode.value is not None:
        return _observed(multiply, plan, lhs, rhs, extra, scales)
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
    return observed(partial(_cast_output_grad, plan), out, (), innermost_only=True)


def _in_qdq(plan: Contraction, role: str, x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns an operand cast to FP8 and back; unchanged if the recipe does not quantize the operand."""
    if scale is not None:
        return in_qdq_with_scale(plan.configs[role], x, scale)
    _, quantizer, view = plan.uses(role).first
    return quantized_and_back(quantizer, view, x, None)


def _cast_output_grad(plan: Contraction, g: jax.Array, args: Any) -> Any:
    """Observer of the result: casts the output gradient to FP8 and back, without delayed scaling."""
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


def _observed(
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
    plan: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    extra: Extra,
    given: Mapping[str, Any],
) -> jax.Array:
    """Returns the product of the operands, and reports its three tensors to the observer.

    Args:
        multiply: computes the product.
        plan: the contraction.
        lhs: the input.
        rhs: the kernel.
        extra: the further arrays of the op.
        given: what the report of a tensor needs, by role: its state for ``calibrate``, its scale for
            ``statistics``.
    """
    observing = mode.value
    # The mode is part of jit's cache key. Without the path in it, layers with equal plans share one trace.
    with mode(None):
        lhs = _reported(plan, observing, "input", lhs, extra, given.get("input"))
        rhs = _reported(plan, observing, "kernel", rhs, extra, given.get("kernel"))
        out = multiply(lhs, rhs)
        if not observing.backward:
            return out
        observer = partial(_report_output_grad, plan, observing)
        return observed(observer, out, (extra, given.get("output_grad")))


def _report_output_grad(plan: Contraction, observing: Observing, g: jax.Array, args: Any) -> Any:
    """Observer of the result: returns the output gradient, and reports it."""
    _, given = args
    if observing.amaxes_to is not None and given is not None:
        amax_of = partial(_amax_of_role, "output_grad", plan)
        return report_cotangent(observing, plan.configs["output_grad"], amax_of, g, args)
    extra, scale = args
    return _reported(plan, observing, "output_grad", g, extra, scale), (None, None)


def _reported(
    plan: Contraction, observing: Observing, role: str, x: jax.Array, extra: Extra, given: Any
) -> jax.Array:
    """Returns ``x`` unchanged, and reports it, if a product quantizes it."""
    if observing.amaxes_to is not None:
        if given is None:
            return x
        return report_amax(observing, plan.configs[role], x, _amax_of_role(role, plan, x, extra), given)
    if not any(plan.recipe.of_role(role)):
        return x
    numbers = on_automatic_axes(plan, partial(_numbers_of_role, role), None)(x, extra, given)
    return with_report(x, numbers, (observing.path, role))


def _amax_of_role(role: str, plan: Contraction, x: jax.Array, extra: Extra) -> jax.Array:
    """Returns the amax of a tensor, or the amaxes of a stack."""
    return plan.amax(role, plan.prepared(role, lax.stop_gradient(x), extra), extra)


def _numbers_of_role(
    role: str, plan: Contraction, x: jax.Array, extra: Extra, scale: jax.Array | None
) -> Numbers:
    """Measures the quantization error of a tensor under each of its quantizers, and merges the results.

    At least one of the two quantizers is not None.
    """
    x, scale = lax.stop_gradient((x, scale))
    x = plan.prepared(role, x, extra)
    first, second = plan.uses(role)
    uses = (first,) if serves(first.quantizer, second.quantizer, first.view) else (first, second)
    found = []
    for _, quantizer, view in uses:
        if quantizer is not None:
            numbers = plan.each(role, partial(numbers_of, quantizer, view), x, scale)
            found.append(merged(numbers) if role in plan.stacked else numbers)
    # ``nonfinite`` counts elements of the tensor; the other counts are per cast. So it must not be added
    # up over the two quantizers.
    return merged_calls(found)._replace(nonfinite=found[0].nonfinite)

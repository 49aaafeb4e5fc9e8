"""``contract`` chooses how a contraction runs: in FP8, frozen, wide, calibrating or measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from fp8flax._compat.max_dtype import is_max_dtype
from fp8flax._core.axes import refuse_unchecked_axes
from fp8flax._core.measuring import Numbers, merged, merged_calls, numbers_of, report_numbers
from fp8flax._core.mode import Calibrating, is_measuring, mode
from fp8flax._core.names import KEPT_WIDE
from fp8flax._core.observe import observed
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
from fp8flax._core.state.state import (
    DelayedConfig,
    ScalingState,
    as_state,
    calibrated_state,
    report_calibrated,
    scales_of,
    step_scales,
)
from fp8flax._core.tracing import traced_once

_States = dict[str, ScalingState]
"""The scaling state of each tensor with delayed scaling, by role."""


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
    checked = checked_states(plan, states)
    if is_frozen:
        plan.warn(plan.recipe.forward)
        fixed = _Fixed(scales_of(plan.configs, checked), None)
        return (_frozen_qdq if plan.is_qdq else _frozen)(plan, lhs, rhs, extra, fixed)
    if isinstance(mode.value, Calibrating):
        return _calibrated(plan, lhs, rhs, extra, checked)
    plan.warn(plan.recipe.forward, plan.recipe.dgrad, plan.recipe.wgrad)
    compute: Callable[..., jax.Array] = _run_qdq if plan.is_qdq else run
    scales = step_scales(plan.configs, checked)
    if is_measuring():
        return _measured(compute, plan, lhs, rhs, extra, scales)
    return compute(plan, (lhs, rhs), extra, scales)


def checked_states(plan: Contraction, states: States) -> _States:
    """Returns the states of the tensors with delayed scaling, after a check.

    Raises:
        TypeError: see ``as_state``. Also if JAX would add up the gradients of the states over devices, see
            ``refuse_unchecked_axes``.
        ValueError: see ``as_state``.
    """
    if any(map(is_max_dtype, jax.tree.leaves(states, is_leaf=is_max_dtype))):
        refuse_unchecked_axes()
    checked = {}
    for role in plan.configs:
        scale, amax_history = getattr(states, role)
        stacked = plan.rhs.shape[:1] if role in plan.stacked else ()
        checked[role] = as_state(scale, amax_history, stacked)
    return checked


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


# Calibrating.


def _calibrated(
    plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, states: _States
) -> jax.Array:
    """Returns the wide contraction, and makes the next scaling states from its tensors.

    The next states are the "gradients" of ``states``. If the mode has a ``report``, it is called with the
    states of input and kernel instead, and the output gradient gets no state.
    """
    report, configs = mode.value.report, plan.configs
    operands = {"input": lhs, "kernel": rhs}
    for role, x in operands.items():
        if role not in configs:
            continue
        config, state = configs[role], states[role]
        amax = plan.amax(role, plan.prepared(role, lax.stop_gradient(x), extra), extra)
        if report is not None:
            operands[role] = report_calibrated(x, report, config, amax, state)
        else:
            operands[role] = observed(partial(_calibrate_operand, config), x, (amax, state))
    out = _wide(plan, operands["input"], operands["kernel"], extra)
    if report is not None or "output_grad" not in configs:
        return out
    return observed(partial(_calibrate_output_grad, plan), out, (extra, states["output_grad"]))


def _calibrate_operand(config: DelayedConfig, g: jax.Array, args: Any) -> Any:
    """Observer of an operand: returns its cotangent unchanged, and its calibrated state.

    The amax of the operand comes from the forward pass, in ``args``.
    """
    amax, state = args
    return g, (None, calibrated_state(config, amax, state))


def _calibrate_output_grad(plan: Contraction, g: jax.Array, args: Any) -> Any:
    """Observer of the result: returns the output gradient unchanged, and its calibrated state."""
    extra, state = args
    amax = plan.amax("output_grad", plan.prepared("output_grad", g, extra), extra)
    return g, (None, calibrated_state(plan.configs["output_grad"], amax, state))


# Measuring.


def _measured(
    compute: Callable[..., jax.Array],
    plan: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    extra: Extra,
    scales: Scales,
) -> jax.Array:
    """Returns the result of ``compute``, and reports the quantization error of the three tensors."""
    path = mode.value.path
    # The mode is part of jit's cache key. Without the path in it, layers with equal plans share one trace.
    with mode(None):
        lhs = _reported(plan, path, "input", lhs, extra, scales.get("input"))
        rhs = _reported(plan, path, "kernel", rhs, extra, scales.get("kernel"))
        out = compute(plan, (lhs, rhs), extra, scales)
        observer = partial(_report_output_grad, plan, path)
        return observed(observer, out, (extra, scales.get("output_grad")))


def _report_output_grad(plan: Contraction, path: tuple[str, ...], g: jax.Array, args: Any) -> Any:
    """Observer of the result: returns the output gradient, and reports its quantization error."""
    extra, scale = args
    return _reported(plan, path, "output_grad", g, extra, scale), (None, None)


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


def _reported(
    plan: Contraction, path: tuple[str, ...], role: str, x: jax.Array, extra: Extra, scale: jax.Array | None
) -> jax.Array:
    """Returns ``x`` unchanged, and reports its quantization error, if a product quantizes it."""
    if not any(plan.recipe.of_role(role)):
        return x
    numbers = on_automatic_axes(plan, partial(_numbers_of_role, role), None)(x, extra, scale)
    return report_numbers(path, role, x, numbers)

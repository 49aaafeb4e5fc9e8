"""Chooses how a contraction runs: in FP8, frozen, wide, calibrating or measured. Only ``contract`` does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fp8flax._compat.max_dtype import is_max_dtype
from fp8flax._compat.reverse_mode import reverse_mode_only
from fp8flax._core.axes import refuse_unchecked_axes
from fp8flax._core.measuring import Numbers, merged, merged_calls, numbers_of, tell
from fp8flax._core.mode import Calibrating, is_measuring, mode
from fp8flax._core.names import KEPT_WIDE
from fp8flax._core.plans.contraction import (
    STATELESS,
    Contraction,
    States,
    on_automatic_axes,
    product_of_wide,
)
from fp8flax._core.plans.engine import run
from fp8flax._core.plans.observe import observed
from fp8flax._core.plans.plan import Extra
from fp8flax._core.qdq import in_qdq_as, out_qdq_as
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantizers import serves, straight_through
from fp8flax._core.state.state import (
    DelayedConfig,
    ScalingState,
    calibrated_state,
    check_state,
    report_calibrated,
)
from fp8flax._core.tracing import traced_once

FORMS = ("direct", "qdq")
"""How an FP8 contraction is written down for the compiler."""

_States = dict[str, ScalingState]
"""The state of each role with delayed scaling."""


def contract(
    plan: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    *extra: jax.Array,
    states: States = STATELESS,
    is_frozen: bool = False,
    kernel: QTensor | None = None,
    input_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns the contraction of a plan, in the form and the mode that are asked for.

    Args:
        plan: what is contracted.
        lhs: the input, a wide float.
        rhs: the kernel, a wide float.
        *extra: what the plan takes beside them.
        states: scaling states of the roles that have delayed scaling.
        is_frozen: whether the states stay as they are, and derivatives are those of the wide contraction.
        kernel: the packed kernel of a frozen contraction, instead of ``rhs``, whose values are not read.
        input_scale: the input's scale beside it, where that is delayed.
    """
    if not any(plan.recipe.quantizers):
        with jax.named_scope(KEPT_WIDE):
            return plan.wide(lhs, rhs, extra)
    if kernel is not None:
        plan.warn(plan.recipe.forward)
        plan = dataclasses.replace(plan, is_packed=True)
        fixed = _Fixed({} if input_scale is None else {"input": input_scale}, kernel)
        return _frozen(plan, lhs, lax.stop_gradient(rhs), extra, fixed)
    checked = _checked_states(plan, states)
    if is_frozen:
        plan.warn(plan.recipe.forward)
        return _frozen(plan, lhs, rhs, extra, _Fixed(plan.scales(checked), None))
    if isinstance(mode.value, Calibrating):
        return _calibrated(plan, lhs, rhs, extra, checked)
    lhs, rhs = reverse_mode_only(lhs), reverse_mode_only(rhs)
    is_delayed = all(
        quantizer is not None and quantizer.needs_state for quantizer in plan.recipe.quantizers
    )
    compute: Callable[..., jax.Array] = _direct
    if plan.dequantized and plan.has_fake_quantized and is_delayed:
        compute = _fake_quantized
    else:
        plan.warn(plan.recipe.forward, plan.recipe.dgrad, plan.recipe.wgrad)
    if is_measuring():
        return _measured(compute, plan, lhs, rhs, extra, checked)
    return compute(plan, lhs, rhs, extra, checked)


def _checked_states(plan: Contraction, states: States) -> _States:
    """Returns the states that some product uses, or raises an error if one cannot be state."""
    if any(map(is_max_dtype, jax.tree.leaves(states, is_leaf=is_max_dtype))):
        refuse_unchecked_axes()
    checked = {}
    for role in plan.configs:
        scale, amax_history = getattr(states, role)
        stacked = plan.rhs.shape[:1] if role in plan.stacked else ()
        checked[role] = check_state(scale, amax_history, stacked)
    return checked


# In FP8.


def _direct(plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, states: _States) -> jax.Array:
    """Returns the contraction, whose products take FP8 operands."""
    return run(plan, (lhs, rhs), extra, states)


def _fake_quantized(
    plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, states: _States
) -> jax.Array:
    """Returns the quantize-dequantize form of delayed scaling, which can be differentiated twice."""
    configs = plan.configs
    lhs = in_qdq_as(configs["input"], lhs, states["input"])
    rhs = in_qdq_as(configs["kernel"], rhs, states["kernel"])
    out = plan.fake_quantized(lhs, rhs, extra)
    return out_qdq_as(configs["output_grad"], out, states["output_grad"])


# Frozen.


class _Fixed(NamedTuple):
    """What does not change from call to call of a frozen contraction."""

    scales: dict[str, jax.Array]
    kernel: QTensor | None
    """Packed; None where it is quantized at each call."""


# Derivation. With straight-through quantization the derivative of q(x) . q(w) in the direction (dx, dw) is
# dx . q(w) + q(x) . dw. There is no scale for tangents, nor for cotangents: both stay wide.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
@traced_once
def _frozen(plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, fixed: _Fixed) -> jax.Array:
    return on_automatic_axes(plan, product_of_wide, plan.out_sharding, lhs, rhs, extra, *fixed)


def _along_lhs(
    plan: Contraction, tangent: jax.Array, rhs: jax.Array, extra: Extra, fixed: _Fixed
) -> jax.Array:
    _, quantizer, view = plan.uses("kernel").first
    if fixed.kernel is not None:
        unpacked = fixed.kernel.quantizer.unpack(fixed.kernel, view)
        return plan.wide(tangent, unpacked.dequantize(view, plan.rhs.dtype), extra)
    quantize = partial(straight_through, quantizer, view)
    scale = fixed.scales.get("kernel")
    return plan.wide(tangent, plan.each("kernel", quantize, rhs, scale), extra)


def _along_rhs(
    plan: Contraction, tangent: jax.Array, lhs: jax.Array, extra: Extra, fixed: _Fixed
) -> jax.Array:
    lhs = plan.prepared("input", lhs, extra)
    view, scale = plan.uses("input").first.view, fixed.scales.get("input")
    return plan.wide(straight_through(plan.recipe.forward.lhs, view, lhs, scale), tangent, extra)


def _frozen_jvp(plan: Contraction, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs, extra, fixed), (lhs_dot, rhs_dot, *_) = primals, tangents
    with jax.named_scope(plan.wide_scope):
        terms = [
            on_automatic_axes(plan, along, plan.out_sharding, tangent, other, extra, fixed)
            for along, tangent, other in ((_along_lhs, lhs_dot, rhs), (_along_rhs, rhs_dot, lhs))
            if not isinstance(tangent, SymbolicZero)
        ]
    out = _frozen(plan, lhs, rhs, extra, fixed)
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


_frozen.defjvp(_frozen_jvp, symbolic_zeros=True)


# Calibrating.


def _calibrated(
    plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, states: _States
) -> jax.Array:
    """Returns the contraction as JAX computes it, from which only the next scaling states are taken."""
    report, configs = mode.value.report, plan.configs
    if report is None:
        lhs, rhs = reverse_mode_only(lhs), reverse_mode_only(rhs)
    operands = {"input": lhs, "kernel": rhs}
    for role, x in operands.items():
        if role not in configs:
            continue
        config, state = configs[role], states[role]
        amax = plan.amax(role, plan.prepared(role, lax.stop_gradient(x), extra), extra)
        if report is not None:
            report_calibrated(report, config, amax, state)
        else:
            operands[role] = observed(partial(_calibrate_operand, config), x, (amax, state))
    out = plan.wide(operands["input"], operands["kernel"], extra)
    if report is not None or "output_grad" not in configs:
        return out
    return observed(partial(_calibrate_output_grad, plan), out, (extra, states["output_grad"]))


def _calibrate_operand(config: DelayedConfig, g: jax.Array, args: Any) -> Any:
    """Observes an operand, whose amax is known from the forward pass."""
    amax, state = args
    return g, (None, calibrated_state(config, amax, state))


def _calibrate_output_grad(plan: Contraction, g: jax.Array, args: Any) -> Any:
    """Observes the cotangent of the result."""
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
    states: _States,
) -> jax.Array:
    """Returns the contraction, and reports what FP8 leaves of its tensors."""
    path, scales = mode.value.path, plan.scales(states)
    with mode(None):  # under which all layers that are alike are traced once
        lhs = _told(plan, path, "input", lhs, extra, scales.get("input"))
        rhs = _told(plan, path, "kernel", rhs, extra, scales.get("kernel"))
        out = compute(plan, lhs, rhs, extra, states)
        observer = partial(_tell_output_grad, plan, path)
        return observed(observer, out, (extra, scales.get("output_grad")))


def _tell_output_grad(plan: Contraction, path: tuple[str, ...], g: jax.Array, args: Any) -> Any:
    """Observes the cotangent of the result."""
    extra, scale = args
    return _told(plan, path, "output_grad", g, extra, scale), (None, None)


def _numbers_of_role(
    role: str, plan: Contraction, x: jax.Array, extra: Extra, scale: jax.Array | None
) -> Numbers:
    """Returns what is left of a tensor by both of its quantizers; at least one is not None."""
    x, scale = lax.stop_gradient((x, scale))
    x = plan.prepared(role, x, extra)
    first, second = plan.uses(role)
    uses = (first,) if serves(first.quantizer, second.quantizer, first.view) else (first, second)
    found = []
    for _, quantizer, view in uses:
        if quantizer is not None:
            numbers = plan.each(role, partial(numbers_of, quantizer, view), x, scale)
            found.append(merged(numbers) if role in plan.stacked else numbers)
    return merged_calls(found)._replace(nonfinite=found[0].nonfinite)


def _told(
    plan: Contraction, path: tuple[str, ...], role: str, x: jax.Array, extra: Extra, scale: jax.Array | None
) -> jax.Array:
    """Returns a tensor, and tells what is left of it."""
    if not any(plan.recipe.of_role(role)):
        return x
    numbers = on_automatic_axes(plan, partial(_numbers_of_role, role), None, x, extra, scale)
    return tell(path, role, x, numbers)

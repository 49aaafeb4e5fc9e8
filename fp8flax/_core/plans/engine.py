"""Differentiates every FP8 op: ``run`` is the ``custom_vjp`` of a contraction."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax

from fp8flax._core.axes import merge_amax, sum_to_axes
from fp8flax._core.plans.contraction import (
    Contraction,
    Extra,
    Operand,
    Scales,
    backward,
    forward,
    kept_sharding,
    on_automatic_axes,
    quantized_product,
)
from fp8flax._core.tracing import traced_once


class _Residuals(NamedTuple):
    """The residuals of an op: what the forward pass keeps for the backward pass."""

    kept: Any
    """Input and kernel, as ``forward`` returned them."""
    extra: Extra
    scales: Scales
    amaxes: dict[str, jax.Array]
    """The amaxes of input and kernel."""


# The derivatives of the operands are straight-through: a contraction is linear in each operand, and
# quantizing counts as the identity. The cotangents of the scales are not derivatives, but amaxes.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def run(
    plan: Contraction, operands: tuple[jax.Array, jax.Array], extra: Extra, scales: Scales
) -> jax.Array:
    """Returns the result of a contraction; the "gradients" of the scales are the amaxes of this step.

    Args:
        plan: the contraction.
        operands: input and kernel, which get gradients.
        extra: further arrays, which get no gradients.
        scales: the scale of each tensor with delayed scaling, from ``state.step_scales``.
    """
    product = on_automatic_axes(plan, quantized_product, plan.out_sharding)
    return product(*operands, extra, scales, None)


@traced_once
def _run_fwd(
    plan: Contraction, operands: tuple[jax.Array, jax.Array], extra: Extra, scales: Scales
) -> tuple[jax.Array, _Residuals]:
    """Runs the forward pass; returns the result and the residuals."""
    kept_shardings = kept_sharding(plan, "input", plan.lhs), kept_sharding(plan, "kernel", plan.rhs)
    shardings = (plan.out_sharding, kept_shardings, None)  # None: amaxes are replicated
    out, kept, amaxes = on_automatic_axes(plan, forward, shardings)(*operands, extra, scales)
    return out, _Residuals(kept, extra, scales, amaxes)


@traced_once
def _run_bwd(plan: Contraction, residuals: _Residuals, g: jax.Array) -> Any:
    """Runs the backward pass; returns the cotangents of operands, extra (None) and scales."""
    kept, extra, scales, amaxes = residuals
    shardings = ((plan.lhs.sharding, plan.rhs.sharding), None)  # None: amaxes are replicated
    grads, amax_of_g = on_automatic_axes(plan, backward, shardings)(kept, extra, scales, g)
    amaxes = {**amaxes, **amax_of_g}
    # The amax of a step has only the batch and manual axes of its scale: it is merged over all others.
    amaxes_of_step = {role: merge_amax(amaxes[role], scale) for role, scale in scales.items()}
    return tuple(map(_as_operand, grads, (plan.lhs, plan.rhs))), None, amaxes_of_step


def _as_operand(grad: jax.Array, operand: Operand) -> jax.Array:
    """Returns a cotangent with the dtype, manual axes and sharding of its operand, as JAX requires."""
    # Inside shard_map, the cotangent of a replicated operand is the sum of the cotangents of all devices.
    grad = sum_to_axes(grad, operand.axes).astype(operand.dtype)
    if operand.sharding is not None:  # scales per row or column may have changed the sharding
        grad = jax.sharding.reshard(grad, operand.sharding)
    return grad


run.defvjp(_run_fwd, _run_bwd)

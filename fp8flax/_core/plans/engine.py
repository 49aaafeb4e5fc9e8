"""Differentiates every FP8 op: ``run`` is the ``custom_vjp`` of a contraction."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax

from fp8flax._core.axes import merge_amax, sum_to_axes
from fp8flax._core.plans.plan import Extra, Operand, Plan, Scales
from fp8flax._core.tracing import traced_once


class _Residuals(NamedTuple):
    """The residuals of an op: what the forward pass keeps for the backward pass."""

    of_plan: Any
    """The residuals that the plan returned."""
    extra: Extra
    scales: Scales
    amaxes: dict[str, jax.Array]
    """The amaxes of the tensors that the forward pass quantizes."""


# The derivatives of the operands are straight-through: a contraction is linear in each operand, and
# quantizing counts as the identity. The cotangents of the scales are not derivatives, but amaxes.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def run(plan: Plan, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales) -> jax.Array:
    """Returns the result of a plan; the "gradients" of the scales are the amaxes of this step.

    Args:
        plan: the op to compute.
        operands: the arrays that get gradients.
        extra: further arrays, which get no gradients.
        scales: the scale of each tensor with delayed scaling, from ``state.step_scales``.
    """
    return plan.primal(operands, extra, scales)


@traced_once
def _run_fwd(
    plan: Plan, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales
) -> tuple[jax.Array, _Residuals]:
    """Runs the forward pass of the plan; returns its result and the residuals."""
    out, of_plan, amaxes = plan.forward(operands, extra, scales)
    return out, _Residuals(of_plan, extra, scales, amaxes)


@traced_once
def _run_bwd(plan: Plan, residuals: _Residuals, g: jax.Array) -> Any:
    """Runs the backward pass of the plan; returns the cotangents of operands, extra (None) and scales."""
    of_plan, extra, scales, amaxes = residuals
    grads, more_amaxes = plan.backward(of_plan, extra, scales, g)
    amaxes = {**amaxes, **more_amaxes}
    # The amax of a step has only the batch and manual axes of its scale: it is merged over all others.
    amaxes_of_step = {name: merge_amax(amaxes[name], scale) for name, scale in scales.items()}
    return tuple(map(_as_operand, grads, plan.operands)), None, amaxes_of_step


def _as_operand(grad: jax.Array, operand: Operand) -> jax.Array:
    """Returns a cotangent with the dtype, manual axes and sharding of its operand, as JAX requires."""
    # Inside shard_map, the cotangent of a replicated operand is the sum of the cotangents of all devices.
    grad = sum_to_axes(grad, operand.axes).astype(operand.dtype)
    if operand.sharding is not None:  # scales per row or column may have changed the sharding
        grad = jax.sharding.reshard(grad, operand.sharding)
    return grad


run.defvjp(_run_fwd, _run_bwd)

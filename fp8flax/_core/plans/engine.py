"""Differentiates every FP8 op: ``run`` is the only ``custom_vjp`` of a contraction, or of a block of them.

The engine handles scaling states, and the plan handles GEMMs. The engine derives the scales of this step
from the states, runs the plan, and returns the next states as the cotangents of the states.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from fp8flax._core.amax import largest_of
from fp8flax._core.axes import sum_to_axes
from fp8flax._core.names import RESIDUAL_NAMES
from fp8flax._core.plans.plan import Extra, Operand, Plan, Scales
from fp8flax._core.state.state import ScalingState, next_state, state_to_keep
from fp8flax._core.tracing import traced_once

_, _, _SCALING_NAME = RESIDUAL_NAMES


def named_scaling(numbers: Any) -> Any:
    """Returns scales or amaxes under the ``checkpoint_name`` that policies of ``jax.checkpoint`` use."""
    return jax.tree.map(partial(checkpoint_name, name=_SCALING_NAME), numbers)


class _Residuals(NamedTuple):
    """The residuals of an op: what the forward pass keeps for the backward pass."""

    of_plan: Any
    """The residuals that the plan returned."""
    extra: Extra
    scales: Scales
    amaxes: dict[str, jax.Array]
    """The partial amaxes of the tensors that the forward pass quantizes."""
    states: dict[str, ScalingState | None]
    """The state of each tensor with delayed scaling; None if the state has a digest, see
    ``state_to_keep``."""


# The derivatives of the operands are straight-through: a contraction is linear in each operand, and
# quantizing counts as the identity. The cotangents of the states are not derivatives, but the next states.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def run(
    plan: Plan, operands: tuple[jax.Array, ...], extra: Extra, states: dict[str, ScalingState]
) -> jax.Array:
    """Returns the result of a plan; the "gradients" of the states are the next states.

    Args:
        plan: the op to compute.
        operands: the arrays that get gradients.
        extra: further arrays, which get no gradients.
        states: the state of each tensor with delayed scaling.
    """
    return plan.primal(operands, extra, plan.scales(states))


@traced_once
def _run_fwd(
    plan: Plan, operands: tuple[jax.Array, ...], extra: Extra, states: dict[str, ScalingState]
) -> tuple[jax.Array, _Residuals]:
    """Runs the forward pass of the plan; returns its result and the residuals."""
    scales = named_scaling(plan.scales(states))
    out, of_plan, amaxes = plan.forward(operands, extra, scales)
    kept = {name: state_to_keep(state) for name, state in states.items()}
    return out, _Residuals(of_plan, extra, scales, amaxes, kept)


@traced_once
def _run_bwd(plan: Plan, residuals: _Residuals, g: jax.Array) -> Any:
    """Runs the backward pass of the plan; returns the cotangents of operands, extra (None) and states."""
    of_plan, extra, scales, amaxes, states = residuals
    grads, more_amaxes = plan.backward(of_plan, extra, scales, g)
    amaxes = {**amaxes, **more_amaxes}
    largest = dict(zip(amaxes, largest_of(list(amaxes.values()))))
    new = {name: next_state(largest[name], scales[name], state) for name, state in states.items()}
    return tuple(map(_as_operand, grads, plan.operands)), None, new


def _as_operand(grad: jax.Array, operand: Operand) -> jax.Array:
    """Returns a cotangent with the dtype, manual axes and sharding of its operand, as JAX requires."""
    # Inside shard_map, the cotangent of a replicated operand is the sum of the cotangents of all devices.
    grad = sum_to_axes(grad, operand.axes).astype(operand.dtype)
    if operand.sharding is not None:  # scales per row or column may have changed the sharding
        grad = jax.sharding.reshard(grad, operand.sharding)
    return grad


run.defvjp(_run_fwd, _run_bwd)

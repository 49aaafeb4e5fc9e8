"""The delayed-scaling state of one tensor: how to compute the scale of a step, and the next state.

A step derives its scale from the amaxes of earlier steps. Then the amax of this step enters the history.

Inside of a gradient, a *digest* takes the place of the scale. It has three numbers: the old scale, and the
scales of this step in e4m3fn and in e5m2. Its cotangent has the scale that was used, the amax of this step,
and zero. JAX merges the cotangents of several uses by maximum. ``tree.enter`` makes the digests of all
tensors of a model together. An op that gets a state without a digest makes one by itself. The "gradient" of
a state is always its ``next_state``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8flax._compat.max_dtype import (
    digested,
    from_max_dtype,
    is_digest,
    is_max_dtype,
    to_digest,
    to_floats,
)
from fp8flax._core.formats import fp8_max
from fp8flax._core.names import RESIDUAL_NAMES
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.scaling import amax_to_scale, is_usable, push_amax
from fp8flax._core.shapes import Float32, Shaped
from fp8flax._core.state.batching import each_alike

_, _, _SCALING_NAME = RESIDUAL_NAMES


class ScalingState(NamedTuple):
    """The delayed-scaling state of one tensor, or of several that are stacked, such as experts' kernels.

    Both arrays are float32, or ``fp32_max_grad`` in a function that is differentiated.
    """

    scale: Shaped[jax.Array, "*scale"]
    """Shape ``(1,)``, or ``(*stack, 1)`` if tensors are stacked; an op also takes a scalar. Or the digest
    in its place."""
    amax_history: Shaped[jax.Array, "*stack length"]
    """Shape ``(amax_history_len,)``, or ``(*stack, amax_history_len)``. The newest entry is at index 0."""


def check_state_dtype(where: str, x: Any) -> None:
    """Raises ``TypeError`` if a leaf of scaling state is neither float32 nor merges by maximum."""
    if not (is_max_dtype(x) or getattr(x, "dtype", None) == jnp.float32):
        got = getattr(x, "dtype", None) or type(x).__name__
        raise TypeError(
            f"The scaling state {where} must be float32; got {got}. Cast the parameters alone, or cast "
            "this leaf back with .astype(jnp.float32)."
        )


def on_device(x: Any) -> Any:
    """Returns a copy in device memory of an array in host memory, where JAX does not compute."""
    is_on_device = jax.typeof(x).memory_space == jax.memory.Space.Device
    return x if is_on_device else jax.device_put(x, jax.memory.Space.Device)


# The scale of a step.


@partial(jax.jit, static_argnums=0)
def _scale_from(quantizer: DelayedQuantizer, scale: jax.Array, amax: jax.Array) -> jax.Array:
    """Returns the scale of this step, from the old scale and the amax of earlier steps."""
    # A NaN marks a state that no step can make (see ``_train.check``): the results must be NaN, too.
    is_marked = scale != scale
    amax, old = jnp.where(is_marked, 0.0, amax), jnp.where(is_usable(scale) | is_marked, scale, 1.0)
    return amax_to_scale(amax, fp8_max(quantizer.dtype), quantizer.rounding, quantizer.margin, old)


# A digest has the scales of ``DelayedScaling()``, because a GPU computes those of all tensors in a few
# kernels (``batching.each_alike``). An op with other options reads the history.
_IN_DIGEST = {DelayedQuantizer(dtype=jnp.float8_e4m3fn): 1, DelayedQuantizer(dtype=jnp.float8_e5m2): 2}
"""The place of each quantizer's scale in a digest, whatever the length of the history."""


def digest_of(state: ScalingState) -> tuple[jax.Array, ...]:
    """Returns the three numbers of the digest of a float32 state, each in the shape of the scale."""
    largest = jnp.max(state.amax_history, -1, keepdims=True)
    return state.scale, *(_scale_from(q, state.scale, largest) for q in _IN_DIGEST)


def scale_of(quantizer: DelayedQuantizer, state: ScalingState) -> Float32[jax.Array, "*stack"]:
    """Returns the float32 scale of this step, computed from the amaxes of earlier steps.

    The shape is that of the history without its last axis. The scale has no derivative of any order.
    """
    usual_length = DelayedQuantizer.amax_history_len
    place = _IN_DIGEST.get(dataclasses.replace(quantizer, amax_history_len=usual_length))
    shape = state.amax_history.shape[:-1]
    if is_digest(state.scale) and place is not None:
        return digested(state.scale)[place].reshape(shape)
    old = lax.stop_gradient(from_max_dtype(state.scale)).reshape(shape)
    history = lax.stop_gradient(from_max_dtype(state.amax_history))
    takes_newest = quantizer.amax_compute_algo == "most_recent"
    return _scale_from(quantizer, old, history[..., 0] if takes_newest else jnp.max(history, -1))


def named_scaling(numbers: Any) -> Any:
    """Returns scales or amaxes under the ``checkpoint_name`` that policies of ``jax.checkpoint`` use."""
    return jax.tree.map(partial(checkpoint_name, name=_SCALING_NAME), numbers)


def step_scales(quantizers: Sequence[DelayedQuantizer], states: Sequence[ScalingState]) -> list[jax.Array]:
    """Returns ``scale_of`` each state to an op, which returns the amaxes of all of them, or of none.

    An amax is the cotangent of its scale, after ``merge_amax``. Then the "gradient" of the state is its
    ``next_state``. Use the scales in one op.
    """
    with_digest = with_digests(states)
    histories = [lax.stop_gradient(from_max_dtype(state.amax_history)) for state in with_digest]
    return _step_scales(tuple(quantizers), [state.scale for state in with_digest], histories)


def with_digests(states: Sequence[ScalingState]) -> list[ScalingState]:
    """Returns states with a digest in the place of each scale; makes the missing digests together."""
    states = [ScalingState(*map(on_device, state)) for state in states]
    missing = [state for state in states if not is_digest(state.scale)]
    if not missing:  # tracing a function with a derivative of its own costs time, also for no states
        return states
    floats = [ScalingState(*map(to_floats, state)) for state in missing]
    made = iter(digests([x._replace(scale=x.scale.reshape(*x.amax_history.shape[:-1], 1)) for x in floats]))
    return [x if is_digest(x.scale) else x._replace(scale=next(made)) for x in states]


Scales = list[jax.Array]


@partial(jax.jit, static_argnums=0)
def _read_scales(quantizers: tuple[DelayedQuantizer, ...], digests: Scales, histories: Scales) -> Scales:
    """Returns the scales of this step."""
    states = map(ScalingState, digests, histories)
    return named_scaling([scale_of(quantizer, state) for quantizer, state in zip(quantizers, states)])


_step_scales = jax.custom_vjp(_read_scales, nondiff_argnums=(0,))


@partial(jax.jit, static_argnums=0)
def _step_scales_bwd(quantizers: Any, scales: Scales, amaxes: Scales) -> tuple[Scales, None]:
    """Returns the cotangents of the digests: the scales and the amaxes of this step."""
    numbers = [(x[..., None] for x in (s, a, jnp.zeros_like(s))) for s, a in zip(scales, amaxes)]
    return [to_digest(*three) for three in numbers], None


# The scales are the residuals, too.
_step_scales.defvjp(lambda quantizers, *states: (_read_scales(quantizers, *states),) * 2, _step_scales_bwd)


# The state after a step.


# The backward rule computes no derivative: the cotangent of a state is its next value.
@jax.custom_vjp
def digests(states: list[ScalingState]) -> list[jax.Array]:
    """Returns the digests of float32 states; the "gradients" of the states are the next states."""
    # Each digest is an array of its own. XLA for GPUs would need one kernel per tensor to split an array of
    # all digests.
    return [to_digest(*numbers) for numbers in each_alike(digest_of, states)]


def next_states(states: Sequence[ScalingState], cotangents: Sequence[jax.Array]) -> list[ScalingState]:
    """Returns the states after a step, from the cotangents of their digests."""
    numbers = zip(*(digested(g, 2) for g in cotangents))
    return each_alike(next_state, states, *numbers, in_parts=True)


digests.defvjp(lambda states: (digests(states), states), lambda states, g: (next_states(states, g),))


def next_state(old: ScalingState, scale: jax.Array, amax: jax.Array) -> ScalingState:
    """Returns the state after a step, from its scale and amax, both in the shape of the old scale."""
    return kept_state(old, ScalingState(scale, push_amax(amax[..., 0], old.amax_history)))


def kept_state(old: ScalingState, new: ScalingState) -> ScalingState:
    """Returns ``new`` where it is valid, and ``old`` elsewhere; each of several stacked tensors by itself.

    If the scale is not positive and finite, no gradient arrived: the old state is kept. If the newest amax
    is not finite, the data held a NaN or an Inf, or were empty: the old history is kept.
    """
    has_gradient = lax.is_finite(new.scale) & (new.scale > 0)
    newest = new.amax_history[..., :1]
    enters = has_gradient & lax.is_finite(newest) & (newest >= 0)
    return ScalingState(
        jnp.where(has_gradient, new.scale, old.scale),
        jnp.where(enters, new.amax_history, old.amax_history),
    )


@partial(jax.jit, static_argnums=0)
def calibrated_state(
    quantizer: DelayedQuantizer, old: ScalingState, amax: Float32[jax.Array, "*scale"]
) -> ScalingState:
    """Returns the state after calibration, with the scale that the next training step uses.

    So the scale follows from ``amax``. In a training step it follows from earlier amaxes only. The amax is
    that of all data, in the shape of the scale. It is -inf without data: the state is kept.
    """
    fresh = ScalingState(jnp.ones_like(old.scale), jnp.zeros_like(old.amax_history))
    history = next_state(fresh, fresh.scale, amax).amax_history
    scale = scale_of(quantizer, fresh._replace(amax_history=history))[..., None]
    return jax.tree.map(partial(jnp.where, amax > -jnp.inf), ScalingState(scale, history), old)

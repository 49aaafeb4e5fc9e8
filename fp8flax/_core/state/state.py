"""The delayed-scaling state of one tensor: how to compute the scale of a step, and the next state.

A step derives its scale from the amaxes of earlier steps. Then the amax of this step enters the history.

Inside of a gradient, a ``Digest`` takes the place of the scale. It holds the scale of this step. Its
cotangent holds the scale that was used and the amax of this step, and JAX merges the cotangents of several
uses by maximum. ``tree.enter`` makes the digests of all tensors of a model together. An op that gets a
state without a digest makes one by itself. The "gradient" of a state is always its ``next_state``.

One state may also belong to several tensors that are stacked, such as the kernels of experts. The scale,
the history and the amax then have leading dimensions, and each tensor has its own scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
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
from fp8flax._core.scaling import (
    compute_scale,
    is_usable,
    power_of_two,
    push_amax,
    scale_exponent,
)
from fp8flax._core.shapes import Float32, Shaped

_, _, _SCALING_NAME = RESIDUAL_NAMES


class ScalingState(NamedTuple):
    """The delayed-scaling state of one tensor, or of several that are stacked."""

    scale: Shaped[jax.Array, "*scale"]
    """Shape ``(1,)``, or ``(*stack, 1)`` if tensors are stacked; an op also takes a scalar. Its dtype is
    float32, or ``fp32_max_grad`` inside a differentiated function.

    Inside ``fp8flax.value_and_grad`` a digest takes the place of the scale, see ``Digest``."""
    amax_history: Shaped[jax.Array, "*stack length"]
    """Shape ``(amax_history_len,)``, or ``(*stack, amax_history_len)`` if tensors are stacked. The newest
    entry is at index 0. Its dtype is float32, or ``fp32_max_grad`` inside a differentiated function."""


def is_state_dtype(x: Any) -> bool:
    """Returns whether a leaf of scaling state has a valid dtype: float32, or one that merges by maximum."""
    return is_max_dtype(x) or getattr(x, "dtype", None) == jnp.float32


class DelayedConfig(NamedTuple):
    """The static options of a cast with delayed scaling (hashable)."""

    compute_dtype: Any
    """The dtype of the division by the scale in ``in_qdq`` and ``out_qdq``; recipes use float32."""
    q_dtype: Any
    margin: int = 0
    amax_compute_algo: str = "max"
    power_2: bool = False


def delayed_config(quantizer: DelayedQuantizer) -> DelayedConfig:
    """Returns the static options of a quantizer with delayed scaling."""
    return DelayedConfig(
        np.float32,
        quantizer.dtype,
        quantizer.margin,
        quantizer.amax_compute_algo,
        quantizer.use_power_2_scales,
    )


class Digest(NamedTuple):
    """Three numbers that take the place of a scale; each has the shape of the scale.

    The digest has the scales of ``DelayedScaling()``, because a GPU computes those of all tensors in a few
    kernels (``batching.each_alike``). An op with other options reads the history.
    """

    scale: jax.Array
    """The old scale. In the cotangent of a digest: the scale of this step."""
    e4m3fn: jax.Array
    """The scale of this step in e4m3fn. In the cotangent of a digest: the amax of this step."""
    e5m2: jax.Array
    """The scale of this step in e5m2. In the cotangent of a digest: zero."""


_IN_DIGEST = [DelayedConfig(np.float32, np.dtype(d)) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2)]
"""The options for which a digest holds the scale, in its order."""


def digest_of(state: ScalingState) -> Digest:
    """Returns the digest of a float32 state."""
    largest = jnp.max(state.amax_history, -1, keepdims=True)
    return Digest(state.scale, *(_scale_from(config, state.scale, largest) for config in _IN_DIGEST))


@partial(jax.jit, static_argnums=0)
def _scale_from(config: DelayedConfig, scale: jax.Array, amax: jax.Array) -> jax.Array:
    """Returns the scale of this step, from the old scale and the amax of earlier steps."""
    new_scale = compute_scale(amax, scale, fp8_max(config.q_dtype), config.margin)
    if config.power_2:
        rounded = power_of_two(scale_exponent(amax, fp8_max(config.q_dtype), "up", config.margin))
        new_scale = jnp.where(is_usable(amax), rounded, new_scale)
    # A NaN marks a state that no step can make (see ``_train.check``): the results must be NaN, too.
    return jnp.where(scale == scale, new_scale, scale)


def scale_of(config: DelayedConfig, state: ScalingState) -> Float32[jax.Array, "*stack"]:
    """Returns the float32 scale of this step, computed from the amaxes of earlier steps.

    Args:
        config: the options of the cast.
        state: the state, with a history of shape ``(..., length)``.

    Returns:
        The scale, shape ``(...)``. It has no derivative of any order.
    """
    shape = state.amax_history.shape[:-1]
    if is_digest(state.scale) and config in _IN_DIGEST:
        return digested(state.scale)[1 + _IN_DIGEST.index(config)].reshape(shape)
    old = lax.stop_gradient(from_max_dtype(state.scale)).reshape(shape)
    history = lax.stop_gradient(from_max_dtype(state.amax_history))
    takes_newest = config.amax_compute_algo == "most_recent"
    return _scale_from(config, old, history[..., 0] if takes_newest else jnp.max(history, -1))


def scales_of(
    configs: Mapping[str, DelayedConfig], states: Mapping[str, ScalingState]
) -> dict[str, jax.Array]:
    """Returns the scale of this step for several tensors, by name; see ``scale_of``."""
    return {name: scale_of(config, states[name]) for name, config in configs.items()}


def named_scaling(numbers: Any) -> Any:
    """Returns scales or amaxes under the ``checkpoint_name`` that policies of ``jax.checkpoint`` use."""
    return jax.tree.map(partial(checkpoint_name, name=_SCALING_NAME), numbers)


def step_scales(
    configs: Mapping[str, DelayedConfig], states: Mapping[str, ScalingState]
) -> dict[str, jax.Array]:
    """Returns the scale of this step for several tensors, by name, to an op that is differentiated.

    Use each scale in one op. In the backward pass the op returns the amax of the tensor, after
    ``merge_amax``, in the place of the cotangent of the scale. Then the "gradient" of the state is its
    ``next_state``.

    Args:
        configs: the options of the cast of each tensor.
        states: the state of each tensor.
    """
    if not configs:
        return {}
    digests = {name: _digest_in(states[name]) for name in configs}
    # ``jax.checkpoint`` keeps the arguments of the function: histories that it does not read are left out.
    histories = {
        name: lax.stop_gradient(from_max_dtype(states[name].amax_history))
        for name, config in configs.items()
        if config not in _IN_DIGEST
    }
    return _step_scales(tuple(configs.items()), digests, histories)


def _digest_in(state: ScalingState) -> jax.Array:
    """Returns the digest of a state; makes one if the state has none."""
    if is_digest(state.scale):
        return state.scale
    scale, history = map(to_floats, state)
    return _made_digest(ScalingState(scale.reshape(*history.shape[:-1], 1), history))


# The backward rule computes no derivative: the cotangent of a state is its next value.
@jax.custom_vjp
def _made_digest(state: ScalingState) -> jax.Array:
    """Returns the digest of a float32 state, as an array whose cotangents merge by maximum."""
    return to_digest(*digest_of(state))


def _made_digest_bwd(state: ScalingState, g: jax.Array) -> tuple[ScalingState]:
    """Returns the next state."""
    scale, amax = digested(g, 2)
    return (next_state(state, scale, amax),)


_made_digest.defvjp(lambda state: (_made_digest(state), state), _made_digest_bwd)

Configs = tuple[tuple[str, DelayedConfig], ...]


@partial(jax.jit, static_argnums=0)
def _read_scales(
    configs: Configs, digests: dict[str, jax.Array], histories: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the scales of this step, from the digests and from the histories that they need."""
    # Without a history, the digest gives the shape of the scale.
    states = {name: ScalingState(x, histories.get(name, x)) for name, x in digests.items()}
    return named_scaling(scales_of(dict(configs), states))


_step_scales = jax.custom_vjp(_read_scales, nondiff_argnums=(0,))


def _step_scales_fwd(configs: Configs, *states: Any) -> tuple[dict[str, jax.Array], Any]:
    """Returns the scales, also as residuals."""
    scales = _read_scales(configs, *states)
    return scales, scales


@partial(jax.jit, static_argnums=0)
def _step_scales_bwd(configs: Configs, scales: dict[str, jax.Array], amaxes: dict[str, jax.Array]) -> Any:
    """Returns the cotangents of the digests, each with the scale and the amax of this step."""
    del configs
    numbers = {name: (scales[name], amaxes[name], jnp.zeros_like(scales[name])) for name in scales}
    return {name: to_digest(*(x[..., None] for x in each)) for name, each in numbers.items()}, None


_step_scales.defvjp(_step_scales_fwd, _step_scales_bwd)


def next_state(old: ScalingState, scale: jax.Array, amax: jax.Array) -> ScalingState:
    """Returns the state after a step: the scale of the step, and the history with its amax.

    Args:
        old: the state before the step, float32.
        scale: the scale of the step, of the shape of the old scale. If it is not positive and finite, no
            gradient arrived: the old state is kept.
        amax: the amax of the step, of the same shape. If it is not finite, the data held a NaN or an Inf,
            or were empty: the old history is kept.
    """
    return kept_state(old, ScalingState(scale, push_amax(amax[..., 0], old.amax_history)))


def kept_state(old: ScalingState, new: ScalingState) -> ScalingState:
    """Returns ``new`` where it is valid, and ``old`` elsewhere; see ``next_state``.

    Each of several stacked tensors is checked by itself.
    """
    has_gradient = lax.is_finite(new.scale) & (new.scale > 0)
    newest = new.amax_history[..., :1]
    enters = has_gradient & lax.is_finite(newest) & (newest >= 0)
    return ScalingState(
        jnp.where(has_gradient, new.scale, old.scale),
        jnp.where(enters, new.amax_history, old.amax_history),
    )


def calibrated_state(
    config: DelayedConfig, old: ScalingState, amax: Float32[jax.Array, "*scale"]
) -> ScalingState:
    """Returns the state after calibration, with the scale that the next training step uses.

    So the scale follows from ``amax``, too. In a training step it follows from earlier amaxes only.

    Args:
        config: the options of the cast.
        old: the state before the calibration, float32.
        amax: the amax of all data, of the shape of the scale; -inf for a tensor without data, whose state
            is kept.
    """
    history = next_state(old, jnp.ones_like(old.scale), amax).amax_history
    scale = scale_of(config, ScalingState(old.scale, history))[..., None]
    return ScalingState(jnp.where(amax > -jnp.inf, scale, old.scale), history)


def as_state(scale: Any, amax_history: Any, num_stacked: int = 0) -> ScalingState:
    """Returns scale and history as a ``ScalingState`` of arrays, after a check of dtypes and shapes.

    Args:
        scale: the scale of the state.
        amax_history: the amax history of the state.
        num_stacked: the number of leading dimensions, along which tensors are stacked; 0 for one tensor.

    Raises:
        TypeError: the dtypes are wrong.
        ValueError: the shapes are wrong.
    """
    scale = scale if is_max_dtype(scale) else jnp.asarray(scale)
    amax_history = amax_history if is_max_dtype(amax_history) else jnp.asarray(amax_history)
    for name, value in (("scale", scale), ("amax_history", amax_history)):
        if not is_state_dtype(value):
            raise TypeError(
                f"{name} must be float32 (or fp32_max_grad); got {value.dtype} of shape {value.shape}. "
                "Scaling state loses its meaning in a narrower dtype: keep it out of any cast of the "
                "variables."
            )
    if is_max_dtype(scale) != is_max_dtype(amax_history):
        raise TypeError(
            f"scale and amax_history must have the same dtype; got {scale.dtype} and {amax_history.dtype}. "
            "Cast neither of them, or both."
        )
    if scale.shape[num_stacked:] not in ((), (1,)):
        raise ValueError(f"scale must be a scalar or have shape (1,); got shape {scale.shape}.")
    if amax_history.ndim != num_stacked + 1 or amax_history.shape[-1] == 0:
        raise ValueError(
            f"amax_history must have shape (length,) with length 1 or more; got {amax_history.shape}."
        )
    return ScalingState(scale, amax_history)

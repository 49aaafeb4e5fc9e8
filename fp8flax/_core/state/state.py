"""The delayed-scaling state of one tensor: how to compute the scale of a step, and the next state.

A step derives its scale from the amaxes of earlier steps. Then the amax of this step enters the history.
``step_scales`` returns the scales to an op. In the backward pass the op returns the amaxes as the
"gradients" of the scales. From these ``step_scales`` computes the next states, as the "gradients" of the
states.

A state has one of three forms. The form decides what JAX does with the "gradients" of several uses:

* float32, under plain ``jax.grad``: JAX adds them up, so the state must be used once.
* ``fp32_max_grad``, after a cast: JAX merges them by maximum. They are checked after the last use.
* A digest in the place of the scale, after ``tree.enter``: JAX merges them by maximum. The next states of
  all tensors are then computed together.

One state may also belong to several tensors that are stacked, such as the kernels of experts. The scale,
the history and the amax then have leading dimensions, and each tensor has its own scale.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8flax._compat.max_dtype import (
    DIGEST_SIZE,
    digested,
    from_max_dtype,
    is_digest,
    is_max_dtype,
    to_digest,
    to_max_dtype,
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
from fp8flax._core.shapes import Float, Float32, Shaped
from fp8flax._core.tracing import traced_once

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


USUAL = tuple(DelayedConfig(np.float32, np.dtype(d)) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2))
"""The options of ``DelayedScaling()``, first for e4m3fn, then for e5m2."""


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
    """Five numbers per tensor that determine its scale of this step; each has the shape of the old scale.

    Digests save a GPU from starting several small kernels for each tensor. ``fp8flax.value_and_grad`` knows
    the states of all tensors. It computes all digests together (``state.batching.each_alike``), and puts
    them in the place of the scales, as arrays of ``digest_dtype``.

    In the backward pass the first number of a digest's cotangent is the scale of this step, and the second
    number is the amax of this step. From them ``value_and_grad`` computes all next states together.
    """

    scale: jax.Array
    """The old scale."""
    largest: jax.Array
    """The largest amax of the history."""
    newest: jax.Array
    """The newest amax of the history."""
    e4m3fn: jax.Array
    """The scale of this step for the options ``USUAL[0]``."""
    e5m2: jax.Array
    """The scale of this step for the options ``USUAL[1]``. For all other options ``scale_of`` computes the
    scale from the first three numbers."""


def digest_of(state: ScalingState, axis: int) -> Digest:
    """Returns the digest of a float32 state whose history runs along ``axis``.

    Each number has the shape of the history, with size 1 along ``axis``.
    """
    history = state.amax_history
    axis %= history.ndim
    largest = jnp.max(history, axis, keepdims=True)
    newest = lax.slice_in_dim(history, 0, 1, axis=axis)
    usual = (scale_from(state.scale, largest, newest) for scale_from in _USUAL_SCALES)
    return Digest(state.scale, largest, newest, *usual)


def _largest_amaxes(histories: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns the largest amax of each history.

    All histories have one shape, and run along their last axis. The results do not have this axis. One
    reduction reads all histories: a GPU starts one kernel.
    """
    start = [np.float32(0)] * len(histories)
    found: Sequence[jax.Array] = lax.reduce(list(histories), start, _largest, (histories[0].ndim - 1,))
    return found


# JAX's caches compare functions by identity. If ``_largest_amaxes`` defined this function at each call, JAX
# would compile it at each call outside of jit.
def _largest(xs: Sequence[jax.Array], ys: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the elementwise maximum of two lists; the reducer of ``_largest_amaxes``."""
    return [lax.max(x, y) for x, y in zip(xs, ys)]


def scale_of(config: DelayedConfig, state: ScalingState) -> Float32[jax.Array, "*stack"]:
    """Returns the float32 scale of this step, computed from the amaxes of earlier steps.

    Args:
        config: the options of the cast.
        state: the state, with a history of shape ``(..., length)``.

    Returns:
        The scale, shape ``(...)``. It has no derivative of any order.
    """
    return scales_of({"": config}, {"": state})[""]


def scales_of(
    configs: Mapping[str, DelayedConfig], states: Mapping[str, ScalingState]
) -> dict[str, jax.Array]:
    """Returns the scale of this step for several tensors, by name; see ``scale_of``.

    If a state has no digest, its history is read here. Histories of one shape are read by one reduction.
    """
    scales: dict[str, jax.Array] = {}
    names_of_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, config in configs.items():
        shape = states[name].amax_history.shape
        if is_digest(states[name].scale):
            digest = Digest(*(number.reshape(shape[:-1]) for number in digested(states[name].scale)))
            usual = dict(zip(USUAL, (digest.e4m3fn, digest.e5m2)))
            scales[name] = usual[config] if config in usual else _scale_from(config, *digest[:3])
        else:
            names_of_shape[shape].append(name)
    for shape, names in names_of_shape.items():
        histories = [_constant(states[name].amax_history) for name in names]
        for name, history, largest in zip(names, histories, _largest_amaxes(histories)):
            old = _constant(states[name].scale).reshape(shape[:-1])
            scales[name] = _scale_from(configs[name], old, largest, history[..., 0])
    return scales


def _constant(x: jax.Array) -> jax.Array:
    """Returns a leaf of the scaling state in float32, without a derivative."""
    return lax.stop_gradient(from_max_dtype(x))


def _scale_from(
    config: DelayedConfig, scale: jax.Array, largest: jax.Array, newest: jax.Array
) -> jax.Array:
    """Returns the scale of this step, computed from the first three numbers of a digest."""
    amax = newest if config.amax_compute_algo == "most_recent" else largest
    new_scale = compute_scale(amax, scale, fp8_max(config.q_dtype), config.margin)
    if config.power_2:
        rounded = power_of_two(scale_exponent(amax, fp8_max(config.q_dtype), "up", config.margin))
        new_scale = jnp.where(is_usable(amax), rounded, new_scale)
    # A NaN marks a state that no step can make (see ``_train.check``): the results must be NaN, too.
    return jnp.where(scale == scale, new_scale, scale)


# Constants, because JAX's caches compare functions by identity.
_USUAL_SCALES = [jax.jit(partial(_scale_from, config)) for config in USUAL]


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
    return _step_scales(tuple(configs.items()), {name: states[name] for name in configs}) if configs else {}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def _step_scales(
    configs: tuple[tuple[str, DelayedConfig], ...], states: dict[str, ScalingState]
) -> dict[str, jax.Array]:
    """Returns ``scales_of``; see ``step_scales``."""
    return scales_of(dict(configs), states)


@traced_once
def _step_scales_fwd(
    configs: tuple[tuple[str, DelayedConfig], ...], states: dict[str, ScalingState]
) -> tuple[dict[str, jax.Array], Any]:
    """Returns the scales, and the residuals: the scales, and each state that ``next_state`` needs."""
    scales = named_scaling(scales_of(dict(configs), states))
    return scales, (scales, {n: None if is_digest(state.scale) else state for n, state in states.items()})


@traced_once
def _step_scales_bwd(
    configs: tuple[tuple[str, DelayedConfig], ...], residuals: Any, amaxes: dict[str, jax.Array]
) -> tuple[dict[str, ScalingState]]:
    """Returns the next states."""
    scales, states = residuals
    return ({name: next_state(amaxes[name], scales[name], states[name]) for name, _ in configs},)


_step_scales.defvjp(_step_scales_fwd, _step_scales_bwd)


def kept_state(old: ScalingState, new: ScalingState, newest: jax.Array) -> ScalingState:
    """Returns the state after a step: the new state where it is valid, and the old state elsewhere.

    A new scale that is not positive and finite means that no gradient arrived: the old state is kept. An
    amax that is not finite means that the data held a NaN or an Inf, or were empty: the old history is
    kept. For stacked tensors each tensor is checked separately.

    Args:
        old: the state before the step, float32.
        new: the state that the step produced, of the same shapes.
        newest: the amax of the step. It broadcasts with scale and history.
    """
    has_gradient = lax.is_finite(new.scale) & (new.scale > 0)
    enters = has_gradient & lax.is_finite(newest) & (newest >= 0)
    return ScalingState(
        jnp.where(has_gradient, new.scale, old.scale),
        jnp.where(enters, new.amax_history, old.amax_history),
    )


def next_state(
    amax: Float[jax.Array, "*stack"],
    new_scale: Float32[jax.Array, "*scale"],
    state: ScalingState | None,
) -> ScalingState:
    """Returns the cotangents of scale and history: the next state, or what it is computed from.

    If a state is used several times, JAX combines its cotangents. So the result depends on the state:

    * A float32 state: the cotangents are the next state, checked by ``kept_state``. JAX adds them up, so
      the state must be used once.
    * A state in ``fp32_max_grad``: the cotangents are the new scale and history, which JAX merges by
      maximum. ``kept_state`` checks them after the merge.
    * A state with a digest, passed as None: the cotangent of the digest holds the new scale and the amax,
      which JAX merges by maximum. The next state is computed from them at the end of the gradient.

    Args:
        amax: the amax of this step, of shape ``(...)``, after ``merge_amax``. An amax of inf marks a NaN or
            an Inf in the data, and wins every merge. An amax of -inf marks empty data, and loses.
        new_scale: the scale of this step, float32, with as many elements as ``amax``.
        state: the state before this step, with a history of shape ``(..., length)``; None if it has a
            digest. The history then has no cotangent.
    """
    if state is None:
        return _cotangent_of_digest(amax, new_scale)
    if is_max_dtype(state.scale):
        return _merging_state(amax, new_scale, state)
    return _float32_state(amax, new_scale, state)


def _float32_state(amax: jax.Array, new_scale: jax.Array, state: ScalingState) -> ScalingState:
    """Returns the next state of a float32 state."""
    new_scale, history = new_scale.reshape(state.scale.shape), state.amax_history
    pushed = ScalingState(new_scale, push_amax(amax, history))
    # ``scale_of`` returns only positive, finite scales, so the new scale is always kept. The old scale is
    # not read, because a GPU would need further kernels for it.
    return kept_state(ScalingState(new_scale, history), pushed, amax[..., None])


def _merging_state(amax: jax.Array, new_scale: jax.Array, state: ScalingState) -> ScalingState:
    """Returns the cotangents of a state in ``fp32_max_grad``: the new scale and history, unchecked."""
    pushed = push_amax(amax, from_max_dtype(state.amax_history))
    # Every entry of the history must lose the merge by maximum if the data were empty.
    pushed = jnp.where((amax == -jnp.inf)[..., None], -jnp.inf, pushed)
    return ScalingState(to_max_dtype(new_scale.reshape(state.scale.shape)), to_max_dtype(pushed))


def _cotangent_of_digest(amax: jax.Array, new_scale: jax.Array) -> ScalingState:
    """Returns the cotangent of a digest, which holds the new scale and the amax; None for the history."""
    numbers = new_scale.reshape(amax.shape), amax
    unused = [jnp.zeros_like(amax)] * (DIGEST_SIZE - len(numbers))
    return ScalingState(to_digest(*(x[..., None] for x in (*numbers, *unused))), None)  # type: ignore


def state_after(old: ScalingState, numbers: tuple[jax.Array, jax.Array], axis: int) -> ScalingState:
    """Returns the state after a step in which the state had a digest.

    Args:
        old: the state before the step, float32.
        numbers: the scale and the amax of the step, from the cotangent of the digest. Each has the shape of
            the scale in ``old``.
        axis: the axis of the history that holds the past amaxes.
    """
    new_scale, amax = numbers
    moved = push_amax(lax.squeeze(amax, (axis,)), jnp.moveaxis(old.amax_history, axis, -1))
    return kept_state(old, ScalingState(new_scale, jnp.moveaxis(moved, -1, axis)), amax)


def calibrated_state(
    config: DelayedConfig, axis: int, old: ScalingState, amax: Float32[jax.Array, "*scale"]
) -> ScalingState:
    """Returns the state after calibration, with the scale that the next training step uses.

    So the scale follows from ``amax``, too. In a training step it follows from earlier amaxes only.

    Args:
        config: the options of the cast.
        axis: the axis of the history that holds the past amaxes.
        old: the state before the calibration, float32.
        amax: the amax of all data, of the shape of the scale; -inf for a tensor without data, whose state
            is kept.
    """
    history = jnp.moveaxis(old.amax_history, axis, -1)
    moved = push_amax(amax.reshape(history.shape[:-1]), history)
    scale = scale_of(config, ScalingState(old.scale, moved)).reshape(old.scale.shape)
    has_data = amax > -jnp.inf
    return ScalingState(
        jnp.where(has_data, scale, old.scale),
        jnp.where(has_data, jnp.moveaxis(moved, -1, axis), old.amax_history),
    )


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

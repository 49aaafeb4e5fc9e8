"""The fixed scales of frozen models, and the recipe of models with only their weights in FP8."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, state_leaf_names
from fp8flax._core.op_base import MissingStateError
from fp8flax._core.quantizers import CurrentQuantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe
from fp8flax._core.state.state import ScalingState, delayed_config, scale_of
from fp8flax._core.state.tree import history_axis
from fp8flax._serve.trees import Path

WEIGHT_ONLY = CustomRecipe(
    forward=GemmRecipe(rhs=CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise"))
)


@jax.custom_jvp
def constant(x: jax.Array) -> jax.Array:
    """Returns codes or scales unchanged; differentiating them raises ``TypeError``."""
    return x


@constant.defjvp
def _constant_jvp(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise TypeError(
        "The FP8 kernels and the scales of a frozen model have no gradient. Differentiate with respect to "
        "the inputs, or to wide parameters only, with the other variables closed over. To train the "
        "kernels, train the model that was frozen."
    )


def fixed_scales(
    path: Path, gemms: CustomRecipe, state: Mapping[str, Any], fresh: list[str]
) -> dict[str, jax.Array]:
    """Returns the scales of input and kernel in the next forward pass, for delayed quantizers only.

    Args:
        path: the path of the op.
        gemms: the recipe of the op.
        state: the collection of all scaling state.
        fresh: a list; the names of scales that have seen no data are appended to it.

    Raises:
        MissingStateError: the collection does not have the state of the op.
    """
    scales = {}
    for role, used in (("input", gemms.forward.lhs), ("kernel", gemms.forward.rhs)):
        quantizer = gemms.delayed.get(role)
        if quantizer is None or used is None or not used.needs_state:
            continue
        node = state
        for name in path:
            node = node.get(name, {})
        names = state_leaf_names(role)
        if not all(name in node for name in names):
            raise MissingStateError(
                f"{OVERWRITE_WITH_GRADIENT}/{'/'.join((*path, names[0]))} is missing from the variables: "
                "freeze needs the scales that training or fp8flax.calibrate left, or fresh ones from "
                "fp8flax.add_fp8_state."
            )
        scale, history = (jnp.asarray(node[name]) for name in names)
        if not isinstance(history, jax.core.Tracer) and not np.any(jax.device_get(history)):
            fresh.append("/".join((*path, names[0])))
        scales[role] = _next(quantizer, scale, history)
    return scales


@functools.partial(jax.jit, static_argnums=0)
def _next(quantizer: Any, scale: jax.Array, history: jax.Array) -> jax.Array:
    """Returns the next scale of a state; for stacked states the next scale of each."""
    axis = history_axis(scale, history)
    if axis is None:
        raise ValueError(
            f"A scale of shape {scale.shape} and an amax history of shape {history.shape} do not fit: they "
            "must have the same shape, but for one axis, where the scale has size 1."
        )
    scales, histories = (jnp.moveaxis(x, axis, -1) for x in (scale, history))
    states = ScalingState(scales.reshape(-1, 1), histories.reshape(-1, history.shape[axis]))
    next_scales = jax.vmap(functools.partial(scale_of, delayed_config(quantizer)))(states)
    return jnp.moveaxis(next_scales.reshape(scales.shape), -1, axis)

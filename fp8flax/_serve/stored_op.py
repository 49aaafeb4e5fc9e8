"""Quantizes the kernel of one op for a frozen model, fixes its scales, and computes the op with them.

Linen and NNX find the ops of a model, and put the stored arrays into it, each in its own way.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.autocast import ambient_hint
from fp8flax._core.formats import fp8_max
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, state_leaf_names
from fp8flax._core.op_base import MissingStateError
from fp8flax._core.ops.modes import packed_kernel
from fp8flax._core.ops.row import OpRow
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantize import quantize
from fp8flax._core.quantizers import CurrentQuantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe, Recipe
from fp8flax._core.scaling import current_scale, finite_amax
from fp8flax._core.state.state import ScalingState, delayed_config, scale_of
from fp8flax._core.state.tree import history_axis
from fp8flax._serve.trees import Path

FROZEN = (
    "model must be a model in training; it is frozen already. Pass the original model, or write the frozen "
    "one with save_safetensors."
)
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
    next_scales = scale_of(delayed_config(quantizer), ScalingState(scales, histories))
    return jnp.moveaxis(next_scales[..., None], -1, axis)


def stored_kernel(
    row: OpRow, recipe: CustomRecipe, lhs: Any, arguments: Any, kernel: jax.Array, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes and the scale of a kernel as a frozen model stores them.

    Args:
        row: the entry that describes this kind of op; see ``plans.row``.
        recipe: the recipe of the op in the frozen model.
        lhs: the shape and dtype of the input.
        arguments: the arguments of the op after input and kernel.
        kernel: the kernel, a wide float.
        scale: the scale of the kernel if it is delayed; otherwise None.
    """
    quantizer = recipe.forward.rhs
    assert quantizer is not None
    if row.plan is not None:
        packed = packed_kernel(row.plan(lhs, kernel, *arguments, recipe=recipe), kernel, scale)
        # A scalar scale is stored in the shape (1,), as the scaling state has it.
        return packed.codes, packed.scale if packed.scale.ndim else packed.scale.reshape((1,))
    if scale is not None:
        return quantize(kernel, quantizer.dtype, broadcastable(scale, kernel)), scale
    # Weight-only: one scale for each output feature of each stacked kernel.
    axes = tuple(range(1 if row.stacked else 0, kernel.ndim - 1))
    scale = current_scale(finite_amax(kernel, axes), fp8_max(quantizer.dtype))
    return quantize(kernel, quantizer.dtype, scale), scale


def broadcastable(scale: jax.Array, kernel: jax.Array) -> jax.Array:
    """Reshapes a scale of a state, ``(..., 1)``, to as many dimensions as the kernel has."""
    if scale.ndim == kernel.ndim:
        return scale
    return scale.reshape((*scale.shape[:-1], *(1,) * (kernel.ndim - scale.ndim + 1)))


def computed(
    row: OpRow,
    recipe: CustomRecipe,
    codes: jax.Array,
    kernel_scale: jax.Array,
    input_scale: jax.Array | None,
    lhs: jax.Array,
    rhs: jax.Array,
    *arguments: Any,
    **keywords: Any,
) -> jax.Array:
    """Returns the result of an op whose kernel is stored.

    Args:
        row: the entry that describes this kind of op; it has a plan.
        recipe: the recipe of the op in the frozen model.
        codes: the codes of the kernel.
        kernel_scale: the scales of the kernel.
        input_scale: the fixed scale of the input; None if the recipe has none.
        lhs: the input.
        rhs: an array of the shape and dtype of the kernel; its values are not read.
        *arguments: the arguments of the op after input and kernel.
        **keywords: further arguments of the op.
    """
    # ``stored_kernel`` gives a scalar scale the shape (1,).
    scale = kernel_scale.reshape(()) if kernel_scale.shape == (1,) else kernel_scale
    return row.in_fp8(
        lhs,
        rhs,
        *arguments,
        stored_kernel=QTensor(constant(codes), constant(scale), recipe.forward.rhs),
        input_scale=None if input_scale is None else constant(input_scale),
        recipe=recipe,
        **keywords,
    )


def check_can_freeze() -> None:
    """Raises ``ValueError`` if FP8 is switched off where ``freeze`` is called."""
    if hint := ambient_hint():
        raise ValueError(f"A model cannot be frozen while FP8 is off.{hint}")


def check_is_on(recipe: Recipe | None) -> None:
    """Raises ``ValueError`` if FP8 is switched off where a frozen model runs, so there is no recipe."""
    if recipe is None:
        raise ValueError(
            "fp8flax.autocast(enabled=False) cannot turn FP8 off in a frozen model, whose kernels are "
            "stored in FP8. Call it outside of that context, or call the original model."
        )


def warn_of(wide: Mapping[str, str], fresh: list[str], calibrate: str) -> None:
    """Warns the caller of ``freeze`` of kernels that stay wide, and of scales that have seen no data.

    Args:
        wide: the reason for each kernel of an FP8 op that stays wide, by the path of the kernel or its op.
        fresh: the names of the scales that have seen no data.
        calibrate: the call that calibrates the model.
    """
    if wide:
        text = "; ".join(f"{path} ({reason})" for path, reason in sorted(wide.items()))
        warnings.warn(f"These kernels of FP8 ops stay wide: {text}.", stacklevel=3)
    if fresh:
        warnings.warn(
            f"These scales are frozen although they have seen no data: {', '.join(fresh)}. To take them "
            f"from sample batches, call {calibrate} before freeze.",
            stacklevel=3,
        )

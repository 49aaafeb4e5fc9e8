"""Quantizes the kernel of one op for a frozen model, and computes the op with the stored kernel.

Linen and NNX find the ops of a model, and put the stored arrays into it, each in its own way.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp8flax._core.autocast import ambient_hint
from fp8flax._core.formats import fp8_max
from fp8flax._core.plans.modes import packed_kernel
from fp8flax._core.plans.row import OpRow
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantize import quantize
from fp8flax._core.recipes import CustomRecipe, Recipe
from fp8flax._core.scaling import current_scale, finite_amax
from fp8flax._serve.scales import constant, fixed_scales
from fp8flax._serve.trees import Path

FROZEN = (
    "model must be a model in training; it is frozen already. Pass the original model, or write the frozen "
    "one with save_safetensors."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpToFreeze:
    """An op of a model that is frozen.

    Attributes:
        path: the path of the op in the scaling state.
        row: the entry that describes this kind of op; see ``plans.row``.
        gemms: the recipe of the op in the frozen model.
        lhs: the shape and dtype of the input.
        arguments: the arguments of the op after input and kernel.
        parameter: the parameter that is the kernel; None if the kernel stays wide.
        kernel: maps the parameter to the kernel, which may be transposed or reshaped.
        into_parameter: the inverse of ``kernel``, for bytes.
        mapped: maps a function of the parameter and the scales, by role, over the axes along which layers
            are stacked. The results are stacked as the parameter is.
    """

    path: Path
    row: OpRow
    gemms: CustomRecipe
    lhs: Any
    arguments: tuple[Any, ...]
    parameter: Any
    kernel: Callable[[jax.Array], jax.Array]
    into_parameter: Callable[[jax.Array], jax.Array]
    mapped: Callable[[Callable[..., Any]], Callable[..., Any]]


class Stored(NamedTuple):
    """The arrays that a frozen model stores for an op."""

    codes: jax.Array | None
    """The FP8 codes, in the shape of the parameter; None if the kernel stays wide."""
    scales: dict[str, jax.Array]
    """The scales that do not change, by role."""


def stored(op: OpToFreeze, state: Mapping[str, Any], fresh: list[str]) -> Stored:
    """Returns what a frozen model stores for an op.

    Args:
        op: the op.
        state: the collection of all scaling state.
        fresh: a list; the names of scales that have seen no data are appended to it.

    Raises:
        MissingStateError: the collection does not have the state of the op.
    """
    scales = fixed_scales(op.path, op.gemms, state, fresh)
    parameter = None if op.parameter is None else jnp.asarray(op.parameter)
    if parameter is None and not scales:
        return Stored(None, {})

    def of_one(parameter: jax.Array | None, scales: dict[str, jax.Array]) -> Stored:
        if parameter is None:
            return Stored(None, scales)
        kernel = _quantized(op, op.kernel(parameter), scales.get("kernel"))
        scale = kernel.scale.reshape((1,)) if kernel.scale.ndim == 0 else kernel.scale
        codes = op.into_parameter(jax.lax.bitcast_convert_type(kernel.codes, jnp.uint8))
        codes = jax.lax.bitcast_convert_type(codes, kernel.codes.dtype)
        return Stored(codes, {**scales, "kernel": scale})

    result: Stored = jax.jit(op.mapped(of_one))(parameter, scales)
    return result


def _quantized(op: OpToFreeze, kernel: jax.Array, scale: jax.Array | None) -> QTensor:
    """Returns a kernel in FP8: codes in the shape of the kernel, and scales by the recipe."""
    if op.row.plan is not None:
        return packed_kernel(op.row.plan(op.lhs, kernel, *op.arguments, recipe=op.gemms), kernel, scale)
    quantizer = op.gemms.forward.rhs
    assert quantizer is not None
    if scale is None:  # weight-only: one scale for each output feature of each stacked kernel
        axes = tuple(range(1 if op.row.stacked else 0, kernel.ndim - 1))
        scale = current_scale(finite_amax(kernel, axes), fp8_max(quantizer.dtype))
        return QTensor(quantize(kernel, quantizer.dtype, scale), scale, quantizer)
    return QTensor(quantize(kernel, quantizer.dtype, broadcastable(scale, kernel)), scale, quantizer)


def broadcastable(scale: jax.Array, kernel: jax.Array) -> jax.Array:
    """Reshapes a scale of a state, ``(..., 1)``, to as many dimensions as the kernel has."""
    if scale.ndim == kernel.ndim:
        return scale
    return scale.reshape((*scale.shape[:-1], *(1,) * (kernel.ndim - scale.ndim + 1)))


def computed(
    row: OpRow,
    recipe: CustomRecipe,
    kernel: QTensor,
    input_scale: Callable[[], jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    *arguments: Any,
    **keywords: Any,
) -> jax.Array:
    """Returns the result of an op whose kernel is stored.

    Args:
        row: the entry that describes this kind of op; it has a plan.
        recipe: the recipe of the op in the frozen model.
        kernel: the stored codes and scales.
        input_scale: returns the scale of the input. It is called only if the recipe takes this scale from
            the scaling state.
        lhs: the input.
        rhs: an array of the shape and dtype of the kernel; its values are not read.
        *arguments: the arguments of the op after input and kernel.
        **keywords: further arguments of the op.
    """
    # ``stored`` gives a scalar scale the shape (1,).
    scale = kernel.scale.reshape(()) if kernel.scale.shape == (1,) else kernel.scale
    is_fixed = recipe.forward.lhs is not None and recipe.forward.lhs.needs_state
    return row.in_fp8(
        lhs,
        rhs,
        *arguments,
        stored_kernel=dataclasses.replace(kernel, scale=scale),
        input_scale=constant(input_scale()) if is_fixed else None,
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


def warn_of_wide(reasons: Mapping[str, str]) -> None:
    """Warns the caller of ``freeze`` of FP8 ops whose kernels stay wide.

    Args:
        reasons: the reason for each kernel, by the path of the kernel or of its op.
    """
    if reasons:
        text = "; ".join(f"{path} ({reason})" for path, reason in sorted(reasons.items()))
        warnings.warn(f"These kernels of FP8 ops stay wide: {text}.", stacklevel=3)


def warn_of_fresh(fresh: list[str], calibrate: str) -> None:
    """Warns the caller of ``freeze`` of scales that have seen no data.

    Args:
        fresh: the names of the scales.
        calibrate: the call that calibrates the model.
    """
    if fresh:
        warnings.warn(
            f"These scales are frozen although they have seen no data: {', '.join(fresh)}. To take them "
            f"from sample batches, call {calibrate} before freeze.",
            stacklevel=3,
        )

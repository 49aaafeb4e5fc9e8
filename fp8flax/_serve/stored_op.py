"""Freezes and computes one op: its kernel is stored in FP8, and its scales no longer change.

Linen and NNX find the ops of a model, and put the stored arrays into it, each in its own way. All that
depends on how the core represents a stored kernel and its scale is in this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, state_leaf_names
from fp8flax._core.ops.dot_general import packed_kernel
from fp8flax._core.ops.op import MissingStateError
from fp8flax._core.ops.row import OpRow
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantizers import CurrentQuantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe, Recipe
from fp8flax._core.state.state import ScalingState, scale_of
from fp8flax._core.state.tree import history_axis

Path = tuple[str, ...]
Scales = dict[str, jax.Array]
"""The scales of an op, by their names in the variables."""

INPUT_SCALE, KERNEL_SCALE = (state_leaf_names(role)[0] for role in ("input", "kernel"))
WEIGHT_ONLY = CustomRecipe(
    forward=GemmRecipe(rhs=CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise"))
)


DAMAGED = "The frozen scales are computed from it. Call calibrate before freeze."
"""The advice in the warning about a scaling state that no training leaves."""


class Layout(NamedTuple):
    """The dimensions of a kernel, counted without those by which layers are stacked."""

    out: tuple[int, ...]
    """The dimensions of the output."""
    summed: tuple[int, ...]
    """The dimensions that the matmul sums over."""


class ServedOp(NamedTuple):
    """Description of an op in a frozen model (hashable)."""

    path: Path
    gemms: CustomRecipe
    kernel: Path | None = None
    """The path of the parameter in FP8 that is the kernel; None if the kernel is wide."""
    layout: Layout | None = None
    """The layout of the kernel; None if the kernel is wide, or the op does not read it as it is stored."""
    dtype: np.dtype | None = None
    """The dtype of the kernel that a Linen model declares."""
    scales: tuple[tuple[str, tuple[int, ...], np.dtype], ...] = ()
    """The names, shapes and dtypes of the scales of an op in a Linen model."""


# Freezing.


def delayed_scales(path: Path, gemms: CustomRecipe, state: Mapping[Path, Any], fresh: list[str]) -> Scales:
    """Returns the scales of input and kernel in the next forward pass, for delayed quantizers only.

    The names of scales that have seen no data are appended to ``fresh``.

    Raises:
        MissingStateError: the state, whose arrays have their paths as keys, does not have a scale.
    """
    scales = {}
    for role, used in (("input", gemms.forward.lhs), ("kernel", gemms.forward.rhs)):
        quantizer = gemms.delayed.get(role)
        if quantizer is None or used is None or not used.needs_state:
            continue
        name, history_name = state_leaf_names(role)
        leaves = [state.get((*path, each)) for each in (name, history_name)]
        place = "/".join((*path, name))
        if any(leaf is None for leaf in leaves):
            raise MissingStateError(
                f"{OVERWRITE_WITH_GRADIENT}/{place} is missing from the variables: freeze needs the scales "
                "that training or fp8flax.calibrate left, or fresh ones from fp8flax.add_fp8_state."
            )
        scale, history = map(jnp.asarray, leaves)
        if not isinstance(history, jax.core.Tracer) and not np.any(jax.device_get(history)):
            fresh.append(place)
        scales[name] = _next_scale(quantizer, scale, history)
    return scales


@functools.partial(jax.jit, static_argnums=0)
def _next_scale(quantizer: Any, scale: jax.Array, history: jax.Array) -> jax.Array:
    """Returns the next scale of a state; for stacked states the next scale of each."""
    axis: Any = history_axis(scale, history)
    scales, histories = (jnp.moveaxis(x, axis, -1) for x in (scale, history))
    next_scales = scale_of(quantizer, ScalingState(scales, histories))
    return jnp.moveaxis(next_scales[..., None], -1, axis)


def stored(
    row: OpRow,
    gemms: CustomRecipe,
    args: Sequence[Any],
    kernel: jax.Array,
    scales: Scales,
    axes: Sequence[int],
    *,
    into_op: Callable[[jax.Array], jax.Array],
    back: Callable[[jax.Array], jax.Array] = lambda codes: codes,
) -> tuple[jax.Array, Scales]:
    """Returns the codes of a kernel as a frozen model stores them, and the scales of its op.

    Args:
        row: the entry of this kind of op in the table of ops.
        gemms: the recipe of the op in the frozen model.
        args: the arguments of the op, with shapes instead of arrays.
        kernel: the parameter that is the kernel.
        scales: the delayed scales.
        axes: the axes by which layers are stacked in the kernel and in the results, the outermost first.
        into_op: makes the operand of the op from the parameter of one layer.
        back: moves the bytes of the codes back to the places of the parameter.
    """

    def of_one(kernel: jax.Array, scales: Scales) -> Any:
        lhs, _, *arguments = args
        plan: Any = row.plan(lhs, operand := into_op(kernel), *arguments, recipe=gemms)  # type: ignore[misc]
        packed = packed_kernel(plan, operand, scales.get(KERNEL_SCALE))
        bits = back(jax.lax.bitcast_convert_type(packed.codes, jnp.uint8))
        # A scalar scale is stored in the shape (1,), as the scaling state has it.
        scale = packed.scale if packed.scale.ndim else packed.scale.reshape((1,))
        return jax.lax.bitcast_convert_type(bits, packed.codes.dtype), {**scales, KERNEL_SCALE: scale}

    for i, axis in reversed([*enumerate(axes)]):
        of_scales = {name: _stack_axes(scale.shape)[i] - i for name, scale in scales.items()}
        of_one = jax.vmap(of_one, in_axes=(axis, of_scales), out_axes=axis)
    is_traced = isinstance(kernel, jax.core.Tracer)
    sharding = None if is_traced else getattr(kernel, "sharding", None)
    # The codes are on the devices of the parameter, if there are several.
    places = (
        {} if sharding is None or len(sharding.device_set) == 1 else {"out_shardings": (sharding, None)}
    )
    result: tuple[jax.Array, Scales] = jax.jit(of_one, **places)(kernel, scales)
    return result


def _stack_axes(shape: tuple[int, ...]) -> list[int]:
    """Returns the axes by which a delayed scale is stacked; the scale has one more axis, of size 1."""
    own = max(axis for axis, size in enumerate(shape) if size == 1)
    return [axis for axis in range(len(shape)) if axis != own]


def layout_of(row: OpRow, gemms: CustomRecipe, args: Sequence[Any]) -> Layout | None:
    """Returns the layout of a kernel that an op reads as it is stored; None if it has batch dimensions."""
    plan: Any = row.plan(*args, recipe=gemms)  # type: ignore[misc]
    (_, summed), (_, batch) = plan.dimension_numbers
    return None if batch else Layout(tuple(i for i in range(args[1].ndim) if i not in summed), summed)


# Computing.


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


def fixed(scales: Mapping[str, jax.Array]) -> Scales:
    """Returns the scales of an op that are in its variables, by role."""
    names = {"input": INPUT_SCALE, "kernel": KERNEL_SCALE}
    return {role: constant(scales[name]) for role, name in names.items() if name in scales}


def computed(
    row: OpRow,
    gemms: CustomRecipe,
    codes: jax.Array,
    scales: Mapping[str, jax.Array],
    lhs: jax.Array,
    *arguments: Any,
    **keywords: Any,
) -> jax.Array:
    """Returns the result of an op with a plan for the codes of its kernel and its scales."""
    scale = constant(scales[KERNEL_SCALE])
    # ``stored`` gives a scalar scale the shape (1,).
    kernel = QTensor(
        constant(codes), scale.reshape(()) if scale.shape == (1,) else scale, gemms.forward.rhs
    )
    return row.in_fp8(lhs, kernel, *arguments, recipe=gemms, frozen=fixed(scales), **keywords)


def check_is_on(recipe: Recipe | None) -> None:
    """Raises ``ValueError`` if FP8 is switched off where a frozen model runs, so there is no recipe."""
    if recipe is None:
        raise ValueError(
            "fp8flax.autocast(enabled=False) cannot turn FP8 off in a frozen model, whose kernels are "
            "stored in FP8. Call it outside of that context, or call the original model."
        )

"""Makes the stored form of a kernel: its scales, and its codes in the shapes of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8flax._core.formats import fp8_max
from fp8flax._core.plans.ops import packed_kernel
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantize import quantize
from fp8flax._core.recipes import CustomRecipe
from fp8flax._core.scaling import current_scale, finite_amax
from fp8flax._model.converted_call import SeenOp
from fp8flax._model.param_origin import Origin, Source
from fp8flax._serve import trees
from fp8flax._serve.trees import Path


def into_sources(kernel: Origin, values: jax.Array) -> tuple[jax.Array, ...]:
    """Moves values from the places of a kernel to the places of the parameters that it was made of.

    This is the transpose of the moves that made the kernel. Places that are not in the kernel become 0.
    Places that are in it twice become the sum of both values. The values must be whole numbers up to 256,
    which bfloat16 holds exactly.
    """
    rebuild = kernel.rebuild
    assert rebuild is not None
    like = [jax.ShapeDtypeStruct(source.shape, jnp.bfloat16) for source in kernel.sources]
    transpose = jax.linear_transpose(lambda *arrays: rebuild(arrays, False), *like)
    return tuple(x.astype(jnp.uint8) for x in transpose(values.astype(jnp.bfloat16)))


def broadcastable(scale: jax.Array, kernel: jax.Array) -> jax.Array:
    """Reshapes a scale of a state, ``(..., 1)``, to as many dimensions as the kernel has."""
    if scale.ndim == kernel.ndim:
        return scale
    return scale.reshape((*scale.shape[:-1], *(1,) * (kernel.ndim - scale.ndim + 1)))


def store(
    found: SeenOp,
    gemms: CustomRecipe,
    wide: list[Any],
    scale: jax.Array | None,
    axis: int | None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns the codes of an op's kernel, as bytes in the shapes of its parameters, and its scales.

    Args:
        found: the record of the op.
        gemms: the recipe of the op.
        wide: the parameters that the kernel is made of.
        scale: the scale of the kernel, if it is delayed; otherwise None.
        axis: the result of ``stacked_axis``.

    Raises:
        ValueError: the parameters are not stacks of the arrays in the record.
    """
    kernel = found.kernel
    assert kernel is not None
    rebuild = kernel.rebuild
    assert rebuild is not None

    def one(wide: tuple[jax.Array, ...], scale: jax.Array | None) -> tuple[Any, jax.Array]:
        stored = _quantized(found, gemms, rebuild(wide, True), scale)
        stored_scale = stored.scale.reshape((1,)) if stored.scale.ndim == 0 else stored.scale
        bits = jax.lax.bitcast_convert_type(stored.codes, jnp.uint8)
        return into_sources(kernel, bits), stored_scale

    whole, part = wide[0].shape, kernel.sources[0].shape
    each = _per_slice(one, whole, part) if axis is None else jax.vmap(one, in_axes=axis, out_axes=axis)
    if each is None:
        raise ValueError(
            f"The parameter {'/'.join(kernel.sources[0].path)} has shape {whole}, but the FP8 op of this "
            f"model takes slices of shape {part}. Pass the variables of this model."
        )
    return jax.jit(each)(tuple(map(jnp.asarray, wide)), scale)


def _quantized(found: SeenOp, gemms: CustomRecipe, kernel: jax.Array, scale: jax.Array | None) -> QTensor:
    """Returns a kernel in FP8: codes in the shape of the kernel, and scales by the recipe."""
    row, (lhs, _, *rest) = found.op.row, found.args
    if row.plan is not None:
        return packed_kernel(row.plan(lhs, kernel, *rest, recipe=gemms), kernel, scale)
    quantizer = gemms.forward.rhs
    assert quantizer is not None
    if scale is None:  # weight-only: one scale for each output feature of each stacked kernel
        axes = tuple(range(1 if row.stacked else 0, kernel.ndim - 1))
        scale = current_scale(finite_amax(kernel, axes), fp8_max(quantizer.dtype))
        return QTensor(quantize(kernel, quantizer.dtype, scale), scale, quantizer)
    return QTensor(quantize(kernel, quantizer.dtype, broadcastable(scale, kernel)), scale, quantizer)


def _per_slice(
    f: Callable[..., Any], shape: tuple[int, ...], slice_shape: tuple[int, ...]
) -> Callable[..., Any] | None:
    """Maps ``f``, which takes slices, over the additional axes of arrays of this shape.

    ``nn.scan`` and ``nn.vmap`` have stacked a layer along these axes. If several axes fit, the first is
    taken. If none fits, the result is None.
    """
    if shape == slice_shape:
        return f
    for axis in range(len(shape)):
        rest = (*shape[:axis], *shape[axis + 1 :])
        if len(rest) >= len(slice_shape):
            inner = _per_slice(f, rest, slice_shape)
            if inner is not None:
                return jax.vmap(inner, in_axes=axis, out_axes=axis)
    return None


def stacked_axis(kernel: Origin, ops: Mapping[Path, SeenOp], params: Any) -> int | None:
    """Returns the axis along which one transformation stacked a kernel's parameters; None if none did.

    If the shapes allow several axes, the other kernels in the same top-level module decide.
    """

    def candidates(source: Source) -> set[int]:
        whole = trees.get(params, source.path).shape
        if len(whole) != len(source.shape) + 1:
            return set()
        fits = [i for i in range(len(whole)) if (*whole[:i], *whole[i + 1 :]) == source.shape]
        return {*fits, *(i - len(whole) for i in fits)}

    own = set.intersection(*map(candidates, kernel.sources))
    others = (
        candidates(source)
        for found in ops.values()
        if found.kernel is not None
        for source in found.kernel.sources
        if source.path[0] == kernel.sources[0].path[0]
    )
    agreed = own.intersection(*(axes for axes in others if axes & own))
    # A scale has one dimension, so its stack axis is 0, 1 or counted from the end.
    return min(agreed or own, key=lambda axis: (axis > 1, axis < 0, abs(axis)), default=None)


def layout(found: SeenOp, whole: tuple[int, ...]) -> Any:
    """Returns the ``ServedOp.layout`` of an op whose first parameter has the shape ``whole``."""
    kernel = found.kernel
    assert kernel is not None
    shape = kernel.sources[0].shape
    is_leading = whole[len(whole) - len(shape) :] == shape
    if not (found.op.row.plan is not None and kernel.is_one_parameter and is_leading):
        return None
    _, contract, batch = found.op.row.plan(*found.args, recipe=found.gemms).views["kernel"][0]
    if batch:
        return None
    return tuple(i for i in range(len(shape)) if i not in contract), contract

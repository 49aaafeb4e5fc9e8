"""A kernel as it is stored: its scales, and its codes in the places of the parameters it is made of."""

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
from fp8flax._model.calls import SeenOp
from fp8flax._model.param_origin import Origin, Source
from fp8flax._serve import trees
from fp8flax._serve.trees import Path


def into_sources(kernel: Origin, values: jax.Array) -> tuple[jax.Array, ...]:
    """Returns values that lie as a kernel does in the places of the parameters that it was made of.

    By the transpose of what was done to them: a place of which the kernel has nothing is 0, and one that
    it has twice the sum. The values are whole numbers up to 256, which bfloat16 holds.
    """
    rebuild = kernel.rebuild
    assert rebuild is not None
    like = [jax.ShapeDtypeStruct(source.shape, jnp.bfloat16) for source in kernel.sources]
    transpose = jax.linear_transpose(lambda *arrays: rebuild(arrays, False), *like)
    return tuple(x.astype(jnp.uint8) for x in transpose(values.astype(jnp.bfloat16)))


def broadcastable(scale: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns a scale of shape ``(..., 1)``, as in states, with as many dimensions as a kernel."""
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
    """Returns the codes of an op's kernel, as bytes in the parameters' shapes, and the kernel's scales.

    Args:
        found: the op.
        gemms: its recipe.
        wide: the parameters that its kernel is made of.
        scale: the kernel's, where it is delayed.
        axis: what ``stacked_axis`` returned.

    Raises:
        ValueError: the parameters are not stacks of what the op was seen to use.
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
    """Returns an op's kernel as it is stored: codes of its shape, scales as the recipe has them."""
    row, (lhs, _, *rest) = found.op.row, found.args
    if row.plan is not None:
        return packed_kernel(row.plan(lhs, kernel, *rest, recipe=gemms), kernel, scale)
    quantizer = gemms.forward.rhs
    assert quantizer is not None
    if scale is None:  # weights alone: one scale per output feature, and per element of a stack
        axes = tuple(range(1 if row.stacked else 0, kernel.ndim - 1))
        scale = current_scale(finite_amax(kernel, axes), fp8_max(quantizer.dtype))
        return QTensor(quantize(kernel, quantizer.dtype, scale), scale, quantizer)
    return QTensor(quantize(kernel, quantizer.dtype, broadcastable(scale, kernel)), scale, quantizer)


def _per_slice(
    f: Callable[..., Any], shape: tuple[int, ...], slice_shape: tuple[int, ...]
) -> Callable[..., Any] | None:
    """Returns ``f`` mapped over the axes by which arrays of ``shape`` exceed the slices that it takes.

    ``nn.scan`` and ``nn.vmap`` stacked a layer along these; where several fit, the first is taken. None if
    none does.
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
    """Returns the axis by which one transformation stacked a kernel's parameters; None if it is not one.

    Where the shapes leave several, those of the other kernels under the same module decide.
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
    # Scales have one dimension, so they are stacked along 0, 1 or from the end.
    return min(agreed or own, key=lambda axis: (axis > 1, axis < 0, abs(axis)), default=None)


def layout(found: SeenOp, whole: tuple[int, ...]) -> Any:
    """Returns the ``ServedOp.layout`` of an op, for a parameter of this shape."""
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

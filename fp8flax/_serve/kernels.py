"""Finds the parameters that the kernels of a Linen model are made of, and how layers are stacked there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from fp8flax._core.recipes import CustomRecipe
from fp8flax._model.converted_call import SeenOp
from fp8flax._model.param_origin import Origin, Source
from fp8flax._serve import trees
from fp8flax._serve.stored_op import OpToFreeze
from fp8flax._serve.trees import Path


def to_freeze(
    path: Path, found: SeenOp, gemms: CustomRecipe, parameters: list[Any], axis: int | None
) -> OpToFreeze:
    """Returns an op of a Linen model in the form in which it is frozen.

    Args:
        path: the path of the op.
        found: the record of the op.
        gemms: the recipe of the op in the frozen model.
        parameters: the parameters that the kernel is made of; empty if the kernel stays wide.
        axis: the result of ``stacked_axis``.
    """
    origin, (lhs, _, *arguments) = found.kernel, found.args

    def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
        assert origin is not None
        whole, part = parameters[0].shape, origin.sources[0].shape
        each = _per_slice(f, whole, part) if axis is None else jax.vmap(f, in_axes=axis, out_axes=axis)
        if each is None:
            raise ValueError(
                f"The parameter {'/'.join(origin.sources[0].path)} has shape {whole}, but the FP8 op of "
                f"this model takes slices of shape {part}. Pass the variables of this model."
            )
        return each

    return OpToFreeze(
        path=path,
        row=found.op.row,
        gemms=gemms,
        lhs=lhs,
        arguments=tuple(arguments),
        parameters=tuple(parameters),
        kernel=lambda arrays: origin.rebuild(arrays, True),  # type: ignore[union-attr, misc]
        parts=lambda values: origin.into_sources(values),  # type: ignore[union-attr]
        mapped=mapped,
    )


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

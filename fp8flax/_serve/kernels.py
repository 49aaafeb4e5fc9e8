"""Describes an op of a Linen model in the form in which it is frozen, and the layout of its kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from fp8flax._core.recipes import CustomRecipe
from fp8flax._linen.conversion import Stacking
from fp8flax._model.converted_call import SeenOp
from fp8flax._serve.stored_op import OpToFreeze
from fp8flax._serve.trees import Path


def to_freeze(path: Path, found: SeenOp, gemms: CustomRecipe, parameters: tuple[Any, ...]) -> OpToFreeze:
    """Returns an op of a Linen model in the form in which it is frozen.

    Args:
        path: the path of the op.
        found: the record of the op.
        gemms: the recipe of the op in the frozen model.
        parameters: the parameters that the kernel is made of; empty if the kernel stays wide.
    """
    origin, (lhs, _, *arguments) = found.kernel, found.args
    if any(stacking.params is None for stacking in found.stacked):
        raise ValueError(
            f"Layers share the parameters of {'/'.join(path)}, but each has scaling state of its own: one "
            "frozen kernel cannot serve them. Let nn.scan or nn.vmap treat both collections alike."
        )
    for source, parameter in zip(origin.sources if origin else (), parameters):
        if _unstacked(parameter.shape, found.stacked) != source.shape:
            raise ValueError(
                f"The parameter {'/'.join(source.path)} has shape {parameter.shape}, but the FP8 op of "
                f"this model takes slices of shape {source.shape}. Pass the variables of this model."
            )

    def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
        for params, state in reversed(found.stacked):
            f = jax.vmap(f, in_axes=(params, state), out_axes=params)
        return f

    return OpToFreeze(
        path=path,
        row=found.op.row,
        gemms=gemms,
        lhs=lhs,
        arguments=tuple(arguments),
        parameters=parameters,
        kernel=lambda arrays: origin.rebuild(arrays, True),  # type: ignore[union-attr, misc]
        parts=lambda values: origin.into_sources(values),  # type: ignore[union-attr]
        mapped=mapped,
    )


def _unstacked(shape: tuple[int, ...], stacked: Iterable[Stacking]) -> tuple[int, ...] | None:
    """Returns the shape of one slice of a stacked parameter; None if the dimensions are too few."""
    sizes = list(shape)
    for axis, _ in stacked:
        if axis is not None:
            if not -len(sizes) <= axis < len(sizes):
                return None
            del sizes[axis]
    return tuple(sizes)


def layout(found: SeenOp) -> Any:
    """Returns the ``ServedOp.layout`` of an op whose kernel is stored."""
    kernel = found.kernel
    assert kernel is not None
    is_leading = all(stacking.params in (None, 0) for stacking in found.stacked)
    if not (found.op.row.plan is not None and kernel.is_one_parameter and is_leading):
        return None
    _, contract, batch = found.op.row.plan(*found.args, recipe=found.gemms).views["kernel"][0]
    if batch:
        return None
    return tuple(i for i in range(len(kernel.sources[0].shape)) if i not in contract), contract

"""Finds which kernels of a Linen model can be stored in FP8, and describes their ops for ``stored_op``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from fp8flax._core.recipes import CustomRecipe
from fp8flax._linen.conversion import Stacking
from fp8flax._model.converted_call import Seen, SeenOp
from fp8flax._serve.scales import WEIGHT_ONLY
from fp8flax._serve.stored_op import OpToFreeze
from fp8flax._serve.trees import Path


def left_wide(seen: Seen, recipes: Mapping[Path, CustomRecipe]) -> dict[Path, str]:
    """Returns the ops whose kernels cannot be stored in FP8, each with the reason.

    The reason is empty if the recipe keeps kernels wide, or the kernel does not come from parameters. A
    kernel can be stored if it is one whole parameter, and no other op and nothing else reads it.
    """
    kernels = [found.kernel for found in seen.ops.values() if found.kernel is not None]
    users = Counter(path for kernel in kernels for path in {source.path for source in kernel.sources})

    def reason_of(found: SeenOp, gemms: CustomRecipe) -> str | None:
        quantizer, kernel = gemms.forward.rhs, found.kernel
        if found.has_several_kernels:
            return "one op multiplies by it and by others"
        if quantizer is None or kernel is None:
            return ""
        if not kernel.is_moved:
            return "it is computed from parameters"
        if any(source.path in seen.used_otherwise for source in kernel.sources):
            return "something else than an FP8 op reads it too"
        if len(kernel.sources) > 1:
            return "it is joined with other parameters to one kernel"
        if not kernel.is_whole_parameter:
            return "the kernel is not the whole parameter"
        if users[kernel.sources[0].path] > 1:
            return "several ops multiply by it"
        if not (found.op.row.plan is not None or gemms is WEIGHT_ONLY or quantizer.needs_state):
            return "convolutions and ragged dots store kernels with delayed scales alone"
        return None

    reasons = {path: reason_of(found, recipes[path]) for path, found in seen.ops.items()}
    return {path: reason for path, reason in reasons.items() if reason is not None}


def reasons_of_parameters(reasons: Mapping[Path, str], ops: Mapping[Path, SeenOp]) -> dict[str, str]:
    """Returns the reasons that are not empty, by the paths of the parameters that stay wide."""
    texts = {}
    for path, reason in reasons.items():
        kernel = ops[path].kernel
        for source in kernel.sources if kernel and reason else ():
            texts["/".join(source.path)] = reason
    return texts


def to_freeze(path: Path, found: SeenOp, gemms: CustomRecipe, parameter: Any) -> OpToFreeze:
    """Returns an op of a Linen model in the form in which it is frozen.

    Args:
        path: the path of the op.
        found: the record of the op.
        gemms: the recipe of the op in the frozen model.
        parameter: the parameter that is the kernel; None if the kernel stays wide.
    """
    origin, (lhs, _, *arguments) = found.kernel, found.args
    if any(stacking.params is None for stacking in found.stacked):
        raise ValueError(
            f"Layers share the parameters of {'/'.join(path)}, but each has scaling state of its own: one "
            "frozen kernel cannot serve them. Let nn.scan or nn.vmap treat both collections alike."
        )
    if parameter is not None and origin is not None:
        source = origin.sources[0]
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
        parameter=parameter,
        kernel=lambda array: origin.rebuild(array),  # type: ignore[union-attr]
        into_parameter=lambda values: origin.into_parameter(values),  # type: ignore[union-attr]
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

"""Finds which kernels of a Linen model can be stored in FP8, and quantizes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fp8flax._core.recipes import CustomRecipe
from fp8flax._model.converted_call import Seen, SeenOp
from fp8flax._serve.stored_op import WEIGHT_ONLY, stored_kernel
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


def params_of(found: SeenOp) -> list[Path]:
    """Returns the paths of the parameters that an op multiplies by."""
    return [source.path for source in (found.kernel.sources if found.kernel else ())]


def stored(
    path: Path, found: SeenOp, recipe: CustomRecipe, parameter: Any, scales: dict[str, jax.Array]
) -> tuple[jax.Array | None, dict[str, jax.Array]]:
    """Returns the codes of a parameter, in its shape, and the scales of the op, by role.

    Stacked layers have stacked codes and scales, along the axis along which their parameters are stacked.

    Args:
        path: the path of the op.
        found: the record of the op.
        recipe: the recipe of the op in the frozen model.
        parameter: the parameter that is the kernel; None if the kernel stays wide. Then there are no codes.
        scales: the delayed scales, by role, stacked as the scaling state is.
    """
    if any(stacking.params is None for stacking in found.stacked):
        raise ValueError(
            f"Layers share the parameters of {'/'.join(path)}, but each has scaling state of its own: one "
            "frozen kernel cannot serve them. Let nn.scan or nn.vmap treat both collections alike."
        )
    if parameter is None and not scales:
        return None, {}
    origin, (lhs, _, *arguments) = found.kernel, found.args

    def of_one(parameter: jax.Array | None, scales: dict[str, jax.Array]) -> Any:
        if parameter is None:
            return None, scales
        assert origin is not None
        wide = origin.rebuild(parameter)
        codes, scale = stored_kernel(found.op.row, recipe, lhs, arguments, wide, scales.get("kernel"))
        bits = origin.into_parameter(jax.lax.bitcast_convert_type(codes, jnp.uint8))
        return jax.lax.bitcast_convert_type(bits, codes.dtype), {**scales, "kernel": scale}

    for params, state in reversed(found.stacked):
        of_one = jax.vmap(of_one, in_axes=(params, state), out_axes=params)
    result: tuple[jax.Array | None, dict[str, jax.Array]] = jax.jit(of_one)(parameter, scales)
    return result


def layout(found: SeenOp) -> Any:
    """Returns the ``ServedOp.layout`` of an op whose kernel is stored."""
    kernel = found.kernel
    assert kernel is not None
    is_leading = all(stacking.params in (None, 0) for stacking in found.stacked)
    if not (found.op.row.plan is not None and kernel.is_one_parameter and is_leading):
        return None
    (_, contract), (_, batch) = found.op.row.plan(*found.args, recipe=found.gemms).dimension_numbers
    if batch:
        return None
    return tuple(i for i in range(len(kernel.sources[0].shape)) if i not in contract), contract

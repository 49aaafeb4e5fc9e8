"""Finds which kernels can be stored in FP8, and why the others stay wide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fp8flax._core.recipes import CustomRecipe
from fp8flax._model.converted_call import Seen, SeenOp
from fp8flax._model.param_origin import Origin
from fp8flax._serve.scales import WEIGHT_ONLY
from fp8flax._serve.trees import Path


def left_wide(seen: Seen, recipes: Mapping[Path, CustomRecipe]) -> dict[Path, str]:
    """Returns the ops whose kernels cannot be stored in FP8, each with the reason.

    The reason is empty if the recipe keeps kernels wide, or the kernel does not come from parameters. A
    parameter can be stored only if each of its elements is in the kernel of exactly one op, and all these
    ops store their kernels. So an op that stays wide keeps the ops that share its parameters wide.
    """
    reasons = {
        path: reason
        for path, found in seen.ops.items()
        if (reason := _own_reason(found, recipes[path], seen)) is not None
    }
    while True:
        stored = {path: found for path, found in seen.ops.items() if path not in reasons}
        more = _reasons_of_parts(stored, recipes)
        if not more:
            return reasons
        reasons |= more


def _own_reason(found: SeenOp, gemms: CustomRecipe, seen: Seen) -> str | None:
    quantizer, kernel = gemms.forward.rhs, found.kernel
    if found.others:
        return "one op multiplies by it and by others"
    if quantizer is None or kernel is None:
        return ""
    if kernel.rebuild is None:
        return "it is computed from parameters"
    if any(source.path in seen.used_otherwise for source in kernel.sources):
        return "something else than an FP8 op reads it too"
    if not (found.op.row.plan is not None or gemms is WEIGHT_ONLY or quantizer.needs_state):
        return "convolutions and ragged dots store kernels with delayed scales alone"
    return None


def _reasons_of_parts(
    stored: Mapping[Path, SeenOp], recipes: Mapping[Path, CustomRecipe]
) -> dict[Path, str]:
    """Returns the ops that stay wide because of the parameters that they share, each with the reason."""
    counts: dict[Path, Any] = {}
    dtypes: dict[Path, set[Any]] = {}
    sources = {path: found.kernel.sources for path, found in stored.items() if found.kernel}
    for path, found in stored.items():
        quantizer = recipes[path].forward.rhs
        assert found.kernel is not None
        assert quantizer is not None
        for source, count in zip(sources[path], _counts(found.kernel, found.args[1].shape)):
            counts[source.path] = counts.get(source.path, 0) + count
            dtypes.setdefault(source.path, set()).add(quantizer.dtype)
    reasons: dict[Path, str] = {}
    for path in stored:
        for source in sources[path]:
            if np.max(counts[source.path]) > 1:
                reasons[path] = "several ops multiply by it"
            elif np.min(counts[source.path], initial=1) < 1:
                reasons[path] = "not all of it is stored in FP8"
            elif len(dtypes[source.path]) > 1:
                reasons[path] = "it would be stored in two formats"
    return reasons


def _counts(kernel: Origin, shape: tuple[int, ...]) -> list[Any]:
    """Returns, for each parameter of a kernel, how often each of its elements is in the kernel."""
    if kernel.is_whole_parameter:
        return [np.ones(kernel.sources[0].shape, np.uint8)]
    with jax.ensure_compile_time_eval():
        ones = jax.device_put(np.ones(shape, np.uint8))
    count = jax.jit(kernel.into_sources).lower(ones).compile()
    return list(jax.device_get(count(ones)))


def reasons_of_parameters(reasons: Mapping[Path, str], ops: Mapping[Path, SeenOp]) -> dict[str, str]:
    """Returns the reasons that are not empty, by the paths of the parameters that stay wide."""
    texts = {}
    for path, reason in reasons.items():
        kernel = ops[path].kernel
        for source in ops[path].others or (s.path for s in (kernel.sources if kernel else ())):
            if reason:
                texts["/".join(source)] = reason
    return texts

"""Moves FP8 codes and scales between the caller's variables and those of the methods.

The two sides, with the dtype of each array::

    the caller has and saves                      a method of the model sees
    ------------------------                      --------------------------
    params/                                       params/
      Dense_0/                                      Dense_0/
        kernel               e4m3  ---------+-----    kernel            float32, its values are not used
        bias                 float32        |         bias              float32
        Fp8DotGeneralOp_0/                  |     _fp8_served/
          kernel_scale       float32  ---+  |       Dense_0/
          input_scale        float32  -+ |  |         Fp8DotGeneralOp_0/
                                       | |  +-----      codes           e4m3
                                       | +--------      kernel_scale    float32
                                       +----------      input_scale     float32

For the caller a kernel is one array under its own name. It is saved, sharded and sent like any other. But
the source of the model declares a float32 kernel, and reshapes or transposes it before the matmul.
So the model gets a float32 kernel, and ``Origin.rebuild`` moves the codes as the model moves that kernel.
The codes are in a collection of this package, at the path of the op. Lifted transformations stack and slice
that collection as they do the parameters (see ``beside_params``). The scaling state of a converted model in
training is also beside the parameters. Its collection is ``_overwrite_with_gradient``, and the caller has
it under the same name.

``ServingCall`` converts the variables from left to right when a call of the model begins, and back when it
ends. At ``init`` the left side holds only the parameters that other methods have made, and the parameters
that come back are random.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import PARAMS, state_leaf_names
from fp8flax._core.quantize import saturated
from fp8flax._core.recipes import CustomRecipe
from fp8flax._serve import trees
from fp8flax._serve.trees import Path

SERVED = "_fp8_served"
CODES = "codes"
KERNEL_SCALE, INPUT_SCALE = (state_leaf_names(role)[0] for role in ("kernel", "input"))


class ServedOp(NamedTuple):
    """Description of an op in a serving model (hashable)."""

    path: Path
    gemms: CustomRecipe
    kernel: tuple[Path, np.dtype] | None
    """The FP8 parameter that is the kernel, and the dtype that the model declares; None for a wide one."""
    scales: tuple[tuple[str, tuple[int, ...], np.dtype], ...] = ()
    """The names, shapes and dtypes of the op's scales."""
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The output dimensions and the summed dimensions of the kernel, counted without stacked dimensions.

    None if the kernel is wide, or the matmul reads it in another order than the parameter has."""


def as_method_sees(
    variables: Mapping[str, Any], ops: Iterable[ServedOp], *, is_init: bool
) -> Mapping[str, Any]:
    """Returns the right side of the diagram for the left side.

    Args:
        variables: the variables of the caller.
        ops: the FP8 ops of the model.
        is_init: whether the parameters of some ops may be missing. Such ops are skipped.
    """
    params, served = nn.meta.unbox(variables.get(PARAMS, {})), dict[str, Any]()
    given = trees.leaves(params)
    for op in ops:
        places = [(*op.path, name) for name, *_ in op.scales]
        if is_init and not (_has_kernel(given, op) and all(place in given for place in places)):
            continue
        if op.kernel is not None:
            path, dtype = op.kernel
            codes = trees.get(given, path)
            served = trees.replaced(served, (*op.path, CODES), codes)
            params = trees.replaced(params, path, codes.astype(dtype))
        for place in places:
            served = trees.replaced(served, place, trees.get(given, place))
        if places:
            params = trees.without(params, op.path)
    return {**variables, PARAMS: params, SERVED: served}


def _has_kernel(params: Mapping[Path, Any], op: ServedOp) -> bool:
    """Returns whether the parameters hold the kernel of an op, or the op stores none."""
    return op.kernel is None or op.kernel[0] in params


def as_caller_sees_init(params: Mapping[str, Any], ops: Iterable[ServedOp]) -> Mapping[str, Any]:
    """Returns the left side of the diagram for parameters that ``init`` made on the right side."""
    boxed, params = params, nn.meta.unbox(params)
    made = trees.leaves(params)
    for op in ops:
        if not _has_kernel(made, op):
            continue  # no method has made the kernel yet
        if op.kernel is not None:
            path, _ = op.kernel
            assert op.gemms.forward.rhs is not None
            codes = saturated(made[path].astype(jnp.float32), op.gemms.forward.rhs.dtype)
            params = trees.replaced(params, path, codes)
        for name, shape, dtype in op.scales:
            params = trees.replaced(params, (*op.path, name), jnp.ones(shape, dtype))
    return trees.reboxed(params, boxed)

"""What lies among a served model's variables and its methods do not know of: codes, scales, narrow caches.

    what the caller has and saves                 what a method of the model sees
    -----------------------------                 -------------------------------
    params/                                       params/
      Dense_0/                                      Dense_0/
        kernel               e4m3  ---------+-----    kernel            float32, of which nothing is read
        bias                 float32        |         bias              float32
        Fp8DotGeneralOp_0/                  |     _fp8_served/
          kernel_scale       float32  ---+  |       Dense_0/
          input_scale        float32  -+ |  |         Fp8DotGeneralOp_0/
                                       | |  +-----      codes_0         e4m3
                                       | +--------      kernel_scale    float32
                                       +----------      input_scale     float32
    cache/                                        cache/
      cached_key             e4m3  ---------------    cached_key        float32
      cached_key_dtype       float32, empty, in the caller's alone: what the model knows it in

Why: to the caller a kernel is one array under its own name, in one collection that is saved, sharded and
sent as any other. But the model's source declares a float32 kernel and reshapes, slices or transposes it
before it multiplies. So it gets one, to see what it does to it (``Origin.rebuild``), and the same is done
to the codes, which are the op's: in a collection of ours, at the op's path. Lifted transformations take
that collection along with the parameters (``beside_params``), stacked and sliced as the kernel is.
A converted model that is trained has the scaling state there in the same way, in its own collection,
``_overwrite_with_gradient``, which the caller has under that name too.

When: from left to right as a call of the model begins, and back as it ends, both in ``ServingCall``. At
``init`` there is nothing on the left but what other methods have made, and what comes back is random.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
CACHE = "cache"
KERNEL_SCALE, INPUT_SCALE = (state_leaf_names(role)[0] for role in ("kernel", "input"))
_DTYPE_OF = "_dtype"


class ServedOp(NamedTuple):
    """An op as a serving model computes it (hashable)."""

    path: Path
    gemms: CustomRecipe
    kernels: tuple[tuple[Path, np.dtype], ...]
    """The parameters that its kernel is made of, where they are stored in FP8, with the dtypes that the
    model knows them in."""
    scales: tuple[tuple[str, tuple[int, ...], np.dtype], ...] = ()
    """Names, shapes and dtypes of its scales."""
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Where the kernel is one parameter as it is: its dimensions that the output has, and that are summed
    over, those by which it is stacked left out."""

    @property
    def codes(self) -> tuple[str, ...]:
        """The names of the codes of ``kernels`` at its path, as a method sees them."""
        return tuple(f"codes_{i}" for i in range(len(self.kernels)))


def as_method_sees(
    variables: Mapping[str, Any], ops: Sequence[ServedOp], *, is_init: bool
) -> Mapping[str, Any]:
    """Returns the right side of the diagram, but for the cache, from the left one.

    Args:
        variables: of the caller, with no boxes.
        ops: those of the model.
        is_init: whether parameters may be missing, with all that belongs to their ops.
    """
    params, served = variables.get(PARAMS, {}), dict[str, Any]()
    if is_init:
        ops = [op for op in ops if _is_made(params, op)]
    for op in ops:
        for name, (path, dtype) in zip(op.codes, op.kernels):
            codes = trees.get(params, path)
            served = trees.replaced(served, (*op.path, name), codes)
            params = trees.replaced(params, path, codes.astype(dtype))
        for name, scale in trees.get(params, op.path).items() if op.scales else ():
            served = trees.replaced(served, (*op.path, name), scale)
    for op in ops:
        if op.scales:
            params = trees.without(params, op.path)
    return {**variables, PARAMS: params, SERVED: served}


def _is_made(params: Mapping[str, Any], op: ServedOp) -> bool:
    """Tells whether the kernels of an op and its scales are there."""
    return all(trees.has(params, path) for path in (*(path for path, _ in op.kernels), op.path))


def as_caller_sees_init(params: Mapping[str, Any], ops: Sequence[ServedOp]) -> Mapping[str, Any]:
    """Returns the left side of the diagram, of the parameters that ``init`` has made on the right one."""
    boxed, params = params, nn.meta.unbox(params)
    # Those of ops whose kernels no method has made yet are left out.
    made = [op for op in ops if all(trees.has(params, path) for path, _ in op.kernels)]
    dtypes = {}
    for op in made:
        for path, _ in op.kernels:
            assert op.gemms.forward.rhs is not None
            dtypes[path] = op.gemms.forward.rhs.dtype
        for name, shape, dtype in op.scales:
            params = trees.replaced(params, (*op.path, name), jnp.ones(shape, dtype))
    for path, dtype in dtypes.items():
        params = trees.replaced(params, path, saturated(trees.get(params, path).astype(jnp.float32), dtype))
    return trees.reboxed(params, boxed)


def narrowed(cache: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Returns a cache with its floats in FP8, and an empty array beside each that has its dtype."""
    narrow: dict[str, Any] = {}
    for name, value in cache.items():
        if isinstance(value, Mapping):
            narrow[name] = narrowed(value, dtype)
        elif jnp.issubdtype(value.dtype, jnp.floating):
            narrow[name] = saturated(value.astype(jnp.float32), dtype)
            narrow[name + _DTYPE_OF] = jnp.zeros((), value.dtype)
        else:
            narrow[name] = value
    return narrow


def widened(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a cache in the dtypes that the model knows, from what ``narrowed`` returned."""
    wide: dict[str, Any] = {}
    for name, value in cache.items():
        if isinstance(value, Mapping):
            wide[name] = widened(value)
        elif not name.endswith(_DTYPE_OF):
            like = cache.get(name + _DTYPE_OF)
            wide[name] = value if like is None else value.astype(like.dtype)
    return wide

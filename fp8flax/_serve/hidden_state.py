"""Moves FP8 codes, scales and narrow caches between the caller's variables and those of the methods.

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
                                       | |  +-----      codes_0         e4m3
                                       | +--------      kernel_scale    float32
                                       +----------      input_scale     float32
    cache/                                        cache/
      cached_key             e4m3  ---------------    cached_key        float32
      cached_key_dtype       float32, a scalar: only the caller has it. It keeps the old dtype

For the caller a kernel is one array under its own name. It is saved, sharded and sent like any other. But
the source of the model declares a float32 kernel, and reshapes, slices or transposes it before the matmul.
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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
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
    """Description of an op in a serving model (hashable)."""

    path: Path
    gemms: CustomRecipe
    kernels: tuple[tuple[Path, np.dtype], ...]
    """The FP8 parameters that the kernel of the op is made of, with the dtypes that the model declares."""
    scales: tuple[tuple[str, tuple[int, ...], np.dtype], ...] = ()
    """The names, shapes and dtypes of the op's scales."""
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """The output dimensions and the summed dimensions of the kernel, counted without stacked dimensions.

    None if the kernel is not one whole parameter."""

    @property
    def codes(self) -> tuple[str, ...]:
        """The names that the codes of ``kernels`` have at the path of the op, for a method."""
        return tuple(f"codes_{i}" for i in range(len(self.kernels)))


def as_method_sees(
    variables: Mapping[str, Any], ops: Sequence[ServedOp], *, is_init: bool
) -> Mapping[str, Any]:
    """Returns the right side of the diagram for the left side; the cache is not changed.

    Args:
        variables: the variables of the caller.
        ops: the FP8 ops of the model.
        is_init: whether the parameters of some ops may be missing. Such ops are skipped.
    """
    stored, served = nn.meta.unbox(variables.get(PARAMS, {})), dict[str, Any]()
    if is_init:
        ops = [op for op in ops if _is_made(stored, op)]
    params = stored
    for op in ops:
        for name, (path, dtype) in zip(op.codes, op.kernels):
            # Not from ``params``: several ops may take parts of one parameter.
            codes = trees.get(stored, path)
            served = trees.replaced(served, (*op.path, name), codes)
            params = trees.replaced(params, path, codes.astype(dtype))
        for name, scale in trees.get(params, op.path).items() if op.scales else ():
            served = trees.replaced(served, (*op.path, name), scale)
    for op in ops:
        if op.scales:
            params = trees.without(params, op.path)
    return {**variables, PARAMS: params, SERVED: served}


def _is_made(params: Mapping[str, Any], op: ServedOp) -> bool:
    """Returns whether the parameters hold the kernels and the scales of an op."""
    return all(trees.has(params, path) for path in (*(path for path, _ in op.kernels), op.path))


def as_caller_sees_init(params: Mapping[str, Any], ops: Sequence[ServedOp]) -> Mapping[str, Any]:
    """Returns the left side of the diagram for parameters that ``init`` made on the right side."""
    boxed, params = params, nn.meta.unbox(params)
    # An op is skipped if no method has made its kernels yet.
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
    """Returns a cache with its floats in FP8, and beside each float a scalar of its old dtype.

    Beside a tuple of arrays is a tuple of scalars.

    Raises:
        ValueError: the cache has a variable under the name of an array for a dtype.
    """
    narrow: dict[str, Any] = {}
    for name, value in cache.items():
        if name + _DTYPE_OF in cache:
            raise ValueError(
                f"kv_cache_dtype stores the dtype of the cache variable {name!r} under the name "
                f"{name + _DTYPE_OF!r}, which the cache has already. Rename one of the two."
            )
        if isinstance(value, Mapping):
            narrow[name] = narrowed(value, dtype)
        elif any(map(_is_float, jax.tree.leaves(value))):
            narrow[name] = jax.tree.map(
                lambda x: saturated(x.astype(jnp.float32), dtype) if _is_float(x) else x, value
            )
            narrow[name + _DTYPE_OF] = jax.tree.map(lambda x: jnp.zeros((), x.dtype), nn.meta.unbox(value))
        else:
            narrow[name] = value
    return narrow


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def widened(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the cache in its old dtypes, given the result of ``narrowed``."""
    wide: dict[str, Any] = {}
    for name, value in cache.items():
        if isinstance(value, Mapping):
            wide[name] = widened(value)
        elif not (name.endswith(_DTYPE_OF) and name.removesuffix(_DTYPE_OF) in cache):
            like = cache.get(name + _DTYPE_OF)
            if like is not None:  # boxes are beside plain arrays
                leaves, treedef = jax.tree.flatten(value)
                value = treedef.unflatten(
                    [x.astype(y.dtype) for x, y in zip(leaves, jax.tree.leaves(like))]
                )
            wide[name] = value
    return wide

"""Traces calls of models; inputs may be shapes instead of arrays, and all other inputs stay concrete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax

from fp8flax._compat.jaxprs import Program
from fp8flax._core.types import PyTree

Arrays = dict[int, jax.Array]


def _of_arrays(
    function: Callable[..., PyTree], args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> tuple[Callable[..., PyTree], Arrays]:
    """Returns ``function`` as a function of its first input and a dict of arrays, and these arrays."""
    leaves, treedef = jax.tree.flatten((args, kwargs))

    def call(first: PyTree, arrays: Arrays) -> PyTree:
        args, kwargs = treedef.unflatten([arrays.get(i, x) for i, x in enumerate(leaves)])
        return function(first, *args, **kwargs)

    return call, {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}


def program_of(
    function: Callable[..., PyTree], variables: PyTree, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]
) -> Program:
    """Returns the jaxpr of ``function(variables, *args, **kwargs)``, with all arrays in its result."""
    call, arrays = _of_arrays(function, args, kwargs)

    def results(variables: PyTree, arrays: Arrays) -> list[jax.Array]:
        return [x for x in jax.tree.leaves(call(variables, arrays)) if isinstance(x, jax.Array)]

    return jax.make_jaxpr(results)(variables, arrays)


def eval_init(model: nn.Module, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
    """Returns the shapes and dtypes of ``model.init``."""
    init, arrays = _of_arrays(model.init, args, kwargs)
    return jax.eval_shape(lambda arrays: init(jax.random.key(0), arrays), arrays)

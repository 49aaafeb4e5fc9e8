"""Traces calls of models; inputs may be shapes (``jax.ShapeDtypeStruct``) instead of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import flax.linen as nn
import jax

from fp8flax._compat.jaxprs import Program
from fp8flax._core.types import PyTree

Arrays = dict[int, jax.Array]


def _arrays_of(args: PyTree, kwargs: PyTree) -> tuple[Arrays, Callable[[Arrays], tuple[PyTree, PyTree]]]:
    """Returns the arrays and shapes among inputs, and a function that puts others in their places."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}
    return arrays, lambda new: treedef.unflatten([new.get(i, x) for i, x in enumerate(leaves)])


def program_of(
    function: Callable[..., PyTree],
    variables: PyTree,
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree],
) -> Program:
    """Returns the jaxpr of ``function(variables, *args, **kwargs)``, with all arrays in its result.

    Inputs that are no arrays stay concrete.
    """
    arrays, inputs_with = _arrays_of(args, kwargs)

    def call(variables: PyTree, arrays: Arrays) -> list[jax.Array]:
        args, kwargs = inputs_with(arrays)
        leaves = jax.tree.leaves(function(variables, *args, **kwargs))
        return [x for x in leaves if isinstance(x, jax.Array)]

    return jax.make_jaxpr(call)(variables, arrays)


def eval_init(model: nn.Module, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> PyTree:
    """Returns the shapes and dtypes of ``model.init``."""
    arrays, inputs_with = _arrays_of(args, kwargs)

    def init(arrays: Arrays) -> PyTree:
        args, kwargs = inputs_with(arrays)
        return model.init(jax.random.key(0), *args, **kwargs)

    return jax.eval_shape(init, arrays)

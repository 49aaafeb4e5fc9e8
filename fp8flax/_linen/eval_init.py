"""Traces calls of models; inputs may be shapes (``jax.ShapeDtypeStruct``) instead of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax


def of_arrays(
    function: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., Any], dict[int, Any]]:
    """Returns ``function(x, *args, **kwargs)`` as a function of ``x`` and arrays, and these arrays.

    They are the arrays and shapes among the arguments. All other arguments stay concrete.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))

    def call(x: Any, arrays: dict[int, Any]) -> Any:
        args, kwargs = treedef.unflatten([arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(x, *args, **kwargs)

    return call, {i: x for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")}


def program_of(function: Callable[..., Any], variables: Any, args: Any, kwargs: Any) -> Any:
    """Returns the jaxpr of ``function(variables, *args, **kwargs)``, with all arrays in its result."""

    def call(*args: Any, **kwargs: Any) -> list[Any]:
        return [x for x in jax.tree.leaves(function(*args, **kwargs)) if isinstance(x, jax.Array)]

    traced, arrays = of_arrays(call, args, kwargs)
    return jax.make_jaxpr(traced)(variables, arrays)


def eval_init(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Returns the shapes and dtypes of ``model.init``."""
    init, arrays = of_arrays(model.init, args, kwargs)
    return jax.eval_shape(lambda arrays: init(jax.random.key(0), arrays), arrays)

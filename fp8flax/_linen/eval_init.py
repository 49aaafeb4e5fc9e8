"""Traces ``init`` of a model for the shapes of its variables; inputs may be shapes instead of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax


def split_arrays(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the arrays among the arguments, and a function that puts other arrays in their places.

    A ``jax.ShapeDtypeStruct`` counts as an array. All other arguments stay concrete.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def fill(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        return treedef.unflatten([next(remaining) if a else leaf for a, leaf in zip(is_array, leaves)])

    return [leaf for a, leaf in zip(is_array, leaves) if a], fill


@contextlib.contextmanager
def needing_inputs(args: Any, kwargs: Any) -> Iterator[None]:
    """A context in which a model is called; if it gets no inputs and needs some, the error says so."""
    try:
        yield
    except TypeError as error:
        if args or kwargs or "required positional argument" not in str(error):
            raise
        raise TypeError(
            f"The model needs sample inputs, and got none: {error}. Pass them as arrays or "
            "jax.ShapeDtypeStruct; their values are not used."
        ) from error


def eval_init(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Returns the shapes and dtypes of ``model.init``."""
    arrays, fill = split_arrays(args, kwargs)

    def init(arrays: list[Any]) -> Any:
        args, kwargs = fill(arrays)
        return model.init(jax.random.key(0), *args, **kwargs)

    with needing_inputs(args, kwargs):
        return jax.eval_shape(init, arrays)

"""``traced_once``: jits a function so that JAX traces and lowers it once for all equal layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Result:
    """Describes the result of a function; static, so that a jitted function can return it."""

    tree: Any
    """The tree structure of the result."""
    places: tuple[int, ...]
    """For each leaf of the result, its index in the list of argument arrays followed by new arrays."""


def traced_once(f: Callable[..., Any]) -> Callable[..., Any]:
    """Jits ``f(static, *arrays)``, so that JAX traces and lowers it once for all equal layers.

    Two layers are equal if they have equal ``static`` values, and arrays of equal shapes and dtypes.

    If ``f`` returns an argument, the jitted function does not return it, and the caller gets the argument
    itself. If ``f`` returns an array twice, the jitted function returns it once. Otherwise jit would return
    copies, which ``jax.checkpoint`` and ``jax.lax.scan`` would keep as additional residuals.

    Args:
        f: a function of a hashable value and of trees of arrays, which returns a tree of arrays.
    """

    @functools.partial(jax.jit, static_argnums=0)
    @functools.wraps(f)
    def traced(static: Any, *args: Any) -> tuple[list[Any], _Result]:
        """Returns the arrays that ``f`` computes, and which leaf of its result is which array."""
        results, tree = jax.tree.flatten(f(static, *args))
        arrays = [*jax.tree.leaves(args)]
        num_given = len(arrays)
        place = {id(x): i for i, x in enumerate(arrays)}
        for x in results:
            if id(x) not in place:
                place[id(x)] = len(arrays)
                arrays.append(x)
        return arrays[num_given:], _Result(tree, tuple(place[id(x)] for x in results))

    @functools.wraps(f)
    def call(static: Any, *args: Any) -> Any:
        """Returns the result of ``f``, put together from the arguments and the new arrays."""
        new, result = traced(static, *args)
        arrays = [*jax.tree.leaves(args), *new]
        return jax.tree.unflatten(result.tree, [arrays[i] for i in result.places])

    return call

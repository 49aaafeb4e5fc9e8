"""``traced_once``: a function that JAX traces and lowers once for all layers that are alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Result:
    """Says where each leaf of a result is: among the arguments, followed by the arrays that are new."""

    tree: Any
    places: tuple[int, ...]


def traced_once(f: Callable[..., Any]) -> Callable[..., Any]:
    """Jits ``f(static, *arrays)``, so that it is traced and lowered once for all layers that are alike.

    Results that are arguments, or that are returned twice, do not go through the jitted function. It would
    make new arrays of them, and ``jax.checkpoint`` and ``jax.lax.scan`` would keep these as residuals.
    """

    @functools.partial(jax.jit, static_argnums=0)
    @functools.wraps(f)
    def traced(static: Any, *args: Any) -> tuple[list[Any], _Result]:
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
        new, result = traced(static, *args)
        arrays = [*jax.tree.leaves(args), *new]
        return jax.tree.unflatten(result.tree, [arrays[i] for i in result.places])

    return call

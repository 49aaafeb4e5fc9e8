"""Stacks small arrays of one shape, so that a GPU starts a few kernels for all, not a few for each.

The stacking saves time only. The values are the same bit for bit without it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def each_alike(
    f: Callable[..., Any],
    axes: Sequence[int],
    *args: Sequence[Any],
    read_once: bool = True,
    in_parts: bool = False,
    loops: bool = False,
) -> list[Any]:
    """Returns ``[f(*each, axis=axis) for axis, *each in zip(axes, *args)]``, for trees of arrays.

    A GPU stacks the trees whose arrays have equal types and shardings, and applies ``f`` to the stacked
    arrays by ``jax.vmap``. A CPU applies ``f`` to each tree: XLA for CPUs would compile the stacked
    computation again into every operation that reads a result.

    Args:
        f: a function of trees of arrays and an axis, defined once: outside of jit, JAX's caches compare
            functions by identity.
        axes: for each call of ``f``, the axis of its arrays that holds the past amaxes.
        *args: for each further argument of ``f``, the list of its values.
        read_once: whether a barrier follows the stacking, so that one kernel alone reads each array. If
            several GPU kernels read a donated array, XLA copies it before it overwrites it.
        in_parts: whether a GPU applies ``f`` to each tree instead of to the stack. The stack is then only
            the copy that all later kernels read. Use it if the results are large: a stacked result would be
            copied into the buffers that the step returns.
        loops: whether a CPU applies ``f`` in a loop, instead of once per tree in the program. Either may
            compile twice as fast as the other, depending on the surrounding program. Measure each call.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, (axis, *each) in enumerate(zip(axes, *args)):
        leaves, treedef = jax.tree.flatten(each)
        shardings = (
            None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None) for x in leaves
        )
        groups[axis, treedef, *map(jax.typeof, leaves), *shardings].append(i)
    results: dict[int, Any] = {}
    for (axis, *_), members in groups.items():
        of_members = ([values[i] for i in members] for values in args)
        of_group = _alike(f, axis, read_once, in_parts, loops, *of_members)
        results.update(zip(members, of_group, strict=True))
    return [results[i] for i in range(len(axes))]


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _alike(
    f: Callable[..., Any], axis: int, read_once: bool, in_parts: bool, loops: bool, *args: Sequence[Any]
) -> list[Any]:
    """Returns ``[f(*each, axis=axis) for each in zip(*args)]``, for trees that can be stacked."""
    num_trees = len(args[0])
    f_traced_once = jax.jit(partial(f, axis=axis))  # for all calls of ``one_by_one``

    def one_by_one(*args: Any) -> list[Any]:
        return [f_traced_once(*each) for each in zip(*args)]

    def stacked(*args: Any) -> list[Any]:
        stacks = list(map(_stack, args))
        return lax.optimization_barrier(stacks) if read_once else stacks

    def in_a_loop(*args: Any) -> list[Any]:
        return _unstack(lax.map(lambda each: f(*each, axis=axis), tuple(stacked(*args))), num_trees)

    def at_once(*args: Any) -> list[Any]:
        if in_parts:
            return one_by_one(*(_unstack(stack, num_trees) for stack in stacked(*args)))
        return _unstack(jax.vmap(f_traced_once)(*stacked(*args)), num_trees)

    if num_trees == 1:
        return one_by_one(*args)
    on_cpu = in_a_loop if loops else one_by_one
    return lax.platform_dependent(*map(list, args), cpu=on_cpu, default=at_once)


def _stack(trees: Sequence[Any]) -> Any:
    """Returns one tree, whose leaves are stacked along a new first axis."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def _unstack(tree: Any, num_trees: int) -> list[Any]:
    """Returns ``num_trees`` trees, one for each index of the first axis; the reverse of ``_stack``."""
    leaves, treedef = jax.tree.flatten(tree)
    split = [[lax.squeeze(part, [0]) for part in lax.split(x, [1] * num_trees)] for x in leaves]
    return [treedef.unflatten([pieces[i] for pieces in split]) for i in range(num_trees)]

"""Computes a function of the state of each tensor, in few GPU kernels for all tensors.

A model has hundreds of tensors, each with a small state, and a GPU takes longer to launch a kernel than to
compute one of them. So a program for a GPU stacks the states of one shape::

    84 states        each a scale (1,) and a history (1024,)
    their rows       (84, 1025), which one kernel makes of all states
    the stack        one state with a scale (84, 1) and a history (84, 1024): columns of the rows
    the results      of ``jax.vmap(f)`` of the stack, taken apart again

A program for a CPU computes each state by itself: XLA for CPUs would compile the stacked computation again
into every operation that reads a result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._core.types import PyTree


def for_each_tensor(
    f: Callable[..., PyTree], *args: Sequence[PyTree], large_results: bool = False
) -> list[PyTree]:
    """Returns ``[f(*each) for each in zip(*args)]``, for trees of small arrays, such as states.

    With ``large_results``, ``f`` takes each state out of the rows, and is computed for each by itself; XLA
    makes few kernels with several results of that. A stacked result would be copied once more, into the
    buffers that a training step returns.

    Define ``f`` once: outside of jit, JAX's caches compare functions by identity.
    """
    groups: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for i, each in enumerate(zip(*args)):
        leaves, treedef = jax.tree.flatten(each)
        # Outside of jit, arrays may be on different devices: one jitted function does not take them all.
        shardings = [getattr(x, "sharding", None) for x in leaves if not isinstance(x, jax.core.Tracer)]
        groups[treedef, *map(jax.typeof, leaves), *shardings].append(i)
    results: dict[int, PyTree] = {}
    for members in groups.values():
        of_members = [tuple(values[i] for values in args) for i in members]
        results.update(zip(members, _of_one_shape(f, large_results, of_members), strict=True))
    return [results[i] for i in range(len(results))]


@partial(jax.jit, static_argnums=(0, 1))
def _of_one_shape(f: Callable[..., PyTree], large_results: bool, trees: list[PyTree]) -> list[PyTree]:
    """Returns ``[f(*tree) for tree in trees]``, for trees that can be stacked."""
    f_traced_once = jax.jit(f)

    def one_by_one(trees: list[PyTree]) -> list[PyTree]:
        return [f_traced_once(*tree) for tree in trees]

    def stacked(trees: list[PyTree]) -> list[PyTree]:
        # Because of the barrier, one kernel alone reads each array. If several GPU kernels read a donated
        # array, XLA copies it before it overwrites it.
        stack = lax.optimization_barrier([_rows(of_arg) for of_arg in zip(*trees)])
        stack = [_from_rows(like, rows) for like, rows in zip(trees[0], stack)]
        if large_results:
            return one_by_one(_unstack(stack, len(trees)))
        return _unstack(jax.vmap(f_traced_once)(*stack), len(trees))

    if len(trees) == 1:
        return one_by_one(trees)
    return lax.platform_dependent(trees, cpu=one_by_one, default=stacked)


def _rows(trees: Sequence[PyTree]) -> jax.Array:
    """Returns an array with a row for each tree: its leaves, which may differ in their last axis."""
    return jnp.stack([lax.concatenate(leaves := jax.tree.leaves(x), leaves[0].ndim - 1) for x in trees])


def _from_rows(like: PyTree, rows: jax.Array) -> PyTree:
    """Returns the stack: ``rows``, taken apart into the leaves of a tree such as ``like``."""
    leaves, treedef = jax.tree.flatten(like)
    return treedef.unflatten(lax.split(rows, [x.shape[-1] for x in leaves], rows.ndim - 1))


def _unstack(stack: PyTree, num: int) -> list[PyTree]:
    """Returns ``num`` trees, one for each index of the first axis of a stacked tree."""
    leaves, treedef = jax.tree.flatten(stack)
    split = [[lax.squeeze(part, [0]) for part in lax.split(x, [1] * num)] for x in leaves]
    return [treedef.unflatten(parts) for parts in zip(*split)]

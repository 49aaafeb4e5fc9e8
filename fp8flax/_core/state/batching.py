"""Stacks small arrays of one shape, so that a GPU starts a few kernels for all, not a few for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._core.types import PyTree


def each_alike(f: Callable[..., PyTree], *args: Sequence[PyTree], in_parts: bool = False) -> list[PyTree]:
    """Returns ``[f(*each) for each in zip(*args)]``, for trees of arrays.

    A GPU stacks the trees whose arrays have equal types and shardings, and applies ``f`` to the stacked
    arrays by ``jax.vmap``. A CPU applies ``f`` to each tree: XLA for CPUs would compile the stacked
    computation again into every operation that reads a result. With ``in_parts``, a GPU applies ``f`` to
    each part of the stack. Use it if the results are large: a stacked result would be copied into the
    buffers that the step returns.

    Define ``f`` once: outside of jit, JAX's caches compare functions by identity.
    """
    groups: dict[tuple[Hashable, ...], list[int]] = defaultdict(list)
    for i, each in enumerate(zip(*args)):
        leaves, treedef = jax.tree.flatten(each)
        shardings = [
            x.sharding if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) else None
            for x in leaves
        ]
        groups[treedef, *map(jax.typeof, leaves), *shardings].append(i)
    results: dict[int, PyTree] = {}
    for members in groups.values():
        of_members = [tuple(values[i] for values in args) for i in members]
        results.update(zip(members, _alike(f, in_parts, of_members), strict=True))
    return [results[i] for i in range(len(results))]


@partial(jax.jit, static_argnums=(0, 1))
def _alike(f: Callable[..., PyTree], in_parts: bool, trees: list[PyTree]) -> list[PyTree]:
    """Returns ``[f(*tree) for tree in trees]``, for trees that can be stacked."""
    f_traced_once = jax.jit(f)

    def one_by_one(trees: list[PyTree]) -> list[PyTree]:
        return [f_traced_once(*tree) for tree in trees]

    def at_once(trees: list[PyTree]) -> list[PyTree]:
        # Because of the barrier, one kernel alone reads each array. If several GPU kernels read a donated
        # array, XLA copies it before it overwrites it.
        stack = lax.optimization_barrier([_rows(of_arg) for of_arg in zip(*trees)])
        stack = [_from_rows(like, rows) for like, rows in zip(trees[0], stack)]
        if in_parts:
            return one_by_one(_unstack(stack, len(trees)))
        return _unstack(jax.vmap(f_traced_once)(*stack), len(trees))

    if len(trees) == 1:
        return one_by_one(trees)
    return lax.platform_dependent(trees, cpu=one_by_one, default=at_once)


def _rows(trees: Sequence[PyTree]) -> jax.Array:
    """Stacks trees in one array: the leaves of a tree, which may differ in their last axis, are a row."""
    return jnp.stack([lax.concatenate(leaves := jax.tree.leaves(x), leaves[0].ndim - 1) for x in trees])


def _from_rows(like: PyTree, rows: jax.Array) -> PyTree:
    """Returns the stacked tree in ``rows``, the result of ``_rows``; ``like`` is one of its trees."""
    leaves, treedef = jax.tree.flatten(like)
    return treedef.unflatten(lax.split(rows, [x.shape[-1] for x in leaves], rows.ndim - 1))


def _unstack(stack: PyTree, num: int) -> list[PyTree]:
    """Returns ``num`` trees, one for each index of the first axis of a stacked tree."""
    leaves, treedef = jax.tree.flatten(stack)
    split = [[lax.squeeze(part, [0]) for part in lax.split(x, [1] * num)] for x in leaves]
    return [treedef.unflatten(parts) for parts in zip(*split)]

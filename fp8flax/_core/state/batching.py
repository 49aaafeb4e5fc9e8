"""Stacks small arrays of one shape, so that a GPU starts a few kernels for all, not a few for each.

The stacking saves time only. The values are the same bit for bit without it; tests set ``is_enabled`` to
False to check that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.choice_at_lowering import unless_cpu

is_enabled = True
"""Whether arrays are stacked."""


def groups(keys: Iterable[Hashable]) -> list[list[int]]:
    """Returns for each distinct key the list of its positions. Keys are ordered by their first position."""
    places = defaultdict(list)
    for i, key in enumerate(keys):
        places[key].append(i)
    return list(places.values())


def key_of(axis: int, *trees: Any) -> Hashable:
    """Returns a key that is equal for trees that can be stacked: they have equal types and shardings.

    Args:
        axis: the axis of the arrays that holds the past amaxes; a part of the key.
        *trees: trees of arrays.
    """
    leaves, treedef = jax.tree.flatten(trees)
    shardings = (None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None) for x in leaves)
    return axis, treedef, *map(jax.typeof, leaves), *shardings


class _How(NamedTuple):
    """The options of ``each_alike``."""

    read_once: bool
    in_parts: bool
    loops: bool


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
        in_parts: whether a GPU splits the stacked arrays again, and applies ``f`` to each part. The
            stacking then serves ``read_once`` only: later kernels read the copy in the stack. Use it if the
            results are large, and the step returns each of them as a buffer of its own. A stacked result
            would be copied into these buffers.
        loops: whether a CPU applies ``f`` in a loop, instead of once per tree in the program. Either may
            compile twice as fast as the other, depending on the surrounding program. Measure each call.
    """
    found: dict[int, Any] = {}
    keys: Iterable[Hashable] = map(key_of, axes, *args) if is_enabled else range(len(axes))
    for group in groups(keys):
        of_group = ([arg[i] for i in group] for arg in args)
        found.update(zip(group, _alike(f, axes[group[0]], _How(read_once, in_parts, loops), *of_group)))
    return [found[i] for i in range(len(axes))]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _alike(f: Callable[..., Any], axis: int, how: _How, *args: Sequence[Any]) -> list[Any]:
    """Returns ``[f(*each, axis=axis) for each in zip(*args)]``, for trees that can be stacked."""
    number = len(args[0])
    once = jax.jit(partial(f, axis=axis))  # traced once for all calls of ``one_by_one``

    def one_by_one(*args: Any) -> list[Any]:
        return [once(*each) for each in zip(*args)]

    def stacked(*args: Any) -> list[Any]:
        stacks = list(map(_stack, args))
        return lax.optimization_barrier(stacks) if how.read_once else stacks

    def in_a_loop(*args: Any) -> list[Any]:
        return _unstack(lax.map(lambda each: f(*each, axis=axis), tuple(stacked(*args))), number)

    def at_once(*args: Any) -> list[Any]:
        if how.in_parts:
            return one_by_one(*(_unstack(stack, number) for stack in stacked(*args)))
        return _unstack(jax.vmap(once)(*stacked(*args)), number)

    if number == 1:
        return one_by_one(*args)
    return unless_cpu(at_once, in_a_loop if how.loops else one_by_one, *map(list, args))


def _stack(trees: Sequence[Any]) -> Any:
    """Returns one tree, whose leaves are stacked along a new first axis."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def _unstack(tree: Any, number: int) -> list[Any]:
    """Returns ``number`` trees, one for each index of the first axis; the reverse of ``_stack``."""
    leaves, treedef = jax.tree.flatten(tree)
    split = [[lax.squeeze(part, [0]) for part in lax.split(x, [1] * number)] for x in leaves]
    return [treedef.unflatten([pieces[i] for pieces in split]) for i in range(number)]

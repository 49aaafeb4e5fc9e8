"""Stacks small arrays of one shape, so that a GPU starts a few kernels for all, not a few for each.

The stacking saves time only. The values are the same bit for bit without it; tests set ``is_enabled`` to
False to check that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.choice_at_lowering import unless_cpu
from fp8flax._compat.max_dtype import digested, to_digest
from fp8flax._compat.xla_metadata import apart
from fp8flax._core.scaling import push_amax
from fp8flax._core.state.state import ScalingState, digest_of, kept_state

is_enabled = True
"""Whether arrays are stacked."""


def groups(keys: Iterable[Hashable]) -> list[list[int]]:
    """Returns for each distinct key the list of its positions. Keys are ordered by their first position."""
    places = defaultdict(list)
    for i, key in enumerate(keys):
        places[key].append(i)
    return list(places.values())


def kind_of(x: Any) -> Any:
    """Returns the type and sharding of an array. Arrays with equal results can be stacked."""
    return jax.typeof(x), None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)


def each_alike(
    f: Callable[..., Any],
    *args: Sequence[Any],
    read_once: bool = True,
    in_parts: bool = False,
    loops: bool = False,
) -> list[Any]:
    """Returns ``[f(*each) for each in zip(*args)]``, for trees of arrays that can be stacked.

    A GPU applies ``f`` to the stacked arrays by ``jax.vmap``. A CPU applies ``f`` to each tree: XLA for
    CPUs would compile the stacked computation again into every operation that reads a result.

    Args:
        f: a function of trees of arrays.
        *args: for each argument of ``f``, the list of its values.
        read_once: whether a barrier follows the stacking, so that one kernel alone reads each array. If
            several GPU kernels read a donated array, XLA copies it before it overwrites it.
        in_parts: whether a GPU splits the stacked arrays again, and applies ``f`` to each part. The
            stacking then serves ``read_once`` only: later kernels read the copy in the stack. Use it if the
            results are large, and the step returns each of them as a buffer of its own. A stacked result
            would be copied into these buffers.
        loops: whether a CPU applies ``f`` in a loop, instead of once per tree in the program. Either may
            compile twice as fast as the other, depending on the surrounding program. Measure each call.
    """
    (number,) = {len(arg) for arg in args}
    if number == 1 or not is_enabled:
        return [f(*each) for each in zip(*args)]

    once = jax.jit(f)  # traced once for all calls of ``one_by_one`` and ``at_once``

    def one_by_one(*args: Any) -> list[Any]:
        return [once(*each) for each in zip(*args)]

    def stacked(*args: Any) -> list[Any]:
        stacks = list(map(_stack, args))
        return lax.optimization_barrier(stacks) if read_once else stacks

    def in_a_loop(*args: Any) -> list[Any]:
        return _unstack(lax.map(lambda each: f(*each), tuple(stacked(*args))), number)

    def at_once(*args: Any) -> list[Any]:
        if in_parts:
            return one_by_one(*(_unstack(stack, number) for stack in stacked(*args)))
        return _unstack(jax.vmap(once)(*stacked(*args)), number)

    return unless_cpu(at_once, in_a_loop if loops else one_by_one, *map(list, args))


def _stack(trees: Sequence[Any]) -> Any:
    """Returns one tree, whose leaves are stacked along a new first axis."""
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def _unstack(tree: Any, number: int) -> list[Any]:
    """Returns ``number`` trees, one for each index of the first axis; the reverse of ``_stack``."""
    leaves, treedef = jax.tree.flatten(tree)
    split = [[lax.squeeze(part, [0]) for part in lax.split(x, [1] * number)] for x in leaves]
    return [treedef.unflatten([pieces[i] for pieces in split]) for i in range(number)]


def digests(axes: Sequence[int], states: Sequence[ScalingState]) -> list[jax.Array]:
    """Returns the digest of each state, an array of ``digest_dtype`` in the shape of the scale.

    Args:
        axes: for each state, the axis of its history that holds the past amaxes.
        states: the states, float32.
    """
    return _by_group(_digests_alike, axes, states)


def _by_group(
    f: Callable[..., Sequence[Any]], axes: Sequence[int], states: Sequence[ScalingState], *others: Any
) -> list[Any]:
    """Calls ``f(axis, states, *others)`` for each group of states that can be stacked; returns all results.

    Args:
        f: a function that returns a result for each state of a group.
        axes: for each state, the axis of its history that holds the past amaxes.
        states: the states, float32.
        *others: for each further argument of ``f``, a value for each state.
    """
    found: dict[int, Any] = {}
    for group in groups((axis, *map(kind_of, state)) for axis, state in zip(axes, states)):
        of_group = ([x[i] for i in group] for x in (states, *others))
        found.update(zip(group, f(axes[group[0]], *of_group)))
    return [found[i] for i in range(len(states))]


@partial(jax.jit, static_argnums=0)
def _digests_alike(axis: int, states: Sequence[ScalingState]) -> list[jax.Array]:
    """Returns the digests of states that can be stacked."""
    # Each digest is an array of its own. XLA for GPUs would need one kernel per tensor to split an array of
    # all digests.
    return [to_digest(*numbers) for numbers in each_alike(partial(digest_of, axis=axis), states)]


def next_states(
    axes: Sequence[int], states: Sequence[ScalingState], cotangents: Sequence[jax.Array]
) -> list[ScalingState]:
    """Returns the state of each tensor after a step.

    Args:
        axes: for each state, the axis of its history that holds the past amaxes.
        states: the states before the step, float32.
        cotangents: for each state, the cotangent of its digest.
    """
    return _by_group(_next_states_alike, axes, states, cotangents)


@partial(jax.jit, static_argnums=0)
def _next_states_alike(
    axis: int, olds: Sequence[ScalingState], cotangents: Sequence[jax.Array]
) -> list[ScalingState]:
    """Returns the next states of states that can be stacked."""

    @apart
    def after_step(old: ScalingState, new_scale: jax.Array, amax: jax.Array) -> ScalingState:
        moved = push_amax(lax.squeeze(amax, (axis,)), jnp.moveaxis(old.amax_history, axis, -1))
        return kept_state(old, ScalingState(new_scale, jnp.moveaxis(moved, -1, axis)), amax)

    new_scales, amaxes = zip(*(digested(cotangent, 2) for cotangent in cotangents))
    return each_alike(after_step, olds, new_scales, amaxes, in_parts=True)

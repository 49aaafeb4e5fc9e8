"""The arithmetic of many small arrays as one array: a GPU then starts a few kernels, not some for each.

Everything works without the stacking, only slower, and the values are the same bit for bit: tests switch
it off by ``is_enabled``.
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
    """Returns the places of equal keys, a list for each key, in the order of their first places."""
    places = defaultdict(list)
    for i, key in enumerate(keys):
        places[key].append(i)
    return list(places.values())


def kind_of(x: Any) -> Any:
    """Returns what arrays have in common that can be stacked: their type, and where they lie."""
    return jax.typeof(x), None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)


def each_alike(
    f: Callable[..., Any],
    *args: Sequence[Any],
    read_once: bool = True,
    in_parts: bool = False,
    loops: bool = False,
) -> list[Any]:
    """Returns ``[f(*each) for each in zip(*args)]``, of trees of arrays that can be stacked.

    A GPU computes them as one array. A CPU does not: XLA would compile stacked arrays again into everything
    that reads them.

    Args:
        f: a function of trees of arrays.
        *args: its arguments, a list of each.
        read_once: whether each array is read by one kernel alone. If a step is donated arrays that
            several kernels read, XLA copies them before it writes the next values over them.
        in_parts: whether a GPU computes ``f`` of each part of that array, and not of the whole. Use it for
            large results that a step returns, each in a place of its own.
        loops: whether a CPU computes them in a loop, and not one by one. Either may compile in half the
            time of the other, depending on what is around it: measure it for each call.
    """
    (number,) = {len(arg) for arg in args}
    if number == 1 or not is_enabled:
        return [f(*each) for each in zip(*args)]

    once = jax.jit(f)  # traced once, for everything below

    def one_by_one(*args: Any) -> list[Any]:
        return [once(*each) for each in zip(*args)]

    def stacked(run: Callable[..., Any], *args: Any) -> Any:
        whole = jax.tree.map(lambda *xs: jnp.stack(xs), *zip(*args))
        return run(*(lax.optimization_barrier(whole) if read_once else whole))

    def parts(tree: Any) -> list[Any]:
        leaves, treedef = jax.tree.flatten(tree)
        split = [[lax.squeeze(part, [0]) for part in lax.split(x, [1] * number)] for x in leaves]
        return [treedef.unflatten([parts[i] for parts in split]) for i in range(number)]

    def in_a_loop(*args: Any) -> list[Any]:
        return parts(stacked(lambda *xs: lax.map(lambda each: f(*each), xs), *args))

    def at_once(*args: Any) -> list[Any]:
        if in_parts:
            return one_by_one(*stacked(lambda *xs: map(parts, xs), *args))
        return parts(stacked(jax.vmap(once), *args))

    return unless_cpu(at_once, in_a_loop if loops else one_by_one, *map(list, args))


def digests(axes: Sequence[int], states: Sequence[ScalingState]) -> list[jax.Array]:
    """Returns the digest of each state, an array of ``digest_dtype`` in the shape of the scale.

    Args:
        axes: along which the history of each state runs.
        states: float32.
    """
    found: dict[int, jax.Array] = {}
    for group in groups((axis, *map(kind_of, state)) for axis, state in zip(axes, states)):
        found.update(zip(group, _digests_alike(axes[group[0]], [states[i] for i in group])))
    return [found[i] for i in range(len(states))]


@partial(jax.jit, static_argnums=0)
def _digests_alike(axis: int, states: Sequence[ScalingState]) -> list[jax.Array]:
    # Not one array of all digests: XLA for GPUs would cut up that array, each part by a kernel.
    return [to_digest(*numbers) for numbers in each_alike(partial(digest_of, axis=axis), states)]


def next_states(
    axes: Sequence[int], states: Sequence[ScalingState], cotangents: Sequence[jax.Array]
) -> list[ScalingState]:
    """Returns the state of each tensor after a step.

    Args:
        axes: along which the history of each state runs.
        states: the states before the step, float32.
        cotangents: those of the digests of the states.
    """
    found: dict[int, ScalingState] = {}
    for group in groups((axis, *map(kind_of, state)) for axis, state in zip(axes, states)):
        of_group = [[x[i] for i in group] for x in (states, cotangents)]
        found.update(zip(group, _next_states_alike(axes[group[0]], *of_group)))
    return [found[i] for i in range(len(states))]


@partial(jax.jit, static_argnums=0)
def _next_states_alike(
    axis: int, olds: Sequence[ScalingState], cotangents: Sequence[jax.Array]
) -> list[ScalingState]:
    @apart
    def next_state(old: ScalingState, new_scale: jax.Array, amax: jax.Array) -> ScalingState:
        moved = push_amax(lax.squeeze(amax, (axis,)), jnp.moveaxis(old.amax_history, axis, -1))
        return kept_state(old, ScalingState(new_scale, jnp.moveaxis(moved, -1, axis)), amax)

    new_scales, amaxes = zip(*(digested(cotangent, 2) for cotangent in cotangents))
    return each_alike(next_state, olds, new_scales, amaxes, in_parts=True)

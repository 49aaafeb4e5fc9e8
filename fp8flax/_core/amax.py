"""The amax of tensors with delayed scaling, in two stages: of parts of each, then of all that a layer has.

GPUs find a maximum of many elements by two kernels, of which the second merges what the blocks of threads
of the first have found. XLA has the first one in the kernel that casts the tensor; the second ones of the
three tensors of a layer, or of all of a feed-forward block, are one kernel here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.jax_rules import manual_axes, unless_cpu, unless_partitioned

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32

_LARGEST_PART = _MOST_PARTS = 16384
"""Elements of which a GPU's block of threads finds the maximum: of more XLA makes two kernels."""


def delayed_amax(
    x: Float[jax.Array, "*dims"], where: Bool[jax.Array, "*#dims"] | None = None
) -> Float[jax.Array, ""]:
    """Returns what ``next_state_of`` must know of a tensor: its amax in its dtype.

    That is inf where it holds a NaN or an Inf, and -inf where it is empty. (A NaN would be lost in a
    maximum over devices, at least on CPUs.)

    Args:
        x: a wide float.
        where: which elements count; all, where that is None.
    """
    return jnp.max(magnitudes(x, where), initial=-jnp.inf)


def magnitudes(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Returns what ``delayed_amax`` is the maximum of."""
    magnitude = jnp.where(jnp.isnan(x), np.array(np.inf, x.dtype), jnp.abs(x))
    if where is not None:
        magnitude = jnp.where(where, magnitude, np.array(-np.inf, x.dtype))
    return magnitude


def amaxes_of_parts(
    x: Float[jax.Array, "*dims"],
    where: Bool[jax.Array, "*#dims"] | None = None,
    codes: Any = (),
    *,
    is_parameter: bool = False,
    num_parts: int | None = None,
) -> tuple[Float[jax.Array, " parts"], Any]:
    """Returns numbers of which the largest is ``delayed_amax(x, where)``, and the codes.

    On one GPU they are the amaxes of equal parts; elsewhere, and where XLA splits the program over several
    devices, which would else exchange all of them, each is that of the whole.

    Args:
        x: as of ``delayed_amax``.
        where: likewise.
        codes: a tree of arrays made of ``x``, to be computed together with the amaxes, so that XLA reads
            the wide tensor once for all.
        is_parameter: whether it surely lies in memory in the order of its dimensions. Of what does not,
            as of what comes out of attention, XLA would make a copy for parts of several dimensions.
        num_parts: how many parts of as many elements, of such an array; None for what suits XLA.
    """
    shape = x.shape if num_parts is None else (num_parts, x.size // num_parts)
    num_leading = 1 if num_parts else _num_leading(x.shape, is_parameter)
    if num_leading == 0:
        amax, codes = lax.optimization_barrier((delayed_amax(x, where), codes))
        return amax[None], codes
    of_each, of_whole = (partial(f, shape, num_leading) for f in (of_equal_parts, _of_whole))
    on_gpu = partial(unless_partitioned, of_each, of_whole)
    is_by_two = where is None and x.dtype == jnp.float32
    on_cpu = partial(of_whole, amax_of=_amax_by_two) if is_by_two else of_whole
    return unless_cpu(on_gpu, on_cpu, x, where, codes)


def of_equal_parts(
    shape: tuple[int, ...], num_leading: int, x: jax.Array, where: jax.Array | None, codes: Any
) -> tuple[jax.Array, Any]:
    """Returns the amax of each part: of all but the leading dimensions of an array of this shape."""
    axes = tuple(range(num_leading, len(shape)))
    amaxes = jnp.max(magnitudes(x, where).reshape(shape), axis=axes).reshape(-1)
    return lax.optimization_barrier((amaxes, codes))


def _of_whole(
    shape: tuple[int, ...],
    num_leading: int,
    x: jax.Array,
    where: jax.Array | None,
    codes: Any,
    amax_of: Callable[..., jax.Array] = delayed_amax,
) -> tuple[jax.Array, Any]:
    amax, codes = lax.optimization_barrier((amax_of(x, where), codes))
    # Behind the barrier, where XLA sees that the largest of them is the one.
    return jnp.broadcast_to(amax, (math.prod(shape[:num_leading]),)), codes


def _amax_by_two(x: jax.Array, where: None) -> jax.Array:
    """Returns the ``delayed_amax`` of a float32 array by two reductions, for CPUs.

    XLA's fast ones for CPUs take in an absolute value or a square, but no choice between it and inf, which
    would be an array in memory; and their maximum may pass NaN over, which their sum does not. (Squares
    that overflow sum to inf, which is no NaN.)
    """
    del where
    has_nan = jnp.isnan(jnp.sum(x * x))
    return jnp.where(has_nan, np.float32(np.inf), jnp.max(jnp.abs(x), initial=-jnp.inf))


def _num_leading(shape: tuple[Any, ...], is_parameter: bool) -> int:
    """Returns of how many leading dimensions the parts are, that one kernel each finds the amaxes of."""
    if not all(isinstance(size, int) and size > 0 for size in shape):
        return 0
    last = len(shape) - 1
    for i in range(1 if is_parameter else max(1, last), last + 1):
        if math.prod(shape[i:]) <= _LARGEST_PART and math.prod(shape[:i]) <= _MOST_PARTS:
            return i
    return 0


def largest_of(parts: Sequence[Float[jax.Array, "*stack parts"]]) -> list[Float32[jax.Array, "*stack"]]:
    """Returns the largest number of each array, in float32; of several vectors by one kernel on one GPU."""
    on_gpu = partial(unless_partitioned, at_once, _one_by_one)
    found: dict[int, jax.Array] = {}
    for group in _alike(parts):
        of_group = [parts[i] for i in group]
        if len(group) == 1 or of_group[0].ndim != 1:
            merged = _one_by_one(of_group)
        else:
            merged = unless_cpu(on_gpu, _one_by_one, of_group)
        found.update(zip(group, merged))
    return [found[i] for i in range(len(parts))]


def at_once(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the largest number of each vector, of any lengths, by one reduction."""
    longest = max(x.shape[0] for x in parts)
    padded = [
        lax.pad(x.astype(jnp.float32), np.float32(-np.inf), [(0, longest - x.shape[0], 0)]) for x in parts
    ]
    return list(jnp.max(jnp.stack(padded), axis=1))


def _one_by_one(parts: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.max(x, axis=-1).astype(jnp.float32) for x in parts]


def _alike(parts: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the places of those that can be one array, and stay as they are over the devices."""
    groups = defaultdict(list)
    for i, x in enumerate(parts):
        groups[x.ndim, manual_axes(x)].append(i)
    return list(groups.values())

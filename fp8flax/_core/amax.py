"""The amax of tensors with delayed scaling, in two stages: of parts of each, then of all that a layer has.

GPUs find a maximum of many elements by two kernels, of which the second merges what the blocks of threads
of the first have found. XLA has the first one in the kernel that casts the tensor; the second ones of the
three tensors of a layer, or of all of a feed-forward block, are one kernel here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._compat.choice_at_lowering import unless_cpu, unless_partitioned
from fp8flax._compat.varying import manual_axes

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
    as_cast: Float[jax.Array, "*dims"] | None = None,
    is_parameter: bool = False,
    num_parts: int | None = None,
) -> tuple[Float[jax.Array, " parts"], Any]:
    """Returns numbers of which the largest is ``delayed_amax(x, where)``, and the codes.

    On one GPU they are the amaxes of equal parts; on CPUs, and where XLA splits the program over several
    devices, which would else exchange all of them, each is that of the whole.

    Args:
        x: as of ``delayed_amax``.
        where: likewise.
        codes: a tree of arrays made of ``x``, to be computed together with the amaxes, so that XLA reads
            the wide tensor once for all.
        as_cast: what the codes are made of, if that is not ``x`` itself, but has its amax. A GPU reads
            that, which its kernel has at hand; for a CPU it would be an array in memory.
        is_parameter: whether it surely lies in memory in the order of its dimensions. Of what does not,
            as of what comes out of attention, XLA would make a copy for parts of several dimensions.
        num_parts: how many parts of as many elements, of such an array; None for what suits XLA.
    """
    shape = x.shape if num_parts is None else (num_parts, x.size // num_parts)
    num_leading = 1 if num_parts else _num_leading(x.shape, is_parameter)
    of_each, of_whole = partial(of_equal_parts, shape, num_leading), partial(_of_whole, shape, num_leading)

    def on_gpu(x: Any, as_cast: jax.Array, *rest: Any) -> Any:
        del x
        if num_leading == 0:
            return of_whole(as_cast, *rest)
        return unless_partitioned(of_each, of_whole, as_cast, *rest)

    def on_cpu(x: jax.Array, as_cast: Any, where: Any, codes: Any) -> Any:
        del as_cast
        return of_whole(x, where, codes, is_on_cpu=True)

    return unless_cpu(on_gpu, on_cpu, x, x if as_cast is None else as_cast, where, codes)


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
    *,
    is_on_cpu: bool = False,
) -> tuple[jax.Array, Any]:
    by_two = is_on_cpu and where is None and x.dtype == jnp.float32
    amax = _amax_by_two(x) if by_two else delayed_amax(x, where)
    amax, codes = lax.optimization_barrier((amax, codes))
    # Behind the barrier, where XLA sees that the largest of them is the one.
    return jnp.broadcast_to(amax, (math.prod(shape[:num_leading]),)), codes


def _amax_by_two(x: jax.Array) -> jax.Array:
    """Returns the ``delayed_amax`` of a float32 array by two reductions, for CPUs.

    XLA's fast ones for CPUs take in an absolute value or a square, but no choice between it and inf, which
    would be an array in memory; and their maximum may pass NaN over, which their sum does not. (Squares
    that overflow sum to inf, which is no NaN.)
    """
    has_nan = jnp.isnan(jnp.sum(x * x))
    # No jnp.where, which is jitted: of an inf in that, jax_debug_infs would not raise what it says.
    return lax.select(has_nan, jnp.float32(jnp.inf), jnp.max(jnp.abs(x), initial=-jnp.inf))


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

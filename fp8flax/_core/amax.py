"""Finds the amax of tensors with delayed scaling, in two stages.

A GPU needs two kernels for the maximum of many elements. In the first kernel each thread block finds the
maximum of a part of the tensor; the second kernel merges these partial amaxes. XLA fuses the first stage
into the kernel that casts the tensor (``amaxes_of_parts``). The second stage runs as one kernel for all
tensors of a layer, or of a feed-forward block (``largest_of``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._compat.choice_at_lowering import unless_cpu, unless_partitioned
from fp8flax._compat.varying import manual_axes
from fp8flax._core.grouping import in_groups
from fp8flax._core.scaling import push_amax
from fp8flax._core.shapes import Bool, Float, Float32

_LARGEST_PART = _MOST_PARTS = 16384
"""Limits on the elements per part and on the number of parts. Beyond them XLA uses two kernels."""


def delayed_amax(
    x: Float[jax.Array, "*dims"], where: Bool[jax.Array, "*#dims"] | None = None
) -> Float[jax.Array, ""]:
    """Returns the amax of a tensor, in its dtype, as the update of the scaling state needs it.

    The amax is inf if the tensor holds a NaN or an Inf. It is -inf if the tensor is empty, and then loses
    every maximum. (A NaN is encoded as inf, because a maximum over devices can lose a NaN, at least on
    CPUs.)

    Args:
        x: an array of a wide float dtype.
        where: mask of the elements that count; None for all.
    """
    return jnp.max(magnitudes(x, where), initial=-jnp.inf)


def magnitudes(x: jax.Array, where: jax.Array | None = None) -> jax.Array:
    """Returns ``abs(x)`` with NaN replaced by inf, and with -inf where the mask ``where`` is False.

    The maximum of the result is ``delayed_amax(x, where)``.
    """
    magnitude = jnp.where(jnp.isnan(x), np.array(np.inf, x.dtype), jnp.abs(x))
    if where is not None:
        magnitude = jnp.where(where, magnitude, np.array(-np.inf, x.dtype))
    return magnitude


def compute_amax_history(
    x: Float[jax.Array, "*dims"], amax_history: Float32[jax.Array, " length"]
) -> Float32[jax.Array, " length"]:
    """Returns ``amax_history`` with the amax of ``x`` entered at index 0.

    The history rolls by -1, and the newest amax replaces the entry that arrives at index 0. After index 0
    come the older amaxes, from the oldest to the second newest. The history stays unchanged if ``x`` is
    empty, or holds a NaN or an Inf.

    Args:
        x: a floating-point array of any shape.
        amax_history: past amaxes, shape ``(length,)``, float32.

    Returns:
        The new history, shape and dtype of ``amax_history``.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> history = jnp.zeros((4,))
        >>> for amax in (1.0, 2.0, 3.0):
        ...     history = fp8.compute_amax_history(jnp.array([0.5, -amax]), history)
        ...     print(history)
        [1. 0. 0. 0.]
        [2. 0. 0. 1.]
        [3. 0. 1. 2.]

    Source: the layout of ``flax.linen.fp8_ops``.
    """
    amax = delayed_amax(jnp.asarray(x, jnp.float32))
    pushed = push_amax(amax.astype(amax_history.dtype), amax_history)
    return jnp.where(jnp.isfinite(amax), pushed, amax_history)


def amaxes_of_parts(
    x: Float[jax.Array, "*dims"],
    where: Bool[jax.Array, "*#dims"] | None = None,
    codes: Any = (),
    *,
    as_cast: Float[jax.Array, "*dims"] | None = None,
    is_row_major: bool = False,
    num_parts: int | None = None,
) -> tuple[Float[jax.Array, " parts"], Any]:
    """Returns partial amaxes, whose maximum is ``delayed_amax(x, where)``, and the codes.

    On one GPU the partial amaxes are those of equal parts of ``x``. On CPUs each of them is the amax of all
    of ``x``. The same holds if XLA splits the program over several devices, since the devices would
    otherwise exchange all partial amaxes.

    Args:
        x: an array of a wide float dtype.
        where: mask of the elements that count; None for all.
        codes: a tree of arrays computed from ``x``. They are returned behind the same optimization barrier
            as the amaxes, so that XLA reads the wide tensor once for all results.
        as_cast: the array from which the codes are computed, such as ``x`` with NaN in the place of Inf;
            None if it is ``x``. It has the shape and the amax of ``x``. A GPU takes the amax of this array,
            which the kernel that casts already holds. A CPU takes the amax of ``x``, because it would have
            to write ``as_cast`` to memory.
        is_row_major: whether the memory layout of ``x`` is certain to follow the order of its dimensions.
            A part may then span several dimensions. For other arrays, such as the output of attention,
            XLA would copy the array first, so a part spans the last dimension only.
        num_parts: number of parts, of ``x.size // num_parts`` elements each; None to choose by the shape.
            Only for arrays whose memory layout follows the order of their dimensions.
    """
    shape = x.shape if num_parts is None else (num_parts, x.size // num_parts)
    num_leading = _num_leading(x.shape, is_row_major) if num_parts is None else 1
    of_each = partial(amaxes_of_equal_parts, shape, num_leading)
    of_whole = partial(_amax_of_whole, math.prod(shape[:num_leading]))

    def on_gpu(x: Any, as_cast: jax.Array, *rest: Any) -> Any:
        del x
        if num_leading == 0:
            return of_whole(as_cast, *rest)
        return unless_partitioned(of_each, of_whole, as_cast, *rest)

    def on_cpu(x: jax.Array, as_cast: Any, where: Any, codes: Any) -> Any:
        del as_cast
        return of_whole(x, where, codes, is_on_cpu=True)

    return unless_cpu(on_gpu, on_cpu, x, x if as_cast is None else as_cast, where, codes)


def amaxes_of_equal_parts(
    shape: tuple[int, ...], num_leading: int, x: jax.Array, where: jax.Array | None, codes: Any
) -> tuple[jax.Array, Any]:
    """Returns one partial amax for each index of the leading dimensions, as a vector, and the codes.

    Args:
        shape: the shape to which ``x`` is reshaped.
        num_leading: number of leading dimensions; the maximum is taken over all other dimensions.
        x: an array of a wide float dtype.
        where: mask of the elements that count; None for all.
        codes: a tree of arrays, returned behind the same optimization barrier as the amaxes.
    """
    axes = tuple(range(num_leading, len(shape)))
    amaxes = jnp.max(magnitudes(x, where).reshape(shape), axis=axes).reshape(-1)
    return lax.optimization_barrier((amaxes, codes))


def _amax_of_whole(
    num_parts: int,
    x: jax.Array,
    where: jax.Array | None,
    codes: Any,
    *,
    is_on_cpu: bool = False,
) -> tuple[jax.Array, Any]:
    """Returns the amax of all of ``x``, repeated ``num_parts`` times, and the codes.

    On a CPU, ``_amax_by_two`` computes the amax of a float32 array without a mask.
    """
    by_two = is_on_cpu and where is None and x.dtype == jnp.float32
    amax = _amax_by_two(x) if by_two else delayed_amax(x, where)
    amax, codes = lax.optimization_barrier((amax, codes))
    # Repeated after the barrier, so that XLA can simplify the later maximum over equal values.
    return jnp.broadcast_to(amax, (num_parts,)), codes


def _amax_by_two(x: jax.Array) -> jax.Array:
    """Returns the ``delayed_amax`` of a float32 array by two reductions, a maximum and a sum, for CPUs.

    XLA's fast reductions for CPUs can fuse an absolute value or a square. They cannot fuse the selection of
    inf for NaN, so XLA would write ``magnitudes(x)`` to memory. Their maximum may ignore a NaN, but their
    sum does not. So a sum of squares detects NaN. (Squares that overflow sum to inf, not to NaN.)
    """
    has_nan = jnp.isnan(jnp.sum(x * x))
    # Not jnp.where, which is jitted: jax_debug_infs raises a different error for an inf inside of jit.
    return lax.select(has_nan, jnp.float32(jnp.inf), jnp.max(jnp.abs(x), initial=-jnp.inf))


def _num_leading(shape: tuple[Any, ...], is_row_major: bool) -> int:
    """Returns the number of leading dimensions of an array of this shape; each index of them is one part.

    Each part spans all other dimensions. Parts are as large as one kernel can reduce. Returns 0 if the
    array is empty, if a size is symbolic, or if no split stays within the limits for one kernel.
    """
    if not all(isinstance(size, int) and size > 0 for size in shape):
        return 0
    last = len(shape) - 1
    for i in range(1 if is_row_major else max(1, last), last + 1):
        if math.prod(shape[i:]) <= _LARGEST_PART and math.prod(shape[:i]) <= _MOST_PARTS:
            return i
    return 0


def largest_of(parts: Sequence[Float[jax.Array, "*stack parts"]]) -> list[Float32[jax.Array, "*stack"]]:
    """Returns the maximum of each array over its last axis, in float32.

    On one GPU a single kernel reduces all vectors that vary over the same manual axes.
    """
    # Each stack of more dimensions has a key of its own, its position, so it is reduced alone.
    keys = (manual_axes(x) if x.ndim == 1 else i for i, x in enumerate(parts))
    return in_groups(_max_of_each, keys, parts)


def _max_of_each(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the maximum of each array over its last axis. On one GPU a single kernel reduces vectors."""
    if len(parts) == 1:
        return _one_by_one(parts)
    on_gpu = partial(unless_partitioned, max_of_stacked, _one_by_one)
    return unless_cpu(on_gpu, _one_by_one, list(parts))


def max_of_stacked(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the maximum of each vector. The vectors are padded and stacked, and reduced once."""
    longest = max(x.shape[0] for x in parts)
    padded = [
        lax.pad(x.astype(jnp.float32), np.float32(-np.inf), [(0, longest - x.shape[0], 0)]) for x in parts
    ]
    return list(jnp.max(jnp.stack(padded), axis=1))


def _one_by_one(parts: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the maximum of each array over its last axis, by one reduction per array."""
    return [jnp.max(x, axis=-1).astype(jnp.float32) for x in parts]

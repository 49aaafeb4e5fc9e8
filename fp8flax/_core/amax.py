"""Finds the amax of tensors with delayed scaling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.scaling import push_amax
from fp8flax._core.shapes import Bool, Float, Float32


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
    magnitude = jnp.where(jnp.isnan(x), np.array(np.inf, x.dtype), jnp.abs(x))
    if where is not None:
        magnitude = jnp.where(where, magnitude, np.array(-np.inf, x.dtype))
    return jnp.max(magnitude, initial=-jnp.inf)


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

"""The metas: arrays that take the place of scales inside of a gradient. ``state.state`` says why."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._compat.max_dtype import MaxDtype, of_floats, to_floats

fp8_meta = MaxDtype((3,))
"""The dtype of a meta. Each element has three float32 numbers, whose cotangents merge by maximum.

The first is the scale; the others are ready-made scales of this step."""


def pack_meta(*numbers: jax.Array) -> jax.Array:
    """Returns an array of ``fp8_meta`` from its three numbers: float32 arrays of its shape."""
    ndim = numbers[0].ndim
    if ndim < 2:
        return of_floats(fp8_meta, jnp.stack(numbers, axis=-1))
    # For stacked layers, a GPU kernel can make several arrays by selects, but only one by a stack.
    cases = [jnp.broadcast_to(x[..., None], (*x.shape, len(numbers))) for x in numbers]
    aval = jax.typeof(cases[0])
    place = lax.broadcasted_iota(np.int32, aval.shape, ndim, out_sharding=aval.sharding)
    return of_floats(fp8_meta, lax.select_n(place, *cases))


def unpack_meta(x: jax.Array, num: int = 3) -> list[jax.Array]:
    """Returns the first ``num`` numbers of an array of ``fp8_meta``, without a gradient."""
    numbers = lax.stop_gradient(to_floats(x))
    return [lax.index_in_dim(numbers, i, -1, keepdims=False) for i in range(num)]

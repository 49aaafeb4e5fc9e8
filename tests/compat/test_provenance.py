"""What the trace of a program says of an array."""

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.provenance import before_cast


def test_the_array_before_a_cast_is_found():
    """Also below a derivative. An array that a loop does not cast by itself stays as it is."""
    found = []

    def looked_at(x):
        found.append(before_cast(x))
        return jnp.sum(x)

    def loss(w):
        wide = w.astype(jnp.bfloat16)
        lax.fori_loop(0, 2, lambda _, total: total + looked_at(wide), jnp.zeros((), wide.dtype))
        return looked_at(wide) + jax.checkpoint(lambda w: looked_at(w.astype(jnp.bfloat16)))(w)

    w = jnp.ones((2, 3))
    jax.jit(jax.grad(loss))(w)
    assert found[0] is None
    assert all((x.shape, x.dtype) == (w.shape, w.dtype) for x in found[-2:])
    assert before_cast(w.astype(jnp.bfloat16)) is None

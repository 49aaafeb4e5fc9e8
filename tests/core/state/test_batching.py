"""Small arrays that are computed as one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.state.batching import each_alike


@pytest.mark.parametrize("kind", [{}, {"in_parts": True}, {"loops": True}, {"read_once": False}])
def test_each_alike_is_each(kind):
    def f(x, pair):
        return x + pair[0], pair[1] - 1

    xs, pairs = [jnp.float32(1), jnp.float32(2)], [(jnp.ones(2), jnp.zeros(3)), (jnp.zeros(2), jnp.ones(3))]
    found = jax.jit(lambda *args: each_alike(f, *args, **kind))(xs, pairs)
    jax.tree.map(np.testing.assert_array_equal, found, [f(*each) for each in zip(xs, pairs)])
    assert len(each_alike(f, xs[:1], pairs[:1], **kind)) == 1
    without_some = jax.jit(lambda xs: each_alike(lambda x, _: x + 1, xs, [None, None], **kind)).trace(xs)
    without_some.lower(lowering_platforms=("cuda",))
    np.testing.assert_array_equal(without_some.lower().compile()(xs), [2, 3])

"""``observed``: an identity, whose cotangent is seen and may be replaced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.observe import observed


def doubled(g, args):
    """Observer: returns twice the cotangent, and the sum of the cotangent for the first argument."""
    return 2 * g, (jnp.sum(g), None)


X, ARGS = jnp.float32([1, 2]), (jnp.float32(0), jnp.float32([5]))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_value_and_cotangents(wrap):
    out, vjp = jax.vjp(wrap(lambda x, args: observed(doubled, x, args)), X, ARGS)
    np.testing.assert_array_equal(out, X)
    dx, (first, second) = vjp(jnp.float32([3, 4]))
    np.testing.assert_array_equal(dx, [6, 8])
    assert first == 7
    np.testing.assert_array_equal(second, [0])


@pytest.mark.parametrize("innermost_only", [False, True])
def test_two_nested_gradients(innermost_only):
    def inner(x, first):
        return jnp.sum(observed(doubled, x, (first, None), innermost_only=innermost_only) ** 3)

    def outer(x, first):
        return jnp.sum(jax.grad(inner)(x, first))

    # The inner gradient is 2 * 3 x**2. The outer one is doubled again, unless only the inner is observed.
    np.testing.assert_array_equal(jax.grad(inner)(X, ARGS[0]), 6 * X**2)
    np.testing.assert_array_equal(jax.grad(outer)(X, ARGS[0]), (1 if innermost_only else 2) * 12 * X)

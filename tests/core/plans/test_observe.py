"""``observed``: an identity, whose cotangent is seen and may be replaced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.plans.observe import observed


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


def test_the_outer_of_two_gradients_is_observed_too():
    def inner(x, first):
        return jnp.sum(observed(doubled, x, (first, None)) ** 3)

    def outer(x, first):
        return jnp.sum(jax.grad(inner)(x, first))

    # The inner gradient is 2 * 3 x**2. The outer one also goes through the observer, once more.
    np.testing.assert_array_equal(jax.grad(inner)(X, ARGS[0]), 6 * X**2)
    np.testing.assert_array_equal(jax.grad(outer)(X, ARGS[0]), 2 * 12 * X)

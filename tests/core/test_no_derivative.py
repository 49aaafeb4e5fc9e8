"""``no_derivative``: values are unchanged, and a derivative is an error."""

import jax
import jax.numpy as jnp
import pytest

from fp8flax._core.no_derivative import no_derivative


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint])
def test_values_are_those_of_the_function(wrap):
    x = jnp.float32([1, 2])
    assert (wrap(no_derivative(jnp.sin))(x) == jnp.sin(x)).all()


@pytest.mark.parametrize("derivative", [jax.grad, jax.jacfwd, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_a_derivative_is_refused(derivative):
    with pytest.raises(TypeError, match="once, in reverse mode"):
        derivative(no_derivative(jnp.sin))(1.0)


def test_a_first_derivative_by_a_rule_of_its_own_is_none():
    """The rules of a ``custom_vjp`` are called, and not differentiated."""

    @jax.custom_vjp
    def f(x):
        return no_derivative(jnp.sin)(x)

    f.defvjp(lambda x: (f(x), x), lambda x, g: (g * no_derivative(jnp.cos)(x),))
    assert jax.grad(f)(1.0) == jnp.cos(1.0)
    with pytest.raises(TypeError, match="second derivatives"):
        jax.grad(jax.grad(f))(1.0)

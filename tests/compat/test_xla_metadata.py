"""A function that XLA for CPUs calls, and does not inline."""

import jax
import jax.numpy as jnp
import pytest

from fp8flax._compat.xla_metadata import apart


def halved(x):
    return {"halves": x / 2, "is_small": x < 1}


@pytest.mark.newest
def test_a_function_apart_is_called_on_cpus_alone():
    traced = jax.jit(apart(halved)).trace(jnp.ones(3))
    assert 'inlineable = "false"' in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "inlineable" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert " call(" in traced.lower().compile().as_text()


def test_a_function_apart_is_differentiated():
    squared = apart(lambda x: (x**2, x + 1))
    assert jax.jvp(lambda x: squared(x)[0], (3.0,), (1.0,)) == (9.0, 6.0)
    assert jax.grad(jax.grad(lambda x: squared(x)[0] * squared(x)[1]))(3.0) == 2 * 4 + 4 * 3

"""A function that XLA for CPUs calls, and does not inline."""

import jax
import jax.numpy as jnp
import numpy as np
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


def test_a_function_apart_is_that_function():
    x = jnp.array([0.5, 3.0])
    for f in (apart(halved), jax.jit(apart(halved)), jax.vmap(apart(halved))):
        result = f(x)
        np.testing.assert_array_equal(result["halves"], [0.25, 1.5])
        np.testing.assert_array_equal(result["is_small"], [True, False])


@pytest.mark.newest
@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("cuda", "cpu")])
def test_a_function_apart_in_a_program_for_several_platforms(platforms):
    exported = jax.export.export(jax.jit(apart(halved)), platforms=platforms)(jnp.ones(2))
    np.testing.assert_array_equal(exported.call(jnp.array([0.5, 3.0]))["halves"], [0.25, 1.5])


def test_a_function_apart_is_differentiated():
    squared = apart(lambda x: (x**2, x + 1))
    assert jax.jvp(lambda x: squared(x)[0], (3.0,), (1.0,)) == (9.0, 6.0)
    assert jax.grad(jax.grad(lambda x: squared(x)[0] * squared(x)[1]))(3.0) == 2 * 4 + 4 * 3

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp8flax._compat.jaxprs import equations


@pytest.mark.newest
def test_equations_have_their_scopes_and_how_often_they_run():
    def f(x):
        with jax.named_scope("outer"):
            loop = jax.jit(lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=4)[0])
            return lax.scan(lambda c, _: (loop(c), None), jnp.cos(x), length=3)[0]

    program = jax.make_jaxpr(f)(np.float32(1))
    found = {one.eqn.primitive.name: one for one in equations(program)}
    assert (found["cos"].times, found["sin"].times) == (1, 12)
    assert found["sin"].scopes.startswith("outer")

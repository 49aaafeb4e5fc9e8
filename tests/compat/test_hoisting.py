import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._compat.hoisting import hoisted
from fp8flax._compat.jaxprs import equations
from tests.cases import normal, variables_of

SAVE_SINES = jax.checkpoint_policies.save_only_these_names("sine")


def dtypes_of_loop(program):
    """Returns the names of the dtypes of the arrays that the only loop of a program gets."""
    (loop,) = (e.eqn for e in equations(program) if e.eqn.primitive.name == "scan")
    return {x.aval.dtype.name for x in loop.invars}


@pytest.mark.newest
def test_what_the_policy_saves_is_computed_before_the_loop():
    def f(fixed, varying):
        named = jax.ad_checkpoint.checkpoint_name(jnp.sin(fixed).astype(jnp.bfloat16), "sine")
        return named.astype(jnp.float32) * varying + jnp.cos(fixed)

    def in_a_loop(fixed, xs):
        step = hoisted(f, fixed, xs[0], SAVE_SINES)
        return jax.lax.scan(lambda carry, x: (carry, step(x)), None, xs)[1]

    fixed, xs = normal(0, 3), normal(1, 4, 3)
    assert dtypes_of_loop(jax.make_jaxpr(in_a_loop)(fixed, xs)) == {"float32", "bfloat16"}
    np.testing.assert_array_equal(in_a_loop(fixed, xs), jax.vmap(f, (None, 0))(fixed, xs))


@pytest.mark.newest
def test_microbatches_share_the_codes_of_kernels():
    model = nn.Dense(16, dot_general_cls=fp8.Fp8DotGeneralOp)
    variables = variables_of(model, normal(0, 8, 16))
    step = fp8.accumulate_gradients(lambda v, x: jnp.mean(jnp.square(model.apply(v, x))))
    assert "uint8" in dtypes_of_loop(jax.make_jaxpr(step)(variables, normal(0, 3, 8, 16)))

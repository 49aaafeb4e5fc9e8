import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8
from fp8flax._compat.jaxprs import equations
from tests.cases import normal, variables_of


def dtypes_of_loop(program):
    """Returns the names of the dtypes of the arrays that the only loop of a program gets."""
    (loop,) = (e.eqn for e in equations(program) if e.eqn.primitive.name == "scan")
    return {x.aval.dtype.name for x in loop.invars}


@pytest.mark.newest
def test_microbatches_share_the_codes_of_kernels():
    model = nn.Dense(16, dot_general_cls=fp8.Fp8DotGeneralOp)
    variables = variables_of(model, normal(0, 8, 16))
    step = fp8.accumulate_gradients(lambda v, x: jnp.mean(jnp.square(model.apply(v, x))))
    assert "uint8" in dtypes_of_loop(jax.make_jaxpr(step)(variables, normal(0, 3, 8, 16)))

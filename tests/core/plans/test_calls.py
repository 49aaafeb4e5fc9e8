"""The signatures of the ops: arguments in the order of the JAX function, whatever is called by name."""

import jax.numpy as jnp
import pytest
from jax import lax

from fp8flax._core.plans.calls import (
    ConvCall,
    DotGeneralCall,
    EinsumCall,
    RaggedDotCall,
    calling,
)
from tests.cases import MATMUL

X, W, SIZES = jnp.ones((4, 3)), jnp.ones((3, 2)), jnp.array([1, 3])
IMAGES, WINDOWS = jnp.ones((1, 4, 4)), jnp.ones((2, 4, 2))
CONV = {"window_strides": (1,), "padding": "SAME", "dimension_numbers": None}


@pytest.mark.parametrize(
    ("cls", "args", "keywords", "function"),
    [
        (DotGeneralCall, (X, W), {"dimension_numbers": MATMUL, "precision": "highest"}, lax.dot_general),
        (ConvCall, (IMAGES, WINDOWS), CONV, lax.conv_general_dilated),
        (RaggedDotCall, (X, jnp.stack([W, W])), {"group_sizes": SIZES}, lax.ragged_dot),
    ],
)
def test_a_call_has_the_arguments_of_the_function(cls, args, keywords, function):
    def multiply(*arguments, out_sharding=None):
        assert out_sharding is None
        return function(*arguments)

    found = calling(cls, multiply)(*args, **keywords)
    assert (found == function(*args, **keywords)).all()


def test_an_einsum_is_one_dot_general():
    calls = []

    def multiply(lhs, rhs, dimension_numbers, precision, preferred_element_type):
        calls.append((dimension_numbers, precision, preferred_element_type))
        return lax.dot_general(lhs, rhs, dimension_numbers)

    found = calling(EinsumCall, multiply)("ab,bc->ca", X, W, precision="high")
    assert (found == (X @ W).T).all()
    assert calls == [(MATMUL, "high", None)]
    with pytest.raises(TypeError, match="eqn"):
        calling(EinsumCall, multiply)(X, X, W)


@pytest.mark.parametrize("cls", [DotGeneralCall, EinsumCall, ConvCall, RaggedDotCall])
def test_an_argument_that_no_function_has_is_refused(cls):
    with pytest.raises(TypeError, match="swallowed"):
        calling(cls, lambda *args: X)(*[X] * 4, swallowed=True)

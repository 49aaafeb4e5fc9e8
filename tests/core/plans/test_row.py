"""The table of ops: what it finds."""

import copy
import pickle

import jax
import jax.numpy as jnp

from fp8flax._core.plans.ops import CONV, DOT_GENERAL, EINSUM, RAGGED_DOT
from fp8flax._core.plans.row import row_of


def test_a_function_of_a_user_is_no_op_of_the_package():
    @jax.jit
    def dot_general(x):
        return x + 1

    (eqn,) = jax.make_jaxpr(dot_general)(jnp.ones(2)).eqns
    assert row_of(eqn.primitive) is None


def test_stacked_roles_have_the_leading_dimension_of_the_kernel():
    assert RAGGED_DOT.leading((5, 2, 3)) == {"kernel": (5,)}
    assert DOT_GENERAL.leading((5, 2)) == {}


def test_a_copy_of_a_row_is_the_row():
    assert copy.deepcopy(CONV) is CONV
    assert pickle.loads(pickle.dumps(EINSUM)) is EINSUM

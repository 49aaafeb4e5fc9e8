"""The table of ops: what it finds, and what it refuses."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import pytest

from fp8flax._core.plans.ops import CONV, DOT_GENERAL, EINSUM, RAGGED_DOT
from fp8flax._core.plans.row import register, row_of, rows


def test_a_function_of_a_user_is_no_op_of_the_package():
    @jax.jit
    def dot_general(x):
        return x + 1

    (eqn,) = jax.make_jaxpr(dot_general)(jnp.ones(2)).eqns
    assert row_of(eqn.primitive, eqn.params) is None


def test_stacked_roles_have_the_leading_dimension_of_the_kernel():
    assert RAGGED_DOT.leading((5, 2, 3)) == {"kernel": (5,)}
    assert DOT_GENERAL.leading((5, 2)) == {}


def test_a_copy_of_a_row_is_the_row():
    assert copy.deepcopy(CONV) is CONV
    assert pickle.loads(pickle.dumps(EINSUM)) is EINSUM


@pytest.mark.parametrize("changes", [{"name": "Other"}, {"primitive": "other"}])
def test_a_second_row_of_a_name_or_a_primitive_is_refused(changes):
    row = dataclasses.replace(DOT_GENERAL, **changes)
    with pytest.raises(ValueError, match="'Fp8DotGeneralOp'"):
        register(row)
    assert row not in rows()

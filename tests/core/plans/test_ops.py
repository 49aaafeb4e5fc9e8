"""The table of ops: each row beside the function of JAX that it stands for."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._core.plans import ops
from fp8flax._core.plans.dot_general import dot_plan
from tests.cases import CONTRACTIONS, MATMUL, normal

SIZES = jnp.array([3, 1])
CONV = ((2, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), 1, 1, None, None)
CALLS = {
    ops.DOT_GENERAL: (normal(0, 2, 5, 7), normal(1, 7, 3), (((2,), (0,)), ((), ())), None, None),
    ops.CONV: (normal(0, 2, 8, 6, 4), normal(1, 3, 3, 4, 5), *CONV),
    ops.RAGGED_DOT: (normal(0, 4, 6), normal(1, 2, 6, 3), SIZES, None, None),
}
by_row = pytest.mark.parametrize("row", CALLS, ids=lambda row: row.name)


@by_row
def test_the_row_of_a_primitive_has_its_arguments(row):
    lhs, rhs, *arguments = CALLS[row]
    operands = tuple(x for x in arguments if isinstance(x, jax.Array))
    rest = arguments[len(operands) :]
    program = jax.make_jaxpr(lambda *x: row.plain(*x, *rest))(lhs, rhs, *operands)
    eqn = next(e for e in program.eqns if ops.row_of(e.primitive, e.params) is not None)
    assert ops.row_of(eqn.primitive, eqn.params) is row
    assert row.unsupported(eqn.params) is None
    found = row.plain(lhs, rhs, *operands, *row.arguments(eqn.params))
    np.testing.assert_array_equal(found, row.plain(*CALLS[row]))


def test_a_function_of_a_user_is_no_op_of_the_package():
    @jax.jit
    def dot_general(x):
        return x + 1

    (eqn,) = jax.make_jaxpr(dot_general)(jnp.ones(2)).eqns
    assert ops.row_of(eqn.primitive, eqn.params) is None


@by_row
def test_flops_are_those_that_xla_counts(row):
    lhs, rhs, *arguments = CALLS[row]
    sizes = row.sizes(lhs.shape, rhs.shape, *arguments)
    product = jax.jit(lambda a, b: jnp.matmul(a, b))
    operands = (jnp.zeros((sizes.batch, *shape)) for shape in ((sizes.m, sizes.k), (sizes.k, sizes.n)))
    assert sizes.flops == product.lower(*operands).compile().cost_analysis()["flops"]
    out = row.plain(*CALLS[row])
    assert sizes.batch * sizes.m * sizes.n == out.size
    assert sizes.k == rhs.size // sizes.n // (rhs.shape[0] if row is ops.RAGGED_DOT else 1)


@pytest.mark.parametrize("name", ["matmul", "dense on a sequence", "two contracting, crossed", "one batch"])
def test_a_matmul_with_its_operands_in_the_other_order(name):
    lhs_shape, rhs_shape, dims = CONTRACTIONS[name]
    lhs, rhs = normal(0, *lhs_shape), normal(1, *rhs_shape)
    swapped = ops.DOT_GENERAL.swapped(lhs, rhs, dims, ("highest", "default"), None)
    assert swapped.arguments[1] == ("default", "highest")
    found = swapped.restore(lax.dot_general(rhs, lhs, *swapped.arguments))
    np.testing.assert_allclose(found, lax.dot_general(lhs, rhs, dims), rtol=1e-5, atol=1e-6)


def test_stacked_roles_have_the_leading_dimension_of_the_kernel():
    assert ops.RAGGED_DOT.leading((5, 2, 3)) == {"kernel": (5,)}
    assert ops.DOT_GENERAL.leading((5, 2)) == {}


def test_a_copy_of_a_row_is_the_row():
    assert copy.deepcopy(ops.CONV) is ops.CONV
    assert pickle.loads(pickle.dumps(ops.EINSUM)) is ops.EINSUM


@pytest.mark.parametrize("changes", [{"name": "Other"}, {"primitive": "other"}])
def test_a_second_row_of_a_name_or_a_primitive_is_refused(changes):
    row = ops.dataclasses.replace(ops.DOT_GENERAL, **changes)
    with pytest.raises(ValueError, match="The table of ops has the row 'Fp8DotGeneralOp' already"):
        ops.register(row)
    assert row not in ops.rows()


def test_a_packed_kernel_has_the_shape_of_the_kernel():
    kernel = normal(1, 40, 3)
    recipe = fp8.MXFP8BlockScaling().gemms
    plan = dot_plan(jax.ShapeDtypeStruct((2, 40), jnp.float32), kernel, MATMUL, recipe=recipe)
    packed = ops.packed_kernel(plan, kernel, None)
    assert packed.codes.shape == kernel.shape
    view = plan.uses("kernel").first.view
    back = packed.quantizer.unpack(packed, view).dequantize(view, jnp.float32)
    np.testing.assert_allclose(back, kernel, rtol=1 / 16, atol=1e-2)

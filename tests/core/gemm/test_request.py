"""Requests: a GEMM as a product of matrices whose columns are contracted."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._core.plans.dot_general import DotPlan
from fp8flax._core.plans.plan import Operand

DELAYED = fp8.DelayedScaling().gemms


def gemms_of(lhs, rhs, dims):
    operands = (Operand(shape, jnp.dtype(jnp.bfloat16), None, frozenset()) for shape in (lhs, rhs))
    return DotPlan(
        recipe=DELAYED,
        **dict(zip(("lhs", "rhs"), operands, strict=True)),
        out_dtype=jnp.dtype(jnp.bfloat16),
        dimension_numbers=dims,
    ).gemms


def ints(seed, *shape):
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32)


CASES = {
    "a matrix": ((6, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "batches of rows": ((2, 3, 4), (4, 5), (((2,), (0,)), ((), ()))),
    "heads": ((2, 3, 4), (4, 5, 7), (((2,), (0,)), ((), ()))),
    "out of heads": ((2, 3, 4, 5), (4, 5, 7), (((2, 3), (0, 1)), ((), ()))),
    "a transposed kernel": ((6, 4), (5, 4), (((1,), (1,)), ((), ()))),
}


@pytest.mark.parametrize("case", CASES)
def test_products_of_transposed_matrices(case):
    lhs_shape, rhs_shape, dims = CASES[case]
    for gemm in (gemms_of(lhs_shape, rhs_shape, dims)[i] for i in (0, 1, 3)):
        matrices, *are_transposed = gemm.of_columns()
        operands = [ints(i, *view.shape) for i, view in enumerate((gemm.lhs, gemm.rhs))]
        depth = gemm.sizes[1]
        columns = [
            x.reshape(depth, -1).T if is_transposed else x.reshape(-1, depth)
            for x, is_transposed in zip(operands, are_transposed, strict=True)
        ]
        assert [x.shape for x in columns] == [matrices.lhs.shape, matrices.rhs.shape]
        actual = lax.dot_general(*columns, matrices.dimension_numbers).reshape(gemm.out_shape)
        np.testing.assert_array_equal(actual, lax.dot_general(*operands, gemm.dimension_numbers))


def test_what_does_not_lie_together_is_left_alone():
    gemms = gemms_of((2, 4, 3), (4, 5), (((1,), (0,)), ((), ())))
    assert gemms.forward.of_columns() is None
    assert gemms_of((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))).forward.of_columns() is None

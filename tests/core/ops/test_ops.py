"""The rows of the ops, each beside the function of JAX that it stands for."""

import jax
import jax.numpy as jnp
import pytest

from fp8flax._core.ops import ops
from tests.cases import normal

SIZES = jnp.array([3, 1])
CONV = ((2, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), 1, 1, None, None)
CALLS = {
    ops.DOT_GENERAL: (normal(0, 2, 5, 7), normal(1, 7, 3), (((2,), (0,)), ((), ())), None, None),
    ops.CONV: (normal(0, 2, 8, 6, 4), normal(1, 3, 3, 4, 5), *CONV),
    ops.RAGGED_DOT: (normal(0, 4, 6), normal(1, 2, 6, 3), SIZES, None, None),
}
by_row = pytest.mark.parametrize("row", CALLS, ids=lambda row: row.name)


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

"""The rows of the ops, each beside the function of JAX that it stands for."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.ops.op import calling
from fp8flax._linen import ops
from tests.cases import normal

SIZES = jnp.array([3, 1])
CONV = ((2, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), 1, 1, None, None)
CALLS = {
    ops.DotGeneral: (normal(0, 2, 5, 7), normal(1, 7, 3), (((2,), (0,)), ((), ())), None, None),
    ops.Conv: (normal(0, 2, 8, 6, 4), normal(1, 3, 3, 4, 5), *CONV),
    ops.RaggedDot: (normal(0, 4, 6), normal(1, 2, 6, 3), SIZES, None, None),
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
    assert sizes.k == rhs.size // sizes.n // (rhs.shape[0] if row is ops.RaggedDot else 1)


@by_row
def test_an_argument_that_no_function_has_is_refused(row):
    assert pickle.loads(pickle.dumps(row)) is row
    with pytest.raises(TypeError, match="swallowed"):
        calling(row, lambda *args: None)(*[None] * 4, swallowed=True)


@pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls:UserWarning")
@by_row
def test_switched_off_an_op_is_the_function_of_jax(row):
    """It makes no state, and leaves what is there."""
    end = 3 if row is ops.RaggedDot else None  # the op takes further arguments by name
    arguments = CALLS[row][:end]
    op = ops.OPS[row]()
    state = op.init(jax.random.key(0), *arguments)
    with fp8.autocast(enabled=False):
        out, variables = op.init_with_output(jax.random.key(0), *arguments)
        again, left = op.apply(state, *arguments, mutable=True)
    assert variables == {}
    for found in (out, again):
        np.testing.assert_array_equal(found, row.plain(*CALLS[row]))
    jax.tree.map(np.testing.assert_array_equal, left, state)

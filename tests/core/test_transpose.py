"""The kernel that transposes codes: every byte, and which products take it."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._audit import compiling
from fp8flax._core.gemm import lowering
from fp8flax._core.gemm.kernels.transpose import can_transpose, transpose
from fp8flax._core.names import TRANSPOSE
from fp8flax._core.plans.dot_general import DotPlan
from fp8flax._core.plans.plan import Operand
from tests.cases import dense_step


@pytest.mark.oldest
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("shape", [(128, 128), (128, 384), (256, 128)])
def test_every_byte_is_moved(shape, dtype):
    codes = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    actual = jax.jit(lambda x: transpose(x, interpret=True))(codes.view(dtype))
    assert actual.dtype == dtype
    np.testing.assert_array_equal(np.asarray(actual).view(np.uint8), codes.T)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(128, 256, True), (128, 192, False), (64, 128, False), (0, 128, False), (2**20, 2**11, False)],
)
def test_where_there_is_a_kernel(rows, columns, expected):
    assert can_transpose(rows, columns) == expected


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
        matrices, are_transposed = gemm.of_columns()
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


@pytest.mark.parametrize(
    ("capability", "name", "rows", "expected"),
    [
        (9.0, "wgrad", 256, True),
        (9.0, "wgrad", 192, False),
        (8.9, "wgrad", 256, False),
        (10.0, "wgrad", 256, False),  # reads either order
        (9.0, "forward", 256, False),  # XLA transposes a kernel where it casts it
        (9.0, "dgrad", 256, False),
    ],
)
def test_which_products_take_it(capability, name, rows, expected):
    gemm = getattr(gemms_of((rows, 128), (128, 256), CASES["a matrix"][2]), name)
    operands = [
        fp8.QTensor(jnp.zeros(view.shape, jnp.float8_e4m3fn), jnp.float32(1), gemm.recipe.lhs)
        for view in (gemm.lhs, gemm.rhs)
    ]
    assert math.prod(gemm.sizes) == rows * 128 * 256
    assert lowering._transposes_codes(capability, gemm, *operands) == expected


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("rows", "kernels"), [(256, 2), (160, 0)])
def test_in_a_layers_program(rows, kernels):
    step, *args = dense_step(rows, 128, 384, fp8.Fp8DotGeneralOp)
    program = compiling.compile_for(compiling.find_target("h200"), step, tuple(args))
    text = program.as_text()
    assert len(re.findall(rf'custom_call_target="__gpu\$xla.gpu.triton".*{TRANSPOSE}\b', text)) == kernels
    assert len(re.findall(r"cublas\$lt\$matmul\$f8", text)) >= 3

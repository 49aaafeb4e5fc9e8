"""The kernel that transposes codes: every byte, and which products take it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._audit import compiling
from fp8flax._core.gemm.kernels.transpose import can_transpose, transpose
from fp8flax._core.names import TRANSPOSE
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


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("rows", "kernels"), [(256, 2), (160, 0)])
def test_in_a_layers_program(rows, kernels):
    step, *args = dense_step(rows, 128, 384, fp8.Fp8DotGeneralOp)
    program = compiling.compile_for(compiling.find_target("h200"), step, tuple(args))
    text = program.as_text()
    assert len(re.findall(rf'custom_call_target="__gpu\$xla.gpu.triton".*{TRANSPOSE}\b', text)) == kernels
    assert len(re.findall(r"cublas\$lt\$matmul\$f8", text)) >= 3

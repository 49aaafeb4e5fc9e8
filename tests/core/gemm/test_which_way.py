"""In which way a GPU multiplies."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.gemm import gemm
from fp8flax._core.gemm.gemm import Gemm
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.ops.contract import States
from fp8flax._core.ops.ragged_dot import fp8_ragged_dot
from tests.cases import MATMUL


@pytest.mark.parametrize(
    "way",
    [
        "plain",
        "blocks",
        pytest.param("vmap", marks=pytest.mark.long),
        pytest.param("remat", marks=pytest.mark.all_cells),
    ],
)
def test_which_gpus_have_the_kernel(way):
    """Hopper, of operands of one dtype; under transformations too. For one GPU, and for several."""
    blocks = way == "blocks"
    recipe = fp8.Float8BlockScaling() if blocks else fp8.Float8CurrentScaling(fp8_format=fp8.Format.E4M3)
    f = partial(fp8_ragged_dot, states=States(), recipe=recipe)
    f = {"vmap": jax.vmap(f), "remat": jax.checkpoint(f)}.get(way, f)
    x, w, sizes = jnp.zeros((64, 32)), jnp.zeros((2, 32, 16)), jnp.array([10, 20])
    if way == "vmap":
        x, w, sizes = (jnp.stack([a] * 2) for a in (x, w, sizes))

    def step(x, w):
        out, vjp = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
        return out, vjp(out)

    for capability, count in ((None, 0), (8.9, 0), (9.0, 3), (10.0, 0)):
        # Pallas's pipeline is one for int32.
        with compile_target(capability), jax.enable_x64(way == "blocks"):
            found = str(jax.make_jaxpr(step)(x, w)).count("name=fp8_grouped_gemm")
            assert found == 2 * count


@pytest.mark.parametrize("capability", [9.0, 10.0])
def test_operands_that_are_filled_up_to_other_widths(capability):
    """Blocks of 32 and of 128 columns, with 96 columns; devices of a mesh cannot split these."""
    quantizers = [
        fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=block, scale="e8m0")
        for block in ((1, 32), (1, 128))
    ]
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=quantizers[0], rhs=quantizers[1]))
    op = fp8.Fp8DotGeneralOp(recipe=recipe)
    with compile_target(capability):
        out = jax.eval_shape(
            lambda x, w: op.apply({}, x, w, MATMUL), jnp.zeros((16, 96)), jnp.zeros((96, 16))
        )
    assert out.shape == (16, 16)


@pytest.mark.parametrize(("number", "fits"), [(4, True), (2**18, False)])
def test_sizes_are_counted_with_their_padding(number, fits):
    """A GPU kernel fills up each matrix of a stack to 128 rows."""
    quantizer = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(1, 128), scale="float32")
    codes = jax.ShapeDtypeStruct((number, 1, 128), jnp.float8_e4m3fn)
    operand = fp8.QTensor(codes, None, quantizer, (1, 1, 128))
    dtype = np.dtype(np.float32)
    product = Gemm((((2,), (2,)), ((0,), (0,))), dtype, dtype, dtype)
    with compile_target(9.0):
        assert (gemm._on_one_gpu(product, operand, operand) is gemm._hopper) == fits

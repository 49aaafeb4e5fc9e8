"""What all contractions have from the one engine, and no test of a single op asks."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8

X, W = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((6, 8), (8, 4)))
DIMS = (((1,), (0,)), ((), ()))


def test_what_is_not_multiplied_in_fp8_takes_any_precision():
    """In the quantize-dequantize form, which the recipe's accumulation says nothing of."""
    op = fp8.Fp8DotGeneralOp(form="qdq")
    variables = op.init(jax.random.key(0), X, W, DIMS)
    out = op.apply(variables, X, W, DIMS, lax.DotAlgorithmPreset.F32_F32_F32)
    np.testing.assert_allclose(out, op.apply(variables, X, W, DIMS), rtol=1e-6)
    with pytest.raises(TypeError, match="precision of an FP8 matmul must be None"):
        fp8.Fp8DotGeneralOp().apply(variables, X, W, DIMS, lax.DotAlgorithmPreset.F32_F32_F32)


@pytest.mark.filterwarnings("ignore:FP8 convolutions")
def test_the_derivative_of_a_frozen_convolution_says_what_it_is():
    """For the audit, which else takes it for a pattern that XLA did not match."""
    layer = nn.Conv(4, (3, 3), conv_general_dilated_cls=fp8.Fp8ConvGeneralDilatedOp)
    x = jnp.ones((1, 8, 8, 2))
    variables = fp8.calibrate(layer.apply, layer.init(jax.random.key(0), x), [x])
    served, variables = fp8.freeze(layer, variables, x)
    step = jax.jit(jax.grad(lambda x: jnp.sum(served.apply(variables, x) ** 2)))
    text = step.lower(x).as_text(debug_info=True)
    transposed = re.findall(r"transpose\(jvp\(Conv\)\)/\S+/conv_general_dilated", text)
    assert transposed
    assert all("/fp8_convolved_wide/" in name for name in transposed)

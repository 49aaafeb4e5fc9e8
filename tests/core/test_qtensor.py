"""Quantized tensors as bits, and back."""

import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.qtensor import QTensor


@pytest.mark.parametrize("scale_dtype", [jnp.float32, jnp.float8_e8m0fnu])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_bits_and_back(dtype, scale_dtype):
    """Every code, NaN among them, and scales of one byte."""
    scale = "e8m0" if scale_dtype == jnp.float8_e8m0fnu else "float32"
    quantizer = fp8.BlockQuantizer(dtype=dtype, block=(1, 32), scale=scale)
    codes = np.arange(256, dtype=np.uint8).reshape(1, 8, 32)
    tensor = QTensor(jnp.asarray(codes.view(dtype)), jnp.ones((1, 8, 1), scale_dtype), quantizer)
    bits = tensor.as_bits()
    np.testing.assert_array_equal(bits.codes, codes)
    assert bits.scale.dtype == (jnp.uint8 if scale == "e8m0" else jnp.float32)
    back = bits.from_bits()
    assert (back.codes.dtype, back.scale.dtype) == (dtype, scale_dtype)
    np.testing.assert_array_equal(np.asarray(back.codes).view(np.uint8), codes)

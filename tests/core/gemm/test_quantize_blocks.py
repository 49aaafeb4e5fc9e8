"""Tensors that one GPU kernel quantizes for both of their GEMMs; the kernel is interpreted."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._audit.program import bytes_moved, parse
from fp8flax._core.gemm import quantize_blocks, quantize_blocks_mosaic
from fp8flax._core.gemm.dispatch import quantize_in_blocks
from fp8flax._core.gemm.gpus import new_kernels
from fp8flax._core.gemm.quantize_blocks import Cast, block_quantize
from fp8flax._core.qtensor import Dims
from tests.cases import assert_same_bits
from tests.gpus import compiled_for_gpus

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def ugly(dtype, rows, columns):
    """Two matrices with rows of all magnitudes, blocks of zeros, NaN, Inf and what is no normal number."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 256, 384)) * np.exp(3 * rng.standard_normal((2, 256, 1)))
    x[0, :130, :130] = 0
    x[0, 200] *= 1e30
    x[0, 201] *= 1e-36
    x[0, 202] *= 1e-39
    x[1, 3, 5], x[1, 4, 5], x[1, 7, 8] = np.inf, -np.inf, np.nan
    return jnp.asarray(x, dtype)[:, :rows, :columns]


KINDS = [
    (E4M3, "power_of_two", jnp.float32, jnp.bfloat16),  # as the float32 copy of a kernel
    (E4M3, "float32", jnp.bfloat16, None),
    (E5M2, "float32", jnp.float32, None),
]
SIZES = [((256, 384), True), ((203, 384), False), ((210, 140), True)]
# Each kind and size, with rows and with square blocks.
CASES = [(block, *KINDS[i], *SIZES[i]) for i in range(3) for block in ((1, 128), (128, 128))]


@pytest.mark.newest
@pytest.mark.parametrize(("block", "dtype", "scale", "of", "rounded_to", "sizes", "inf_is_nan"), CASES)
def test_the_kernel_quantizes_as_the_quantizer(block, dtype, scale, of, rounded_to, sizes, inf_is_nan):
    """To the last bit of codes and scales; of sizes that are no multiples of a block, too."""
    kernel = partial(block_quantize, interpret=True)
    assert_same_as_the_quantizer(kernel, block, dtype, scale, of, rounded_to, sizes, inf_is_nan)


@pytest.mark.long
@pytest.mark.parametrize(("block", "dtype", "scale", "of", "rounded_to", "sizes", "inf_is_nan"), CASES)
def test_the_kernel_in_mosaic_quantizes_as_the_quantizer(
    block, dtype, scale, of, rounded_to, sizes, inf_is_nan
):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    kernel = partial(quantize_blocks_mosaic.block_quantize, interpret=InterpretGPUParams())
    assert_same_as_the_quantizer(kernel, block, dtype, scale, of, rounded_to, sizes, inf_is_nan)


def assert_same_as_the_quantizer(kernel, block, dtype, scale, of, rounded_to, sizes, inf_is_nan):
    quantizer = fp8.BlockQuantizer(dtype=dtype, block=block, scale=scale)
    cast = Cast(quantizer, (Dims(3, (1,), 1), Dims(3, (2,), 1)), inf_is_nan)
    x = ugly(of, *sizes)
    rounding = cast._replace(rounded_to=rounded_to)
    found = jax.jit(partial(quantize_blocks.compute, rounding, kernel=kernel))(x)
    wanted = jax.jit(partial(quantize_blocks.reference, cast))(x.astype(rounded_to or of))
    for ours, theirs in zip(found, wanted):
        np.testing.assert_array_equal(ours.scale, theirs.scale)
        assert_same_bits(ours.codes, theirs.codes)
        assert np.isnan(np.asarray(ours.codes, np.float32)).sum() == (3 if inf_is_nan else 1)
        assert ours.block == theirs.block


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_the_kernel_in_mosaic_is_chosen_by_the_switch_alone_and_moves_as_many_bytes():
    def programs():
        for block in ((1, 128), (128, 128)):
            quantizer = fp8.BlockQuantizer(dtype=E4M3, block=block, scale="power_of_two")
            quantize = partial(quantize_in_blocks, Cast(quantizer, (Dims(2, (0,)), Dims(2, (1,)))))
            x = jax.ShapeDtypeStruct((256, 384), jnp.bfloat16)
            yield compiled_for_gpus("h200", jax.jit(quantize), x)

    today = [*programs()]
    with new_kernels(True):
        new = [*programs()]
    assert [["mosaic_gpu" in text for text in texts] for texts in (today, new)] == [[False] * 2, [True] * 2]
    moved = [[sum(map(bytes_moved, parse(text).kernels)) for text in texts] for texts in (today, new)]
    assert moved[0] == moved[1]


def test_nothing_that_may_be_nan_meets_a_minimum_or_maximum():
    """Those of Pallas's Triton backend prefer a number to a NaN, which no interpreter shows."""
    x = jnp.zeros((1, 128, 128))
    for rows, scale in ((1, "power_of_two"), (128, "float32")):
        quantizer = fp8.BlockQuantizer(dtype=E4M3, block=(rows, 128), scale=scale)
        text = str(jax.make_jaxpr(partial(block_quantize, quantizer=quantizer))(x))
        assert "pallas_call" in text
        assert not re.search(r":f32\[128,128\] = (max|min|clamp)\b", text)

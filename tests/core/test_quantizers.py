"""Codes and scales of every quantizer, bit for bit those of the reference in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.formats import fp8_max
from fp8flax._core.qtensor import Dims, QTensor
from fp8flax._core.scaling import amax_to_scale
from tests import reference, reference_recipes
from tests.cases import KINDS, assert_same_bits, codes_and_scales, normal

pytestmark = pytest.mark.optimized

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
DEQUANTIZE = jax.jit(QTensor.dequantize, static_argnums=1)


def current(granularity, power_2=False):
    return lambda dtype: fp8.CurrentQuantizer(
        dtype=dtype, granularity=granularity, use_power_2_scales=power_2
    )


def blocks(block, scale, rounding="up"):
    return lambda dtype: fp8.BlockQuantizer(dtype=dtype, block=block, scale=scale, scale_rounding=rounding)


QUANTIZERS = {
    "tensorwise": current("tensorwise"),
    "tensorwise, powers of two": current("tensorwise", power_2=True),
    "axiswise": current("axiswise"),
    "axiswise, powers of two": current("axiswise", power_2=True),
    "MX": blocks((1, 32), "e8m0"),
    "MX, floor": blocks((1, 32), "e8m0", "floor"),
    "1x128": blocks((1, 128), "power_of_two"),
    "1x128, float32": blocks((1, 128), "float32"),
    "128x128": blocks((128, 128), "power_of_two"),
    "128x128, float32": blocks((128, 128), "float32"),
    "NVFP4": lambda _: fp8.NVFP4Quantizer(),
    "NVFP4, squares": lambda _: fp8.NVFP4Quantizer(block=(16, 16)),
}


def assert_same_quantized(actual, codes, scale, *of_tensor):
    found = np.asarray(actual.codes)
    if of_tensor:
        np.testing.assert_array_equal(actual.tensor_scale, *of_tensor)
        is_nan = np.isnan(DEQUANTIZE(actual, jnp.float32))  # whose codes mean nothing
        found = np.where(is_nan, codes, found)
    assert_same_bits(found, codes)
    assert actual.scale.dtype == scale.dtype
    np.testing.assert_array_equal(*(np.asarray(x).astype(np.float32) for x in (actual.scale, scale)))


WHOLE, EDGES, EMPTY = (131, 70), (1, 33), (0, 5)  # sizes that no block divides
CODES_AND_SCALES = [
    *((name, E4M3, 1, WHOLE, "float32") for name in QUANTIZERS),
    *((name, E5M2, 0, WHOLE, "float32") for name in ("axiswise", "MX, floor", "128x128, float32")),
    *((name, E4M3, 0, WHOLE, "float32") for name in ("NVFP4", "NVFP4, squares")),
    *(
        (name, E4M3, contract, shape, "float32")
        for name in ("axiswise", "MX", "128x128, float32", "NVFP4, squares")
        for shape in (EDGES, EMPTY)
        for contract in (0, 1)
    ),
    *((name, E4M3, 1, (3, 70), "bfloat16") for name in ("axiswise", "1x128, float32", "NVFP4, squares")),
    *((name, E4M3, 1, (3, 70), "float16") for name in ("tensorwise", "NVFP4, squares")),
    *((name, E4M3, 1, (3, 70), "float64") for name in ("tensorwise", "axiswise", "MX", "NVFP4")),
]


@pytest.mark.parametrize(("name", "q_dtype", "contract", "shape", "dtype"), CODES_AND_SCALES)
def test_codes_and_scales(name, q_dtype, contract, shape, dtype):
    """Both orientations; numbers of all kinds, with one scale also beyond float32."""
    quantizer, xs = QUANTIZERS[name](q_dtype), [*reference_recipes.tensors(shape, 0).values()]
    if dtype == "float64" and isinstance(quantizer, fp8.CurrentQuantizer):
        xs.append(np.resize([1e300, 1.0, -2e300, 0.0], shape))
    with jax.enable_x64(dtype == "float64"), np.errstate(all="ignore"):
        quantize = jax.jit(lambda x: quantizer.quantize(x, Dims(2, (contract,))))
        for x in (x.astype(dtype) for x in xs):
            assert_same_quantized(quantize(x), *codes_and_scales(quantizer, x, contract))


@pytest.mark.parametrize(
    ("granularity", "expected"), [("tensorwise", 0.02), ("axiswise", [[0.01], [0.02]])]
)
def test_a_smaller_amax_counts_as_epsilon(granularity, expected):
    quantizer = fp8.CurrentQuantizer(dtype=E4M3, granularity=granularity, amax_epsilon=4.48)
    scale = quantizer.quantize(jnp.float32([[1.0, 2.0], [8.96, 0.0]]), Dims(2, (1,))).scale
    np.testing.assert_allclose(scale, expected, rtol=1e-6)


def test_batches_and_stacks():
    """A batch is quantized matrix by matrix; of a stack each element has scales of its own."""
    x = reference_recipes.tensors((2, 3, 200), 0)["heavy-tailed"]
    dims = Dims(3, (2,), 1)
    for name in ("MX", "1x128, float32", "128x128"):
        quantizer = QUANTIZERS[name](E4M3)
        kind = KINDS[quantizer.scale, quantizer.scale_rounding]
        codes, scale = reference_recipes.blockwise(x, E4M3, quantizer.block, kind)
        assert_same_quantized(
            jax.jit(lambda x, q=quantizer: q.quantize(x, dims))(x), codes[:, :3, :200], scale
        )
    quantizer = QUANTIZERS["axiswise"](E4M3)
    expected = reference_recipes.axiswise(x, E4M3, (1, 2))
    assert_same_quantized(jax.jit(lambda x: quantizer.quantize(x, Dims(3, (1, 2))))(x), *expected)
    quantizer = QUANTIZERS["tensorwise"](E4M3)
    stacked = jax.jit(lambda x: quantizer.quantize(x, dims._replace(is_stack=True)))(x)
    each = [reference_recipes.tensorwise(one, E4M3) for one in x]
    codes, scales = (np.stack(arrays) for arrays in zip(*each))
    assert_same_quantized(stacked, codes, scales[:, None, None])


BITS = np.arange(1, 255, dtype=np.uint32)[:, None] << 23  # every normal exponent
MANTISSAS = np.array([0, 1, 0x600000, 0x600001, 0x700000, 0x700001, 0x7FFFFF], np.uint32)
AMAXES = np.append((BITS | MANTISSAS).view(np.float32).ravel(), np.float32(0))
"""Around 1, 1.75 and 1.875 times every power of two."""


@pytest.mark.parametrize("name", [E4M3, E5M2])
@pytest.mark.parametrize("kind", ["power_of_two", "e8m0_floor"])
def test_every_exponent_of_a_power_of_two_scale(kind, name):
    limit, rounding = fp8_max(name), "floor" if kind == "e8m0_floor" else "up"
    actual = jax.jit(lambda a: amax_to_scale(a, limit, rounding))(AMAXES)
    expected = reference_recipes.scale_of(AMAXES, name, kind).astype(np.float32)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", [E4M3, E5M2])
def test_all_e8m0_values_dequantize(name):
    """Each scale but the subnormal one, which no quantizer makes, times each of the 256 codes."""
    codes = np.arange(256, dtype=np.uint8).view(reference.FP8[name])
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    quantizer = fp8.BlockQuantizer(dtype=name)
    # 256 rows of 8 blocks of 32: each row holds all codes, and one scale.
    codes_and_scales = np.tile(codes, (256, 1)), np.repeat(scales[:, None], 8, 1)
    q = QTensor(*map(jnp.asarray, codes_and_scales), quantizer, (1, 32))
    values = DEQUANTIZE(q, jnp.float32)
    expected = reference_recipes.as_float64(scales)[:, None] * codes.astype(np.float64)
    representable = ~(np.abs(expected) < 2.0**-126) | (expected == 0)
    representable[0] = False
    with np.errstate(over="ignore"):
        expected = expected.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(values)[representable], expected[representable])
    assert np.isnan(values[255]).all()


@pytest.mark.parametrize("name", ["tensorwise", "axiswise", "MX", "128x128, float32"])
def test_there_and_back(name):
    """The dequantized operand has its old shape, and is within half a unit in the last place of e4m3."""
    quantizer, x = QUANTIZERS[name](E4M3), normal(0, 2, 9, 3, 40)
    q = jax.jit(lambda x: quantizer.quantize(x, Dims(4, (3,), 1)))(x)
    for dtype in (jnp.float32, jnp.bfloat16):
        back = DEQUANTIZE(q, dtype)
        assert (back.shape, back.dtype) == (x.shape, dtype)
        np.testing.assert_allclose(back.astype(jnp.float32), x, rtol=2**-4 * 1.05, atol=2e-5)


def test_a_tensor_compares_as_an_object_and_prints_types():
    """``==`` of fields raises an error, because arrays compare number by number."""
    one, other = (QUANTIZERS["axiswise"](E4M3).quantize(jnp.ones((2, 3)), Dims(2, (1,))) for _ in range(2))
    assert one == one != other
    assert len({one, other}) == 2
    expected = "QTensor(codes=float8_e4m3fn[2, 3], scale=float32[2, 1], quantizer=CurrentQuantizer("
    assert repr(one).startswith(expected)
    assert str(jax.eval_shape(lambda q: q, one)) == repr(one)
    assert "codes=None" in repr(jax.tree.map(lambda _: None, one))

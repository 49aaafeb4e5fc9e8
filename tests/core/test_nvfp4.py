"""NVFP4: codes and scales bit for bit those of a reference in NumPy; stochastic rounding; random keys.

XLA takes long to compile random numbers. So most tests are not jitted and have the same shapes: then the
package's own jitted functions are compiled once for all of them.
"""

import dataclasses
import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._core import nvfp4
from fp8flax._core.gemm.gemm import Gemm, _in_bfloat16, multiply
from fp8flax._core.ops.conv import fp8_conv_general_dilated
from fp8flax._core.ops.dot_general import fp8_dot_general
from fp8flax._core.qtensor import Dims
from tests import reference_recipes
from tests.cases import CONTRACTIONS, MATMUL, normal

pytestmark = pytest.mark.optimized

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
RECIPE = fp8.NVFP4BlockScaling()
KEY = jax.random.key(7)


def nearest(y):
    """Rounds to the grid; ties go to the even code."""
    distance = np.abs(np.abs(y)[..., None] - GRID)
    is_odd = np.arange(8) % 2
    index = np.lexsort((np.broadcast_to(is_odd, distance.shape), distance), axis=-1)[..., 0]
    return np.copysign(GRID[index], y)


def reference(x, block):
    """Returns codes, scales of blocks, and the scale of a matrix, by the formulas of the paper.

    The factor before the cast is written without ``dec``, which is ``1 / enc``. A block with a NaN or an
    Inf has the scale NaN, and the codes of a block with the scale zero are zero.
    """
    x = reference_recipes.as_float32(x)
    padded = np.pad(x, [(0, -n % size) for n, size in zip(x.shape, block)])
    shape = padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1]
    tiles, one = padded.reshape(shape), np.float32(1)
    of_block = np.max(np.abs(tiles), (1, 3), keepdims=True, initial=0)
    of_block = np.where(np.isfinite(of_block), of_block, np.float32(np.nan))
    amax = np.max(np.nan_to_num(of_block), initial=np.float32(0))
    with np.errstate(all="ignore"):
        enc = np.minimum(np.float32(448 * 6) / amax, np.float32(2.0**117)) if amax else one
        dec = one / enc
        of_block = np.where(of_block < 6 * 2.0**-126, of_block * 0, of_block)  # XLA has no subnormals
        scale = np.minimum(of_block / np.float32(6) * enc, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        wide = scale.astype(np.float32)
        factor = np.where(wide == 0, 0, np.minimum(enc / wide, np.finfo(np.float32).max))
        codes = nearest(np.clip(tiles * factor.astype(np.float32), -6, 6))
    codes = codes.reshape(padded.shape)[: x.shape[0], : x.shape[1]]
    return codes, scale[:, 0, :, 0], dec, wide


def values_of(x, block):
    """Returns the values that the reference rounds a matrix to, in float64."""
    codes, scale, dec, _ = reference(x, block)
    repeated = np.repeat(np.repeat(scale.astype(np.float64), block[0], 0), block[1], 1)
    return codes * repeated[: x.shape[0], : x.shape[1]] * np.float64(dec)


def check(q, x, block):
    codes, scale, dec, wide = reference(x, block)
    assert (q.codes.dtype, q.scale.dtype) == (jnp.float4_e2m1fn, jnp.float8_e4m3fn)
    np.testing.assert_array_equal(q.tensor_scale, dec)
    np.testing.assert_array_equal(np.asarray(q.scale).astype(np.float32), scale.astype(np.float32))
    has_nan = np.repeat(np.repeat(np.isnan(wide[:, 0, :, 0]), block[0], 0), block[1], 1)
    has_nan = has_nan[: x.shape[0], : x.shape[1]]
    actual = np.asarray(q.codes).astype(np.float64)
    np.testing.assert_array_equal(actual[~has_nan], codes[~has_nan])
    np.testing.assert_array_equal(np.isnan(q.dequantize(jnp.float32)), has_nan)


@pytest.mark.parametrize("shape", [(37, 70), (1, 33), (0, 5)], ids=str)
@pytest.mark.parametrize("rows", [1, 16])
def test_codes_and_scales(rows, shape):
    """Both orientations; sizes that no block divides; NaN, Inf, zeros, and 1e±30."""
    quantizer = fp8.NVFP4Quantizer(block=(rows, 16))
    for contract, block in ((1, (rows, 16)), (0, (16, rows))):
        quantize = jax.jit(lambda x, c=contract: quantizer.quantize(x, Dims(2, (c,))))
        for x in reference_recipes.tensors(shape, 0).values():
            check(quantize(x), x, block)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = reference_recipes.tensors((16, 40), 0)["outliers"].astype(dtype)
        q = fp8.NVFP4Quantizer().quantize(jnp.asarray(x), Dims(2, (1,)))
        check(q, x, (1, 16))
        assert q.dequantize(dtype).dtype == dtype


def test_bfloat16_holds_each_product_of_code_and_scale():
    codes = jnp.asarray(np.append(GRID, -GRID)).astype(jnp.float32)
    scales = jax.lax.bitcast_convert_type(jnp.arange(127, dtype=jnp.uint8), jnp.float8_e4m3fn)
    products = jnp.outer(codes, scales.astype(jnp.float32))
    np.testing.assert_array_equal(products.astype(jnp.bfloat16).astype(jnp.float32), products)


# Rotation.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation(dtype):
    hadamard = np.array([[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
    matrix = np.diag(SIGNS) @ hadamard / 4
    x = normal(0, 3, 40, 5, dtype=dtype)
    actual = jax.jit(lambda x: nvfp4.rotated(x, 1))(x)
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (0, 8), (0, 0))).reshape(3, 3, 16, 5)
    expected = np.einsum("bgic,ij->bgjc", padded, matrix).reshape(3, 48, 5)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    # On GPUs: a sum, and the amaxes of the groups by additions alone.
    groups = jnp.asarray(padded.astype(np.float32))
    np.testing.assert_allclose(nvfp4.rotated_by_sum(groups, 2).reshape(3, 48, 5), expected, atol=1e-5)
    amax = nvfp4.amax_of_rotated(groups.reshape(3, 48, 5), 1)
    np.testing.assert_allclose(amax, np.abs(expected).reshape(3, 3, 16, 5).max(2), atol=1e-5)
    # Both operands rotated: the same product.
    y = normal(1, 40, 6)
    product = nvfp4.rotated(x[0].astype(jnp.float32), 0).T @ nvfp4.rotated(y, 0)
    np.testing.assert_allclose(product, x[0].astype(jnp.float32).T @ y, atol=1e-4)
    q = fp8.NVFP4Quantizer(rotation=True).quantize(x.at[0, 17, 2].set(jnp.inf), Dims(3, (1,)))
    is_nan = np.isnan(q.dequantize(jnp.float32))
    assert is_nan[0, 16:32, 2].all()
    assert is_nan.sum() == 16


# Stochastic rounding.


def test_stochastic_rounding():
    """Between the same neighbors, with the right mean and variance, over 10,000 draws of each number."""
    y = np.array([6, 0.1, 0.25, 0.7, 1.2, 1.4, 1.6, 1.9, 2.3, 2.9, 3.5, 3.9, 4.2, 5, 5.9, 0], np.float32)
    y = y * np.array([1, -1] * 8, np.float32)
    x = np.broadcast_to(y, (10_000, 16))  # the amax 6 gives the scales 448 and 1/448
    quantizer = fp8.NVFP4Quantizer(stochastic_rounding=True)
    q = jax.jit(lambda x, key: quantizer.quantize(x, Dims(2, (1,)), key))(x, KEY)
    drawn = np.abs(np.asarray(q.dequantize(jnp.float32), np.float64))
    below = GRID[np.searchsorted(GRID, np.abs(y), side="right") - 1]
    above = GRID[np.minimum(np.searchsorted(GRID, np.abs(y)), 7)]
    step = above - below
    part = np.divide(np.abs(y) - below, step, out=np.zeros(16), where=step > 0)
    for i in range(16):
        assert set(np.unique(drawn[:, i].round(4))) == {below[i], above[i]}
    sigma = step * np.sqrt(part * (1 - part))
    assert (np.abs(drawn.mean(0) - np.abs(y)) <= 4.5 * sigma / 100 + step / 512 + 1e-6).all()
    np.testing.assert_allclose(drawn.std(0), sigma, atol=0.02)
    assert abs(np.corrcoef(drawn[:-1, 3], drawn[1:, 3])[0, 1]) < 0.05  # rows have numbers of their own
    signs = np.sign(np.asarray(q.codes).astype(np.float32))
    assert (signs * np.sign(y) >= 0).all()


def test_mean_over_all_random_bytes():
    """All 256 bytes: the mean is off by at most 1/256 of a step, to both sides alike."""
    y = jnp.linspace(-6, 6, 4001)
    bits = jnp.broadcast_to(jnp.arange(256, dtype=jnp.uint8)[:, None], (256, y.size))
    mean = np.mean(jax.jit(nvfp4._rounded_stochastically)(jnp.broadcast_to(y, bits.shape), bits), 0)
    step = np.where(np.abs(y) < 2, 0.5, np.where(np.abs(y) < 4, 1, 2))
    assert np.abs((mean - y) / step).max() <= 1 / 256
    assert abs(np.mean((mean - y) * np.sign(y) / step)) < 1e-4


# The three GEMMs.


X, W, G = (normal(i, 32, 32) for i in range(3))


def gradients(recipe, x, w, g, key=KEY):
    """Returns the result and both gradients, for the output gradient ``g``."""

    def multiply(x, w):
        return fp8_dot_general(x, w, MATMUL, recipe=recipe, key=key)

    out, vjp = jax.vjp(multiply, x, w)
    return out, *vjp(g)


@pytest.mark.parametrize("disable_2d_quantization", [False, True])
@pytest.mark.parametrize("rows", [48, 41])
def test_three_gemms(rows, disable_2d_quantization):
    recipe = fp8.NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_2d_quantization=disable_2d_quantization
    )
    # Multiples of 1/4, so that a rotation is exact.
    x, w, g = (
        np.round(normal(i, *shape) * 8) / 4 for i, shape in enumerate([(rows, 40), (40, 24), (rows, 24)])
    )
    out, dx, dw = gradients(recipe, x, w, g, None)
    height = 1 if disable_2d_quantization else 16
    xt, gt = (np.asarray(nvfp4.rotated(a, 0)) for a in (x, g))
    expected = values_of(x, (1, 16)) @ values_of(w, (16, height))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)
    expected = values_of(g, (1, 16)) @ values_of(w, (height, 16)).T
    np.testing.assert_allclose(dx, expected, rtol=1e-5, atol=1e-4)
    expected = values_of(xt, (16, 1)).T @ values_of(gt, (16, 1))
    np.testing.assert_allclose(dw, expected, rtol=1e-5, atol=1e-3)


def snr(actual, expected):
    error = np.asarray(actual, np.float64) - expected
    return 10 * np.log10(np.sum(np.square(expected)) / np.sum(np.square(error)))


def test_signal_to_noise_on_gaussian_data():
    """Close to what was seen elsewhere: 16.7, 15.1 and 15.6 dB."""
    x, w, g = (np.asarray(normal(i, 256, 256)) for i in range(3))
    made = gradients(RECIPE, x, w, g)
    for actual, expected, decibels in zip(made, (x @ w, g @ w.T, x.T @ g), (16.7, 15.1, 15.6)):
        assert abs(snr(actual, expected) - decibels) < 0.6


def test_the_gradient_is_right_on_average():
    keys = jax.random.split(KEY, 150)
    mean = sum(np.asarray(gradients(RECIPE, X, W, G, key)[1]) for key in keys) / 150
    w = fp8.NVFP4Quantizer(block=(16, 16)).quantize(W, Dims(2, (0,))).dequantize(jnp.float32)
    assert snr(mean, np.asarray(G @ w.T)) > 30  # 15 for one draw


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in CONTRACTIONS if name != "no rows"])
def test_all_dimension_numbers(name):
    lhs, rhs, dims = CONTRACTIONS[name]
    x, w = normal(0, *lhs), normal(1, *rhs)
    recipe = fp8.NVFP4BlockScaling(disable_stochastic_rounding=True)
    out, vjp = jax.vjp(partial(fp8_dot_general, dimension_numbers=dims, recipe=recipe), x, w)
    wide, vjp_of_wide = jax.vjp(partial(jax.lax.dot_general, dimension_numbers=dims), x, w)
    g = normal(2, *out.shape)
    for actual, expected in zip((out, *vjp(g)), (wide, *vjp_of_wide(g))):
        assert snr(actual, np.asarray(expected)) > 6  # about 0 for wrong numbers


def test_nan_reaches_the_gradients_and_the_result():
    out, _, dw = gradients(RECIPE, X.at[3, 5].set(jnp.nan), W, G)
    assert np.isnan(out[3]).all()
    assert np.isfinite(out[4]).all()
    assert np.isnan(dw[5]).all()
    assert np.isfinite(dw[6]).all()
    _, dx, dw = gradients(RECIPE, X, W, G.at[3, 5].set(jnp.inf))
    assert np.isnan(dx[3]).all()
    assert np.isfinite(dx[4]).all()
    assert np.isnan(dw[:, 5]).all()


def test_a_bfloat16_gemm_gives_the_same_values():
    quantized = (fp8.NVFP4Quantizer().quantize(normal(i, 32, 64), Dims(2, (1,))) for i in range(2))
    a, b = (dataclasses.replace(q, tensor_scale=None) for q in quantized)
    gemm = Gemm((((1,), (1,)), ((), ())), *[np.dtype(np.float32)] * 3)
    np.testing.assert_allclose(_in_bfloat16(gemm, a, b), multiply(gemm, a, b), rtol=1e-5)


@pytest.mark.parametrize("other", [fp8.BlockQuantizer(dtype="float8_e4m3fn"), None, "current"])
def test_parts_of_other_recipes(other):
    other = fp8.CurrentQuantizer(dtype="float8_e4m3fn") if other == "current" else other
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=other, rhs=fp8.NVFP4Quantizer()))
    assert 15 < snr(fp8_dot_general(X, W, MATMUL, recipe=recipe), np.asarray(X @ W)) < 26


def test_codes_are_kept_for_the_backward_pass():
    """4-bit codes of the rotated input and of the kernel, their scales, and no wide tensor."""
    _, vjp = jax.vjp(
        lambda x, w: fp8_dot_general(x, w, MATMUL, recipe=RECIPE, key=KEY), *[normal(0, 64, 64)] * 2
    )
    kept = [(str(x.dtype), x.shape) for x in jax.tree.leaves(vjp) if x.ndim]
    assert sorted(kept) == [*[("uint4", (64, 64))] * 2, ("uint8", (4, 4)), ("uint8", (4, 64))]


# Recipes.


def test_recipe():
    gemms = RECIPE.gemms
    assert gemms.forward.lhs == fp8.NVFP4Quantizer()
    assert gemms.is_random
    assert gemms.forward.rhs == gemms.dgrad.rhs == fp8.NVFP4Quantizer(block=(16, 16))
    assert gemms.dgrad.lhs == fp8.NVFP4Quantizer(stochastic_rounding=True)
    assert gemms.wgrad.lhs == fp8.NVFP4Quantizer(rotation=True)
    assert gemms.wgrad.rhs == fp8.NVFP4Quantizer(rotation=True, stochastic_rounding=True)
    plain = fp8.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    )
    assert set(plain.gemms.quantizers) == {fp8.NVFP4Quantizer()}
    assert not plain.gemms.is_random


@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (lambda: fp8.NVFP4BlockScaling(disable_rht=1), TypeError, "disable_rht"),
        (lambda: fp8.NVFP4Quantizer(block=(1, 32)), ValueError, "block"),
        (lambda: fp8.NVFP4Quantizer(block=(16, 16), rotation=True), ValueError, "rotation"),
        (lambda: fp8.GemmRecipe(lhs=fp8.NVFP4Quantizer(rotation=True)), ValueError, "rotat"),
    ],
)
def test_wrong_options(make, error, word):
    with pytest.raises(error, match=word):
        make()


def test_ops_without_nvfp4_say_so():
    x = normal(0, 4, 16)
    with pytest.raises(ValueError, match="NVFP4"):
        fp8.Fp8RaggedDotOp(recipe=RECIPE).apply({}, x, normal(1, 2, 16, 16), jnp.array([2, 2]))
    image, kernel = normal(0, 1, 16, 8), normal(1, 16, 16, 3)
    arguments = (1,), "SAME", None, None, None, 1, 1, None, None
    with pytest.raises(ValueError, match="windows overlap"):
        fp8_conv_general_dilated(image, kernel, *arguments, recipe=RECIPE)


# Random keys.


class Net(nn.Module):
    """Two layers, or three in a scan."""

    in_scan: bool = False
    remat: bool = False
    names: tuple = ("params", "fp8")

    @nn.compact
    def __call__(self, x):
        dense = partial(
            nn.Dense, 32, use_bias=False, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=RECIPE)
        )
        if not self.in_scan:
            return dense()(dense()(x))

        def body(layer, x, _):
            return layer(x), None

        body = nn.remat(body) if self.remat else body
        scan = nn.scan(
            body, variable_axes={"params": 0}, split_rngs=dict.fromkeys(self.names, True), length=3
        )
        return scan(dense(), x, None)[0]


def loss(model, variables, x, key=None):
    rngs = None if key is None else {"fp8": key}
    return jnp.sum(jnp.sin(model.apply(variables, x, rngs=rngs)) * G)


@functools.cache
def variables_of(model):
    return model.init(jax.random.key(0), X)


def grads(model, key=KEY):
    return jax.grad(partial(loss, model))(variables_of(model), X, key)


def equal(one, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


def close(one, other):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), one, other)


def test_without_a_key():
    """The forward pass runs; the backward pass says what is missing."""
    model = Net()
    assert np.isfinite(loss(model, variables_of(model), X))
    with pytest.raises(ValueError, match="rngs"):
        grads(model, None)
    with pytest.raises(ValueError, match="split_rngs"):
        jax.eval_shape(partial(grads, Net(in_scan=True, names=("params",))), KEY)


def test_equal_keys_give_equal_gradients():
    model = Net()
    assert equal(grads(model), grads(model))
    assert not equal(grads(model), grads(model, jax.random.key(8)))
    assert equal(grads(model, jax.random.PRNGKey(7)), grads(model))


def test_each_layer_and_each_use_has_its_own_numbers():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            op = fp8.Fp8DotGeneralOp(recipe=RECIPE)
            other = fp8.Fp8DotGeneralOp(recipe=RECIPE)
            return [f(x, G, MATMUL) for f in (op, op, other)]

    model, dxs = Twice(), []
    for i in range(3):
        run = lambda x, i=i: jnp.sum(model.apply({}, x, rngs={"fp8": KEY})[i] * G)  # noqa: E731
        dxs.append(jax.grad(run)(X))
    assert not equal(dxs[0], dxs[1])
    assert not equal(dxs[0], dxs[2])


@pytest.mark.parametrize(
    "policy", [None, jax.checkpoint_policies.save_only_these_names(*fp8.RESIDUAL_NAMES)]
)
def test_remat_gives_the_same(policy, capsys):
    model = Net()
    run = jax.checkpoint(partial(loss, model), policy=policy)
    assert equal(jax.grad(run)(variables_of(model), X, KEY), grads(model))
    jax.ad_checkpoint.print_saved_residuals(run, variables_of(model), X, KEY)
    kept = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "output of" in line]
    assert len(kept) == (0 if policy is None else 12)
    assert kept.count("f32[]") == (0 if policy is None else 4)


def test_both_uses_of_an_output_gradient_have_their_own_numbers():
    recipe = fp8.NVFP4BlockScaling(disable_rht=True)
    g = jnp.where(normal(9, 32, 32) > 0, jnp.float32(6), jnp.float32(2.4))  # all blocks have the amax 6
    _, dx, dw = gradients(recipe, jnp.eye(32), jnp.eye(32), g)
    assert set(np.unique(np.asarray(dx).round(4))) == set(np.unique(np.asarray(dw).round(4))) == {2, 3, 6}
    assert not np.array_equal(dx, dw)


@pytest.mark.long
def test_remat_in_a_scan_gives_the_same():
    assert equal(grads(Net(in_scan=True)), grads(Net(in_scan=True, remat=True)))


@pytest.mark.long
def test_scan_splits_the_key():
    """Three equal layers get three different gradients from equal inputs."""
    model = Net(in_scan=True)
    kernels = jax.tree.map(lambda w: jnp.broadcast_to(jnp.eye(32), w.shape), variables_of(model))
    x = jnp.broadcast_to(jnp.float32([6.0, 0.0] * 16), (32, 32))  # e2m1 has these numbers
    (dw,) = jax.tree.leaves(jax.grad(lambda v: jnp.sum(model.apply(v, x, rngs={"fp8": KEY}) * G))(kernels))
    assert dw.shape == (3, 32, 32)
    assert len(np.unique(np.asarray(dw).reshape(3, -1), axis=0)) == 3


def batches_of(sizes, seed=3):
    return normal(seed, *sizes, 32, 32), jax.random.split(KEY, sizes)


def input_gradient(x, key):
    return gradients(RECIPE, x, W, jnp.sin(x), key)[1]


def test_vmap():
    """Keys of a batch give what each gives alone; with one key each example has numbers of its own."""
    xs, keys = batches_of((3,))
    made = jax.vmap(input_gradient)(xs, keys)
    for i in range(3):
        close(made[i], input_gradient(xs[i], keys[i]))
    made = jax.vmap(input_gradient, (0, None))(jnp.broadcast_to(X, xs.shape), KEY)
    assert len(np.unique(np.asarray(made).reshape(3, -1), axis=0)) == 3


@pytest.mark.long
def test_nested_vmap():
    xs, keys = batches_of((2, 3))
    made = jax.vmap(jax.vmap(input_gradient))(xs, keys)
    close(made[1, 2], input_gradient(xs[1, 2], keys[1, 2]))
    same = jnp.broadcast_to(X, xs.shape)
    for axes, key in (((None, None), KEY), ((0, None), keys[:, 0]), ((None, 0), keys[0])):
        run = jax.vmap(jax.vmap(input_gradient, (0, axes[1])), (0, axes[0]))
        assert len(np.unique(np.asarray(run(same, key)).reshape(6, -1), axis=0)) == 6


@pytest.mark.parametrize("axes", [(None, 0), pytest.param((0, None), marks=pytest.mark.long), (0, 0)])
def test_kernels_of_a_batch(axes):
    """Each tensor of ``jax.vmap`` has its own scale."""
    recipe = fp8.NVFP4BlockScaling(disable_stochastic_rounding=True)
    factors = jnp.float32([[[1.0]], [[50.0]], [[0.1]]])
    args = [x if axis is None else x[None] * factors for x, axis in zip((X, W), axes)]
    made = jax.vmap(partial(gradients, recipe, key=None), (*axes, None))(*args, G)
    for i in range(3):
        alone = [a if axis is None else a[i] for a, axis in zip(args, axes)]
        close([x[i] for x in made], list(gradients(recipe, *alone, G, None)))


def test_batch_dimensions_under_vmap():
    dims = (((2,), (1,)), ((0,), (0,)))
    factors = jnp.float32([1, 50, 0.1]).reshape(3, 1, 1, 1)
    x, w = normal(0, 3, 2, 5, 32) * factors, normal(1, 3, 2, 32, 7) * factors[::-1]
    multiply = partial(fp8_dot_general, dimension_numbers=dims, recipe=RECIPE)
    alone = [[multiply(a, b) for b in w] for a in x]
    for_all_w = jax.vmap(multiply, (None, 0))
    close(jax.vmap(multiply, (0, None))(x, w[1]), jnp.stack([row[1] for row in alone]))
    close(jax.vmap(for_all_w, (0, None))(x, w), jnp.stack([jnp.stack(row) for row in alone]))


def test_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=(P("data"), P()))
    def step(x, w, g):
        _, dx, dw = gradients(RECIPE, x, w, g)
        return dx, dw

    x, g = (jnp.concatenate([one] * 8) for one in (X, G))
    dx, dw = jax.jit(step)(x, W, g)
    assert len(np.unique(np.asarray(dx).reshape(8, -1), axis=0)) == 8
    assert snr(dw, 8 * np.asarray(X.T @ G)) > 18  # 15 if all devices had the same numbers


def test_fsdp_gives_what_one_device_gives():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    args = normal(0, 256, 128), normal(1, 128, 64), normal(2, 256, 64)
    split = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in args]
    close(gradients(RECIPE, *split), gradients(RECIPE, *args))


def test_explicit_mesh():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    expected = gradients(RECIPE, X, W, G)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P("data"))
        x, w, g = (jax.device_put(x, s) for x, s in zip((X, W, G), (rows, NamedSharding(mesh, P()), rows)))
        multiply = partial(
            fp8_dot_general, dimension_numbers=MATMUL, recipe=RECIPE, key=KEY, out_sharding=rows
        )
        out, vjp = jax.vjp(multiply, x, w)
        close([out, *vjp(g)], [*expected])


@pytest.mark.long
def test_einsum_and_accumulated_gradients():
    class Sum(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (4, 8, 16))
            return fp8.Fp8Einsum(recipe=RECIPE)("bsnd,ndf->bsf", x, w)

    model, x = Sum(), normal(0, 2, 16, 4, 8)
    variables = model.init(jax.random.key(0), x)

    def run(v, batch):
        x, key = batch
        return jnp.sum(jnp.cos(model.apply(v, x, rngs={"fp8": key})))

    batch = x[:, None], jax.random.split(KEY, 2)
    total, found = fp8.accumulate_gradients(run)(variables, batch)
    each = [jax.value_and_grad(run)(variables, (x[i : i + 1], batch[1][i])) for i in range(2)]
    np.testing.assert_allclose(total, (each[0][0] + each[1][0]) / 2, rtol=1e-5)
    dw = (each[0][1]["params"]["w"] + each[1][1]["params"]["w"]) / 2
    np.testing.assert_allclose(found["params"]["w"], dw, atol=1e-4)


def test_statistics():
    model = Net()
    measure = fp8.statistics(partial(loss, model))
    found = measure(variables_of(model), X, KEY)["Dense_0/Fp8DotGeneralOp_0"]
    assert 19 < found["input"]["sqnr"] < 22
    assert 15 < found["output_grad"]["sqnr"] < 19


def test_quantize_model():
    model = fp8.quantize_model(nn.Dense(32, use_bias=False), recipe=RECIPE, include=".*")
    variables = {"params": {"kernel": W}}
    run = jax.grad(lambda v, key: jnp.sum(model.apply(v, X, rngs={"fp8": key}) * G))
    close(run(variables, KEY), run(variables, KEY))
    assert not equal(run(variables, KEY), run(variables, jax.random.key(0)))


# NNX.


def test_nnx():
    def grad_of(model):
        return fp8nnx.value_and_grad(lambda m, x: jnp.sum(m(x) * G))(model, X)[1]

    def layer(**options):
        op = fp8nnx.Fp8DotGeneralOp(recipe=RECIPE, **options)
        return nnx.Linear(32, 32, dot_general=op, rngs=nnx.Rngs(0))

    model, other = layer(rngs=nnx.Rngs(fp8=1)), layer(rngs=nnx.Rngs(1))
    first, second = grad_of(model), grad_of(model)
    assert not equal(first, second)
    assert equal(grad_of(layer(rngs=nnx.Rngs(fp8=1))), first)
    assert not equal(grad_of(other), second)
    plain = layer()
    assert np.isfinite(plain(X)).all()
    with pytest.raises(ValueError, match="fp8"):
        grad_of(plain)


@pytest.mark.long
def test_nnx_whole_model():
    class Blocks(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs), in_axes=0)
            self.layers = make(nnx.Rngs(0).split(3))

        def __call__(self, x):
            run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.layers)

    options = {"recipe": RECIPE, "include": ".*"}
    model = fp8.quantize_model(Blocks(), rngs=nnx.Rngs(fp8=0), **options)
    grad = nnx.jit(nnx.grad(lambda m: jnp.sum(m(X) * G)))
    first, second = grad(model), grad(model)
    assert np.isfinite(first["layers"]["kernel"][...]).all()
    assert not equal(first, second)
    with pytest.raises(ValueError, match="fp8"):
        grad(fp8.quantize_model(Blocks(), **options))
    with pytest.raises(TypeError, match="rngs"):
        fp8.quantize_model(nn.Dense(4), rngs=nnx.Rngs(0))

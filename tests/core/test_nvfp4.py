"""NVFP4: its transform, stochastic rounding and random keys; other files test it beside other recipes.

XLA takes long to compile random numbers. So most tests multiply 32×32 matrices, by the same programs.
"""

import dataclasses
import itertools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp8flax as fp8
from fp8flax._core import nvfp4
from fp8flax._core.gemm import emulated
from fp8flax._core.gemm.dispatch import multiply
from fp8flax._core.gemm.gemm import Gemm
from fp8flax._core.measuring import Numbers, numbers_of
from fp8flax._core.qtensor import Dims, QTensor
from tests import reference_recipes
from tests.cases import MATMUL, fp8_dot_general, mesh, normal, variables_of, with_reference

long = partial(pytest.param, marks=pytest.mark.long)
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
RECIPE = fp8.NVFP4BlockScaling()
NEAREST = fp8.NVFP4BlockScaling(disable_stochastic_rounding=True)
KEY = jax.random.key(7)
X, W, G = (normal(i, 32, 32) for i in range(3))
OP = partial(fp8.Fp8DotGeneralOp, recipe=RECIPE)
CONV = partial(nn.Conv, 3, 16, conv_general_dilated_cls=partial(fp8.Fp8ConvGeneralDilatedOp, recipe=RECIPE))
DENSE = partial(nn.Dense, 32, use_bias=False, dot_general_cls=OP)
NET = nn.Sequential([DENSE(), DENSE()])
NNX_LAYER = partial(nnx.Linear, 32, 32, rngs=nnx.Rngs(0))
NNX_SCAN = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
DEQUANTIZE = jax.jit(QTensor.dequantize, static_argnums=1)
same = np.testing.assert_array_equal


def close(one, other):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), one, other)


def test_bfloat16_holds_each_product_of_code_and_scale():
    """So a GEMM in bfloat16 gives the same values."""
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    products = np.outer(GRID, scales).astype(ml_dtypes.bfloat16)
    same(products.astype(np.float64), np.outer(GRID, scales))
    quantize = jax.jit(partial(fp8.NVFP4Quantizer().quantize, dims=Dims(2, (1,))))
    a, b = (dataclasses.replace(quantize(x), tensor_scale=None) for x in (X, W))
    gemm = Gemm(Dims(2, (1,)), Dims(2, (1,)), *[np.dtype(np.float32)] * 3)
    close(*(jax.jit(partial(run, gemm))(a, b) for run in (emulated.compute, multiply)))


def test_hadamard_transform():
    x = normal(0, 3, 40, 5, dtype=jnp.bfloat16)
    padded = np.pad(np.asarray(x, np.float32), ((0, 0), (0, 8), (0, 0))).reshape(3, 3, 16, 5)
    rotated = reference_recipes.rotated(x, 1)
    expected = rotated.reshape(3, 3, 16, 5)
    close(jax.jit(partial(nvfp4.hadamard, axis=1))(x), rotated)
    # On GPUs: a sum, and the amaxes of the groups by additions alone.
    close(jax.jit(partial(nvfp4.hadamard_by_sum, axis=2))(padded), expected)
    amax = jax.jit(partial(nvfp4.amax_of_hadamard, axis=1))(padded.reshape(3, 48, 5))
    close(amax, np.abs(expected).max(2))
    quantize = jax.jit(partial(fp8.NVFP4Quantizer(rotation=True).quantize, dims=Dims(3, (1,))))
    plain, dims = fp8.NVFP4Quantizer(), Dims(3, (1,))
    of_rotated = Numbers(*numbers_of(plain, dims, nvfp4.hadamard(x, 1)))
    found = Numbers(*numbers_of(dataclasses.replace(plain, rotation=True), dims, x))
    close(found, of_rotated._replace(amax=jnp.max(jnp.abs(x))))
    q = quantize(x.at[0, 17, 2].set(jnp.inf))
    same(np.argwhere(np.isnan(DEQUANTIZE(q, "float32"))), [(0, i, 2) for i in range(16, 32)])


def test_stochastic_rounding():
    """Both neighbors, with the right mean and variance; no bias over all random bytes."""
    y = [6, -0.1, 0.25, -0.7, 1.2, -1.4, 1.6, -1.9, 2.3, -2.9, 3.5, -3.9, 4.2, -5, 5.9, 0]
    x = np.broadcast_to(np.float32(y), (10_000, 16))  # the amax 6 gives the scales 448 and 1/448
    quantize = partial(fp8.NVFP4Quantizer(stochastic_rounding=True).quantize, dims=Dims(2, (1,)))
    q = jax.jit(quantize)(x, key=KEY)
    assert (np.sign(np.asarray(q.codes).astype(np.float32)) * np.sign(y) >= 0).all()
    drawn, y = np.abs(np.asarray(q.codes).astype(np.float64)), np.abs(np.float32(y))
    below, above = GRID[np.searchsorted(GRID, y, side="right") - 1], GRID[np.searchsorted(GRID, y)]
    assert [set(column) for column in drawn.T] == [{*pair} for pair in zip(below, above)]
    sigma = np.sqrt((above - y) * (y - below))
    assert (np.abs(drawn.mean(0) - y) <= 4.5 * sigma / 100 + (above - below) / 512 + 1e-6).all()
    assert (np.abs(drawn.std(0) - sigma) <= 0.02 * (above - below)).all()
    assert abs(np.corrcoef(drawn[:-1, 3], drawn[1:, 3])[0, 1]) < 0.05  # rows have numbers of their own
    y, bytes_ = np.linspace(-6, 6, 4001, dtype=np.float32), np.arange(256, dtype=np.uint8)
    run = jax.jit(jax.vmap(nvfp4._rounded_stochastically, (None, 0)))
    made = run(y, np.broadcast_to(bytes_[:, None], (256, y.size)))
    error = (np.mean(made, 0) - y) / np.where(np.abs(y) < 2, 0.5, np.where(np.abs(y) < 4, 1, 2))
    assert np.abs(error).max() <= 1 / 256
    assert abs(np.mean(error * np.sign(y))) < 1e-4


def gradients(recipe, x, w, g, key=KEY, **options):
    """Returns the result and both gradients, for the output gradient ``g``."""
    multiply = partial(fp8_dot_general, dimension_numbers=MATMUL, recipe=recipe, key=key, **options)
    out, vjp = jax.vjp(multiply, x, w)
    return out, *vjp(g)


def snr(actual, expected):
    error = np.asarray(actual, np.float64) - expected
    return 10 * np.log10(np.sum(np.square(expected)) / np.sum(np.square(error)))


@pytest.mark.long
def test_signal_to_noise_on_gaussian_data():
    """Close to what was seen elsewhere: 16.7, 15.1 and 15.6 dB; the gradient is right on average."""
    operands = [np.asarray(normal(i, 3, 32, 32)) for i in range(8)]
    made = [np.stack(each) for each in zip(*(gradients(RECIPE, *each) for each in operands))]
    wide = [np.stack(each) for each in zip(*((x @ w, g @ w.T, x.T @ g) for x, w, g in operands))]
    for actual, expected, decibels in zip(made, wide, (16.7, 15.1, 15.6)):
        assert abs(snr(actual, expected) - decibels) < 0.6
    mean = np.mean([gradients(RECIPE, X, W, G, key)[1] for key in jax.random.split(KEY, 100)], 0)
    assert snr(mean, G @ with_reference(fp8.NVFP4Quantizer(block=(16, 16)), W, 1).T) > 30  # 15 for one draw


def test_nan_reaches_the_gradients_and_the_result():
    x, g = np.array(X), np.array(G)
    x[3, 5], g[3, 5] = np.nan, np.inf
    out, _, dw = map(np.isnan, gradients(RECIPE, x, W, G))
    assert [out[3].all(), out[4].any(), dw[5].all(), dw[6].any()] == [True, False] * 2
    _, dx, dw = map(np.isnan, gradients(RECIPE, X, W, g))
    assert [dx[3].all(), dx[4].any(), dw[:, 5].all()] == [True, False, True]


def test_recipe():
    x, w = fp8.NVFP4Quantizer(), fp8.NVFP4Quantizer(block=(16, 16))
    g, rotated = fp8.NVFP4Quantizer(stochastic_rounding=True), fp8.NVFP4Quantizer(rotation=True)
    both = fp8.NVFP4Quantizer(rotation=True, stochastic_rounding=True)
    assert [RECIPE.gemms.is_random, RECIPE.gemms.quantizers] == [True, (x, w, g, w, rotated, both)]
    plain = dataclasses.replace(NEAREST, disable_rht=True).gemms
    assert [plain.is_random, plain.quantizers] == [False, (x, w, x, w, x, x)]
    plain = dataclasses.replace(NEAREST, disable_2d_quantization=True).gemms
    assert [plain.is_random, plain.quantizers] == [False, (x, x, x, x, rotated, rotated)]


@pytest.mark.parametrize(
    ("word", "make"),
    [
        ("disable_rht", lambda: fp8.NVFP4BlockScaling(disable_rht=1)),
        ("block", lambda: fp8.NVFP4Quantizer(block=(1, 32))),
        ("rotation", lambda: fp8.NVFP4Quantizer(block=(16, 16), rotation=True)),
        ("same rotation", lambda: fp8.GemmRecipe(lhs=fp8.NVFP4Quantizer(rotation=True))),
        ("rngs", lambda: fp8.quantize_model(nn.Dense(4), rngs=nnx.Rngs(0))),
        ("NVFP4", lambda: fp8.Fp8RaggedDotOp(recipe=RECIPE).apply({}, X, W[None], jnp.array([32]))),
        ("windows overlap", lambda: jax.eval_shape(CONV().init, KEY, X[None])),
    ],
)
def test_wrong_options_and_ops_without_nvfp4(word, make):
    with pytest.raises((TypeError, ValueError), match=word):
        make()


class Layers(nn.Module):
    """Three layers in a scan."""

    dense: partial = DENSE
    names: tuple = ("params", "fp8")

    @nn.compact
    def __call__(self, x):
        options = {"variable_axes": {"params": 0}, "split_rngs": dict.fromkeys(self.names, True)}
        run = nn.scan(lambda layer, x, _: (layer(x), None), length=3, **options)
        return run(self.dense(name="dense"), x, None)[0]


def loss(model, variables, x, key=None):
    rngs = None if key is None else {"fp8": key}
    return jnp.sum(jnp.sin(model.apply(variables, x, rngs=rngs)) * G)


def grads(model, key=KEY):
    return jax.grad(partial(loss, model))(variables_of(model, X), X, key)


def num_different(trees):
    return len({b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree)) for tree in trees})


def test_keys():
    """Without a key the forward pass runs, and the backward pass says what is missing."""
    layers = nn.Sequential([nn.Dense(32), nn.Einsum((32, 32), "ab,bc->ac")])
    quantized = fp8.quantize_model(layers, recipe=RECIPE, include=".*")
    for model in (NET, quantized):
        found = [grads(model, key) for key in (KEY, jax.random.PRNGKey(7), jax.random.key(8))]
        assert [num_different(found[:2]), num_different(found[1:])] == [1, 2]
        assert np.isfinite(loss(model, variables_of(model, X), X))
        with pytest.raises(ValueError, match="rngs"):
            grads(model, None)
    with pytest.raises(ValueError, match="split_rngs"):
        jax.eval_shape(partial(grads, Layers(names=("params",))), KEY)


def test_each_use_has_its_own_numbers():
    """Each layer, each call, and both uses of an output gradient."""
    ops = nn.Sequential([OP(), OP()])
    run = nn.apply(lambda ops, x: [ops.layers[i](x, G, MATMUL) for i in (0, 0, 1)], ops)
    vjp = jax.vjp(lambda x: run({}, x, rngs={"fp8": KEY}), X)[1]
    assert num_different([vjp([G * n for n in row]) for row in np.eye(3, dtype=np.float32)]) == 3
    g = jnp.where(G > 0, jnp.float32(6), jnp.float32(2.4))  # all blocks have the amax 6
    _, dx, dw = gradients(fp8.NVFP4BlockScaling(disable_rht=True), jnp.eye(32), jnp.eye(32), g)
    assert set(np.unique(dx.round(4))) == set(np.unique(dw.round(4))) == {2, 3, 6}
    assert not np.array_equal(dx, dw)


def test_an_input_rounded_at_random():
    """The forward pass uses the key with and without a gradient, in the same way."""
    forward = fp8.GemmRecipe(lhs=fp8.NVFP4Quantizer(stochastic_rounding=True), rhs=fp8.NVFP4Quantizer())
    run = partial(fp8_dot_general, X, W, MATMUL, recipe=fp8.CustomRecipe(forward=forward))
    differentiated = gradients(fp8.CustomRecipe(forward=forward), X, W, G)[0]
    assert num_different([run(key=KEY), differentiated, run(key=jax.random.key(8))]) == 2


def test_residuals_and_remat(capsys):
    """4-bit codes of the rotated input and of the kernel, their scales, and no wide tensor."""
    _, vjp = jax.vjp(partial(fp8_dot_general, dimension_numbers=MATMUL, recipe=RECIPE, key=KEY), X, W)
    kept = [(str(x.dtype), x.shape) for x in jax.tree.leaves(vjp) if x.ndim]
    assert sorted(kept) == [*[("uint4", (32, 32))] * 2, ("uint8", (2, 2)), ("uint8", (2, 32))]
    variables, save = variables_of(NET, X), jax.checkpoint_policies.save_only_these_names
    for policy, num_kept in ((None, [0, 0]), (save(*fp8.RESIDUAL_NAMES), [12, 4])):
        run = jax.checkpoint(partial(loss, NET), policy=policy)
        assert num_different([jax.grad(run)(variables, X, KEY), grads(NET)]) == 1
        jax.ad_checkpoint.print_saved_residuals(run, variables, X, KEY)
        kept = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "output of" in line]
        assert [len(kept), kept.count("f32[]")] == num_kept


@pytest.mark.long
def test_scan_splits_the_key():
    """Equal layers get different gradients from equal inputs; with remat, the same."""
    kernels = {"params": {"dense": {"kernel": jnp.broadcast_to(jnp.eye(32), (3, 32, 32))}}}
    x = jnp.broadcast_to(jnp.float32([6.0, 0.0] * 16), (32, 32))  # e2m1 has these numbers
    remat = partial(nn.remat(nn.Dense), 32, use_bias=False, dot_general_cls=OP)
    each = [jax.grad(partial(loss, Layers(dense)))(kernels, x, KEY) for dense in (DENSE, remat)]
    assert [num_different(each), num_different(each[0]["params"]["dense"]["kernel"])] == [1, 3]


@pytest.mark.parametrize("sizes", [(3,), long((2, 3))])
def test_vmap(sizes):
    """With one key each example has numbers of its own; keys of a batch give what each gives alone."""
    keys, xs = jax.random.split(KEY, sizes), normal(3, *sizes, 32, 32)
    alone = lambda x, key: gradients(RECIPE, x, W, jnp.sin(x), key)[1]  # noqa: E731
    for axes in itertools.product((None, 0), repeat=len(sizes)):
        run = alone
        for axis in axes[::-1]:
            run = jax.vmap(run, (0, axis))
        used = keys[tuple(0 if axis is None else slice(None) for axis in axes)]
        assert num_different(run(jnp.broadcast_to(X, xs.shape), used).reshape(-1, 32, 32)) == keys.size
    for i in np.ndindex(sizes):
        close(run(xs, keys)[i], alone(xs[i], keys[i]))


@pytest.mark.parametrize("axes", [(None, 0), long((0, None)), long((0, 0))])
def test_each_tensor_of_vmap_has_its_own_scale(axes):
    factors = jnp.float32([1, 50, 0.1]).reshape(3, 1, 1)
    args = [x if axis is None else x[None] * factors for x, axis in zip((X, W), axes)]
    made = jax.vmap(partial(gradients, NEAREST, key=None), (*axes, None))(*args, G)
    for i in range(3):
        alone = [a if axis is None else a[i] for a, axis in zip(args, axes)]
        close([x[i] for x in made], [*gradients(NEAREST, *alone, G, None)])


@pytest.mark.long
def test_batch_dimensions_under_vmap():
    factors = jnp.float32([1, 50, 0.1]).reshape(3, 1, 1, 1)
    x, w = normal(0, 3, 2, 5, 32) * factors, normal(1, 3, 2, 32, 7) * factors[::-1]
    multiply = partial(fp8_dot_general, dimension_numbers=(((2,), (1,)), ((0,), (0,))), recipe=RECIPE)
    alone = jnp.stack([jnp.stack([multiply(a, b) for b in w]) for a in x])
    close(jax.vmap(multiply, (0, None))(x, w[1]), alone[:, 1])
    close(jax.vmap(jax.vmap(multiply, (None, 0)), (0, None))(x, w), alone)


def test_shard_map():
    rows = PartitionSpec("data")
    run = lambda x, g: gradients(RECIPE, x, W, g)[1:]  # noqa: E731
    step = jax.shard_map(run, mesh=mesh(data=8), in_specs=rows, out_specs=(rows, PartitionSpec()))
    dx, dw = jax.jit(step)(*(jnp.concatenate([one] * 8) for one in (X, G)))
    assert num_different(dx.reshape(8, 32, 32)) == 8
    assert snr(dw, 8 * np.asarray(X.T @ G)) > 18  # 15 if all devices had the same numbers


@pytest.mark.long
@pytest.mark.optimized
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_fsdp_and_an_explicit_mesh_give_what_one_device_gives(axis_type):
    on, is_explicit = mesh(axis_type, data=2), axis_type == AxisType.Explicit
    args, rows = [normal(0, 64, 32), W, normal(1, 64, 32)], NamedSharding(on, PartitionSpec("data"))
    expected = gradients(RECIPE, *args)
    with jax.set_mesh(on):
        of_w = NamedSharding(on, PartitionSpec()) if is_explicit else rows
        x, w, g = map(jax.device_put, args, (rows, of_w, rows))
        close(gradients(RECIPE, x, w, g, out_sharding=rows if is_explicit else None), expected)


@pytest.mark.long
def test_statistics_and_accumulated_gradients():
    variables, batches = variables_of(NET, X), (normal(0, 2, 32, 32), jax.random.split(KEY, 2))
    found = fp8.statistics(partial(loss, NET))(variables, X, KEY)["layers_0/Fp8DotGeneralOp_0"]
    assert 19 < found["input"]["sqnr"] < 22
    assert 15 < found["output_grad"]["sqnr"] < 19
    run = lambda v, batch: loss(NET, v, *batch)  # noqa: E731
    each = [jax.value_and_grad(run)(variables, batch) for batch in zip(*batches)]
    close(fp8.accumulate_gradients(run)(variables, batches), jax.tree.map(lambda a, b: (a + b) / 2, *each))


ROTATING = fp8.NVFP4Quantizer(rotation=True)
ONLY_ROTATED = fp8.CustomRecipe(wgrad=fp8.GemmRecipe(lhs=ROTATING, rhs=ROTATING))


@pytest.mark.parametrize("recipe", [NEAREST, ONLY_ROTATED])
def test_statistics_of_a_rotated_cast_are_of_the_tensor(recipe):
    """The rotated tensor has a larger amax, and a NaN makes all values of its group NaN."""
    op, x = fp8.Fp8DotGeneralOp(recipe=recipe), jnp.tile(jnp.float32(nvfp4._SIGNS)[:, None], 16)
    measure = fp8.statistics(lambda x: jnp.sum(op.apply({}, x, W[:16, :16], MATMUL)))
    for operand, num_nan in ((x, 0), (x.at[3, 5].set(np.nan), 1)):
        found = measure(operand)["Fp8DotGeneralOp"]["input"]
        assert (found["amax"], found["nonfinite"]) == (1, num_nan)


def nnx_layers():
    return nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))(nnx.Rngs(0).split(3))


@pytest.mark.parametrize(("make", "run"), [(NNX_LAYER, nnx.Linear.__call__), long(nnx_layers, NNX_SCAN)])
def test_nnx(make, run):
    gradient = nnx.jit(nnx.grad(lambda m: jnp.sum(run(m, X) * G)))

    def grads_of(rngs):
        model = fp8.quantize_model(make(), recipe=RECIPE, include=".*", rngs=rngs)
        assert np.isfinite(run(model, X)).all()
        return [gradient(model) for _ in range(2)]

    first, again, other = (grads_of(rngs) for rngs in (nnx.Rngs(fp8=1), nnx.Rngs(1), nnx.Rngs(fp8=2)))
    assert [num_different([first, again]), num_different([*first, *other])] == [1, 4]
    with pytest.raises(ValueError, match="fp8"):
        grads_of(None)

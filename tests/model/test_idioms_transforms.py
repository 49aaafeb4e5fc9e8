"""Transformations of FP8 models and of frozen models work as users write them."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8flax as fp8
from tests.cases import normal, variables_of

OWG = "_overwrite_with_gradient"
KEY = jax.random.key(0)
X = np.asarray(normal(0, 3, 32))
Dense = partial(nn.Dense, dot_general_cls=fp8.Fp8DotGeneralOp)
RECIPES = {
    "delayed": fp8.DelayedScaling(),
    "current": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "mxfp8": fp8.MXFP8BlockScaling(),
}


def repeats(request, is_repeat):
    """Skips, without --all-cells, cells that repeat a code path."""
    if is_repeat:
        request.getfixturevalue("_all_cells")


def frozen(model, x, recipe=None, weight_only=False, **options):
    """Returns a converted model, frozen with its initial variables."""
    model8 = fp8.quantize_model(model, include=".*", recipe=recipe, **options)
    variables = variables_of(model8, x)
    if OWG in variables:
        variables = fp8.calibrate(model8.apply, variables, [x])
    return fp8.freeze(model8, variables, weight_only=weight_only)


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), a, b)


@pytest.mark.filterwarnings("ignore:FP8 convolutions", "ignore:These kernels of FP8 ops")
class TestInputGradientOfAFrozenModel:
    """Gradients with respect to inputs are right, as for forces, guidance and saliency."""

    @pytest.mark.parametrize("recipe", [*RECIPES, "weight_only"])
    def test_is_that_through_the_dequantized_kernel(self, recipe, request):
        repeats(request, recipe in ("current", "axiswise", "weight_only"))
        model, variables = frozen(nn.Dense(8), X, RECIPES.get(recipe), recipe == "weight_only")
        params = variables["params"]
        scale = np.asarray(params["Fp8DotGeneralOp_0"]["kernel_scale"], np.float32)
        if scale.ndim == 3:  # (1, columns of the kernel, blocks)
            scale = np.repeat(scale[0].T, 32, axis=0)
        kernel = np.asarray(params["kernel"], np.float32) * scale
        g = np.asarray(normal(1, 3, 8))

        def f(x):
            return jnp.sum(model.apply(variables, x) * g)

        assert_close(jax.grad(f)(jnp.asarray(X)), g @ kernel.T)
        assert_close(
            jax.jit(jax.vmap(jax.grad(lambda x, g: model.apply(variables, x) @ g)))(X, g), g @ kernel.T
        )
        assert_close(jax.jvp(f, (X,), (X,))[1], np.sum(X @ kernel * g))
        assert_close(jax.linearize(f, X)[1](X), np.sum(X @ kernel * g))

    @pytest.mark.parametrize("window", ["patches", "overlapping"])
    @pytest.mark.parametrize("recipe", ["delayed", "current", "weight_only"])
    def test_of_a_convolution(self, window, recipe, request):
        repeats(request, recipe != "delayed")
        strides = (2, 2) if window == "patches" else (1, 1)
        conv = nn.Conv(4, (2, 2), strides, use_bias=False)
        x = X.reshape(1, 4, 4, 6)
        model, variables = frozen(conv, x, RECIPES.get(recipe), recipe == "weight_only")
        codes = variables["params"]["kernel"]
        kernel = np.asarray(codes, np.float32)
        if codes.dtype == jnp.float8_e4m3fn:
            kernel = kernel * np.asarray(variables["params"]["Fp8ConvGeneralDilatedOp_0"]["kernel_scale"])
        else:  # quantized at each call
            kernel = np.asarray(fp8.qdq(codes, jnp.float8_e4m3fn, jnp.float32(np.abs(kernel).max() / 448)))
        g = jnp.ones(model.apply(variables, x).shape)
        reference = jax.vjp(lambda x: conv.apply({"params": {"kernel": jnp.asarray(kernel)}}, x), x)[1](g)[
            0
        ]
        assert_close(jax.vjp(lambda x: model.apply(variables, x), x)[1](g)[0], reference)

    @pytest.mark.parametrize("weight_only", [False, True])
    def test_fp8_kernels_have_none_and_wide_parameters_do(self, weight_only, request):
        repeats(request, weight_only)
        model, variables = frozen(nn.Dense(8), X, weight_only=weight_only)
        with pytest.raises(TypeError, match="no gradient"):
            jax.grad(lambda v: jnp.sum(model.apply(v, X)))(variables)

        def loss(bias):
            return jnp.sum(model.apply({"params": {**variables["params"], "bias": bias}}, X))

        np.testing.assert_array_equal(jax.grad(loss)(variables["params"]["bias"]), np.full(8, 3.0))


class Loop(nn.Module):
    """Applies one layer three times."""

    kind: str
    layer: type = Dense

    @nn.compact
    def __call__(self, x):
        layer = self.layer(32)

        def body(module, carry):
            return carry[0] + 1, nn.tanh(module(carry[1]))

        if self.is_initializing() or self.kind == "unrolled":
            for _ in range(3):
                x = nn.tanh(layer(x))
            return x
        if self.kind == "jvp":
            return nn.jvp(lambda m, x: body(m, body(m, body(m, (0, x))))[1], layer, (x,), (x,), {})
        return nn.while_loop(lambda m, c: c[0] < 3, body, layer, (0, x))[1]


@pytest.mark.filterwarnings("ignore:FP8 convolutions")
class TestCalibrateWithoutReverseMode:
    @pytest.mark.parametrize("kind", ["while_loop", "jvp"])
    @pytest.mark.parametrize("converted", [False, True])
    def test_is_that_of_the_same_layers_unrolled(self, kind, converted, request):
        repeats(request, converted == (kind == "while_loop"))

        def model(kind):
            return fp8.quantize_model(Loop(kind, nn.Dense), include=".*") if converted else Loop(kind)

        variables = variables_of(model(kind), X)
        batches = [jnp.asarray(X), jnp.asarray(3 * X)]
        state = fp8.calibrate(model(kind).apply, variables, batches)
        expected = fp8.calibrate(model("unrolled").apply, variables, batches)
        assert np.max(expected[OWG]["Dense_0"]["Fp8DotGeneralOp_0"]["input_amax_history"]) > 1
        jax.tree.map(np.testing.assert_array_equal, state, expected)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return nn.tanh(nn.Dense(32)(x)), None


class Lifted(nn.Module):
    kind: str

    @nn.compact
    def __call__(self, x):
        if self.kind == "remat":
            return nn.remat(Block)()(x)[0]
        if self.kind == "scan":
            return nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()(
                x, None
            )[0]
        return nn.RNN(nn.SimpleCell(32))(x[None])


@pytest.mark.long
@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("kind", ["remat", "scan", "rnn"])
def test_no_tracer_outlives_its_trace(kind, request):
    repeats(request, kind != "remat")
    model = fp8.quantize_model(Lifted(kind), include=".*")
    x = jnp.asarray(X)
    with jax.checking_leaks():
        variables = variables_of(model, x)
        jax.jit(fp8.grad(lambda v: jnp.mean(model.apply(v, x) ** 2))).lower(variables)
        serve, served = fp8.freeze(model, variables, weight_only=True)
        jax.jit(serve.apply).lower(served, x)


class TestExportOfABatchOfAnySize:
    x = jnp.asarray(np.resize(X, (5, 64)))

    def export(self, fun, *args):
        batch = jax.ShapeDtypeStruct((jax.export.symbolic_shape("b")[0], 64), jnp.float32)
        exported = jax.export.export(jax.jit(fun))(jax.eval_shape(lambda *args: args, *args)[0], batch)
        return jax.export.deserialize(exported.serialize()).call(*args, self.x)

    @pytest.mark.long
    @pytest.mark.parametrize(
        "recipe", [*RECIPES.values(), fp8.Float8BlockScaling()], ids=lambda r: type(r).__name__
    )
    def test_forward_gradient_and_frozen(self, recipe, request):
        repeats(request, not isinstance(recipe, fp8.MXFP8BlockScaling))
        model = fp8.quantize_model(nn.Dense(32), include=".*", recipe=recipe)
        variables = variables_of(model, self.x)
        if OWG in variables:
            variables = fp8.calibrate(model.apply, variables, [self.x])

        def step(v, x):
            return fp8.value_and_grad(lambda v: jnp.mean(model.apply(v, x) ** 2))(v)

        assert_close(self.export(step, variables), jax.jit(step)(variables, self.x))
        serve, served = fp8.freeze(model, variables)
        assert_close(self.export(serve.apply, served), jax.jit(serve.apply)(served, self.x))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:These kernels of FP8 ops stay wide")
def test_no_implicit_transfers():
    """Other ones, ``jax.device_put``, are allowed; what Optax makes of a state is its own."""
    model = nn.Sequential([Dense(32), nn.relu, Dense(4)])
    x = jax.device_put(X)
    variables = jax.device_put(variables_of(model, x))
    longer = nn.Dense(
        32, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=1100))
    )
    state_of_one = {"params": variables["params"]["layers_0"], OWG: variables[OWG]["layers_0"]}
    fused = fp8.quantize_model(Fused(), include=".*")
    of_fused = fused.init(KEY, x)

    def loss(v, x):
        return jnp.mean(model.apply(v, x) ** 2)

    grads = fp8.grad(loss)(variables, x)
    with jax.transfer_guard("disallow"):
        fp8.add_fp8_state({"params": variables["params"]}, model, x)
        fp8.add_fp8_state(state_of_one, longer, x)
        calibrated = fp8.calibrate(model.apply, variables, [x, x])
        fp8.calibrate(loss, variables, [x], backward=True)
        fp8.freeze(model, calibrated, x)
        fp8.freeze(fused, fp8.calibrate(fused.apply, of_fused, [x]), weight_only=True)
        state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.identity())
        fp8.check_state(state.apply_gradients(grads=grads).params, variables)


class Fused(nn.Module):
    """A layer with two kernels in one parameter."""

    @nn.compact
    def __call__(self, x):
        a, b = jnp.split(self.param("ab", nn.initializers.normal(), (32, 64)), 2, axis=1)
        return x @ a + x @ b

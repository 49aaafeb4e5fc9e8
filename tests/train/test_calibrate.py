"""Calibration fills the scales before the first step, and changes nothing else."""

from functools import partial

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from tests.cases import OWG, assert_trees_equal, mesh, normal, variables_of
from tests.models import in_scan
from tests.train.net import MODEL, VARIABLES, Net, Op, op_of, trained

X = 1e3 * normal(0, 8, 6)
HIDDEN = jax.jit(partial(Net(None).apply, use_second=False))({"params": VARIABLES["params"]}, X)


def loss(variables, x):
    return 1e-6 * jnp.mean(MODEL.apply(variables, x) ** 2)


def error(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def test_forward():
    after = fp8.calibrate(MODEL.apply, VARIABLES, [X / 2, X, X / 4])
    assert_trees_equal(after["params"], VARIABLES["params"])
    for name, x in (("first", X), ("second", HIDDEN)):
        state, kernel = op_of(after, name), VARIABLES["params"][name]["kernel"]
        for role, tensor in (("input", x), ("kernel", kernel)):
            amax = np.max(np.abs(tensor))
            # The amaxes are those of wide tensors, without the rounding or saturation of earlier layers.
            np.testing.assert_allclose(state[f"{role}_amax_history"], [amax, 0, 0, 0], rtol=1e-6)
            np.testing.assert_allclose(state[f"{role}_scale"], [amax / 448], rtol=1e-6)
        for leaf in ("output_grad_scale", "output_grad_amax_history"):
            np.testing.assert_array_equal(state[leaf], op_of(VARIABLES, name)[leaf])


def test_backward():
    after = fp8.calibrate(loss, VARIABLES, [X, X / 2], backward=True)
    forward = fp8.calibrate(MODEL.apply, VARIABLES, [X, X / 2])
    state = op_of(after, "second")
    for leaf in ("input_scale", "input_amax_history", "kernel_scale", "kernel_amax_history"):
        np.testing.assert_array_equal(state[leaf], op_of(forward, "second")[leaf])
    out = Net(None).apply({"params": VARIABLES["params"]}, X)
    amax = np.max(np.abs(2e-6 * out / out.size))
    np.testing.assert_allclose(state["output_grad_amax_history"], [amax, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(state["output_grad_scale"], [amax / 57344], rtol=1e-6)
    assert_trees_equal(after["params"], VARIABLES["params"])


def test_the_next_step_uses_these_scales():
    after = fp8.calibrate(loss, VARIABLES, [X], backward=True)
    new = jax.jit(fp8.grad(loss))(after, X)
    for name in ("first", "second"):
        for role in ("input", "kernel", "output_grad"):
            scale = f"{role}_scale"
            np.testing.assert_array_equal(op_of(new, name)[scale], op_of(after, name)[scale])


def test_11_the_first_step():
    """Without calibration, inputs with amax 3,900 and gradients of 1e-5 lose half of the result or more."""
    layer, plain = nn.Dense(64, dot_general_cls=Op, use_bias=False), nn.Dense(64, use_bias=False)
    current = nn.Dense(
        64, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=fp8.Float8CurrentScaling()), use_bias=False
    )
    key = jax.random.key(3)
    x = jax.random.normal(key, (256, 64))
    x = jnp.abs(3900 * x / jnp.max(jnp.abs(x)))  # as after a relu
    weights = 1e-5 * (1 + jax.random.uniform(key, (256, 64)))

    def loss(layer, variables, x):
        return jnp.sum(layer.apply(variables, x) * weights)

    fresh = variables_of(layer, x)
    wide = {"params": fresh["params"]}
    calibrated = fp8.calibrate(partial(loss, layer), fresh, [x], backward=True)
    out, wgrad = plain.apply(wide, x), jax.grad(partial(loss, plain))(wide, x)["params"]["kernel"]
    errors = {}
    cases = {"fresh": (layer, fresh), "calibrated": (layer, calibrated), "current": (current, wide)}
    for name, (model, variables) in cases.items():
        grads = jax.jit(fp8.grad(partial(loss, model)))(variables, x)
        errors[name] = error(model.apply(variables, x), out), error(grads["params"]["kernel"], wgrad)
    assert min(errors["fresh"]) > 0.4, errors
    # The remaining error is the rounding to FP8, as with amaxes of the same batch.
    np.testing.assert_allclose(errors["calibrated"], errors["current"], rtol=1e-3)
    assert max(errors["calibrated"]) < 0.05, errors


@pytest.mark.parametrize("tied", [False, True], ids=["stacked", "tied"])
def test_under_transformations(tied):
    """A layer with remat inside of a scan; its weights are stacked or shared."""
    model = in_scan(tied, remat=True)(Op)
    variables = variables_of(model, X)
    after = fp8.calibrate(lambda v, x: jnp.sum(model.apply(v, x)), variables, [X], backward=True)
    params = variables["params"]["layers"]["Dense_0"]
    x, amaxes = X, []
    for i in range(3):
        amaxes.append(np.max(np.abs(x)))
        layer = params if tied else jax.tree.map(lambda leaf, i=i: leaf[i], params)
        x = nn.tanh(nn.Dense(6).apply({"params": layer}, x))
    state = after[OWG]["layers"]["Dense_0"]["Fp8DotGeneralOp_0"]
    assert np.all(state["output_grad_amax_history"][..., 0] > 0)
    newest = state["input_amax_history"][..., 0]
    np.testing.assert_allclose(newest, max(amaxes) if tied else amaxes, rtol=1e-5)


class Differentiated(nn.Module):
    """A model that differentiates its layers, as if its forces were the gradient of its energy."""

    def setup(self):
        self.net = Net()

    def __call__(self, x):
        module, variables = self.net.unbind()
        return jax.value_and_grad(lambda x: jnp.sum(module.apply(variables, x)))(x)


def test_a_model_that_differentiates_itself():
    variables = {collection: {"net": tree} for collection, tree in VARIABLES.items()}
    after = fp8.calibrate(Differentiated().apply, variables, [X], backward=True, has_aux=True)
    expected = fp8.calibrate(lambda v, x: jnp.sum(MODEL.apply(v, x)), VARIABLES, [X], backward=True)
    assert_trees_equal({collection: tree["net"] for collection, tree in after.items()}, expected)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_call_under_stop_gradient(backward):
    """Self-distillation and DQN targets: a call gets no gradient, and its data are larger."""

    def distance(variables, x):
        target = jax.lax.stop_gradient(MODEL.apply(variables, 50 * x))
        return 1e-6 * jnp.mean((MODEL.apply(variables, x) - target) ** 2)

    after = fp8.calibrate(distance, VARIABLES, [X], backward=backward)
    expected = fp8.calibrate(MODEL.apply, VARIABLES, [50 * X])
    for name in ("first", "second"):
        state = op_of(after, name)
        for leaf in ("input_scale", "input_amax_history", "kernel_scale", "kernel_amax_history"):
            np.testing.assert_array_equal(state[leaf], op_of(expected, name)[leaf])
        assert (state["output_grad_amax_history"][0] > 0) == backward


class WithFunctions(nn.Module):
    """A layer that calls the functions of ``flax.linen.fp8_ops``, as MaxText's do."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (6, 8))

        def state(role):
            leaves = {"scale": jnp.ones((1,)), "amax_history": jnp.zeros((4,))}
            return [self.variable(OWG, f"{role}_{name}", lambda x=x: x).value for name, x in leaves.items()]

        e4m3 = jnp.float32, jnp.float8_e4m3fn
        out = fp8.in_qdq(*e4m3, x, *state("input")) @ fp8.in_qdq(*e4m3, kernel, *state("kernel"))
        return fp8.out_qdq(jnp.float32, jnp.float8_e5m2, out, *state("output_grad"))


def test_the_functions_are_calibrated_as_the_op():
    states = []
    for model in (WithFunctions(), nn.Dense(8, use_bias=False, dot_general_cls=Op)):
        of_squares = lambda v, x, model=model: jnp.sum(model.apply(v, x) ** 2)  # noqa: E731
        state = fp8.calibrate(of_squares, variables_of(model, X), [X], backward=True)[OWG]
        states.append(state.get("Fp8DotGeneralOp_0", state))
    assert_trees_equal(*states)


def test_without_gradients_and_in_shard_map():
    """A decoder returns integers; and each device reports the amax of its part of the data."""
    expected = fp8.calibrate(MODEL.apply, VARIABLES, [X])
    assert_trees_equal(fp8.calibrate(lambda v, x: jnp.argmax(MODEL.apply(v, x)), VARIABLES, [X]), expected)
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    split = jax.shard_map(lambda v, x: jax.lax.pmean(loss(v, x), "data"), mesh=mesh(data=2), **specs)
    found = fp8.calibrate(split, VARIABLES, [X], backward=True)
    expected = fp8.calibrate(loss, VARIABLES, [X], backward=True)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), found, expected)


def test_inputs_of_every_kind():
    frozen = fp8.calibrate(MODEL.apply, flax.core.freeze(VARIABLES), iter([X]))
    assert isinstance(frozen, flax.core.FrozenDict)
    aux = fp8.calibrate(
        lambda v, b: (loss(v, b["x"]), b), VARIABLES, [{"x": X}], backward=True, has_aux=True
    )
    assert_trees_equal(aux, fp8.calibrate(loss, VARIABLES, [X], backward=True))
    with_ints = fp8.calibrate(lambda v, x: (MODEL.apply(v, x), jnp.argmax(x)), frozen, [X])
    assert_trees_equal(with_ints, frozen)


def test_old_amaxes_are_forgotten():
    """Old outliers would make the codes of all later batches zeros."""
    expected = fp8.calibrate(loss, VARIABLES, [X], backward=True)
    marked = jax.tree.map(lambda x: x * np.nan, VARIABLES)
    for old in (fp8.calibrate(MODEL.apply, VARIABLES, [1e8 * X]), trained(3), marked):
        found = fp8.calibrate(loss, {**VARIABLES, OWG: old[OWG]}, [X], backward=True)
        assert_trees_equal(found, expected)
    # The state of output gradients is not calibrated forward, and is kept.
    for name, leaf in op_of(fp8.calibrate(MODEL.apply, trained(3), [X])).items():
        kept = trained(3) if name.startswith("output_grad") else fp8.calibrate(MODEL.apply, trained(), [X])
        np.testing.assert_array_equal(leaf, op_of(kept)[name])


@pytest.mark.parametrize("backward", [False, True])
def test_recipes_without_state(backward):
    """There is nothing to calibrate, and the variables stay as they are."""
    model = Net(partial(fp8.Fp8DotGeneralOp, recipe=fp8.Float8CurrentScaling()))
    fun = (lambda v, x: jnp.sum(model.apply(v, x))) if backward else model.apply
    variables = {"params": VARIABLES["params"]}
    with pytest.warns(UserWarning, match="no scaling state"):
        assert_trees_equal(fp8.calibrate(fun, variables, [X], backward=backward), variables)


def test_a_batch_of_zeros_says_nothing():
    after = fp8.calibrate(MODEL.apply, VARIABLES, [0 * X, 1e-6 * X])
    state = op_of(after, "first")
    np.testing.assert_allclose(state["input_scale"], [1e-6 * np.max(np.abs(X)) / 448], rtol=1e-6)
    zeros = fp8.calibrate(lambda v, x: (MODEL.apply(v, x), 3), VARIABLES, [0 * X])
    np.testing.assert_array_equal(op_of(zeros, "first")["input_scale"], [1.0])


class TestRefused:
    @pytest.mark.parametrize(
        ("fun", "variables", "batches", "match"),
        [
            (MODEL.apply, VARIABLES, [], "batches were empty"),
            (lambda v, x: x, VARIABLES, [X], "No FP8 layer"),
        ],
    )
    def test_nothing_to_do(self, fun, variables, batches, match):
        with pytest.raises(ValueError, match=match):
            fp8.calibrate(fun, variables, batches)

    def test_state_that_is_missing(self):
        with pytest.raises(fp8.MissingStateError, match="first"):
            fp8.calibrate(MODEL.apply, {"params": VARIABLES["params"]}, [X])

    def test_fp8_is_switched_off(self):
        with fp8.autocast(enabled=False), pytest.raises(ValueError, match="enabled=False"):
            fp8.calibrate(MODEL.apply, VARIABLES, [X])

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_bad_batch(self, bad):
        with pytest.raises(ValueError, match="Batch 1 .*first/.*input_amax"):
            fp8.calibrate(MODEL.apply, VARIABLES, [X, X.at[0, 0].set(bad)])

    @pytest.mark.parametrize(("has_aux", "wanted"), [(False, "scalar-output"), (True, "two-element tuple")])
    def test_no_loss(self, has_aux, wanted):
        with pytest.raises(TypeError, match=wanted):
            fp8.calibrate(lambda v, x: x, VARIABLES, [X], backward=True, has_aux=has_aux)

    def test_a_layer_left_out(self):
        match = "second/Fp8DotGeneralOp_0/input_amax_history"
        with pytest.warns(UserWarning, match=match):
            after = fp8.calibrate(partial(MODEL.apply, use_second=False), VARIABLES, [X])
        assert_trees_equal(op_of(after, "second"), op_of(VARIABLES, "second"))
        assert op_of(after, "first")["input_amax_history"][0] == np.max(np.abs(X))


def test_states_stacked_along_another_axis():
    """Reports to the host take the amaxes of each layer."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            ones = nn.initializers.ones
            return nn.Dense(4, use_bias=False, kernel_init=ones, dot_general_cls=Op)(x), None

    axes = {"params": 1, OWG: 1}
    model = nn.scan(Block, variable_axes=axes, split_rngs={"params": True}, length=3)()
    x = jnp.ones((2, 4))
    variables = model.init(jax.random.key(0), x, None)

    def loop(v, x):  # has no reverse mode
        return jax.lax.while_loop(
            lambda c: c[0] < 1, lambda c: (c[0] + 1, model.apply(v, c[1], None)[0]), (0, x)
        )[1]

    found = fp8.calibrate(loop, variables, [x])
    state = found[OWG]["Dense_0"]["Fp8DotGeneralOp_0"]
    np.testing.assert_allclose(state["input_scale"], np.array([[1, 4, 16]]) / 448, rtol=1e-6)

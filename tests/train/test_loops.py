"""Training loops of others: Flax's loss scale, ``check_state``, and the code of docs/loops.md."""

import re
import warnings
from functools import partial

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale

import fp8flax as fp8
from tests import ROOT
from tests.cases import OWG, assert_trees_equal, variables_of
from tests.models import in_scan
from tests.pages import examples_of, run
from tests.train.net import MODEL, VARIABLES, Op, X, gradient, op_of, trained

pytestmark = pytest.mark.usefixtures("promotion_of_users")
Y = jnp.sin(X.sum(-1, keepdims=True))


class Half(nn.Module):
    """One FP8 layer in float16; it compiles in half the time of two layers."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(32, dtype=jnp.float16, dot_general_cls=Op, name="first")(x))
        return nn.Dense(1, dtype=jnp.float16, name="last")(x).astype(jnp.float32)


def loss_of(model, variables, x=X):
    return jnp.mean((model.apply(variables, x) - Y) ** 2)


HALF = Half()
HALF_START = variables_of(HALF, X, seed=5)
ADAM = optax.adam(1e-2)  # one object, so that all steps of a kind are one program


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_parameters_that_are_differentiated_alone(transform):
    """The state would stay as it is, so there is a warning."""
    params, state = HALF_START["params"], HALF_START[OWG]
    with pytest.warns(UserWarning, match="without its scaling state"):
        transform(jax.grad(lambda p: loss_of(HALF, {"params": p, OWG: state}, X)))(params)
    transform(jax.grad(partial(loss_of, HALF, x=X)))(HALF_START)


class TestDynamicScale:
    def test_integers_have_no_gradient(self):
        layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        variables = {**layer.init(jax.random.key(0), X), "cache": {"index": jnp.int32(3)}}
        step = fp8.DynamicScale().value_and_grad(lambda v: jnp.mean(layer.apply(v, X)))
        _, finite, _, grads = step(variables)
        assert finite
        assert grads["cache"]["index"].dtype == jax.dtypes.float0

    @pytest.mark.filterwarnings("ignore:The kernel of an FP8 layer is differentiated")
    def test_as_flaxs_own_beside_the_state(self):
        """Parameters and loss scale are those of Flax; the state is that of the loss that was scaled."""
        params, state = HALF_START["params"], HALF_START[OWG]

        @jax.jit
        def all_three(scale, theirs, x):
            loss = partial(loss_of, HALF, x=x)
            of_params = theirs.value_and_grad(lambda params: loss({"params": params, OWG: state}))(params)
            scaled = fp8.grad(lambda v: scale.scale * loss(v))(HALF_START)[OWG]
            return scale.value_and_grad(loss)(HALF_START), of_params, scaled

        for size, x in ((2.0**14, X), (2.0**40, X), (2.0**14, X.at[0, 0].set(jnp.nan))):
            options = {"growth_interval": 1, "scale": jnp.float32(size), "fin_steps": jnp.int32(1)}
            scales = [cls(**options) for cls in (fp8.DynamicScale, dynamic_scale.DynamicScale)]
            ours, theirs, scaled = all_three(*scales, x)
            assert_trees_equal(ours.grad["params"], theirs.grad)
            assert ours.finite == theirs.finite == (size < 2**40 and x is X)
            assert isinstance(ours.dynamic_scale, fp8.DynamicScale)
            assert jax.tree.leaves(ours.dynamic_scale) == jax.tree.leaves(theirs.dynamic_scale)
            assert (ours.dynamic_scale.scale > size) == ours.finite
            assert_trees_equal(ours.grad[OWG], scaled)

    def test_the_smallest_scale(self):
        for minimum in (1.0, None):
            scale = fp8.DynamicScale(scale=1.0, minimum_scale=minimum)
            after = scale.value_and_grad(lambda w: w * jnp.inf)(jnp.ones(()))
            assert not after.finite
            assert after.dynamic_scale.scale == (minimum or 0.5)

    def test_has_aux_argnums_and_keywords(self):
        def loss(variables, offset, power=1):
            value = loss_of(HALF, variables) + offset**power
            return value, {"offset": offset}

        gradient = fp8.DynamicScale(scale=256.0).value_and_grad(loss, argnums=(0, 1), has_aux=True)
        result = jax.jit(partial(gradient, power=2))(HALF_START, 3.0)
        assert isinstance(result, dynamic_scale.DynamicScaleResult)
        (value, aux), (grads, offset_grad) = result.aux, result.grad
        np.testing.assert_allclose(value, loss_of(HALF, HALF_START) + 9, rtol=1e-5)
        assert (aux["offset"], offset_grad, bool(result.finite)) == (3.0, 6.0, True)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
        assert_trees_equal(op_of(grads)["input_scale"], jnp.ones((1,)))

    def test_without_gradients(self):
        result = fp8.DynamicScale().value_and_grad(lambda params, x: jnp.sum(x))({}, X)
        assert (bool(result.finite), result.grad) == (True, {})

    @pytest.mark.long
    def test_over_devices_the_state_is_the_maximum(self):
        def of_device(x, axis_name=None):
            scale = fp8.DynamicScale(scale=256.0)
            return scale.value_and_grad(partial(loss_of, HALF), axis_name=axis_name)(HALF_START, x).grad

        xs = jnp.stack([X, 3 * X])
        reduced = jax.jit(jax.vmap(partial(of_device, axis_name="data"), axis_name="data"))(xs)
        each = jax.jit(jax.vmap(of_device))(xs)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1], b.max(0)), reduced[OWG], each[OWG])
        close = partial(np.testing.assert_allclose, rtol=1e-2, atol=1e-3)
        jax.tree.map(lambda a, b: close(a[1], b.mean(0)), reduced["params"], each["params"])


FIRST = f"{OWG}/first/Fp8DotGeneralOp_0/"


class TestCheckState:
    @pytest.mark.parametrize(
        "form", [lambda v: v, flax.core.freeze, lambda v: v[OWG], partial(jax.tree.map, np.asarray)]
    )
    def test_good_state_passes(self, form):
        fp8.check_state(form(trained(1)))
        fp8.check_state(form(trained(2)), before=form(trained(1)))
        fp8.check_state(form(trained(6)), before=form(trained(5)))

    def test_without_state_there_is_nothing_to_check(self):
        for variables in ({"params": {"w": jnp.ones(2)}}, {}):
            with pytest.warns(UserWarning, match="no FP8 scaling state"):
                fp8.check_state(variables)

    def test_other_state_before(self):
        state = fp8.TrainState.create(apply_fn=None, params=trained(1), tx=optax.sgd(0.1))
        without = {"params": state.params["params"]}
        for variables, before in ((state, state.params), (without, state.params)):
            with pytest.raises(ValueError, match=f"{FIRST}input_amax_history is not in both"):
                fp8.check_state(variables, before=before)

    @pytest.mark.parametrize(
        ("leaf", "change", "message"),
        [
            ("input_scale", lambda a: 0 * a, "scale is not positive"),
            ("kernel_scale", lambda a: jnp.nan * a, "scale is not positive"),
            ("input_amax_history", lambda a: -a, "negative"),
            ("input_amax_history", lambda a: a.at[2].set(jnp.inf), "not finite"),
        ],
    )
    def test_a_bad_leaf_is_named(self, leaf, change, message):
        variables = trained()
        op_of(variables)[leaf] = change(op_of(variables)[leaf])
        role = leaf.partition("_")[0]
        with pytest.raises(ValueError, match=rf"{FIRST}{role}_amax_history .*{message}"):
            fp8.check_state(variables)

    def test_two_steps_are_no_step(self):
        """A correct loop that calls ``check_state`` after two steps gets a short message about that."""
        with pytest.raises(ValueError, match="of 5 more.*`before` must be exactly one step earlier"):
            fp8.check_state(trained(4), before=trained(2))

    def test_a_state_that_never_moved(self):
        with pytest.raises(ValueError, match="No history has moved"):
            fp8.check_state(VARIABLES)
        variables = trained()
        with pytest.raises(ValueError, match="No history has moved"):
            fp8.check_state(variables, before=variables)

    def test_a_layer_that_did_not_move_is_a_warning(self):
        variables, before = trained(2), trained(1)
        variables[OWG]["second"] = VARIABLES[OWG]["second"]
        with pytest.warns(UserWarning, match="second/Fp8DotGeneralOp_0/input_amax_history"):
            fp8.check_state(variables)
        variables[OWG]["second"] = before[OWG]["second"]
        with pytest.warns(UserWarning, match="second/Fp8DotGeneralOp_0/input_amax_history"):
            fp8.check_state(variables, before=before)

    def test_a_stacked_layer_that_did_not_move(self):
        stacked = jax.tree.map(lambda *a: jnp.stack(a), trained()[OWG], VARIABLES[OWG])
        with pytest.warns(UserWarning, match=r"input_amax_history.* did not move"):
            fp8.check_state({OWG: stacked})

    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_a_step_that_was_none(self, steps):
        before = trained(steps)
        grads = gradient(before, 3 * X)
        scaled = {**before, OWG: jax.tree.map(lambda g: 0.3 * g, grads[OWG])}
        with pytest.raises(ValueError, match="past entries"):
            fp8.check_state(scaled, before=before)


def grads_of(state, x, y):
    return fp8.grad(lambda v: jnp.mean((state.apply_fn(v, x) - y) ** 2))(state.params)


def clipped(state, x, y):
    return optax.clip_by_global_norm(1.0).update(grads_of(state, x, y), optax.EmptyState())[0]


def scaled_by_flax(state, x, y):
    scale = dynamic_scale.DynamicScale(scale=jnp.float32(2.0**10))
    return scale.value_and_grad(lambda v: jnp.mean((state.apply_fn(v, x) - y) ** 2))(state.params).grad


def two_applies(state, x, y):
    def loss(v):
        return jnp.mean((state.apply_fn(v, x) - y) ** 2) + jnp.mean(state.apply_fn(v, 2 * x))

    return jax.grad(loss)(state.params)


# The gradients that a loop gives to ``TrainState.apply_gradients``; test_train.py has more of them.
MISTAKES = {
    "clip over all gradients": clipped,
    "Flax's DynamicScale": scaled_by_flax,
    "microbatches added up": lambda state, x, y: jax.tree.map(
        jnp.add, grads_of(state, x[:2], y[:2]), grads_of(state, x[2:], y[2:])
    ),
    "two applies with jax.grad": two_applies,
}
# Gradients with which the state stands still, as if no layer had taken part in the step.
MISTAKES_THAT_STAND_STILL = {
    "old state": lambda state, x, y: {**grads_of(state, x, y), OWG: state.params[OWG]},
    "zero state": lambda state, x, y: {
        **grads_of(state, x, y),
        OWG: jax.tree.map(jnp.zeros_like, state.params[OWG]),
    },
}


SGD = optax.sgd(0.1)
STATE = fp8.TrainState.create(apply_fn=MODEL.apply, params=VARIABLES, tx=SGD).replace(step=jnp.int32(0))


def step_with(gradients):
    return jax.jit(lambda state: state.apply_gradients(grads=gradients(state, X, Y)))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_loud(mistake):
    """With jit the next loss is NaN, and ``check_state`` says why."""
    after = step_with(MISTAKES[mistake])(STATE).params
    assert jnp.isnan(loss_of(MODEL, after))
    with pytest.raises(ValueError, match=f"{FIRST}.*the scale is NaN"):
        fp8.check_state(after)


def test_mistakes_without_jit_are_errors():
    grads = jax.tree.map(jnp.negative, gradient(VARIABLES, X))
    with pytest.raises(ValueError, match=f"(?s){FIRST}.*fp8flax.value_and_grad"):
        STATE.apply_gradients(grads=grads)


@pytest.mark.parametrize("mistake", MISTAKES_THAT_STAND_STILL)
def test_a_state_that_stands_still(mistake):
    step = step_with(MISTAKES_THAT_STAND_STILL[mistake])
    with pytest.raises(ValueError, match="No history has moved"):
        fp8.check_state(step(step(STATE)).params)


@jax.jit
def after_adam(variables, grads):
    updates, _ = ADAM.update(grads, ADAM.init(variables))
    return optax.apply_updates(variables, updates)


def optimizer_over_all(variables):
    return after_adam(variables, gradient(variables, X))


def ema_over_all(variables):
    new = {**variables, OWG: gradient(variables, X)[OWG]}
    return optax.incremental_update(new, variables, 0.1)


# At the very first step an average is the newest entry alone, which may be anything.
@pytest.mark.parametrize(
    ("loop", "steps"),
    [(optimizer_over_all, 0), (optimizer_over_all, 2), (ema_over_all, 1), (ema_over_all, 2)],
)
def test_a_loop_that_goes_over_the_state_is_seen_after_a_step(loop, steps):
    before = trained(steps)
    with pytest.raises(ValueError, match="training leaves"):
        fp8.check_state(loop(before), before=before)


def test_the_scale_of_an_average_over_all_variables_does_not_follow_from_its_history():
    model = nn.Dense(1, dot_general_cls=partial(Op, recipe=fp8.DelayedScaling(amax_history_len=16)))
    variables = average = variables_of(model, X)
    gradient = jax.jit(fp8.grad(partial(loss_of, model)))
    for i in range(4):
        variables = {**variables, OWG: gradient(variables, (1.0 + i) * X)[OWG]}
        average = optax.incremental_update(variables, average, 0.1)
    fp8.check_state(variables)
    with pytest.raises(ValueError, match="a scale does not follow from its history"):
        fp8.check_state(average)
    with pytest.warns(UserWarning, match="scaling state .*input_amax_history .* is not what training"):
        fp8.add_fp8_state(average, model, X)
    with pytest.warns(UserWarning, match="scaling state .*input_amax_history .* is not what training"):
        fp8.freeze(model, average, X)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The FP8 scaling state")
        fp8.add_fp8_state(variables, model, X)
        fp8.freeze(model, variables, X)


@pytest.mark.parametrize("model", [MODEL, in_scan()(Op)], ids=["layers", "stack"])
def test_mutable(model):
    """The collection that ``apply`` returns as mutable holds the old state, so naming it warns."""
    variables = variables_of(model, X)
    for mutable in (OWG, [OWG, "batch_stats"], flax.core.DenyList("params")):
        with pytest.warns(UserWarning, match="old state.*fp8flax.value_and_grad"):
            jax.eval_shape(partial(model.apply, mutable=mutable), variables, X)
    for mutable in (False, True, ["batch_stats"]):
        jax.eval_shape(partial(model.apply, mutable=mutable), variables, X)


CONVERTED = fp8.quantize_model(nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)]), include=".*")


@pytest.mark.parametrize("model", [MODEL, in_scan()(Op), CONVERTED], ids=["layers", "stack", "converted"])
def test_state_is_made_by_init_alone(model):
    """A mutable collection does not make new state, with other scales than those that were trained."""
    params = {"params": variables_of(model, X)["params"]}
    for mutable in (True, ["params", OWG], False):
        with pytest.raises(fp8.MissingStateError, match="only init makes it"):
            jax.eval_shape(partial(model.apply, mutable=mutable), params, X)
    key, lazy = jax.random.key(0), jax.ShapeDtypeStruct(X.shape, X.dtype)
    for make in (lambda: model.lazy_init(key, lazy), lambda: model.init_with_output(key, X)[1]):
        assert OWG in jax.eval_shape(make)


@pytest.mark.long
def test_the_page():
    """The code of docs/loops.md runs. Adapters that are trained alone leave the base's state behind."""
    namespace = {}
    for section in re.split(r"(?m)^## ", (ROOT / "docs" / "loops.md").read_text()):
        run(examples_of(section), "docs/loops.md", namespace)
        if section.startswith("LoRA"):
            lora = dict(namespace)
    with pytest.raises(ValueError, match="No history has moved"):
        fp8.check_state(lora["all_variables"])
    assert op_of({OWG: lora["scaling"]}, "base")["output_grad_amax_history"][0] > 0
    state = lora["state"]
    new = state.apply_gradients(grads=grads_of(state, lora["x"], lora["y"]))
    fp8.check_state(new.params, before=lora["all_variables"])
    assert_trees_equal(new.params["params"]["base"], lora["all_variables"]["params"]["base"])

"""FP8 without Flax: functions whose state is an argument, in trees of every kind, beside the Linen ops."""

import dataclasses
import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import fp8flax as fp8
from tests.cases import MATMUL, OWG, RECIPES, assert_same_bits, assert_trees_equal, normal

DELAYED = RECIPES["delayed"]
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@partial(jax.tree_util.register_dataclass, data_fields=["w", "fp8"], meta_fields=["recipe"])
@dataclasses.dataclass(eq=False)
class Linear:
    """A layer as Equinox writes it: a dataclass that is a tree, with attributes on its paths."""

    w: jax.Array
    fp8: dict
    recipe: object = DELAYED

    @classmethod
    def of(cls, seed, *shape, recipe=DELAYED):
        return cls(normal(seed, *shape) / shape[0] ** 0.5, fp8.init_state(recipe), recipe)

    def __call__(self, x):
        dims = ((x.ndim - 1,), (0,)), ((), ())
        return fp8.dot_general(x, self.w, dims, state=self.fp8, recipe=self.recipe)


@partial(jax.tree_util.register_dataclass, data_fields=["tied", "layers"], meta_fields=[])
@dataclasses.dataclass(eq=False)
class MLP:
    """Two calls of one layer, with other data, and a layer in a list."""

    tied: Linear
    layers: list

    @classmethod
    def of(cls, recipe):
        return cls(Linear.of(0, 8, 8, recipe=recipe), [Linear.of(1, 8, 4, recipe=recipe)])

    def __call__(self, x):
        return self.layers[0](jax.nn.relu(self.tied(3.0 * jax.nn.relu(self.tied(x)))))


class LinenMLP(nn.Module):
    recipe: object

    @nn.compact
    def __call__(self, x):
        dense = partial(
            nn.Dense, use_bias=False, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=self.recipe)
        )
        tied = dense(8, name="tied")
        return dense(4, name="last")(nn.relu(tied(3.0 * nn.relu(tied(x)))))


X = normal(2, 16, 8)


def loss_of(model, x=X):
    return jnp.mean(model(x) ** 2)


def step_of(tx, gradient=None):
    """Returns a step of training as users write it."""
    gradient = gradient or fp8.value_and_grad(loss_of)

    @jax.jit
    def step(model, opt_state, x):
        value, grads = gradient(model, x)
        (state, params), (next_state, grads) = fp8.split_state(model), fp8.split_state(grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return value, fp8.merge_state(next_state, params, before=state), opt_state

    return step


@pytest.mark.usefixtures("promotion_of_users")
@EACH_RECIPE
def test_tied_weights_train_as_in_linen(recipe):
    train_as_in_linen(MLP.of(recipe), recipe)


def train_as_in_linen(model, recipe):
    """Trains a model like ``MLP`` beside the one of Linen, and compares the bits."""
    linen, tx = LinenMLP(recipe), optax.adam(1e-2)
    params = {"tied": {"kernel": model.tied.w}, "last": {"kernel": model.layers[0].w}}
    variables = {"params": params}
    if recipe is DELAYED:
        variables[OWG] = {name: {"Fp8DotGeneralOp_0": fp8.init_state(recipe)} for name in params}
    state = fp8.TrainState.create(apply_fn=linen.apply, params=variables, tx=tx)

    @jax.jit
    def linen_step(state, x):
        gradient = fp8.value_and_grad(lambda v: jnp.mean(linen.apply(v, x) ** 2))
        value, grads = gradient(state.params)
        return value, state.apply_gradients(grads=grads)

    opt_state, step = tx.init(fp8.split_state(model)[1]), step_of(tx)
    for i in range(3):
        expected, state = linen_step(state, (1.0 + i) * X)
        value, model, opt_state = step(model, opt_state, (1.0 + i) * X)
        assert_same_bits(value, expected)
        for name, layer in (("tied", model.tied), ("last", model.layers[0])):
            assert_same_bits(layer.w, state.params["params"][name]["kernel"])
            if recipe is DELAYED:
                assert_trees_equal(layer.fp8, state.params[OWG][name]["Fp8DotGeneralOp_0"])


OPERANDS = {
    "dot_general": ((normal(0, 4, 6), normal(1, 6, 8)), (MATMUL,), fp8.Fp8DotGeneralOp),
    "einsum": ((normal(0, 2, 3, 6), normal(1, 6, 2, 4)), ("bsd,dhk->bhsk",), fp8.Fp8Einsum),
    "ragged_dot": ((normal(0, 6, 4), normal(1, 2, 4, 8)), (jnp.array([4, 2]),), fp8.Fp8RaggedDotOp),
}


@pytest.mark.parametrize("recipe", [DELAYED, RECIPES["mxfp8"]], ids=["delayed", "mxfp8"])
@pytest.mark.parametrize("name", OPERANDS)
def test_as_the_op(name, recipe):
    """Result, gradients and next state have the bits of the op."""
    operands, arguments, op = OPERANDS[name]
    op = op(recipe=recipe)
    experts = {"num_experts": 2} if name == "ragged_dot" else {}
    state = fp8.init_state(recipe, **experts)

    def args(x, w):
        return (*arguments, x, w) if name == "einsum" else (x, w, *arguments)

    def plain(state, x, w):
        return jnp.sum(getattr(fp8, name)(*args(x, w), state=state, recipe=recipe) ** 2)

    def linen(state, x, w):
        return jnp.sum(op.apply({OWG: state} if state else {}, *args(x, w)) ** 2)

    for _ in range(2):
        ours, theirs = (jax.jit(fp8.value_and_grad(f, (0, 1, 2)))(state, *operands) for f in (plain, linen))
        assert_trees_equal(ours, theirs, assert_same_bits)
        state = ours[1][0]


def test_init_state_is_that_of_the_ops():
    variables = fp8.Fp8DotGeneralOp(recipe=DELAYED).init(jax.random.key(0), X, X.T, MATMUL)
    assert_trees_equal(fp8.init_state(DELAYED), variables[OWG])
    assert fp8.init_state()["kernel_amax_history"].shape == (1024,)
    with fp8.autocast(recipe=DELAYED):
        assert_trees_equal(fp8.init_state(), variables[OWG])
    with fp8.autocast(enabled=False):
        assert fp8.init_state(DELAYED) == {}
    with pytest.raises(ValueError, match="num_experts must be 1 or more"):
        fp8.init_state(DELAYED, num_experts=0)
    with pytest.raises(TypeError, match="recipe"):
        fp8.init_state("delayed")


def test_the_recipe_in_use():
    dot, state = partial(fp8.dot_general, X, X.T, MATMUL), fp8.init_state(DELAYED)
    with fp8.autocast(recipe=DELAYED):
        np.testing.assert_array_equal(
            dot(state=state), fp8.dot_general(X, X.T, MATMUL, state=state, recipe=DELAYED)
        )
    with fp8.autocast(recipe=fp8.Float8CurrentScaling()):
        for none in (None, {}):
            np.testing.assert_array_equal(dot(state=none), dot(recipe=fp8.Float8CurrentScaling()))
    with fp8.autocast(enabled=False):
        np.testing.assert_array_equal(dot(state=state, recipe=DELAYED), lax.dot_general(X, X.T, MATMUL))


def test_wrong_states_are_refused():
    dot, state = partial(fp8.dot_general, X, X.T, MATMUL, recipe=DELAYED), fp8.init_state(DELAYED)
    without = {name: leaf for name, leaf in state.items() if name != "kernel_scale"}
    for missing in (without, {**state, "kernel_scale": None}):
        with pytest.raises(fp8.MissingStateError, match="has no 'kernel_scale'.*fp8flax.init_state"):
            dot(state=missing)
    for none in (None, {}):
        with pytest.raises(fp8.MissingStateError, match="has no 'input_scale'"):
            dot(state=none)
    with pytest.raises(TypeError, match="state must be a dict.*got tuple"):
        dot(state=(1.0,))
    with pytest.raises(TypeError, match="input_scale must be float32; got bfloat16"):
        dot(state={**state, "input_scale": jnp.ones((1,), jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"input_amax_history has shape \(1024,\).* needs \(4,\)"):
        dot(state=fp8.init_state())
    with pytest.raises(TypeError, match="lhs"):
        fp8.dot_general(jnp.ones((2, 2), jnp.int32), X, MATMUL, state=state, recipe=DELAYED)


def test_stochastic_rounding_takes_a_key():
    recipe, w = fp8.NVFP4BlockScaling(), normal(3, 64, 64)

    def loss(w, key):
        return jnp.sum(fp8.dot_general(w, w.T, MATMUL, recipe=recipe, key=key) ** 2)

    gradient = jax.jit(fp8.grad(loss))
    one, again, two = (gradient(w, jax.random.key(i)) for i in (0, 0, 1))
    assert (one == again).all()
    assert (one != two).any()
    with pytest.raises(ValueError, match="fp8flax.dot_general key="):
        fp8.grad(loss)(w, None)


# Trees in which users keep a state.
PLACES = {
    "dict": lambda layer: {"block": {"w": layer.w, "fp8": layer.fp8}},
    "under params": lambda layer: {"params": {"w": layer.w, "fp8": layer.fp8}},
    "tuple": lambda layer: ([layer.w], (layer.fp8,)),
    "dataclass": lambda layer: layer,
    "dataclasses": lambda layer: MLP(layer, [{"model": (layer,)}]),
    "flat": lambda layer: {"w": layer.w, **layer.fp8},
}
PLACE = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def two_calls(tree, x):
    """Multiplies twice by the first weights in a tree, with their state."""
    w = jax.tree.leaves(fp8.split_state(tree)[1])[0]
    names = sorted(fp8.init_state(DELAYED))
    layer = Linear(w, dict(zip(names, jax.tree.leaves(fp8.split_state(tree)[0]))))
    return jnp.mean(layer(x) ** 2) + jnp.mean(layer(2.0 * x))


@PLACE
def test_state_is_found_in_every_tree(place):
    """Two calls merge, microbatches merge, devices merge, and a check sees a change."""
    tree = place(Linear.of(0, 8, 8))
    grads = jax.jit(fp8.grad(two_calls))(tree, X)
    state, rest = fp8.split_state(grads)
    assert_trees_equal(fp8.merge_state(state, rest), grads)
    newest = next(x[0] for x in jax.tree.leaves(state) if x.shape == (4,))
    np.testing.assert_array_equal(newest, 2 * jnp.abs(X).max())
    _, accumulated = jax.jit(fp8.accumulate_gradients(two_calls))(tree, X.reshape(4, 4, 8))
    assert_trees_equal(fp8.split_state(accumulated)[0], state)
    stacked = jax.tree.map(lambda g: jnp.stack([g, 3 * g]), grads)
    reduced = jax.vmap(lambda g: fp8.pmean_gradients(g, "i"), axis_name="i")(stacked)
    factors = fp8.merge_state(jax.tree.map(lambda s: 3.0, state), jax.tree.map(lambda g: 2.0, rest))
    jax.tree.map(
        lambda r, g, f: np.testing.assert_allclose(r[0], f * g, rtol=1e-6), reduced, grads, factors
    )
    before = fp8.split_state(tree)[0]
    with warnings.catch_warnings():  # a tree of dataclasses holds a layer that did not run
        warnings.filterwarnings("ignore", "The FP8 scaling state .* did not move")
        fp8.check_state(grads, before=tree)
        fp8.check_state(fp8.merge_state(state, rest, before=before))
    with pytest.raises(ValueError, match="input_amax_history"):
        fp8.check_state(jax.tree.map(lambda g: -g, grads))


def test_an_optimizer_sees_parameters_alone():
    model = MLP.of(DELAYED)
    state, params = fp8.split_state(model)
    assert [x.shape for x in jax.tree.leaves(params)] == [(8, 8), (8, 4)]
    assert len(jax.tree.leaves(state)) == 12
    assert isinstance(params, MLP)
    assert params.tied.fp8["input_scale"] is state.tied.w is None
    assert_trees_equal(fp8.merge_state(state, params), model)
    assert_trees_equal(fp8.merge_state(*fp8.split_state(model)[:1], params, before=state), model)
    nothing, everything = fp8.split_state(MLP.of(RECIPES["mxfp8"]))
    assert jax.tree.leaves(nothing) == []
    assert len(jax.tree.leaves(fp8.merge_state(nothing, everything))) == 2
    for whole in ((state, model), (model, params)):
        with pytest.raises(ValueError, match="Both arguments of merge_state have a leaf in one place"):
            fp8.merge_state(*whole)


def test_a_state_that_no_step_can_make():
    model = MLP.of(DELAYED)
    before, params = fp8.split_state(model)
    after = fp8.split_state(jax.jit(fp8.grad(loss_of))(model, X))[0]
    wrong = jax.tree.map(lambda s: 0.3 * s, after)
    with pytest.raises(ValueError, match=r"tied/fp8/input_amax_history .*is not the next state"):
        fp8.merge_state(wrong, params, before=before)
    marked = jax.jit(lambda *a: fp8.merge_state(*a, before=before))(wrong, params)
    assert jnp.isnan(loss_of(marked, X))
    with pytest.raises(ValueError, match=r"tied/fp8/input_amax_history.*the scale is NaN"):
        fp8.check_state(marked)


# Gradients of microbatches by hand, as other code bases take them: a scan with the gradient inside.
BATCHES = X.reshape(4, 4, 8) * jnp.arange(1.0, 5.0)[:, None, None]


def zeros(model):
    return jax.tree.map(jnp.zeros_like, model)


def sum_in_scan(gradient, model):
    """AXLearn's ``with_minibatch_steps``, and levanter's first form: a sum, then a scale."""

    def body(total, x):
        return jax.tree.map(jnp.add, total, gradient(model, x)), None

    total, _ = lax.scan(body, zeros(model), BATCHES)
    return jax.tree.map(lambda g: g / len(BATCHES), total)


GRADIENTS = pytest.mark.parametrize("gradient", [fp8.grad, jax.grad], ids=["fp8.grad", "jax.grad"])


def one_call(layer, x):
    return jnp.mean(layer(x) ** 2)


@GRADIENTS
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_loop_over_microbatches_that_does_not_carry_the_state_warns(gradient, wrap):
    with pytest.warns(UserWarning, match="the loop does not carry the state.*accumulate_gradients"):
        wrap(partial(sum_in_scan, gradient(one_call)))(Linear.of(0, 8, 8))


def mean_of_carry(gradient, model):
    """MaxText's loop, with the state beside its parameters: the mean has the values of a state."""

    def body(carry, x):
        params, total = carry
        return (params, jax.tree.map(jnp.add, total, gradient(params, x))), None

    (_, total), _ = lax.scan(body, (model, zeros(model)), BATCHES)
    return jax.tree.map(lambda g: g / len(BATCHES), total)


def mean_in_while(gradient, model):
    def body(carry):
        i, params, total = carry
        return i + 1, params, jax.jit(partial(jax.tree.map, jnp.add))(total, gradient(params, BATCHES[i]))

    total = lax.while_loop(lambda carry: carry[0] < 4, body, (0, model, zeros(model)))[-1]
    return jax.tree.map(lambda g: 0.25 * g, total)


@GRADIENTS
@pytest.mark.parametrize("form", [mean_of_carry, mean_in_while])
def test_a_mean_of_states_is_seen_under_jit(form, gradient):
    """Without the check it passes: past amaxes and the scale are those of each microbatch."""
    layer = Linear.of(0, 8, 8)
    layer.fp8 = fp8.grad(one_call)(layer, X).fp8
    state, params = fp8.split_state(layer)

    @jax.jit
    def step(state, params):
        averaged = fp8.split_state(form(gradient(one_call), fp8.merge_state(state, params)))[0]
        return averaged, fp8.merge_state(averaged, params, before=state)

    averaged, after = step(state, params)
    fp8.check_state(averaged, before=state)
    assert jnp.isnan(one_call(after, X))
    with pytest.raises(ValueError, match="fp8/input_amax_history.*the scale is NaN"):
        fp8.check_state(after)


def test_a_maximum_of_states_is_the_next_state():
    """Levanter since 2026-08: each kind of gradient-carried state says how it accumulates."""
    layer = Linear.of(0, 8, 8)

    def body(carry, x):
        model, total = carry
        states, grads = zip(fp8.split_state(total), fp8.split_state(fp8.grad(one_call)(model, x)))
        state, grads = jax.tree.map(jnp.maximum, *states), jax.tree.map(jnp.add, *grads)
        return (model, fp8.merge_state(state, grads)), None

    (_, total), _ = jax.jit(partial(lax.scan, body))((layer, zeros(layer)), BATCHES)
    whole = fp8.grad(one_call)(layer, BATCHES.reshape(-1, 8))
    for name in ("input_scale", "input_amax_history", "kernel_scale", "kernel_amax_history"):
        assert_same_bits(total.fp8[name], whole.fp8[name])


def test_one_microbatch_is_no_sum():
    layer = Linear.of(0, 8, 8)
    state, params = fp8.split_state(layer)

    @jax.jit
    def step(state, params):
        model = fp8.merge_state(state, params)

        def body(carry, x):
            model, total = carry
            return (model, jax.tree.map(jnp.add, total, fp8.grad(one_call)(model, x))), None

        (_, total), _ = lax.scan(body, (model, zeros(model)), X[None])
        total = jax.tree.map(lambda g: g / (params.w[0, 0] * 0 + 1), total)
        return fp8.merge_state(fp8.split_state(total)[0], params, before=state)

    assert_trees_equal(step(state, params).fp8, jax.jit(fp8.grad(one_call))(layer, X).fp8)


def test_loops_that_are_right_do_not_warn():
    """Steps of training in a scan, inference in a scan, gradients of a scan, and our accumulation."""
    layer = Linear.of(0, 8, 8)

    def train(layer, x):
        grads = fp8.grad(one_call)(layer, x)
        (state, params), (after, grads) = fp8.split_state(layer), fp8.split_state(grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return fp8.merge_state(after, params, before=state), None

    def of_scan(layer):
        return lax.scan(lambda total, x: (total + one_call(layer, x), None), 0.0, BATCHES)[0]

    trained, _ = jax.jit(partial(lax.scan, train))(layer, BATCHES)
    for x in BATCHES:
        layer, _ = jax.jit(train)(layer, x)
    assert_trees_equal(trained.fp8, layer.fp8)
    lax.map(partial(one_call, layer), BATCHES)
    _, accumulated = fp8.accumulate_gradients(one_call)(layer, BATCHES)
    whole = fp8.grad(one_call)(layer, BATCHES.reshape(-1, 8))
    of_inputs = {name: x for name, x in whole.fp8.items() if not name.startswith("output_grad")}
    for name, expected in of_inputs.items():
        assert_same_bits(accumulated.fp8[name], expected)
        assert_same_bits(jax.jit(fp8.grad(of_scan))(layer).fp8[name], expected)

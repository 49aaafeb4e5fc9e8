"""Training steps of NNX models equal those of the same Linen model, bit for bit; errors guard the state."""

import operator
import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import normal
from tests.nnx.layout import to_linen

DELAYED = fp8.DelayedScaling(amax_history_len=4)
OWG = "_overwrite_with_gradient"
X, Y = normal(0, 6, 16), normal(1, 6, 16)


def nnx_op():
    return fp8nnx.Fp8DotGeneralOp(recipe=DELAYED)


class LinenModel(nn.Module):
    """One layer that is called twice, one once, and one with no gradient."""

    @nn.compact
    def __call__(self, x):
        layer = partial(nn.Dense, 16, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=DELAYED))
        shared = layer(name="shared")
        unused = jax.lax.stop_gradient(layer(name="unused")(x))
        return layer(name="last")(nn.relu(shared(2 * nn.relu(shared(x))))) + 0 * unused


class Model(nnx.Module):
    def __init__(self, rngs):
        layer = partial(nnx.Linear, 16, 16, rngs=rngs)
        self.shared = layer(dot_general=nnx_op())
        self.unused = layer(dot_general=nnx_op())
        self.last = layer(dot_general=nnx_op())

    def __call__(self, x):
        unused = jax.lax.stop_gradient(self.unused(x))
        return self.last(nnx.relu(self.shared(2 * nnx.relu(self.shared(x))))) + 0 * unused


def loss_of(model, x):
    return jnp.mean((model(x) - Y) ** 2)


@nnx.jit
def train_step(model, optimizer, x):
    loss, grads = fp8nnx.value_and_grad(loss_of)(model, x)
    optimizer.update(model, grads)
    return loss


def linear(seed=0):
    return nnx.Linear(16, 16, dot_general=nnx_op(), rngs=nnx.Rngs(seed))


def optimizer_of(model):
    return fp8nnx.Optimizer(model, optax.sgd(1e-2, momentum=0.9))


@pytest.mark.long
@pytest.mark.newest
def test_steps_are_those_of_the_linen_model():
    linen_model, model = LinenModel(), Model(nnx.Rngs(0))
    variables = to_linen(model)
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1e-2, momentum=0.9))
    state = fp8.TrainState.create(apply_fn=linen_model.apply, params=variables, tx=tx)
    optimizer = fp8nnx.Optimizer(model, tx)

    @jax.jit
    def linen_step(state, x):
        loss, grads = fp8.value_and_grad(lambda v: jnp.mean((linen_model.apply(v, x) - Y) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    # NaN leaves no trace in a history, a batch of zeros and one of large values each theirs.
    for factor in (1.0, 100.0, 0.0, 1.0):
        state, expected = linen_step(state, factor * X)
        assert train_step(model, optimizer, factor * X) == expected
    jax.tree.map(np.testing.assert_array_equal, to_linen(model), state.params)
    assert optimizer.step.get_value() == state.step
    unused = state.params[OWG]["unused"]["Fp8DotGeneralOp_0"]
    assert unused["input_amax_history"].max() == 0
    shared = state.params[OWG]["shared"]["Fp8DotGeneralOp_0"]
    assert shared["kernel_amax_history"].min() > 0


def test_a_model_that_is_no_pytree():
    """Its state enters the gradient, and the optimizer overwrites it."""

    class NoPytree(nnx.Module, pytree=False):
        def __init__(self):
            self.layer = nnx.Linear(16, 16, dot_general=nnx_op(), rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.layer(x)

    model = NoPytree()
    optimizer = fp8nnx.Optimizer(model, optax.sgd(0.1))
    train_step(model, optimizer, X)
    history = model.layer.dot_general.input_amax_history.get_value()
    np.testing.assert_allclose(history, [np.max(np.abs(X)), 0, 0, 0], rtol=1e-6)


@pytest.mark.newest
def test_functions_of_trees_take_what_split_returns():
    """A loop that differentiates an ``nnx.State`` calls ``fp8.grad``, as for variables of Linen."""
    graphdef, before = nnx.split(linear())

    @jax.jit
    def both(state):
        def loss(model):
            return jnp.sum(model(X)) + jnp.sum(model(3 * X))

        grads = fp8.grad(lambda state: loss(nnx.merge(graphdef, state)))(state)
        return grads, fp8nnx.grad(loss)(nnx.merge(graphdef, state))

    grads, expected = both(before)
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.to_pure_dict, (grads, expected)))
    assert grads["dot_general"]["input_amax_history"].get_value()[0] == 3 * jnp.max(jnp.abs(X))
    with pytest.raises(ValueError, match="No history has moved"):
        fp8.check_state(before)
    fp8.check_state(grads, before)


@pytest.mark.long
def test_model_keeps_its_state_until_it_is_overwritten():
    layer = linear()
    before = nnx.to_pure_dict(nnx.state(layer))
    step = fp8nnx.value_and_grad(lambda m: (jnp.sum(m(X)), {"x": X, "m": m}), has_aux=True)
    (value, aux), grads = step(layer)
    assert value.dtype == jnp.float32
    assert aux["m"] is layer
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer)), before)
    kernel = layer.kernel.get_value()
    fp8nnx.overwrite_state(layer, grads)
    assert layer.dot_general.input_amax_history.get_value()[0] == jnp.max(jnp.abs(X))
    assert layer.kernel.get_value() is kernel
    gradient, aux = fp8nnx.grad(lambda m: (jnp.sum(m(X)), 1), has_aux=True)(layer)
    assert set(gradient) == {"bias", "dot_general", "kernel"}
    assert aux == 1


def test_only_what_f_writes_changes_in_the_model():
    """As with ``nnx.value_and_grad``, and not before ``f`` returns: another thread may use the model."""

    class Writes(nnx.Module):
        def __init__(self, op, rngs):
            self.linear = nnx.Linear(16, 16, dot_general=op, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)

        def __call__(self, x):
            self.new = nnx.Variable(jnp.ones(1))
            return self.norm(self.dropout(self.linear(x)))

    model, plain = Writes(nnx_op(), nnx.Rngs(0)), Writes(jax.lax.dot_general, nnx.Rngs(0))
    variable, before = model.linear.dot_general.input_scale, jax.tree.leaves(nnx.state(model))

    def loss(inner):
        assert all(map(operator.is_, jax.tree.leaves(nnx.state(model)), before))
        return jnp.sum(inner(X))

    fp8nnx.grad(loss)(model)
    nnx.grad(lambda inner: jnp.sum(inner(X)))(plain)
    assert model.linear.dot_general.input_scale is variable
    del model.linear.dot_general
    found, expected = (nnx.as_pure(nnx.state(m, nnx.Not(nnx.RngKey))) for m in (model, plain))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0.2, atol=0.02), found, expected)
    assert (found["dropout"]["rngs"]["count"], found["new"]) == (1, 1)
    assert found["norm"]["mean"].any()


def test_errors_about_the_state_name_the_layer():
    """An op by hand knows no path, but ``value_and_grad`` has the model."""
    with fp8.autocast(recipe=fp8.Float8CurrentScaling()):
        stateless = nnx.Linear(16, 16, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
    model = nnx.List([linear(), stateless])
    model[0].dot_general.recipe = fp8.DelayedScaling(amax_history_len=3)
    converted = fp8.quantize_model(nnx.Sequential(linear()), include=".*")
    converted.layers[0].dot_general.recipe = fp8.DelayedScaling(amax_history_len=3)
    calls = {
        "0/dot_general/input_amax_history": lambda: fp8nnx.grad(lambda m: jnp.sum(m[0](X)))(model),
        "1/dot_general/input_scale": lambda: fp8nnx.grad(lambda m: jnp.sum(m[1](X)))(model),
        r"Fp8DotGeneralOp\.input_scale": lambda: stateless(X),
        "layers/0/input_amax_history": lambda: converted(X),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=rf"scaling state {name}[ ,]"):
            call()


def test_what_is_differentiated():
    first, second = linear(0), linear(1)

    def loss(x, first, second):
        return jnp.sum(second(first(x)))

    kernels = nnx.DiffState(1, nnx.PathContains("kernel"))
    of_x, of_first, of_second = fp8nnx.grad(loss, argnums=(0, kernels, 2))(X, first, second)
    assert of_x.shape == X.shape
    assert set(of_first) == {"dot_general", "kernel"}
    assert set(of_second) == {"bias", "dot_general", "kernel"}
    (alone,) = fp8nnx.grad(loss, argnums=(2,))(X, first, second)
    jax.tree.map(np.testing.assert_array_equal, *map(nnx.to_pure_dict, (alone, of_second)))
    fp8nnx.overwrite_state(first, of_first)
    fp8nnx.overwrite_state(second, of_second)
    both = nnx.List([first, second])
    twice = fp8nnx.grad(lambda a, b: jnp.sum(a[0](X) + b(3 * X)), argnums=(0, 1))(both, second)
    assert jnp.max(jnp.abs(X)) == twice[0][0]["dot_general"]["input_amax_history"].get_value()[0]


def test_a_layer_that_the_loss_does_not_use_keeps_its_state():
    layer = linear()
    fp8nnx.overwrite_state(layer, fp8nnx.grad(lambda m: jnp.sum(m(X)))(layer))
    with pytest.raises(ZeroDivisionError):
        fp8nnx.grad(lambda m: 1 / 0)(layer)
    assert layer.dot_general.input_scale.get_value().dtype == jnp.float32
    grads = fp8nnx.grad(lambda m: jnp.sum(m.bias.get_value()))(layer)
    kept, old = (nnx.to_pure_dict(nnx.state(x, fp8nnx.OverwriteWithGradient)) for x in (grads, layer))
    jax.tree.map(np.testing.assert_array_equal, kept, old)


def test_a_gradient_inside_of_another():
    """Each of them has the state of its own loss. Only the reference form can be differentiated twice."""
    op = fp8nnx.Fp8DotGeneralOp(recipe=DELAYED, form="qdq")
    layer = nnx.Linear(16, 16, dot_general=op, rngs=nnx.Rngs(0))

    def loss(model):
        inner = fp8nnx.grad(lambda m: jnp.sum(m(X)))(model)
        return jnp.sum(model(2 * X)), nnx.to_pure_dict(inner)

    outer, inner = fp8nnx.grad(loss, has_aux=True)(layer)
    for found, x in ((inner, X), (nnx.to_pure_dict(outer), 2 * X)):
        expected = nnx.to_pure_dict(fp8nnx.grad(lambda m, x=x: jnp.sum(m(x)))(layer))
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.newest
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_inf_leave_no_trace(bad):
    layer = linear()
    x = X.at[0, 0].set(bad)
    loss, grads = fp8nnx.value_and_grad(lambda m: jnp.sum(m(x)))(layer)
    assert not np.isfinite(loss) or bad == np.inf
    fp8nnx.overwrite_state(layer, grads)
    op = layer.dot_general
    assert op.input_amax_history.get_value().max() == 0
    assert op.kernel_amax_history.get_value()[0] == jnp.max(jnp.abs(layer.kernel.get_value()))
    for variable in jax.tree.leaves(nnx.to_pure_dict(nnx.state(layer, fp8nnx.OverwriteWithGradient))):
        assert np.isfinite(variable).all()


def test_empty_batches_and_models_without_state():
    layer = linear()
    grads = fp8nnx.grad(lambda m: jnp.sum(m(X[:0])))(layer)
    fp8nnx.overwrite_state(layer, grads)
    assert layer.dot_general.input_amax_history.get_value().max() == 0
    op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
    plain = nnx.Linear(16, 16, dot_general=op, rngs=nnx.Rngs(0))
    optimizer = optimizer_of(plain)
    before = plain.kernel.get_value()
    optimizer.update(plain, fp8nnx.grad(lambda m: jnp.sum(m(X)))(plain))
    assert not np.array_equal(plain.kernel.get_value(), before)


def test_optimizers_do_not_see_the_state():
    layer = linear()
    optimizer = optimizer_of(layer)
    sizes = {leaf.size for leaf in jax.tree.leaves(nnx.state(optimizer))}
    assert sizes == {1, 16, 16 * 16}
    nnx.eval_shape(lambda: optimizer_of(linear()))  # the target of a checkpoint
    grads = fp8nnx.grad(lambda m: jnp.sum(m(X)))(layer)
    before = nnx.to_pure_dict(nnx.state(layer))
    with pytest.raises(ValueError, match="structure"):
        optimizer.update(layer, nnx.state(grads, fp8nnx.OverwriteWithGradient))
    for wrong in (
        nnx.grad(lambda m: jnp.sum(m.bias.get_value()))(layer),
        fp8nnx.grad(lambda m: jnp.sum(m[0](X)))(nnx.List([layer])),
        X,
    ):
        with pytest.raises(ValueError, match="another structure than the state"):
            optimizer.update(layer, wrong)
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(layer)), before)
    halved = nnx.to_pure_dict(grads)
    halved["dot_general"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), halved["dot_general"])
    nnx.update(grads, halved)
    with pytest.raises(TypeError, match="must be float32; got bfloat16"):
        optimizer.update(layer, grads)


def grads_of(model, x):
    return fp8nnx.grad(lambda m: loss_of(m, x))(model)


# tests/train/test_loops.py has more of them. The gradients that a loop gives to ``Optimizer.update``.
MISTAKES = {
    "clip over all gradients": lambda model: optax.clip_by_global_norm(1e-3).update(
        grads_of(model, X), optax.EmptyState()
    )[0],
    "two calls with nnx.grad": lambda model: nnx.grad(
        lambda m: loss_of(m, X) + loss_of(m, 2 * X),
        argnums=nnx.DiffState(0, (nnx.Param, fp8nnx.OverwriteWithGradient)),
    )(model),
}


def test_arguments_are_those_of_nnx():
    """By name, behind others with defaults; numbered from the end; by name alone only if they are bound."""

    def loss(model, x, rate=2.0, power=1.0, *, shift=0.0):
        return rate * loss_of(model, x) ** power + shift

    layer = linear()
    bound = partial(loss, shift=1.0)
    calls = [
        (loss, (layer, X), {"power": 3.0}),
        (bound, (layer, X), {"power": 2.0}),
        (loss, (layer,), {"x": X}),
        (loss, (), {"model": layer, "x": X}),
    ]
    for f, args, kwargs in calls:
        value, grads = fp8nnx.value_and_grad(f)(*args, **kwargs)
        np.testing.assert_array_equal(value, f(*args, **kwargs))
        assert np.any(grads["kernel"].get_value())
    for of_module in (fp8nnx.value_and_grad(loss), nnx.value_and_grad(loss)):
        with pytest.raises(TypeError, match="shift|keyword"):
            of_module(layer, X, shift=1.0)
    _, (of_layer, of_x) = fp8nnx.value_and_grad(loss_of, argnums=(0, -1))(layer, X)
    assert of_x.shape == X.shape
    assert np.any(of_layer["dot_general"]["input_amax_history"].get_value())


def test_the_check_of_a_state_that_the_program_shows_costs_nothing():
    graphdef, start = nnx.split(Model(nnx.Rngs(0)))

    def step(start, factor):
        model = nnx.merge(graphdef, start)
        grads = fp8nnx.grad(loss_of)(model, X)
        if factor is None:
            return nnx.state(grads, fp8nnx.OverwriteWithGradient)
        fp8nnx.overwrite_state(model, grads if factor == 1 else jax.tree.map(lambda g: factor * g, grads))
        return nnx.state(model, fp8nnx.OverwriteWithGradient)

    unchecked, checked, multiplied = (
        jax.jit(partial(step, factor=factor)).lower(start).compile().as_text().count(" = ")
        for factor in (None, 1, 0.5)
    )
    assert checked == unchecked < multiplied / 1.2


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_loud(mistake, wrap):
    """A mistake is an error without jit; with jit the next loss is NaN, and ``check_state`` says why."""
    layer = linear()
    optimizer = optimizer_of(layer)

    @wrap
    def step(model, optimizer):
        optimizer.update(model, MISTAKES[mistake](model))

    if wrap is nnx.jit:
        step(layer, optimizer)
        assert jnp.isnan(loss_of(layer, X))
        with pytest.raises(ValueError, match="dot_general/input_amax_history .* the scale is NaN"):
            fp8nnx.check_state(layer)
    else:
        with pytest.raises(ValueError, match="change only the gradients of the parameters"):
            step(layer, optimizer)


@pytest.mark.parametrize("wrap", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_an_optimizer_that_would_leave_the_state_out_is_an_error(wrap):
    layer = linear()
    step = wrap(lambda model, optimizer: optimizer.update(model, grads_of(model, X)))
    with pytest.raises(ValueError, match="dot_general"):
        step(layer, nnx.Optimizer(layer, optax.adamw(0.1), wrt=nnx.Param))


@pytest.mark.parametrize("wrt", [nnx.Variable, ..., nnx.PathContains("dot_general")], ids=str)
def test_an_optimizer_cannot_see_the_state(wrt):
    with pytest.raises(ValueError, match="wrt must choose parameters; .* FP8 scaling state"):
        fp8nnx.Optimizer(linear(), optax.sgd(0.1), wrt=wrt)
    fp8nnx.Optimizer(linear(), optax.sgd(0.1), wrt=nnx.All(wrt, nnx.Not(fp8nnx.OverwriteWithGradient)))


SEARCHES = {
    "lbfgs": optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(3)),
    "backtracking": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(3)),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The kernel of an FP8 layer:UserWarning")
@pytest.mark.parametrize("search", SEARCHES)
def test_line_searches(search):
    """Optax gets what it gets for the parameters alone; the state is that of the step."""
    model, tx = Model(nnx.Rngs(0)), SEARCHES[search]
    optimizer, (graphdef, params, rest) = fp8nnx.Optimizer(model, tx), nnx.split(model, nnx.Param, ...)
    kind, params = fp8nnx.OverwriteWithGradient, nnx.as_pure(params)

    def value_fn(params):
        return loss_of(nnx.merge(graphdef, params, rest), X)

    @nnx.jit
    def step(model, optimizer):
        value, grads = fp8nnx.value_and_grad(loss_of)(model, X)
        optimizer.update(model, grads, grad=grads, value=value, value_fn=value_fn)
        return value, grads

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The kernel of an FP8 layer")
        value, grads = step(model, optimizer)
    grad, state = nnx.split_state(nnx.as_pure(grads), lambda path, _: "dot_general" not in path, ...)
    update = jax.jit(partial(tx.update, value_fn=value_fn))
    updates, _ = update(grad, tx.init(params), params, grad=grad, value=value)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, nnx.as_pure(nnx.state(model, nnx.Param)), optax.apply_updates(params, updates))
    jax.tree.map(np.testing.assert_array_equal, nnx.as_pure(nnx.state(model, kind)), state)


def test_check_state():
    layer = linear()
    before = nnx.clone(layer)
    grads = fp8nnx.grad(lambda m: jnp.sum(m(X)))(layer)
    fp8nnx.overwrite_state(layer, grads)
    fp8nnx.check_state(layer)
    fp8nnx.check_state(layer, before)
    fp8nnx.check_state(nnx.state(layer), nnx.state(before))
    halved = jax.tree.map(lambda x: x / 2, nnx.state(layer))
    with pytest.raises(ValueError, match="is not what training leaves"):
        fp8nnx.check_state(halved, before)


@pytest.mark.long
def test_microbatches_hand_on_what_is_not_differentiated():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.linear = linear()
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(16, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.dropout(self.linear(x)))

    batches = jnp.stack([X, 3 * X])
    model, one_by_one = Noisy(nnx.Rngs(0)), Noisy(nnx.Rngs(0))

    def loss(model, x):
        out = model(x)
        return jnp.mean((out - Y) ** 2), out

    (value, outs), grads = nnx.jit(fp8nnx.accumulate_gradients(loss, has_aux=True))(model, batches)
    each = [fp8nnx.value_and_grad(loss, has_aux=True)(one_by_one, x) for x in batches]
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    close(value, np.mean([one for (one, _), _ in each]))
    close(outs, jnp.stack([out for (_, out), _ in each]))
    assert model.dropout.rngs.count.get_value() == one_by_one.dropout.rngs.count.get_value() == 2
    close(model.norm.mean.get_value(), one_by_one.norm.mean.get_value())
    kernels = [g["linear"]["kernel"].get_value() for _, g in each]
    # Output gradients are halved before they are cast, where the last bit of what is smallest may be lost.
    mean = sum(kernels) / 2
    np.testing.assert_allclose(grads["linear"]["kernel"].get_value(), mean, rtol=1e-5, atol=1e-4)
    of_mean, *alone = (nnx.to_pure_dict(g)["linear"]["dot_general"] for g in (grads, *(g for _, g in each)))
    assert of_mean["input_amax_history"][0] == 3 * jnp.max(jnp.abs(X))
    for name, state in of_mean.items():
        largest = np.maximum(*(one[name] for one in alone))
        close(state, largest / 2 if name == "output_grad_amax_history" else largest)
    with pytest.raises(ValueError, match="first dimension"):
        fp8nnx.accumulate_gradients(loss_of)(linear(), {"x": X, "y": X[:2]})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_a_module_keeps_of_the_state_is_float32():
    """While gradients are computed, the state has a dtype that merges by maximum."""

    class Keeps(nnx.Module):
        def __init__(self):
            self.linear = linear()
            self.snapshot = nnx.Variable(jnp.zeros(1))

        def __call__(self, x):
            scale = self.linear.dot_general.input_scale.get_value()
            self.snapshot.set_value(scale)
            self.sow(nnx.Intermediate, "scale", {"input": scale})
            return self.linear(x)

    def loss(model, other):
        out = jnp.sum(model(X)) + jnp.sum(other["model"](X))
        state = nnx.state(model)
        return out, (nnx.clone(model), state, nnx.to_pure_dict(state), [model.snapshot])

    model, other = Keeps(), {"model": Keeps()}
    (_, aux), grads = fp8nnx.value_and_grad(loss, has_aux=True, argnums=(0, 1))(model, other)
    for tree in (*aux, *grads, model, other):
        dtypes = {x.dtype for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}
        assert dtypes == {jnp.dtype("float32")}
    assert model.scale.get_value()[0]["input"] == other["model"].snapshot.get_value() == 1
    assert aux[0].linear.dot_general.input_scale.get_value() == 1


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_gradients_that_leave_the_state_out(jit):
    """With ``nnx.grad`` and ``nnx.Optimizer`` the scales would stay 1, so there is a warning."""

    def loss(model, x):
        return jnp.sum(model(x) ** 2)

    model = fp8nnx.quantize_model(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), include=".*")
    with pytest.warns(UserWarning, match="without its scaling state"):
        jit(nnx.grad(loss))(model, X)
    loss(model, X)  # this and others do not warn
    fp8nnx.grad(loss)(model, X)
    nnx.grad(loss, argnums=1)(model, X)
    nnx.grad(loss, argnums=nnx.DiffState(0, (nnx.Param, fp8nnx.OverwriteWithGradient)))(model, X)

"""Faults during training (NaN, Inf, nothing, too large, too small), and what they leave in the state.

A small model is trained through random sequences of good and bad steps. The scaling state of every tensor
is compared with a model of it in NumPy, exactly.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import fp8flax as fp8
from tests import reference
from tests.cases import MATMUL, OWG, assert_trees_equal, data, make_step, variables_of
from tests.train.net import op_of

ROWS, FEATURES, MICROBATCHES = 4, 6, 3
HIDDEN = 8
WIDTHS = {"first": HIDDEN, "second": HIDDEN, "third": 3}
DTYPES = {"input": "float8_e4m3fn", "kernel": "float8_e4m3fn", "output_grad": "float8_e5m2"}
TENSORS = [(name, role) for name in WIDTHS for role in DTYPES]
HISTORY = 4
RECIPE = fp8.DelayedScaling(amax_history_len=HISTORY)
FAULTS = (np.nan, np.inf, -np.inf)
LEARNING_RATE = 0.01
NEVER = 10**6  # ``optax.apply_if_finite`` applies a bad update after this many errors in a row
_rng = np.random.default_rng(0)
X = _rng.standard_normal((8, MICROBATCHES, ROWS, FEATURES)).astype(np.float32)
G = _rng.standard_normal((8, MICROBATCHES, ROWS, WIDTHS["third"])).astype(np.float32)


def op_with(recipe, form="direct"):
    return partial(fp8.Fp8DotGeneralOp, recipe=recipe, form=form)


class Net(nn.Module):
    """Three FP8 layers; a traced flag can skip the second one."""

    @nn.compact
    def __call__(self, x, skip, taps):
        """Returns the output, and what the second and the third layer got.

        ``taps`` are zeros that are added to each layer's output: their gradients are its output gradients.
        """
        op = op_with(RECIPE)

        def layer(name):
            return nn.Dense(WIDTHS[name], dot_general_cls=op, name=name)

        def use_second(mdl, h, tap):
            return nn.relu(layer("second")(h) + tap)

        def skip_second(mdl, h, tap):
            return h

        h1 = nn.relu(layer("first")(x) + taps["first"])
        if self.is_initializing():
            h2 = use_second(self, h1, taps["second"])
        else:
            h2 = nn.cond(skip, skip_second, use_second, self, h1, taps["second"])
        return layer("third")(h2) + taps["third"], {"second": h1, "third": h2}


def zero_taps(*lead):
    return {name: jnp.zeros((*lead, width)) for name, width in WIDTHS.items()}


@jax.jit
def train_step(state, x, g, skip):
    """Trains on microbatches ``x`` with output gradients ``g``; ``skip`` says which skip a layer."""

    def loss(variables, taps):
        def microbatch(total, args):
            x, g, skip, taps = args
            out, inputs = state.apply_fn(variables, x, skip, taps)
            return total + jnp.sum(out * g), inputs

        return lax.scan(microbatch, jnp.zeros(()), (x, g, skip, taps))

    gradients = fp8.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, inputs), (grads, output_grads) = gradients(state.params, zero_taps(*x.shape[:2]))
    return state.apply_gradients(grads=grads), grads["params"], inputs, output_grads


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def amax(x):
    """Returns the amax of each microbatch, over the last two axes; -inf for an empty one."""
    return np.abs(x).max(axis=(-2, -1), initial=-np.inf)


def with_fault(x, where, fault):
    x = x.copy()
    x.reshape(-1)[where % x.size] = fault
    return x


def amaxes_of_step(params, x, g, skip, inputs, output_grads):
    """Returns the amax of each tensor in a step, and whether it was used.

    The input of the first layer, the kernels, and the output gradient of the last layer are known
    beforehand. The others are as the step gave them.
    """
    assert output_grads["third"].tobytes() == g.tobytes()
    seen = {("first", "input"): amax(x), ("third", "input"): amax(inputs["third"])}
    seen["second", "input"] = np.where(skip, -np.inf, amax(inputs["second"]))
    for name in WIDTHS:
        seen[name, "kernel"] = amax(params[name]["kernel"])
        seen[name, "output_grad"] = amax(output_grads[name])
    seen["second", "output_grad"] = np.where(skip, -np.inf, seen["second", "output_grad"])
    return [(np.max(seen[name, role]), name != "second" or not skip.all()) for name, role in TENSORS]


# name: (batch and its output gradients after the change, for a place and a fault; whether all is finite)
STEPS = {
    "good": (lambda x, g, *_: (x, g), True),
    "fault in the input": (lambda x, g, *fault: (with_fault(x, *fault), g), None),
    "fault in the gradient": (lambda x, g, *fault: (x, with_fault(g, *fault)), False),
    "overflow": (lambda x, g, _, fault: (x, g * np.float32(fault)), False),
    "zeros": (lambda x, g, *_: (0 * x, g), None),
    "no gradient": (lambda x, g, *_: (x, 0 * g), None),
    "empty": (lambda x, g, *_: (x[:, :0], g[:, :0]), True),
    "tiny": (lambda x, g, *_: (np.float32(1e-30) * x, np.float32(1e-30) * g), None),
    "huge": (lambda x, g, *_: (np.float32(1e30) * x, g), None),
    "huge gradient": (lambda x, g, *_: (x, np.float32(1e30) * g), None),
}


@pytest.mark.long
def test_any_sequence_of_good_and_bad_steps():
    model, rng = Net(), np.random.default_rng(0)
    variables = variables_of(model, jnp.ones((ROWS, FEATURES)), jnp.array(False), zero_taps(ROWS))
    inner = optax.chain(optax.clip(1.0), optax.sgd(LEARNING_RATE))
    tx = optax.apply_if_finite(inner, NEVER)
    state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    start = state.replace(step=jnp.zeros((), jnp.int32))
    for i in range(400):
        before = start if i % 8 == 0 else state
        name, data = rng.choice([*STEPS]), rng.integers(len(X))
        change, is_finite = STEPS[name]
        x, g = change(X[data], G[data], rng.integers(X[data].size), rng.choice(FAULTS))
        skip = rng.random(MICROBATCHES) < rng.choice([0, 0.5, 1])
        state, grads, inputs, output_grads = jax.device_get(train_step(before, x, g, skip))
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, before)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state)), (i, name)
        # The scaling state.
        amaxes = amaxes_of_step(before.params["params"], x, g, skip, inputs, output_grads)
        for (layer, role), (newest, is_used) in zip(TENSORS, amaxes):
            leaves = [f"{role}_scale", f"{role}_amax_history"]
            (scale, history), new = (
                [op_of(s.params, layer)[leaf] for leaf in leaves] for s in (before, state)
            )
            if is_used:
                scale = reference.next_scale(history, scale, DTYPES[role])
                history = reference.next_history([newest], history)
            np.testing.assert_array_equal(new[0], scale, err_msg=f"{i} {name}")
            np.testing.assert_array_equal(new[1], history, err_msg=f"{i} {name}")
        # The parameters.
        found = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        assert is_finite in (None, found), (i, name)
        assert state.opt_state.last_finite == found
        changed = bits(state.params["params"]) != bits(before.params["params"])
        assert changed == found or name in ("zeros", "no gradient", "empty", "tiny"), (i, name)


@pytest.mark.parametrize(
    ("form", "role", "fault"),
    [*zip(["direct"] * 3, DTYPES, FAULTS), *zip(["qdq"] * 3, DTYPES, FAULTS[::-1])],
)
def test_a_tensor_with_a_fault_alone_keeps_its_history(form, role, fault):
    op, expected = op_with(RECIPE, form)(), reference.DenseStep(HISTORY)
    step, shapes = make_step(op, MATMUL), ((ROWS, FEATURES), (FEATURES, 3))
    variables = variables_of(op, *map(jnp.ones, shapes), MATMUL)
    for i in range(4):
        tensors = dict(zip(DTYPES, map(np.asarray, data(i, *shapes, MATMUL, jnp.float32))))
        if i == 2:
            tensors[role] = with_fault(tensors[role], 7, fault)
        (variables, *_), out = step(variables, *tensors.values())
        expected(*tensors.values())
        for name in DTYPES:
            np.testing.assert_array_equal(variables[OWG][f"{name}_scale"], expected.scale[name])
            np.testing.assert_array_equal(variables[OWG][f"{name}_amax_history"], expected.history[name])
    assert np.isfinite(out).all()


def test_an_empty_microbatch_leaves_the_word_to_the_others():
    """The state of two microbatches is that of one call on both."""
    model = nn.Dense(3, use_bias=False, dot_general_cls=op_with(RECIPE))

    @jax.jit
    def state_after(variables, *microbatches):
        def loss(variables):
            return sum((jnp.sum(model.apply(variables, x) * g) for x, g in microbatches), jnp.zeros(()))

        return fp8.grad(loss)(variables)[OWG]

    good, empty = (X[0, 0], G[0, 0]), (X[0, 0, :0], G[0, 0, :0])
    bad = with_fault(good[0], 3, np.nan), with_fault(good[1], 3, -np.inf)
    variables = variables_of(model, good[0])
    variables |= {OWG: state_after(variables, good)}
    for pair in ((good, empty), (empty, good), (bad, empty), (good, bad)):
        both = tuple(np.concatenate(arrays) for arrays in zip(*pair))
        assert_trees_equal(state_after(variables, *pair), state_after(variables, both))


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        (RECIPE, "direct"),
        (RECIPE, "qdq"),
        (fp8.Float8CurrentScaling(), "direct"),
    ],
    ids=["delayed", "delayed-qdq", "current"],
)
def test_an_overflow_of_the_gradient_is_seen_in_every_layer(recipe, form):
    """A saturated Inf would look like a gradient: the optimizer and the histories would take it."""
    layer = partial(nn.Dense, use_bias=False, dot_general_cls=op_with(recipe, form))
    model = nn.Sequential([layer(HIDDEN), jnp.tanh, layer(3)])
    variables = variables_of(model, X[0, 0])
    gradient = jax.jit(fp8.grad(lambda v, factor: factor * jnp.mean(model.apply(v, X[0, 0]) ** 2)))
    variables |= {OWG: gradient(variables, 1.0)[OWG]} if OWG in variables else {}
    grads = gradient(variables, -np.inf)
    for leaf in jax.tree.leaves(grads["params"]):
        assert not np.isfinite(leaf).any()
    for name, ops in variables.get(OWG, {}).items():
        new, old = (op["Fp8DotGeneralOp_0"]["output_grad_amax_history"] for op in (grads[OWG][name], ops))
        assert bits(new) == bits(old)
    again = gradient({**variables, **{name: grads[name] for name in grads if name == OWG}}, 1.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(again))


class Layer(nn.Module):
    """An FP8 layer for ``nn.scan``."""

    op: object

    @nn.compact
    def __call__(self, x, _=None):
        return nn.Dense(FEATURES, use_bias=False, dot_general_cls=self.op)(x), None


FACTORS = np.float32([1, 1, 1, 1, 0, 1e37, 5e37, 1e-37, 1e-40, np.nan, -np.inf])


@pytest.mark.filterwarnings("ignore:The FP8 scaling state .* did not move")
@pytest.mark.parametrize(
    ("axis", "num_layers", "options"),
    [
        (0, 1, {"margin": 16, "amax_history_len": 1}),
        (1, 1, {"margin": 16, "amax_history_len": 2, "fp8_format": fp8.Format.HYBRID_FNUZ}),
        (0, 2, {"amax_history_len": 12, "amax_compute_algo": "most_recent"}),
        (1, 2, {"margin": 3, "amax_history_len": 12, "use_power_2_scales": True}),
    ],
)
def test_no_check_refuses_what_steps_make(axis, num_layers, options):
    """Random steps; ``apply_gradients`` keeps their states, and ``check_state`` accepts them."""
    op, axes = op_with(fp8.DelayedScaling(**options)), {"params": 0, OWG: axis}
    model = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=num_layers)(op)
    start = variables_of(model, X[0, 0])
    gradient = jax.jit(fp8.grad(lambda v, x, g: jnp.sum(model.apply(v, x)[0] * g)))
    new_state = fp8.TrainState.create(apply_fn=None, params=start, tx=optax.sgd(0.0)).replace
    step, rng = jax.jit(lambda v, grads: new_state(params=v).apply_gradients(grads=grads).params), _rng
    before = start
    for i in range(60):
        before = start if i % 12 == 0 else before
        x, kernel, g = rng.choice(FACTORS, 3) if i % 3 else np.ones(3, np.float32)
        params = jax.tree.map(lambda p, kernel=kernel: kernel * p, start["params"])
        before = {"params": params, OWG: before[OWG]}
        grads = gradient(before, x * X[i % 8, 0], g * np.resize(G[i % 8, 0], (ROWS, FEATURES)))
        after = step(before, grads)
        assert_trees_equal(after[OWG], grads[OWG])
        assert_trees_equal(new_state(params=before).apply_gradients(grads=grads).params[OWG], after[OWG])
        if bits(after[OWG]) != bits(before[OWG]):
            fp8.check_state(after, before=before)
        if any(np.max(leaf) > 0 for p, leaf in jax.tree.leaves_with_path(after[OWG]) if "hist" in str(p)):
            fp8.check_state(after)
        before = after

"""Faults during training (NaN, Inf, nothing, too large, too small), and what they leave in the state.

A small model is trained through random sequences of good and bad steps. The scaling state of every tensor
is compared with a model of it in NumPy, exactly.
"""

import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import fp8flax as fp8
from tests.cases import variables_of

OWG = fp8.OVERWRITE_WITH_GRADIENT
ROWS, FEATURES, MICROBATCHES = 4, 6, 3
HIDDEN = 8
WIDTHS = {"first": HIDDEN, "second": HIDDEN, "third": 3}
MAX_OF_ROLE = {"input": 448.0, "kernel": 448.0, "output_grad": 57344.0}
TENSORS = [(name, role) for name in WIDTHS for role in MAX_OF_ROLE]
FP8_MAX = np.float32([MAX_OF_ROLE[role] for _, role in TENSORS])
HISTORY = 4
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
        op = op_with(fp8.DelayedScaling(amax_history_len=HISTORY))

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


def scaling_state(state):
    """Returns the scales and the histories of all tensors, stacked."""
    ops = {name: state.params[OWG][name]["Fp8DotGeneralOp_0"] for name in WIDTHS}
    return [
        np.stack([ops[name][role + suffix] for name, role in TENSORS])
        for suffix in ("_scale", "_amax_history")
    ]


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def amax(x):
    """Returns the amax of each microbatch, over the last two axes; -inf for an empty one."""
    return np.abs(x).max(axis=(-2, -1), initial=-np.inf)


def next_scaling_state(scale, history, amaxes, used=True, fp8_max=FP8_MAX):
    """Returns the scaling state of some tensors after a step, by the NumPy model.

    Args:
        scale: shape ``(tensors,)``.
        history: shape ``(tensors, length)``.
        amaxes: the largest magnitude of each tensor in this step; not finite where there is none.
        used: whether a gradient arrived.
    """
    largest = history.max(axis=1)
    with np.errstate(divide="ignore"):
        new_scale = 1 / (fp8_max / largest)
    new_scale = np.clip(new_scale, np.finfo(np.float32).tiny, np.finfo(np.float32).max)
    pushed = np.roll(history, -1, axis=1)
    pushed[:, 0] = amaxes
    return (
        np.where(used & (largest > 0), new_scale, scale),
        np.where((used & np.isfinite(amaxes))[:, None], pushed, history),
    )


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
    used = [name != "second" or not skip.all() for name, _ in TENSORS]
    return np.float32([np.max(seen[tensor]) for tensor in TENSORS]), np.array(used)


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
        scale, history = scaling_state(before)
        amaxes = amaxes_of_step(before.params["params"], x, g, skip, inputs, output_grads)
        scale, history = next_scaling_state(scale[:, 0], history, *amaxes)
        new_scale, new_history = scaling_state(state)
        np.testing.assert_array_equal(new_scale[:, 0], scale, err_msg=f"{i} {name}")
        np.testing.assert_array_equal(new_history, history, err_msg=f"{i} {name}")
        # The parameters.
        found = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        assert is_finite in (None, found), (i, name)
        assert state.opt_state.last_finite == found
        changed = bits(state.params["params"]) != bits(before.params["params"])
        assert changed == found or name in ("zeros", "no gradient", "empty", "tiny"), (i, name)


class TestOneTensor:
    """Faults are in exactly one of the input, the kernel and the output gradient."""

    roles = tuple(MAX_OF_ROLE)

    @staticmethod
    @functools.cache
    def layer(form):
        """Returns a state at its first step, and the jitted step."""
        op = op_with(fp8.DelayedScaling(amax_history_len=HISTORY), form)
        model = nn.Dense(3, use_bias=False, dot_general_cls=op)
        variables = variables_of(model, jnp.ones((ROWS, FEATURES)))
        state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(LEARNING_RATE))

        @jax.jit
        def step(state, *microbatches):
            def loss(variables):
                outs = [state.apply_fn(variables, x) for x, _ in microbatches]
                return sum((jnp.sum(y * g) for y, (_, g) in zip(outs, microbatches)), jnp.zeros(()))

            value, grads = fp8.value_and_grad(loss)(state.params)
            return state.apply_gradients(grads=grads), value

        return state, step

    def step_as_expected(self, form, state, *microbatches):
        """Takes a step, and compares the scaling state of the three tensors with the model's."""
        op = state.params[OWG]["Fp8DotGeneralOp_0"]
        xs, gs = zip(*microbatches)
        amaxes = np.float32(
            [np.max([amax(t) for t in ts]) for ts in (xs, [state.params["params"]["kernel"]], gs)]
        )
        scale, history = next_scaling_state(
            np.stack([op[f"{role}_scale"][0] for role in self.roles]),
            np.stack([op[f"{role}_amax_history"] for role in self.roles]),
            amaxes,
            fp8_max=FP8_MAX[:3],
        )
        new, loss = self.layer(form)[1](state, *microbatches)
        new_op = new.params[OWG]["Fp8DotGeneralOp_0"]
        for i, role in enumerate(self.roles):
            np.testing.assert_array_equal(new_op[f"{role}_scale"], scale[i : i + 1])
            np.testing.assert_array_equal(new_op[f"{role}_amax_history"], history[i])
            kept = bits(new_op[f"{role}_amax_history"]) == bits(op[f"{role}_amax_history"])
            assert kept == (not np.isfinite(amaxes[i]))
        return new, loss

    @pytest.mark.parametrize(
        ("form", "role", "fault"),
        [
            *zip(["direct"] * 3, roles, FAULTS),
            *zip(["qdq"] * 3, roles, FAULTS[::-1]),
        ],
    )
    def test_it_alone_keeps_its_history(self, form, role, fault):
        state, _ = self.layer(form)
        for i in range(2):
            state, _ = self.step_as_expected(form, state, (X[i, 0], G[i, 0]))
        x, g, params = X[2, 0], G[2, 0], state.params["params"]
        if role == "input":
            x = with_fault(x, 7, fault)
        elif role == "output_grad":
            g = with_fault(g, 7, fault)
        else:
            kernel = jnp.array(with_fault(np.array(params["kernel"]), 7, fault))
            state = state.replace(params={**state.params, "params": {"kernel": kernel}})
        state, _ = self.step_as_expected(form, state, (x, g))
        state = state.replace(params={**state.params, "params": params})
        state, loss = self.step_as_expected(form, state, (X[3, 0], G[3, 0]))
        assert np.isfinite(loss)
        assert bits(state.params["params"]) != bits(params)

    def test_an_empty_microbatch_leaves_the_word_to_the_others(self):
        state, _ = self.layer("direct")
        good, empty = (X[0, 0], G[0, 0]), (X[0, 0, :0], G[0, 0, :0])
        state, _ = self.step_as_expected("direct", state, good)
        for order in (good, empty), (empty, good):
            state, loss = self.step_as_expected("direct", state, *order)
            assert np.isfinite(loss)
        bad = (with_fault(good[0], 3, np.nan), with_fault(good[1], 3, -np.inf))
        for order in (bad, empty), (good, bad):
            after, _ = self.step_as_expected("direct", state, *order)
            np.testing.assert_array_equal(
                after.params[OWG]["Fp8DotGeneralOp_0"]["input_amax_history"],
                state.params[OWG]["Fp8DotGeneralOp_0"]["input_amax_history"],
            )


@pytest.mark.parametrize(
    ("recipe", "form"),
    [
        (fp8.DelayedScaling(amax_history_len=HISTORY), "direct"),
        (fp8.DelayedScaling(amax_history_len=HISTORY), "qdq"),
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


@pytest.mark.parametrize(
    ("wrap", "length", "algorithm"),
    [(lambda f: f, 1, "max"), (jax.jit, HISTORY, "max"), (jax.jit, 1, "most_recent")],
    ids=["eager", "jit", "most_recent"],
)
def test_a_subnormal_amax_leaves_no_scale(wrap, length, algorithm):
    """A history of such amaxes is all zeros, so the scale stays until there is other data."""
    recipe = fp8.DelayedScaling(amax_history_len=length, amax_compute_algo=algorithm)
    model = nn.Dense(3, use_bias=False, dot_general_cls=op_with(recipe))
    state = fp8.TrainState.create(
        apply_fn=model.apply, params=variables_of(model, X[0, 0]), tx=optax.sgd(0.0)
    )

    @jax.jit
    def gradient(variables, amax):
        return fp8.grad(lambda v: jnp.sum(model.apply(v, X[0, 0]) * amax))(variables)

    @wrap
    def apply(state, grads):
        return state.apply_gradients(grads=grads)

    scales = []
    for amax in np.float32([2.0, 1e-40, 4.0, 8.0]):
        grads = gradient(state.params, amax)
        state = apply(state, grads)
        op = state.params[OWG]["Fp8DotGeneralOp_0"]
        assert bits(op) == bits(grads[OWG]["Fp8DotGeneralOp_0"])
        assert bits(op["output_grad_amax_history"][0]) == bits(amax)
        scales.append(op["output_grad_scale"][0])
    np.testing.assert_allclose(np.float32(scales) * 57344, [57344, 2, 2, 4], rtol=1e-6)

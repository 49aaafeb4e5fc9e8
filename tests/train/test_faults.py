"""Faults during training (NaN, Inf, nothing, too large, too small), and what they leave in the state.

A state machine trains a small model through random sequences of good and bad steps. The scaling state of
every tensor is compared with a model of it in NumPy, exactly.
"""

import functools
import itertools
from functools import partial

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from jax import lax

import fp8flax as fp8
from tests.cases import variables_of

SEQUENCES, STEPS = 60, 8

OWG = fp8.OVERWRITE_WITH_GRADIENT
ROWS, FEATURES, MICROBATCHES = 4, 6, 3
HIDDEN = 8
WIDTHS = {"first": HIDDEN, "second": HIDDEN, "third": 3}
MAX_OF_ROLE = {"input": 448.0, "kernel": 448.0, "output_grad": 57344.0}
TENSORS = [(name, role) for name in WIDTHS for role in MAX_OF_ROLE]
FP8_MAX = np.float32([MAX_OF_ROLE[role] for _, role in TENSORS])
HISTORY = 4
FAULTS = (np.nan, np.inf, -np.inf)
LEARNING_RATE, MOMENTUM = 0.01, 0.9
NEVER = 10**6  # ``optax.apply_if_finite`` applies a bad update after this many errors in a row


def op_with(recipe, form="direct"):
    return partial(fp8.Fp8DotGeneralOp, recipe=recipe, form=form)


class Net(nn.Module):
    """Three FP8 layers; a traced flag can skip the second one."""

    activation: object = nn.relu
    amax_history_len: int = HISTORY

    @nn.compact
    def __call__(self, x, skip, taps):
        """Returns the output, and what the second and the third layer got.

        ``taps`` are zeros that are added to each layer's output: their gradients are its output gradients.
        """
        op = op_with(fp8.DelayedScaling(amax_history_len=self.amax_history_len))

        def layer(name):
            return nn.Dense(WIDTHS[name], dot_general_cls=op, name=name)

        def use_second(mdl, h, tap):
            return self.activation(layer("second")(h) + tap)

        def skip_second(mdl, h, tap):
            return h

        h1 = self.activation(layer("first")(x) + taps["first"])
        if self.is_initializing():
            h2 = use_second(self, h1, taps["second"])
        else:
            h2 = nn.cond(skip, skip_second, use_second, self, h1, taps["second"])
        return layer("third")(h2) + taps["third"], {"second": h1, "third": h2}


def zero_taps(*lead):
    return {name: jnp.zeros((*lead, width)) for name, width in WIDTHS.items()}


def create(model, inner):
    x = jnp.ones((ROWS, FEATURES))
    variables = variables_of(model, x, jnp.array(False), zero_taps(ROWS))
    tx = optax.apply_if_finite(inner, NEVER)
    state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)
    return state.replace(step=jnp.zeros((), jnp.int32))


def train_step(state, parts):
    """Trains on microbatches; ``parts`` are stacks of ``(x, output gradient, whether to skip a layer)``."""

    def loss(variables, taps):
        def microbatch(total, args):
            x, g, skip, taps = args
            out, inputs = state.apply_fn(variables, x, skip, taps)
            return total + jnp.sum(out * g), inputs

        total, inputs = jnp.zeros(()), []
        for part, tap in zip(parts, taps):
            total, seen = lax.scan(microbatch, total, (*part, tap))
            inputs.append(seen)
        return total, inputs

    taps = [zero_taps(*x.shape[:2]) for x, _, _ in parts]
    gradients = fp8.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, inputs), (grads, output_grads) = gradients(state.params, taps)
    return state.apply_gradients(grads=grads), value, grads["params"], inputs, output_grads


@functools.cache
def start():
    return create(Net(), CLIPPED_SGD)


jitted_step = jax.jit(train_step)


def scaling_state(state):
    """Returns the scales and the histories of all tensors, stacked."""
    ops = {name: state.params[OWG][name]["Fp8DotGeneralOp_0"] for name in WIDTHS}
    return [
        np.stack([ops[name][role + suffix] for name, role in TENSORS])
        for suffix in ("_scale", "_amax_history")
    ]


def momentum_of(state):
    (_, (trace, _)) = state.opt_state.inner_state
    return trace.trace


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


def layout(tree):
    return [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree.leaves_with_path(tree)]


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


CLIPPED_SGD = optax.chain(optax.clip(1.0), optax.sgd(LEARNING_RATE, momentum=MOMENTUM))
_rng = np.random.default_rng(0)
X = _rng.standard_normal((8, MICROBATCHES, ROWS, FEATURES)).astype(np.float32)
G = _rng.standard_normal((8, MICROBATCHES, ROWS, WIDTHS["third"])).astype(np.float32)


def with_fault(x, where, fault):
    x = x.copy()
    x.reshape(-1)[where % x.size] = fault
    return x


BATCHES = st.sampled_from(range(len(X)))
PLACED_FAULTS = st.sampled_from(list(itertools.product(range(X[0].size), FAULTS)))
FLAGS = st.sampled_from(list(itertools.product((False, True), repeat=MICROBATCHES)))
POWERS = st.sampled_from(list(itertools.product(np.float32((1e-30, 1, 1e30)), repeat=2)))


def named(*columns):
    """Returns a table for the message of an assertion."""
    return dict(zip(TENSORS, zip(*columns)))


class Training(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.state = start()

    def train(self, *parts):
        """Takes a step and checks its result; returns the loss and whether parameters changed."""
        parts = [(x, g, np.broadcast_to(np.asarray(skip), len(x))) for x, g, skip in parts]
        before = self.state
        after, loss, grads, inputs, output_grads = jax.device_get(jitted_step(before, parts))
        self.state = after
        assert layout(after) == layout(before)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
        # The scaling state.
        old_scale, old_history = scaling_state(before)
        scale, history = next_scaling_state(
            old_scale[:, 0], old_history, *self.amaxes(before.params["params"], parts, inputs, output_grads)
        )
        new_scale, new_history = scaling_state(after)
        assert np.array_equal(new_scale[:, 0], scale), named(new_scale, scale, old_scale)
        assert np.array_equal(new_history, history), named(new_history, history, old_history)
        assert (scale > 0).all()
        assert (history >= 0).all()
        # The parameters and the optimizer.
        is_finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
        assert after.step == before.step + 1
        assert after.opt_state.last_finite == is_finite
        changed = bits(after.params["params"]) != bits(before.params["params"])
        if is_finite:
            momentum = jax.tree.map(
                lambda g, m: np.clip(g, -1, 1) + np.float32(MOMENTUM) * m, grads, momentum_of(before)
            )
            close = partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
            jax.tree.map(close, momentum_of(after), momentum)
            jax.tree.map(
                lambda new, old, m: close(new, old - np.float32(LEARNING_RATE) * m),
                *(after.params["params"], before.params["params"], momentum),
            )
        else:
            assert not changed
            assert bits(momentum_of(after)) == bits(momentum_of(before))
        return loss, changed

    def amaxes(self, params, parts, inputs, output_grads):
        """Returns the amax of each tensor in this step, and whether it was used.

        The input of the first layer, the kernels, and the output gradient of the last layer are known
        beforehand. The others are as the step gave them.
        """
        tensors = []
        for (x, g, skip), ins, grads in zip(parts, inputs, output_grads):
            assert grads["third"].tobytes() == g.tobytes()
            in_2, in_3, grad_1, grad_2 = map(
                amax, (ins["second"], ins["third"], grads["first"], grads["second"])
            )
            in_2, grad_2 = np.where(skip, -np.inf, (in_2, grad_2))
            tensors.append((amax(x), grad_1, in_2, grad_2, in_3, amax(g)))
        tensors = np.concatenate(tensors, axis=1).max(axis=1)
        amaxes = np.empty((3, 3), np.float32)
        amaxes[:, 0], amaxes[:, 2] = tensors[0::2], tensors[1::2]
        amaxes[:, 1] = [np.abs(params[name]["kernel"]).max() for name in WIDTHS]
        used = np.ones((3, 3), bool)
        used[1] = not all(skip.all() for _, _, skip in parts)
        return amaxes.ravel(), used.ravel()

    @rule(i=BATCHES)
    def good(self, i):
        loss, changed = self.train((X[i, :1], G[i, :1], False))
        assert np.isfinite(loss)
        assert changed

    @rule(i=BATCHES, fault=st.sampled_from(FAULTS))
    def loss_that_overflows(self, i, fault):
        loss, changed = self.train((X[i, :1], G[i, :1] * np.float32(fault), False))
        assert not np.isfinite(loss)
        assert not changed

    @rule(i=BATCHES)
    def zeros(self, i):
        self.train((np.zeros_like(X[i, :1]), G[i, :1], False))

    @rule(i=BATCHES)
    def zero_loss(self, i):
        loss, _ = self.train((X[i, :1], np.zeros_like(G[i, :1]), False))
        assert loss == 0

    @rule(i=BATCHES)
    def empty(self, i):
        loss, _ = self.train((X[i, :1, :0], G[i, :1, :0], False))
        assert loss == 0

    @rule(i=BATCHES, powers=POWERS)
    def scaled(self, i, powers):
        self.train((X[i, :1] * powers[0], G[i, :1] * powers[1], False))

    @rule(i=BATCHES, skip=FLAGS)
    def microbatches(self, i, skip):
        loss, changed = self.train((X[i], G[i], skip))
        assert np.isfinite(loss)
        assert changed

    @rule(i=BATCHES, skip=FLAGS, fault=PLACED_FAULTS)
    def fault_in_the_input(self, i, skip, fault):
        self.train((with_fault(X[i], *fault), G[i], skip))

    @rule(i=BATCHES, skip=FLAGS, fault=PLACED_FAULTS)
    def fault_in_the_gradient(self, i, skip, fault):
        _, changed = self.train((X[i], with_fault(G[i], *fault), skip))
        assert not changed  # the bias saw it


@pytest.mark.long
def test_any_sequence_of_good_and_bad_steps():
    settings = hypothesis.settings(
        max_examples=SEQUENCES,
        stateful_step_count=STEPS,
        deadline=None,
        derandomize=True,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    run_state_machine_as_test(Training, settings=settings)


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
        for order in (bad, empty), (bad, good), (good, bad):
            after, _ = self.step_as_expected("direct", state, *order)
            np.testing.assert_array_equal(
                after.params[OWG]["Fp8DotGeneralOp_0"]["input_amax_history"],
                state.params[OWG]["Fp8DotGeneralOp_0"]["input_amax_history"],
            )
        params = jax.tree.map(jnp.zeros_like, state.params["params"])
        state = state.replace(params={**state.params, "params": params})
        state, loss = self.step_as_expected("direct", state, empty, empty)
        assert loss == 0


@functools.cache
def scaled_by_a_factor(recipe, form):
    """Returns a state, and a step whose loss is multiplied by a factor."""
    layer = partial(nn.Dense, use_bias=False, dot_general_cls=op_with(recipe, form))
    model = nn.Sequential([layer(HIDDEN), jnp.tanh, layer(3)])
    tx = optax.apply_if_finite(optax.sgd(LEARNING_RATE), NEVER)
    variables = variables_of(model, X[0, 0])
    state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)

    @jax.jit
    def step(state, factor):
        loss = lambda v: factor * jnp.mean(state.apply_fn(v, X[0, 0]) ** 2)  # noqa: E731
        grads = fp8.grad(loss)(state.params)
        return state.apply_gradients(grads=grads), grads

    return state, step


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
    state, step = scaled_by_a_factor(recipe, form)
    state, _ = step(state, 1.0)
    after, grads = step(state, -np.inf)
    for leaf in jax.tree.leaves(grads["params"]):
        assert not np.isfinite(leaf).any()
    assert bits(after.params["params"]) == bits(state.params["params"])
    for name, ops in state.params.get(OWG, {}).items():
        op, old = after.params[OWG][name]["Fp8DotGeneralOp_0"], ops["Fp8DotGeneralOp_0"]
        assert bits(op["output_grad_amax_history"]) == bits(old["output_grad_amax_history"])
    again, _ = step(after, 1.0)
    for leaf in jax.tree.leaves(again.params["params"]):
        assert np.isfinite(leaf).all()
    assert bits(again.params["params"]) != bits(after.params["params"])


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

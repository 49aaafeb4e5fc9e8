"""The engine with a plan of one multiplication: derivatives, states and residuals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.plans.engine import run
from fp8flax._core.plans.plan import Operand, Plan
from fp8flax._core.state.state import DelayedConfig, ScalingState, step_scales
from fp8flax._core.state.tree import merge_by_max
from tests import reference

CONFIG = DelayedConfig(jnp.float32, np.dtype(jnp.float8_e4m3fn))


@dataclasses.dataclass(frozen=True)
class Scaled(Plan):
    """``x`` times the scale of the tensor ``x``; the backward pass multiplies by 10 instead."""

    x: Operand

    @property
    def operands(self):
        return (self.x,)

    @property
    def configs(self):
        return {"x": CONFIG, "g": CONFIG}

    def primal(self, operands, extra, scales):
        return operands[0].astype(jnp.float32) * scales["x"]

    def forward(self, operands, extra, scales):
        (x,) = operands
        return self.primal(operands, extra, scales), x, {"x": jnp.max(jnp.abs(x), keepdims=True)}

    def backward(self, residuals, extra, scales, g):
        assert residuals.shape == g.shape
        return (10 * g.astype(jnp.float32),), {"g": jnp.max(jnp.abs(g), keepdims=True)}


X = jnp.asarray([1.0, -3.0], jnp.bfloat16)
HISTORIES = {"x": np.float32([7.0, 14.0]), "g": np.float32([2.0, 0.0])}
STATES = {name: ScalingState(jnp.ones(1), jnp.asarray(h)) for name, h in HISTORIES.items()}


def loss(x, states):
    plan = Scaled(Operand.of(x))
    return jnp.sum(run(plan, (x,), (), step_scales(plan.configs, states)) * np.float32([5, 2]))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_the_gradient_of_a_state_is_the_next_state(wrap):
    grad, new = jax.grad(wrap(loss), (0, 1))(X, STATES)
    assert grad.dtype == X.dtype
    np.testing.assert_array_equal(grad.astype(jnp.float32), [50, 20])
    for name, data in (("x", X), ("g", np.float32([5, 2]))):
        history = HISTORIES[name]
        np.testing.assert_array_equal(
            new[name].scale, reference.next_scale(history, np.ones(1), "float8_e4m3fn")
        )
        np.testing.assert_array_equal(new[name].amax_history, reference.next_history(data, history))


def test_the_result_has_the_scale_of_the_past():
    plan = Scaled(Operand.of(X))
    out = run(plan, (X,), (), step_scales(plan.configs, STATES))
    scale = reference.next_scale(HISTORIES["x"], np.ones(1), "float8_e4m3fn")
    np.testing.assert_allclose(out, np.asarray(X, np.float32) * scale, rtol=1e-6)


def test_two_calls_merge_their_amaxes():
    roles = {"x": "input", "g": "output_grad"}
    variables = {
        f"{roles[name]}{suffix}": leaf
        for name, state in STATES.items()
        for suffix, leaf in zip(("_scale", "_amax_history"), state)
    }

    def twice(variables):
        state = merge_by_max(variables)
        states = {
            name: ScalingState(state[f"{role}_scale"], state[f"{role}_amax_history"])
            for name, role in roles.items()
        }
        return loss(X, states) + loss(2 * X, states)

    new = jax.grad(twice)(variables)
    np.testing.assert_array_equal(new["input_amax_history"], [6, 7])
    np.testing.assert_array_equal(new["output_grad_amax_history"], [5, 2])

"""A feed-forward block as one op, beside its layers one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.names import ROLES
from fp8flax._core.plans.contraction import States
from fp8flax._core.plans.dot_general import fp8_dot_general
from fp8flax._core.plans.mlp import _joined, _scales_by_layer, hidden, is_all_delayed, mlp, runs_as_one
from fp8flax._core.state.state import ScalingState
from tests.cases import MATMUL, normal

DELAYED = fp8.DelayedScaling(amax_history_len=2)
RECIPE = DELAYED.gemms


@pytest.mark.parametrize("gated", [False, True])
def test_value_gradients_and_states_are_those_of_the_layers(gated):
    x = normal(0, 5, 16)
    kernels = [normal(i, 16, 8) for i in range(1, 3 if gated else 2)] + [normal(3, 8, 4)]
    biases = [normal(i, 8) for i in range(5, 7 if gated else 6)]
    state = ScalingState(jnp.ones(1), jnp.float32([8.0, 4.0]))
    states = [States(state, state, state) for _ in kernels]
    names = tuple("abc"[: len(kernels)])

    def as_one(x, kernels, biases, states):
        return mlp(x, kernels, biases, states, RECIPE, "relu", names)

    def dense(x, kernel, state):
        return fp8_dot_general(x, kernel, MATMUL, states=state, recipe=DELAYED)

    def one_by_one(x, kernels, biases, states):
        products = [dense(x, *each) + bias for *each, bias in zip(kernels, states, biases)]
        active = jax.nn.relu(products[0])
        return dense(active * products[1] if gated else active, kernels[-1], states[-1])

    def of(f):
        def loss(*args):
            return jnp.sum(f(*args) * normal(9, 5, 4))

        with jax.numpy_rank_promotion("allow"):
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, kernels, biases, states)

    (value, grads), (expected, expected_grads) = of(as_one), of(one_by_one)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(grads[:3]), jax.tree.leaves(expected_grads[:3])):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(jnp.abs(theirs).max()))
    for i, (ours, theirs) in enumerate(zip(grads[3], expected_grads[3])):
        for role in ROLES:
            for a, b in zip(getattr(ours, role), getattr(theirs, role)):
                np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=f"{i}/{role}")


@pytest.mark.parametrize("num", [1, 2])
def test_hidden_activations(num):
    dense = [np.float32([-1, 2]), np.float32([3, 5])][:num]
    np.testing.assert_array_equal(hidden("relu", list(map(jnp.asarray, dense))), [0, 2 if num == 1 else 10])


def test_names_of_tensors_there_and_back():
    layers = [dict(zip(("input", "kernel", "output_grad"), np.float32(x))) for x in ([1, 2, 3], [4, 5, 6])]
    joined = _joined(layers)
    assert joined["0/kernel"] == 2
    assert joined["1/input"] == 4
    assert _scales_by_layer(joined, 2) == layers


def test_which_recipes_and_inputs_run_as_one():
    wide_wgrad = fp8.CustomRecipe(forward=RECIPE.forward, dgrad=RECIPE.dgrad)
    assert is_all_delayed(RECIPE)
    assert not is_all_delayed(wide_wgrad)
    assert not is_all_delayed(fp8.Float8CurrentScaling().gemms)
    assert runs_as_one(RECIPE, jnp.ones((2, 2)), jnp.bfloat16)
    assert not runs_as_one(RECIPE, jnp.ones((2, 2)), jnp.float64)


def test_states_are_checked():
    kernels = [normal(1, 16, 8), normal(3, 8, 4)]
    state = ScalingState(jnp.ones(1), jnp.bfloat16([8.0, 4.0]))
    states = [States(state, state, state)] * 2
    with pytest.raises(TypeError, match="amax_history must be float32"):
        mlp(normal(0, 5, 16), kernels, [], states, RECIPE, "relu", "ab")

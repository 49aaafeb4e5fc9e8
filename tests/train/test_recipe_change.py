"""A run whose recipe changes: FP8, then off, then other recipes. The scaling state waits; runs resume."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import fp8flax as fp8
from tests.cases import OWG, assert_trees_equal, normal

DELAYED = fp8.DelayedScaling(amax_history_len=4)
FORWARD_IN_FP8 = fp8.CustomRecipe(forward=fp8.MXFP8BlockScaling().gemms.forward)
NUM_STEPS = 7
X = normal(0, NUM_STEPS, 8, 32, dtype=jnp.bfloat16)


def recipe_of(step):
    """Two steps with delayed scaling, one without FP8, one each of two stateless recipes, then delayed."""
    recipe = {3: fp8.Float8CurrentScaling(), 4: FORWARD_IN_FP8}.get(step, DELAYED)
    return fp8.autocast(enabled=step != 2, recipe=recipe)


STATELESS = (2, 3, 4)


def dense(**fields):
    return nn.Dense(32, dtype=jnp.bfloat16, use_bias=False, **fields)


MODEL = nn.Sequential([dense(dot_general_cls=fp8.Fp8DotGeneralOp), nn.relu, dense(), dense()])
TX = optax.sgd(0.1, momentum=0.9)


def loss_of(apply, variables, x):
    return jnp.mean(jnp.square(apply(variables, x).astype(jnp.float32)))


@partial(jax.jit, donate_argnums=0)
def train_step(state, x):
    loss, grads = fp8.value_and_grad(partial(loss_of, state.apply_fn))(state.params, x)
    return state.apply_gradients(grads=grads), loss


def new_state():
    with recipe_of(0):
        variables = MODEL.init(jax.random.key(1), X[0])
    state = fp8.TrainState.create(apply_fn=MODEL.apply, params=variables, tx=TX)
    return state.replace(step=jnp.int32(0))


def trained(state, steps):
    """Returns copies of the states after these steps, and the losses."""
    found = []
    for step in steps:
        with recipe_of(step):
            state, loss = train_step(state, X[step])
        found.append((jax.tree.map(jnp.copy, state), loss))
    return found


@pytest.fixture(scope="module")
def uninterrupted():
    before = train_step._cache_size()
    found = trained(new_state(), range(NUM_STEPS))
    assert train_step._cache_size() - before == 4  # a program per recipe, and one without FP8
    return found


def test_a_step_that_needs_no_state_leaves_it_alone(uninterrupted):
    states = [state.params[OWG] for state, _ in uninterrupted]
    for step in STATELESS:
        assert_trees_equal(states[step], states[step - 1])
    last = [state["layers_0"]["Fp8DotGeneralOp_0"]["input_amax_history"] for state in states[-3:-1]]
    expected = np.roll(last[0], -1)
    expected[0] = jnp.max(jnp.abs(X[5]))
    np.testing.assert_array_equal(last[1], expected)


def test_so_do_accumulated_gradients_and_steps_without_jit(uninterrupted):
    state = uninterrupted[1][0]
    old = state.params[OWG]
    accumulated = fp8.accumulate_gradients(partial(loss_of, MODEL.apply))
    with fp8.autocast(recipe=FORWARD_IN_FP8):
        _, grads = jax.jit(accumulated)(state.params, X[4].reshape(2, 4, 32))
        assert_trees_equal(grads[OWG], old)
        grads = fp8.grad(partial(loss_of, MODEL.apply))(state.params, X[4])
        assert_trees_equal(grads[OWG], old)
        assert_trees_equal(state.apply_gradients(grads=grads).params[OWG], old)


def test_a_saved_run_resumes_with_the_same_bits(uninterrupted, tmp_path):
    done = 2  # steps; the next one is without FP8
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", uninterrupted[done - 1][0])
        checkpointer.wait_until_finished()
        state = checkpointer.restore(tmp_path / "state", new_state())
    resumed = trained(state, range(int(state.step), NUM_STEPS))
    assert_trees_equal(jax.tree.leaves(resumed), jax.tree.leaves(uninterrupted[done:]))


def test_a_train_state_is_not_variables(uninterrupted):
    state = uninterrupted[0][0]
    for call in (
        lambda: fp8.freeze(MODEL, state, X[0]),
        lambda: fp8.calibrate(MODEL.apply, state, [X[0]]),
        lambda: fp8.add_fp8_state(state, MODEL, X[0]),
        lambda: fp8.load_into(state, {}),
        lambda: fp8.weights_for_serving(MODEL, state, X[0]),
    ):
        with pytest.raises(TypeError, match=r"Pass state\.params"):
            call()

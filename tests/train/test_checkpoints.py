"""Checkpoints of Orbax: their layout, and FP8 after a run without it. test_recipe_change resumes a run."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import fp8flax as fp8
from tests.cases import OWG, assert_same_bits, assert_trees_equal, flat, normal, variables_of
from tests.train.net import Net, Op, op_of

X = normal(0, 8, 16, dtype=jnp.bfloat16)
AMAX = np.float32(np.max(np.abs(np.float32(X))))
TX = optax.adam(1e-2)


# One object per model, so that its train states are of one kind.
NET, WIDE = (Net(op, param_dtype=jnp.bfloat16) for op in (Op, None))


def start(model):
    """Returns the train state at step 0; all of its leaves are arrays."""
    state = fp8.TrainState.create(apply_fn=model.apply, params=variables_of(model, X), tx=TX)
    return state.replace(step=jnp.int32(0))


@jax.jit
def train_step(state, x):
    def loss(variables):
        return jnp.mean(jnp.square(state.apply_fn(variables, x)).astype(jnp.float32))

    grads = fp8.grad(loss)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # Adam needs it
        return state.apply_gradients(grads=grads)


@cache
def trained(model, steps=3):
    state = jax.jit(start, static_argnums=0)(model)
    for step in range(steps):
        state = train_step(state, X * 2.0**step)
    return state


@cache
def abstract(model):
    return jax.eval_shape(partial(start, model))


def orbax_save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def orbax_restore(path, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, *target)


def test_a_checkpoint_has_the_names_of_flax(tmp_path):
    """The layout is version 1 of the format; a change would break all checkpoints of users."""
    orbax_save(tmp_path / "checkpoint", trained(NET))
    variables = orbax_restore(tmp_path / "checkpoint")["params"]
    found = {name: (str(leaf.dtype), leaf.shape) for name, leaf in flat(variables[OWG]).items()}
    assert found == {
        f"{layer}/Fp8DotGeneralOp_0/{role}_{leaf}": ("float32", shape)
        for layer in ("first", "second")
        for role in ("input", "kernel", "output_grad")
        for leaf, shape in (("scale", (1,)), ("amax_history", (4,)))
    }
    # Inputs grew from step to step: the newest amax comes first, then the oldest to the second newest.
    newest, _, oldest, second = np.asarray(op_of(variables)["input_amax_history"])
    np.testing.assert_array_equal([oldest, second, newest], AMAX * np.float32([1, 2, 4]))


@pytest.mark.long
def test_a_checkpoint_without_fp8_begins_an_fp8_run(tmp_path):
    before = trained(WIDE)
    orbax_save(tmp_path / "checkpoint", before)
    restored = orbax_restore(tmp_path / "checkpoint", abstract(WIDE))
    assert OWG not in restored.params
    variables = fp8.add_fp8_state(restored.params, NET, X)
    state = restored.replace(apply_fn=abstract(NET).apply_fn, params=variables)
    assert_trees_equal(state.params["params"], before.params["params"], assert_same_bits)
    assert_trees_equal(state.opt_state, before.opt_state, assert_same_bits)
    assert_trees_equal(variables[OWG], trained(NET, 0).params[OWG], assert_same_bits)
    after = train_step(state, X)
    assert int(after.step) == 4
    np.testing.assert_array_equal(op_of(after.params)["input_amax_history"], [AMAX, 0, 0, 0])

    back = restored.replace(params=fp8.remove_fp8_state(after.params))
    orbax_save(tmp_path / "back", back)
    assert_trees_equal(orbax_restore(tmp_path / "back", abstract(WIDE)), back, assert_same_bits)
    train_step(back, X)

"""Orbax and flax.serialization restore train states bit for bit, or raise an error."""

from functools import cache, partial

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import fp8flax as fp8
from tests.cases import normal, variables_of

OWG = fp8.OVERWRITE_WITH_GRADIENT
X = normal(0, 8, 16, dtype=jnp.bfloat16)
AMAX = np.float32(np.max(np.abs(np.float32(X))))
TX = optax.adam(1e-2)


class Net(nn.Module):
    """Two layers in bfloat16; without FP8 if the history length ``length`` is None."""

    length: int | None = 4
    width: int = 16

    @nn.compact
    def __call__(self, x):
        op = None
        if self.length is not None:
            op = partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=self.length))
        dense = partial(nn.Dense, param_dtype=jnp.bfloat16, dot_general_cls=op)
        return dense(16, name="second")(dense(self.width, name="first")(x))


net = cache(Net)  # one object per model, so that its train states are of one kind


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


def bits_of(tree):
    """Returns every leaf's name, dtype, shape and bytes."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    arrays = [(jax.tree_util.keystr(path), np.asarray(leaf)) for path, leaf in leaves]
    return [(name, a.dtype, a.shape, a.tobytes()) for name, a in arrays]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert bits_of(a) == bits_of(b)


def orbax_save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def orbax_restore(path, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, *target)


def through_orbax(path, tree, target):
    orbax_save(path / "checkpoint", tree)
    return orbax_restore(path / "checkpoint", target)


def through_msgpack(path, tree, target):
    (path / "checkpoint").write_bytes(flax.serialization.to_bytes(tree))
    return flax.serialization.from_bytes(target, (path / "checkpoint").read_bytes())


both = pytest.mark.parametrize("through", [through_orbax, through_msgpack], ids=["orbax", "msgpack"])


@pytest.mark.long
@both
def test_a_train_state_comes_back(through, tmp_path):
    state = trained(net())
    assert all(np.all(leaf[..., :1] > 0) for leaf in jax.tree.leaves(state.params[OWG]))
    restored = through(tmp_path, state, abstract(net()))
    assert isinstance(restored, fp8.TrainState)
    assert_same(restored, state)
    assert_same(train_step(restored, X), train_step(state, X))


def test_a_checkpoint_has_the_names_of_flax(tmp_path):
    """The layout is version 1 of the format; a change would break all checkpoints of users."""
    orbax_save(tmp_path / "checkpoint", trained(net()))
    state = orbax_restore(tmp_path / "checkpoint")["params"][OWG]
    found = {name: (str(dtype), shape) for name, dtype, shape, _ in bits_of(state)}
    assert found == {
        f"['{layer}']['Fp8DotGeneralOp_0']['{role}_{leaf}']": ("float32", shape)
        for layer in ("first", "second")
        for role in ("input", "kernel", "output_grad")
        for leaf, shape in (("scale", (1,)), ("amax_history", (4,)))
    }
    # Inputs grew from step to step: the newest amax comes first, then the oldest to the second newest.
    newest, _, oldest, second = np.asarray(state["first"]["Fp8DotGeneralOp_0"]["input_amax_history"])
    np.testing.assert_array_equal([oldest, second, newest], AMAX * np.float32([1, 2, 4]))


@pytest.mark.long
@both
def test_a_checkpoint_without_fp8_begins_an_fp8_run(through, tmp_path):
    before = trained(net(None))
    restored = through(tmp_path, before, abstract(net(None)))
    assert OWG not in restored.params
    variables = fp8.add_fp8_state(restored.params, net(), X)
    state = restored.replace(apply_fn=abstract(net()).apply_fn, params=variables)
    assert_same(state.params["params"], before.params["params"])
    assert_same(state.opt_state, before.opt_state)
    assert_same(variables[OWG], trained(net(), 0).params[OWG])
    after = train_step(state, X)
    assert int(after.step) == 4
    histories = after.params[OWG]["first"]["Fp8DotGeneralOp_0"]
    np.testing.assert_array_equal(histories["input_amax_history"], [AMAX, 0, 0, 0])

    back = restored.replace(params=fp8.remove_fp8_state(after.params))
    (tmp_path / "back").mkdir()
    assert_same(through(tmp_path / "back", back, abstract(net(None))), back)
    train_step(back, X)


def test_a_cast_of_the_whole_checkpoint_is_refused(tmp_path):
    orbax_save(tmp_path / "checkpoint", trained(net()).params)
    narrow = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), abstract(net()).params)
    restored = orbax_restore(tmp_path / "checkpoint", narrow)
    message = "_overwrite_with_gradient/first/Fp8DotGeneralOp_0/input_(scale|amax_history) must be float32"
    with pytest.raises(TypeError, match=message):
        fp8.add_fp8_state(restored, net(), X)
    with pytest.raises(TypeError, match=message):
        fp8.TrainState.create(apply_fn=net().apply, params=restored, tx=TX)
    with pytest.raises(TypeError, match=message):
        train_step(trained(net()).replace(params=restored), X)
    with pytest.raises(TypeError, match="must be float32; got bfloat16"):
        net().apply(restored, X)

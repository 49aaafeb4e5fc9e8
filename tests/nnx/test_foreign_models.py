"""NNX models written as other code bases write them are converted, trained, frozen and saved, unchanged."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._compat.jaxprs import equations
from tests.cases import cells
from tests.foreign_nnx import MODELS, TOKENS, LanguageModel

pytestmark = [
    pytest.mark.usefixtures("promotion_of_users"),
    pytest.mark.filterwarnings("ignore:(These scales are frozen|These kernels|FP8 convolutions)"),
]
SHORT = fp8.DelayedScaling(amax_history_len=4)


def arrays(nodes):
    return jax.tree.map(np.asarray, nnx.state(nodes, nnx.Not(nnx.RngState)))


def of_state(f, model, inputs):
    """Applies a transformation of JAX to a call of a model, which changes neither model nor inputs."""
    graphdef, state = nnx.split((model, inputs))

    def call(state):
        model, (args, kwargs) = nnx.merge(graphdef, state)
        return model(*args, **kwargs)

    return f(call)(state)


def output(model, inputs):
    return np.asarray(of_state(jax.jit, model, inputs))


def flops(model, inputs):
    """Counts the operations of the contractions in the program of a call."""
    total = 0
    for eqn, _, times, _ in equations(of_state(jax.make_jaxpr, model, inputs)):
        size, shapes = math.prod(eqn.outvars[0].aval.shape), [x.aval.shape for x in eqn.invars]
        dims = eqn.params.get("dimension_numbers")
        if eqn.primitive.name == "dot_general":
            total += 2 * times * size * math.prod(shapes[0][i] for i in dims[0][0])
        elif eqn.primitive.name == "conv_general_dilated":
            total += 2 * times * size * math.prod(shapes[1]) // shapes[1][dims.rhs_spec[0]]
    return total


@nnx.jit
def train_step(model, optimizer, inputs):
    loss, grads = fp8nnx.value_and_grad(lambda m, x: jnp.mean(m(*x[0], **x[1]) ** 2))(model, inputs)
    optimizer.update(model, grads)
    return loss


def check(model, args, kwargs, converted, folder):
    """Takes a model through all that this package does with it; returns the frozen model."""
    inputs, before = (args, kwargs), arrays((model, args, kwargs))
    wide = output(model, inputs)
    model8 = fp8.quantize_model(model, SHORT, *args, include=".*", **kwargs)
    report = fp8.report(model8, *args, **kwargs)
    assert sum(row.flops for row in report.rows) == flops(model, inputs)
    assert len(report.converted) == converted
    with fp8.autocast(enabled=False):
        np.testing.assert_array_equal(output(model8, inputs), wide)

    assert np.isfinite(train_step(model8, fp8nnx.Optimizer(model8, optax.adamw(1e-3)), nnx.clone(inputs)))
    fp8.check_state(model8)  # warns of a history that did not move
    out = output(model8, inputs)
    assert 0 < np.linalg.norm(out - wide) / np.linalg.norm(wide) < 0.3

    frozen = fp8.freeze(model8, *args, **kwargs)
    np.testing.assert_allclose(output(frozen, inputs), out, atol=0.02 * np.abs(out).max())
    graphdef, random, state = nnx.split(model8, nnx.RngState, ...)  # NumPy and Orbax have no random keys
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "model", state)
    with ocp.StandardCheckpointer() as checkpointer:
        again = nnx.merge(graphdef, random, checkpointer.restore(folder / "model", state))
    np.testing.assert_array_equal(output(again, inputs), out)
    jax.tree.map(np.testing.assert_array_equal, arrays((model, args, kwargs)), before)
    jax.clear_caches()
    return frozen


# The kernels that are stored in FP8: all but the embedding, which is also a table.
STORED = {"Tunix Llama 3, remat": 7, "Tunix Qwen3-MoE": 7, "Bonsai Qwen3": 7}
FEW = ["Bonsai DenseNet", "Bonsai Qwen3"]


@pytest.mark.long
@pytest.mark.parametrize("name", cells(MODELS, repeated=[name for name in MODELS if name not in FEW]))
def test_a_model(name, tmp_path):
    frozen = check(*MODELS[name](), tmp_path)
    codes = [x for x in jax.tree.leaves(nnx.state(frozen, fp8nnx.Frozen)) if x.dtype.itemsize == 1]
    assert len(codes) >= STORED.get(name, 1)


@pytest.mark.all_cells
def test_adapters_of_qwix(tmp_path):
    """Qwix adds the adapters of LoRA in a call of the model, in front of the conversion."""
    qwix = pytest.importorskip("qwix")
    lora = qwix.LoraProvider(module_path=".*(gate|down)", rank=2, alpha=2.0)
    model = qwix.apply_lora_to_model(LanguageModel(), lora, TOKENS, rngs=nnx.Rngs(0))
    check(model, (TOKENS,), {}, 12, tmp_path)

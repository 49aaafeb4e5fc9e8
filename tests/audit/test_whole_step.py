"""FP8 adds few kernels, bytes and memory to a whole training step that XLA compiles for an H200."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import fp8flax as fp8
from fp8flax._audit import compiling, kernels
from fp8flax.demo import training
from tests.cases import struct

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("gpu")]


@pytest.fixture(autouse=True)
def _optax_promotes():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Layer(nn.Module):
    """The matmuls of a Llama's layer, with an elementwise product in the place of attention."""

    op: Any

    @nn.compact
    def __call__(self, x):
        dense = partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.op)
        norm = partial(nn.RMSNorm, dtype=jnp.bfloat16)
        h = norm()(x)
        query, key, value = (dense(4096, name=name)(h) for name in ("query", "key", "value"))
        x = x + dense(4096, name="out")(nn.tanh(query) * key + value)
        h = norm()(x)
        gate, up = (dense(14336, name=name)(h) for name in ("gate", "up"))
        return x + dense(4096, name="down")(nn.silu(gate) * up)


def step_of(apply):
    """Returns a jitted step of a train state; the loss is a mean of squares."""

    def step(state, x):
        def loss(variables):
            return jnp.mean(jnp.square(apply(state, variables, x).astype(jnp.float32)))

        value, grads = fp8.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return jax.jit(step, donate_argnums=0)


def state_of(model, *args):
    def initial(*args):
        params = model.init(jax.random.key(0), *args)
        return fp8.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-4))

    return jax.eval_shape(initial, *args)


def read(step, *args):
    """Returns the kernels of a program compiled for an H200, and its temporary bytes."""
    program = compiling.compile_for(compiling.find_target("h200"), step, args)
    return kernels.read(program.as_text()).kernels, program.memory_analysis().temp_size_in_bytes


def figures(op):
    """Returns the kernels of a step of 2 layers, the MiB that they move beside GEMMs, and temporary MiB."""
    model, x = nn.Sequential([Layer(op), Layer(op)]), struct(8192, 4096)
    step = step_of(lambda state, variables, x: state.apply_fn(variables, x))
    found, temporary = read(step, state_of(model, x), x)
    for dot in (dot for kernel in found for dot in kernel.dots):
        assert (dot.backend == "cublasLt" and dot.lhs_dtype.startswith("f8")) == (op is not None)
    others = sum(k.bytes for k in found if not k.dots) // 2**20
    return len(found), others, temporary // 2**20


@pytest.mark.newest
def test_of_a_llama():
    wide, delayed = map(figures, (None, fp8.Fp8DotGeneralOp))
    # Each of 14 layers adds five kernels: casts, transposes, and merges of amaxes. The states of all layers
    # are entered, left and checked in 13.
    assert delayed[0] - wide[0] <= 14 * 5 + 13
    # JAX 0.12 moves 832 MiB less for the norms of the model in bfloat16. The FP8 programs move as much as
    # before.
    in_bf16 = wide[1] + (832 if jax.__version_info__ >= (0, 12) else 0)
    assert delayed[1] <= 1.105 * in_bf16
    assert delayed[2] <= 0.93 * wide[2]


def test_of_the_demo():
    """The step has 580 kernels, and 410 in bfloat16."""
    task = training.lm(None, "delayed", None)
    found, _ = read(training.train_step, *training.arguments_of_step(task, "fp8"))
    assert len(found) <= 585


def scanned(block, length, op):
    """Returns the kernels of a step of ``num`` blocks under ``nn.scan``, and its temporary bytes."""
    lifted = nn.scan(
        block,
        variable_axes={"params": 0, fp8.OVERWRITE_WITH_GRADIENT: 0},
        split_rngs={"params": True},
        length=length,
    )
    model, x = lifted(op), struct(8192, block.width, dtype=jnp.float32)
    step = step_of(lambda state, variables, x: state.apply_fn(variables, x, None)[0])
    return read(step, state_of(model, x, None), x)


class Scanned(Layer):
    width: int = 1024

    @nn.compact
    def __call__(self, x, _):
        dense = partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.op)
        norm = partial(nn.LayerNorm, dtype=jnp.bfloat16)
        h = norm()(x)
        query, key, value = (dense(self.width, name=name)(h) for name in ("query", "key", "value"))
        x = x + dense(self.width, name="out")(nn.tanh(query) * key + value)
        h = norm()(x)
        gate, up = (dense(4 * self.width, name=name)(h) for name in ("gate", "up"))
        return x + dense(self.width, name="down")(nn.silu(gate) * up), None


def test_of_layers_under_scan_and_remat():
    """The step in bfloat16 runs 345 kernels."""
    found, _ = scanned(nn.remat(Scanned, prevent_cse=False), 4, fp8.Fp8DotGeneralOp)
    assert sum(kernel.trip_count for kernel in found) <= 740

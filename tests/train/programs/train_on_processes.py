"""Trains a small network data-parallel, as one of several processes; see test_processes.py.

It writes the losses and the final variables as this process has them to an npz file.
"""

import argparse
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8

STEPS, ROWS, WIDTH = 4, 16, 8


def batch(step):
    """Returns the global batch of a step: small integers, whose sums are exact in any order."""
    draw = np.random.default_rng(step)
    x = draw.integers(-4 - step, 5 + step, (ROWS, WIDTH)).astype(np.float32)
    return x, draw.integers(-2, 3, (ROWS, 2)).astype(np.float32)


def on_a_grid(key, shape, dtype):
    """Initial weights: eighths, which stay eighths under steps of one eighth."""
    return jnp.asarray(np.random.default_rng(shape).integers(-4, 5, shape) / 8, dtype)


def train(mesh):
    """Returns the losses and the final variables.

    No sum is ever rounded: inputs, weights and scales are integers times powers of two, and the optimizer
    takes the sign of the gradient. So every bit must be that of a run with one process.
    """
    replicated, by_rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    recipe = fp8.DelayedScaling(amax_history_len=3, use_power_2_scales=True)
    op = partial(fp8.Fp8DotGeneralOp, recipe=recipe)
    dense = partial(nn.Dense, dot_general_cls=op, kernel_init=on_a_grid)
    model, tx = nn.Sequential([dense(WIDTH), nn.relu, dense(2)]), optax.sign_sgd(1 / 8)

    @partial(jax.jit, out_shardings=replicated)
    def start():
        variables = model.init(jax.random.key(0), jnp.zeros((ROWS, WIDTH)))
        return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=tx)

    def loss(variables, x, y):
        return jnp.mean((model.apply(variables, x) - y) ** 2)

    @partial(jax.jit, out_shardings=replicated)
    def train_step(state, x, y):
        value, grads = fp8.value_and_grad(loss)(state.params, x, y)
        return state.apply_gradients(grads=grads), value

    rows = ROWS // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)

    def data_of(step):
        return [jax.make_array_from_process_local_data(by_rows, part[mine]) for part in batch(step)]

    state, losses = start(), []
    state = state.replace(params=fp8.calibrate(model.apply, state.params, [data_of(0)[0]]))
    for step in range(STEPS):
        data = data_of(step)
        assert data[0].shape == (ROWS, WIDTH)
        state, value = train_step(state, *data)
        losses.append(np.asarray(value))
    return np.stack(losses), state.params


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.processes > 1:
        jax.distributed.initialize(
            arguments.coordinator, arguments.processes, arguments.process, initialization_timeout=60
        )
    assert jax.process_count() == jax.device_count() == arguments.processes
    assert jax.local_device_count() == 1
    losses, variables = train(Mesh(np.array(jax.devices()), ("data",)))
    found = {"losses": losses}
    for path, leaf in jax.tree_util.tree_flatten_with_path(variables)[0]:
        assert leaf.sharding.is_fully_replicated
        found["/".join(key.key for key in path)] = np.asarray(leaf)
    np.savez(arguments.out, **found)


if __name__ == "__main__":
    main()

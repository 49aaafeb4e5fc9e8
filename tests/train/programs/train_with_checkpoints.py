"""Trains a small network and saves every step; killed and started again by test_kill.py.

It goes on from the newest checkpoint, and writes to the log, a line each, which state it restored and which
state each step left behind.
"""

import argparse
import hashlib
import os
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import fp8flax as fp8

OP = partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=4))
MODEL = nn.Sequential([nn.Dense(16, dot_general_cls=OP), nn.relu, nn.Dense(1, dot_general_cls=OP)])


def batch(step):
    """Returns the data of a step, the same in every process. It grows, and so do the scales."""
    x = np.random.default_rng(step).standard_normal((16, 8), np.float32) * np.float32(1 + step / 8)
    return x, np.sin(x.sum(-1, keepdims=True))


@jax.jit
def start():
    variables = MODEL.init(jax.random.key(0), jnp.zeros((16, 8)))
    state = fp8.TrainState.create(apply_fn=MODEL.apply, params=variables, tx=optax.adam(1e-2))
    return state.replace(step=jnp.int32(0))


@jax.jit
def train_step(state, x, y):
    def loss(variables):
        return jnp.mean((state.apply_fn(variables, x) - y) ** 2)

    return state.apply_gradients(grads=fp8.grad(loss)(state.params))


def digest(state):
    """Returns a hash of every bit of the state: names, dtypes, shapes, values."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        leaf = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        found.update(leaf.tobytes())
    return found.hexdigest()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("log")
    parser.add_argument("--checkpoints", help="folder; without it nothing is saved or restored")
    parser.add_argument("--steps", type=int, help="stop after this step; without it the program never ends")
    arguments = parser.parse_args()
    log = os.open(arguments.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(event, state):
        os.write(log, f"{event} {int(state.step)} {digest(state)}\n".encode())

    # Arrays get a sharding as restored ones have, so that one compiled step serves both.
    state, manager = jax.device_put(start(), jax.devices()[0]), None
    if arguments.checkpoints:
        options = ocp.CheckpointManagerOptions(max_to_keep=3)
        manager = ocp.CheckpointManager(os.path.abspath(arguments.checkpoints), options=options)
        if manager.latest_step() is not None:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(abstract))
            write("restored", state)
    while int(state.step) != arguments.steps:
        state = train_step(state, *batch(int(state.step)))
        write("step", state)
        if manager is not None:
            manager.save(int(state.step), args=ocp.args.StandardSave(state))
    if manager is not None:
        manager.close()


if __name__ == "__main__":
    main()

"""A model of two FP8 layers, which the tests of training share."""

import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

import fp8flax as fp8
from tests.cases import OWG, normal, variables_of

Op = partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=4))


class Net(nn.Module):
    """Two FP8 layers, one of them optional, and a batch norm."""

    op: object = Op
    widths: tuple[int, int] = (8, 8)
    batch_norm: bool = False
    param_dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, use_second=True, train=False):
        dense = partial(nn.Dense, dot_general_cls=self.op, param_dtype=self.param_dtype)
        x = nn.relu(dense(self.widths[0], name="first")(x))
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=not train, name="norm")(x)
        second = dense(self.widths[1], name="second")
        return second(x) if use_second or self.is_initializing() else x


MODEL = Net()
X = normal(0, 4, 6)
VARIABLES = variables_of(MODEL, X)


def mse(variables, x, **kwargs):
    return jnp.mean(MODEL.apply(variables, x, **kwargs) ** 2)


gradient = jax.jit(fp8.grad(mse), static_argnames="use_second")


@functools.cache
def _trained(steps):
    variables = VARIABLES
    for i in range(steps):
        variables = {**variables, OWG: gradient(variables, X * (i + 2.0))[OWG]}
    return variables


def trained(steps=2):
    """Returns variables after some steps, so that scale and history are not the initial ones."""
    return jax.tree.map(lambda leaf: leaf, _trained(steps))


def op_of(variables, layer="first"):
    """Returns the scaling state of a layer."""
    return variables[OWG][layer]["Fp8DotGeneralOp_0"]

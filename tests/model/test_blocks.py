"""A rule by which a module is computed as one block, and what is refused."""

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.names import CAST_TRANSPOSE
from fp8flax.audit import compiling, kernels
from tests.cases import OWG, cells, normal, struct

RECIPE = fp8.DelayedScaling(amax_history_len=4)
ROWS, WIDTH, HIDDEN = 16, 32, 48
GATED = fp8.FusedMLP(into=("gate_proj", "up_proj"), out_of="down_proj", activation="silu")
PLAIN = fp8.FusedMLP(into="up_proj", out_of="down_proj", activation="gelu")


def silu_gate(gate, up):
    return nn.silu(gate) * up


class Mlp(nn.Module):
    """A Llama's, or something that looks like it."""

    between: Any = silu_gate
    gated: bool = True
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    hidden: int = HIDDEN

    @nn.compact
    def __call__(self, x):
        dense = partial(nn.Dense, use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype)
        gate = [dense(self.hidden, name="gate_proj")(x)] * self.gated
        h = self.between(*gate, dense(self.hidden, name="up_proj")(x))
        return dense(x.shape[-1], name="down_proj")(h)


class Model(nn.Module):
    """Blocks behind norms, in layers."""

    mlp: Any = Mlp
    kind: str = "loop"

    @nn.compact
    def __call__(self, x):
        mlp = self.mlp  # the class, or a partial of it

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return x + mlp(name="mlp")(nn.RMSNorm()(x)), None

        if self.kind == "loop":
            for i in range(2):
                x, _ = Layer(name=f"layers_{i}")(x, None)
            return x
        stacked = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return stacked(name="layers")(x, None)[0]


def converted(model, *rules, **options):
    return fp8.quantize_model(model, RECIPE, include=".*", rules=rules, **options)


def pair(model, said=GATED, pattern="mlp"):
    """Returns the model with the rule and without it, and calibrated variables of both."""
    one, layers = converted(model, (pattern, said)), converted(model)
    x = normal(0, ROWS, WIDTH)
    variables = layers.init(jax.random.key(0), x)
    variables["params"] = jax.tree.map(lambda p: p + 0.1 * normal(1, *p.shape), variables["params"])
    return one, layers, fp8.calibrate(layers.apply, variables, x)


def step_of(model, wrap=jax.jit):
    def loss(variables, x):
        return jnp.mean(jnp.square(model.apply(variables, x).astype(jnp.float32) - 1))

    return wrap(fp8.value_and_grad(loss, (0, 1)))


def is_one(model, variables):
    """Tells whether a model is computed with the derivative of a block."""
    x = normal(0, ROWS, WIDTH)
    return "_mlp_bwd" in str(jax.make_jaxpr(step_of(model, lambda f: f))(variables, x))


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_near(actual, expected, rtol=1e-5, atol=1e-7):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), actual, expected)


@pytest.mark.oldest
@pytest.mark.parametrize("kind", ["loop", "scan"])
def test_steps_are_those_of_the_layers(kind):
    """In float32 but for the last bits of a sum; the tree is the same, and so are the next states."""
    one, layers, variables = pair(Model(kind=kind))
    x = normal(0, ROWS, WIDTH)
    assert is_one(one, variables)
    assert not is_one(layers, variables)
    assert_equal(one.init(jax.random.key(3), x), layers.init(jax.random.key(3), x))
    actual, wanted = step_of(one)(variables, x), step_of(layers)(variables, x)
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    assert_near(actual, wanted)

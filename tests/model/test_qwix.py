"""Adapters of Qwix (LoRA) beside FP8 layers: added before ``quantize_model``, and after it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import OWG, normal
from tests.models import ALL

qwix = pytest.importorskip("qwix")

pytestmark = [
    pytest.mark.all_cells,
    pytest.mark.usefixtures("promotion_of_users"),
    # Raised by Qwix.
    pytest.mark.filterwarnings("ignore"),
]


def with_lora(model, *inputs, layers=".*", **kwargs):
    provider = qwix.LoraProvider(module_path=layers, rank=4, alpha=2.0)
    return qwix.apply_lora_to_model(model, provider, *inputs, **kwargs)


LAYERS = {
    "Linear": (lambda rngs: nnx.Linear(16, 8, rngs=rngs), (4, 16)),
    "LinearGeneral": (lambda rngs: nnx.LinearGeneral(16, (2, 4), rngs=rngs), (4, 16)),
    "Einsum": (lambda rngs: nnx.Einsum("bi,io->ob", (16, 8), rngs=rngs), (4, 16)),
    "Conv": (lambda rngs: nnx.Conv(3, 8, (4, 4), (4, 4), rngs=rngs), (1, 8, 8, 3)),
}


@pytest.mark.parametrize("has_inputs", [False, True])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("layer", LAYERS)
def test_nnx(layer, order, has_inputs):
    """The base layer gives bit for bit what it gives alone; beside it the adapters compute and train."""
    make, shape = LAYERS[layer]
    x, rngs = normal(0, *shape), nnx.Rngs(1)
    wide = nnx.Sequential(make(nnx.Rngs(0)))
    inputs, options = (x,) * has_inputs, {**ALL, "exclude": "lora", "allow_unmatched": True}
    if order == "before":
        model = fp8.quantize_model(with_lora(wide, x, rngs=rngs), *inputs, **options)
    else:
        model = with_lora(fp8.quantize_model(wide, *inputs, **options), x, rngs=rngs)
    alone = fp8.quantize_model(wide, **ALL)(x)
    assert np.abs(alone - wide(x)).max() > 1e-3
    assert [row.kernel for row in fp8.report(model, x).converted] == ["layers/0/kernel"]
    np.testing.assert_array_equal(model(x), alone)  # the second factor of an adapter starts with zeros
    second = model.layers[0].kernel_lora_b
    grads = fp8nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)
    assert np.abs(grads["layers"][0]["kernel_lora_b"][...]).max() > 0
    second[...] = normal(1, *second.shape)
    plain = with_lora(wide, x, rngs=rngs)
    nnx.update(plain, nnx.state(model, nnx.LoRAParam))
    np.testing.assert_allclose(model(x) - alone, plain(x) - wide(x), rtol=1e-4, atol=1e-4)


class Experts(nnx.Module):
    def __init__(self):
        self.kernels, self.out = nnx.Param(normal(2, 2, 16, 8)), nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, sizes):
        return self.out(jax.lax.ragged_dot(x, self.kernels[...], sizes))


@pytest.mark.parametrize("order", ["before", "after"])
def test_experts_beside_adapters(order):
    inputs, model = (normal(0, 4, 16), jnp.array([3, 1])), Experts()
    lora = {"layers": "out", "rngs": nnx.Rngs(1)}  # Qwix has no adapters for experts
    if order == "before":
        model8 = fp8.quantize_model(with_lora(model, *inputs, **lora), *inputs, **ALL)
    else:
        model8 = with_lora(fp8.quantize_model(model, *inputs, **ALL), *inputs, **lora)
    np.testing.assert_array_equal(model8(*inputs), fp8.quantize_model(model, *inputs, **ALL)(*inputs))


@pytest.mark.parametrize("order", ["before", "after"])
def test_linen(order):
    x, wide = normal(0, 4, 16), nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(8)])
    options = {**ALL, "exclude": "lora", "allow_unmatched": True}
    if order == "before":
        model = fp8.quantize_model(with_lora(wide), **options)
    else:
        model = with_lora(fp8.quantize_model(wide, **options))
    variables = model.init(jax.random.key(0), x)
    alone = fp8.quantize_model(wide, **ALL).apply(variables, x)
    np.testing.assert_array_equal(jax.jit(model.apply)(variables, x), alone)
    grads = fp8.grad(lambda variables: jnp.sum(model.apply(variables, x) ** 2))(variables)
    for layer in ("layers_0", "layers_2"):
        assert np.abs(grads["params"][layer]["kernel_lora_b"]).max() > 0
        assert {*variables[OWG][layer]} == {"Fp8DotGeneralOp_0"}

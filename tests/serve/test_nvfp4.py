"""NVFP4 kernels in frozen models, and in files with the layout of compressed-tensors."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import assert_same
from tests.models import trained
from tests.serve.net import Net, X, read
from tests.serve.test_checkpoints import WRITTEN

RECIPES = [fp8.NVFP4BlockScaling(), fp8.NVFP4BlockScaling(disable_2d_quantization=True)]


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 3}
        return nn.scan(lambda layer, x, _: (layer(x), None), **axes)(nn.Dense(64, name="up"), x, None)[0]


@pytest.mark.newest
@pytest.mark.parametrize(
    ("model", "recipe"), [(Net(), RECIPES[0]), (Net(), RECIPES[1]), (Stack(), RECIPES[0])]
)
def test_frozen_and_in_a_file(model, recipe, tmp_path):
    """Same bits as in training, in the file as for a server, and in models that the file is loaded into."""
    model8, variables = trained(model, X, recipe=recipe, exclude="last")
    serve, served = fp8.freeze(model8, variables)
    out, expected = (jax.jit(m.apply)(v, X) for m, v in ((serve, served), (model8, variables)))
    np.testing.assert_array_equal(out, expected)
    fp8.save_safetensors(tmp_path / "a", serve, served)
    (tensors, config), checkpoint = read(tmp_path / "a"), fp8.read_checkpoint(tmp_path / "a")
    assert config["config_groups"]["group_0"]["input_activations"] is None
    weights = jax.jit(lambda v: fp8.weights_for_serving(model8, v))(variables)
    assert_same(weights, tensors)
    assert_same(fp8.load_into(jax.tree.map(jnp.zeros_like, served), checkpoint), served)
    wide, grid = fp8.load_into(variables, checkpoint)["params"], np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in set(wide) - {"last", "norm"}:
        packed, scale = (tensors[f"{name}.weight_{end}"] for end in ("packed", "scale"))
        bits = np.stack([packed % 16, packed // 16], -1).reshape(*packed.shape[:-1], -1)
        weight = np.concatenate([grid, -grid])[bits] * scale.astype(np.float32).repeat(16, -1)
        weight *= np.float32(1) / tensors[f"{name}.weight_global_scale"].reshape(
            -1, *[1] * (weight.ndim - 1)
        )
        loaded, kernel = (np.asarray(v[name]["kernel"]) for v in (wide, variables["params"]))
        np.testing.assert_array_equal(
            loaded.reshape(weight.swapaxes(-1, -2).shape).swapaxes(-1, -2), weight
        )
        assert np.linalg.norm(loaded - kernel) < 0.15 * np.linalg.norm(kernel)


def test_nnx_and_a_file_of_the_library(tmp_path):
    """A frozen and a wide model get the values of the file, and the frozen one writes its bits again."""
    op = fp8nnx.Fp8DotGeneralOp(recipe=RECIPES[0])
    model = nnx.Linear(64, 8, dot_general=op, rngs=nnx.Rngs(0))
    frozen, rename = fp8.freeze(model, X), {"^kernel": "up", "^bias": "up.bias"}
    np.testing.assert_array_equal(frozen(X), model(X))
    original = fp8.read_checkpoint(WRITTEN[0].with_name("compressed_nvfp4"))
    for target in (frozen, model):
        fp8.load_into(target, {x: original[x] for x in ("up.weight", "up.bias")}, rename=rename)
    np.testing.assert_allclose(frozen(X), model(X), rtol=0.1, atol=0.1 * np.abs(model(X)).max())
    fp8.save_safetensors(tmp_path / "a", frozen, rename=rename)
    weight, own = original["up.weight"], fp8.read_checkpoint(tmp_path / "a")["up.weight"]
    assert weight.input_scale == np.float32(3) / np.float32(2688)
    for field in ("in_file", "scale", "tensor_scale"):
        np.testing.assert_array_equal(getattr(own, field), getattr(weight, field))

"""NVFP4 kernels in frozen models, and in files with the layout of compressed-tensors."""

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.models import trained
from tests.serve.net import RECIPES, Net, X, read
from tests.serve.test_checkpoints import WRITTEN


@pytest.mark.newest
@pytest.mark.parametrize("recipe", [RECIPES["nvfp4"], fp8.NVFP4BlockScaling(disable_2d_quantization=True)])
def test_frozen_and_in_a_file(recipe, tmp_path):
    """The results have the bits of training. Two codes are in a byte, the first in its low bits."""
    model8, variables = trained(Net(), X, recipe=recipe, exclude="last")
    serve, served = fp8.freeze(model8, variables, X)
    out, expected = (jax.jit(m.apply)(v, X) for m, v in ((serve, served), (model8, variables)))
    np.testing.assert_array_equal(out, expected)
    fp8.save_safetensors(tmp_path / "a", serve, served)
    tensors, config = read(tmp_path / "a")
    assert config["config_groups"]["group_0"]["input_activations"] is None
    up = served["params"]["up"]
    codes, scales = np.asarray(up["kernel"]), up["Fp8DotGeneralOp_0"]
    assert codes.dtype == ml_dtypes.float4_e2m1fn
    bits = codes.T.view(np.uint8)
    np.testing.assert_array_equal(tensors["up.weight_packed"], bits[:, ::2] + 16 * bits[:, 1::2])
    np.testing.assert_array_equal(tensors["up.weight_scale"], scales["kernel_scale"][0])
    np.testing.assert_array_equal(1 / tensors["up.weight_global_scale"], scales["kernel_tensor_scale"])


def test_nnx_and_a_file_of_the_library(tmp_path):
    """A frozen and a wide model get the values of the file, and the frozen one writes its bits again."""
    op = fp8nnx.Fp8DotGeneralOp(recipe=RECIPES["nvfp4"])
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

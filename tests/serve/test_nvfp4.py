"""NVFP4 kernels in frozen models, and in files with the layout of compressed-tensors."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import assert_same
from tests.models import trained
from tests.serve.net import Net, X, read
from tests.serve.test_checkpoints import WRITTEN, write

RECIPE = fp8.NVFP4BlockScaling()


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "fp8": True}, "length": 3}
        return nn.scan(lambda layer, x, _: (layer(x), None), **axes)(nn.Dense(64, name="up"), x, None)[0]


def unpacked(tensors, name):
    """Computes a weight of a file in NumPy, by the specification."""
    packed, scale = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"].astype(np.float32)
    grid = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = np.stack([packed % 16, packed // 16], -1).reshape(*packed.shape[:-1], -1)
    factor = np.float32(1) / tensors[f"{name}.weight_global_scale"].reshape(-1, 1, 1)
    return np.concatenate([grid, -grid])[nibbles] * scale.repeat(16, -1) * factor


@pytest.mark.newest
@pytest.mark.parametrize(
    ("model", "options"), [(Net(), {}), (Net(), {"disable_2d_quantization": True}), (Stack(), {})]
)
def test_frozen_and_in_files(model, options, tmp_path):
    model8, variables = trained(model, X, recipe=fp8.NVFP4BlockScaling(**options), exclude="last")
    serve, served = fp8.freeze(model8, variables)
    np.testing.assert_array_equal(
        *(jax.jit(m.apply)(v, X) for m, v in ((serve, served), (model8, variables)))
    )
    fp8.save_safetensors(tmp_path / "a", serve, served)
    (tensors, config), checkpoint = read(tmp_path / "a"), fp8.read_checkpoint(tmp_path / "a")
    weights = jax.jit(lambda v: fp8.weights_for_serving(model8, v))(variables)
    assert_same(dict(sorted(weights.items())), dict(sorted(tensors.items())))
    assert_same(fp8.load_into(jax.tree.map(jnp.zeros_like, served), checkpoint), served)
    assert config["format"] == "nvfp4-pack-quantized"
    assert config["config_groups"]["group_0"]["input_activations"] is None
    wide = fp8.load_into(variables, checkpoint)["params"]
    for name in set(wide) - {"last", "norm"}:
        assert served["params"][name]["kernel"].dtype == jnp.float4_e2m1fn
        weight, kernel = unpacked(tensors, name), variables["params"][name]["kernel"]
        loaded = np.asarray(wide[name]["kernel"]).reshape(len(weight), weight.shape[-1], -1)
        np.testing.assert_array_equal(loaded.swapaxes(-1, -2), weight)
        assert np.linalg.norm(wide[name]["kernel"] - kernel) < 0.15 * np.linalg.norm(kernel)


def test_nnx_and_a_file_of_the_library(tmp_path):
    """A frozen and a wide model get the values of the file, and the frozen one writes its bits again."""
    (folder,) = (path for path in WRITTEN if "nvfp4" in path.name)
    model = nnx.Linear(64, 8, dot_general=fp8nnx.Fp8DotGeneralOp(recipe=RECIPE), rngs=nnx.Rngs(0))
    frozen, rename = fp8.freeze(model, X), {"^kernel": "up", "^bias": "up.bias"}
    np.testing.assert_array_equal(frozen(X), model(X))
    checkpoint = fp8.read_checkpoint(folder)
    assert float(checkpoint["up.weight"].input_scale[0]) == np.float32(3 / 2688)
    for target in (frozen, model):
        fp8.load_into(target, {x: checkpoint[x] for x in ("up.weight", "up.bias")}, rename=rename)
    np.testing.assert_allclose(frozen(X), model(X), rtol=0.1, atol=0.1 * np.abs(model(X)).max())
    fp8.save_safetensors(tmp_path / "a", frozen, rename=rename)
    (tensors, _), (original, _) = read(tmp_path / "a"), read(folder / "model.safetensors")
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, original[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": np.ones((4, 3), ml_dtypes.float8_e4m3fn)}, r"got \[4, 16\], \[4, 3\]"),
        ({"weight_packed": np.ones((4, 15), np.uint8)}, r"got \[4, 15\], \[4, 2\]"),
        ({"weight_global_scale": np.ones(4, np.float32)}, r"float32\[4\]"),
        ({"weight_global_scale": np.ones(1, np.float16)}, r"float16\[1\]"),
        ({"weight": np.ones((4, 32), np.float32)}, "also has 'up.weight'"),
    ],
)
def test_damaged_files(changes, message, tmp_path):
    scale = np.ones((4, 2), ml_dtypes.float8_e4m3fn)
    parts = {"weight_packed": np.ones((4, 16), np.uint8), "weight_scale": scale}
    parts |= {"weight_global_scale": np.ones(1, np.float32), **changes}
    write(tmp_path / "a", {f"up.{name}": x for name, x in parts.items()})
    with pytest.raises(ValueError, match=message):
        fp8.read_checkpoint(tmp_path / "a")


@pytest.mark.parametrize(
    ("width", "kernel", "reason"),
    [
        (40, fp8.NVFP4Quantizer(), "sums over 40"),
        (64, fp8.NVFP4Quantizer(rotation=True), "rotates it"),
        (64, fp8.NVFP4Quantizer(stochastic_rounding=True), "at random"),
    ],
)
def test_what_stays_wide(width, kernel, reason):
    lhs = fp8.NVFP4Quantizer(rotation=kernel.rotation)
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=lhs, rhs=kernel))
    model8, variables = trained(nn.Dense(8), X[:, :width], recipe=recipe)
    with pytest.warns(UserWarning, match=f"stay wide: kernel .*{reason}"):
        _, served = fp8.freeze(model8, variables, X[:, :width])
    assert_same(served["params"], variables["params"])

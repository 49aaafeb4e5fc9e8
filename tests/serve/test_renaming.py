"""Renamed files have the names, layouts and config that the loader of another program expects."""

import re
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import fp8flax as fp8
from tests.cases import RECIPES, normal, variables_of
from tests.serve.net import read


class Net(nn.Module):
    """Two layers in FP8, and a wide one of each layout."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 32, name="embed")(tokens)
        x = nn.Dense(16, name="layers_0")(x)
        x = nn.Dense(16, name="layers_1")(x)
        x = nn.DenseGeneral((2, 4), use_bias=False, name="wide")(x)
        return nn.DenseGeneral(3, axis=(-2, -1), name="head")(x) + nn.Dense(3, name="gate")(x[..., 0, :])


TO_TORCH = {
    r"^layers_(\d+)": r"model.layers.\1",
    "^embed.embedding": "model.embed.weight",
    "gate.kernel": "gate.weight",
}
RENAMED = {
    "model.embed.weight",
    *(f"model.layers.{i}.{last}" for i in "01" for last in ("weight", "weight_scale", "bias")),
    *("wide.kernel", "head.kernel", "head.bias", "gate.weight", "gate.bias"),
}
TOKENS = np.zeros((2, 3), np.int32)


@pytest.fixture(scope="module")
def served():
    model8 = fp8.quantize_model(Net(), RECIPES["current"], include="layers")
    return fp8.freeze(model8, variables_of(model8, TOKENS), TOKENS)


@pytest.fixture(name="save")
def save_in(served, tmp_path):
    return partial(fp8.save_safetensors, tmp_path / "model.safetensors", *served)


@pytest.mark.newest
def test_renamed(served, save, tmp_path):
    path = tmp_path / "model.safetensors"
    save()
    original, _ = read(path)
    save(rename=TO_TORCH)
    tensors, config = read(path)
    assert set(tensors) == RENAMED
    for i in "01":
        for last in ("weight", "weight_scale", "bias"):
            old, new = original[f"layers_{i}.{last}"], tensors[f"model.layers.{i}.{last}"]
            np.testing.assert_array_equal(old, new)
    params = served[1]["params"]
    np.testing.assert_array_equal(tensors["gate.weight"], np.asarray(params["gate"]["kernel"]).T)
    np.testing.assert_array_equal(tensors["model.embed.weight"], params["embed"]["embedding"])
    np.testing.assert_array_equal(tensors["wide.kernel"], params["wide"]["kernel"])
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata()["format"] == "pt"  # transformers reads no other
    assert config["ignore"] == ["gate", "head", "wide"]


def test_patterns_one_after_another(save, tmp_path):
    """Each pattern is applied to the names that the patterns before it returned."""
    save(rename={"^layers_": "blocks.", r"^blocks\.1": "last"})
    names = set(read(tmp_path / "model.safetensors")[0])
    assert {"blocks.0.weight", "last.weight", "last.weight_scale", "last.bias"} <= names


def test_patterns_for_other_recipes(save, tmp_path):
    """A pattern may match a name that a variable would have without FP8, or under another recipe."""
    save(rename={r"^layers_(\d)\.kernel$": r"layers_\1.w", "weight_scale_inv$": "x", "input_scale$": "y"})
    renamed, _ = read(tmp_path / "model.safetensors")
    save()
    assert read(tmp_path / "model.safetensors")[0].keys() == renamed.keys()


@pytest.mark.parametrize(
    ("rename", "error", "message"),
    [
        ({"^layer_": "x"}, ValueError, "matches none"),
        ({r"^layers_\d\.kernels$": "x"}, ValueError, "matches none"),
        ({"layers_": "x", "layers_0": "y"}, ValueError, "'layers_0', which matches none"),
        ({"(": "x"}, re.error, "unterminated"),
        (["layers"], TypeError, "dict of regular expressions"),
        ({r"layers_\d": "layer"}, ValueError, r"would both be 'layer\.\w+'"),
        ({r"wide.kernel": "wide.weight"}, ValueError, "makes a weight of params/wide/kernel"),
    ],
)
def test_errors(rename, error, message, save, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("as it was")
    with pytest.raises(error, match=message):
        save(rename=rename)
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]


TENSOR = fp8.CurrentQuantizer(dtype=jnp.float8_e4m3fn)
E5M2 = fp8.CurrentQuantizer(dtype=jnp.float8_e5m2)
CHANNEL = fp8.CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise")
ROWS = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(1, 128), scale="float32")
BLOCKS = fp8.BlockQuantizer(dtype=jnp.float8_e5m2, block=(128, 128), scale="float32")


@pytest.mark.parametrize(("lhs", "rhs"), [(E5M2, TENSOR), (TENSOR, E5M2), (ROWS, CHANNEL), (ROWS, BLOCKS)])
def test_what_no_config_describes(lhs, rhs, tmp_path):
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=lhs, rhs=rhs))
    model8 = fp8.quantize_model(Net(), recipe, include="layers")
    model, served = fp8.freeze(model8, variables_of(model8, TOKENS), TOKENS)
    fp8.save_safetensors(tmp_path / "model", model, served)
    assert read(tmp_path / "model")[1] is None


@pytest.mark.filterwarnings("ignore:These kernels of FP8 ops stay wide")
def test_convolutions(tmp_path):
    """A kernel keeps its layout, and no config describes an op that quantizes its kernel at each call."""
    model8, x = fp8.quantize_model(nn.Conv(16, (2, 2), strides=2), include=".*"), normal(0, 1, 4, 4, 16)
    variables = fp8.calibrate(model8.apply, variables_of(model8, x), [x])
    model, served = fp8.freeze(model8, variables, x)
    fp8.save_safetensors(tmp_path / "model", model, served)
    tensors, config = read(tmp_path / "model")
    assert config is None
    np.testing.assert_array_equal(tensors["kernel"], served["params"]["kernel"])


def test_configs(tmp_path):
    mixed = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=TENSOR, rhs=CHANNEL))
    configs = []
    for recipe in (mixed, RECIPES["block128"]):
        model8 = fp8.quantize_model(Net(), recipe, include="layers")
        model, served = fp8.freeze(model8, variables_of(model8, TOKENS), TOKENS)
        fp8.save_safetensors(tmp_path / "model", model, served, rename={"gate": "router"})
        configs.append(read(tmp_path / "model")[1])
    group = configs[0]["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "tensor")
    assert configs[1]["modules_to_not_convert"] == ["head", "router", "wide"]

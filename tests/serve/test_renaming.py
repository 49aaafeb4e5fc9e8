"""Renamed files have the names, layouts and config that the loader of another program expects."""

import json
from functools import partial

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import fp8flax as fp8
from tests.cases import RECIPES, assert_same, normal, variables_of


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


def frozen(recipe, include="layers", **options):
    model8 = fp8.quantize_model(Net(), RECIPES[recipe], include=include)
    return fp8.freeze(model8, variables_of(model8, TOKENS), **options)


def read(path):
    """Returns the tensors of a file; those in FP8 as bytes."""
    dtypes = {"F8_E4M3": np.uint8, "F32": np.float32}
    return {
        name: np.frombuffer(info["data"], dtypes[info["dtype"]]).reshape(info["shape"])
        for name, info in safetensors.deserialize(path.read_bytes())
    }


@pytest.fixture(scope="module")
def served():
    return frozen("current")


@pytest.fixture(name="save")
def save_in(served, tmp_path):
    return partial(fp8.save_safetensors, tmp_path / "model.safetensors", *served)


@pytest.mark.oldest
@pytest.mark.parametrize("kind", ["patterns", "callable"])
def test_renamed(kind, served, save, tmp_path):
    def name_of(name):
        name = name.replace("layers_", "model.layers.").replace("embed.embedding", "model.embed.weight")
        return name.replace("gate.kernel", "gate.weight")

    path = tmp_path / "model.safetensors"
    save()
    original = read(path)
    save(rename=TO_TORCH if kind == "patterns" else name_of)
    tensors = read(path)
    assert set(tensors) == RENAMED
    for i in "01":
        for last in ("weight", "weight_scale", "bias"):
            old, new = original[f"layers_{i}.{last}"], tensors[f"model.layers.{i}.{last}"]
            np.testing.assert_array_equal(old, new)
    params = served[1]["params"]
    np.testing.assert_array_equal(tensors["gate.weight"], np.asarray(params["gate"]["kernel"]).T)
    np.testing.assert_array_equal(tensors["model.embed.weight"], params["embed"]["embedding"])
    np.testing.assert_array_equal(tensors["wide.kernel"], params["wide"]["kernel"])
    assert_same(fp8.load_safetensors(path), served[1])
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    assert metadata["format"] == "pt"  # transformers reads no other
    assert json.loads(metadata["quantization_config"])["ignore"] == ["gate", "head", "wide"]


def test_patterns_one_after_another(save, tmp_path):
    """Each pattern is applied to the names that the patterns before it returned."""
    save(rename={"^layers_": "blocks.", r"^blocks\.1": "last"})
    names = set(read(tmp_path / "model.safetensors"))
    assert {"blocks.0.weight", "last.weight", "last.weight_scale", "last.bias"} <= names


@pytest.mark.parametrize(
    ("rename", "error", "message"),
    [
        (
            {"^layer_": "x"},
            ValueError,
            r"the pattern '\^layer_', which matches none of \['embed.embedding', .*Cor",
        ),
        ({"layers_": "x", "layers_0": "y"}, ValueError, r"the pattern 'layers_0', which matches none of"),
        (
            {"(": "x"},
            ValueError,
            r"rename has '\(': 'x', which is not a valid regular expression .*unterminated",
        ),
        (
            {"layers": r"\1"},
            ValueError,
            r"which is not a valid regular expression .*invalid group reference",
        ),
        (
            {"layers": r"\g<x>"},
            ValueError,
            r"which is not a valid regular expression .*unknown group name 'x'",
        ),
        (
            {"layers": 3},
            TypeError,
            r"must map each pattern, .* to a name, .*; got 'layers': 3\.",
        ),
        (
            {3: "layers"},
            TypeError,
            r"must map each pattern, .* to a name, .*; got 3: 'layers'\.",
        ),
        (
            ["layers"],
            TypeError,
            r"must be a dict of regular expressions .* or a callable .*; got \['layers'\]",
        ),
        (lambda name: None, TypeError, r"must return a string .*; got None for 'embed.embedding'"),
        (lambda name: "", ValueError, r"gives 'embed.embedding' an empty name. Give each"),
        ({"^gate.bias$": ""}, ValueError, r"gives 'gate.bias' an empty name"),
        (
            {r"layers_\d": "layer"},
            ValueError,
            r"params/layers_1/\S+ and params/layers_0/\S+ would both be 'layer\.\w+' .*Correct rename",
        ),
        (
            {"weight_scale": "scale"},
            ValueError,
            r"changes 'layers_0.weight_scale' to 'layers_0.scale', but",
        ),
        (
            {r"0.weight$": "2.weight"},
            ValueError,
            r"to 'layers_2.weight', but|looks for 'layers_2.weight_scale'",
        ),
        (
            {r"wide.kernel": "wide.weight"},
            ValueError,
            r"makes a weight of params/wide/kernel, of shape \(16, 2, 4\)\. .* ends in 'kernel'",
        ),
    ],
)
def test_errors(rename, error, message, save, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("as it was")
    with pytest.raises(error, match=message):
        save(rename=rename)
    assert path.read_text() == "as it was"
    assert list(tmp_path.iterdir()) == [path]


CONFIG = {"model_type": "net", "hidden_size": 16, "quantization_config": None}


def test_config(save, tmp_path):
    path = tmp_path / "config.json"
    save(rename=TO_TORCH, config=CONFIG)
    with safetensors.safe_open(tmp_path / "model.safetensors", "np") as file:
        quantization = json.loads(file.metadata()["quantization_config"])
    assert json.loads(path.read_text()) == {**CONFIG, "quantization_config": quantization}
    assert quantization["ignore"] == ["gate", "head", "wide"]
    save(rename={**TO_TORCH, "^head": "lm"}, config={**CONFIG, "tie_word_embeddings": True})
    written = json.loads(path.read_text())["quantization_config"]
    assert written == {**quantization, "ignore": ["gate", "lm", "lm_head", "wide"]}


def test_config_of_blocks(tmp_path):
    fp8.save_safetensors(
        tmp_path / "model",
        *frozen("block128"),
        config={"tie_word_embeddings": True},
        rename={"gate": "router"},
    )
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["modules_to_not_convert"] == ["head", "lm_head", "router", "wide"]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("net", TypeError, "config must be a mapping, such as the to_dict.*; got str"),
        (
            {"a": {1, 2}},
            TypeError,
            "config must have values that JSON can hold: .*set is not JSON serializable",
        ),
        (
            {"quantization_config": {"a": 1}},
            ValueError,
            r"must not have a quantization_config.*; got \{'a': 1\}\. Leave",
        ),
    ],
)
def test_errors_of_config(config, error, message, save, tmp_path):
    with pytest.raises(error, match=message):
        save(config=config)
    assert not list(tmp_path.iterdir())


TENSOR = fp8.CurrentQuantizer(dtype=jnp.float8_e4m3fn)
E5M2 = fp8.CurrentQuantizer(dtype=jnp.float8_e5m2)
CHANNEL = fp8.CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise")
BLOCKS = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(1, 128), scale="float32")


@pytest.mark.parametrize(("lhs", "rhs"), [(E5M2, TENSOR), (TENSOR, E5M2), (BLOCKS, CHANNEL)])
def test_what_no_config_describes(lhs, rhs, tmp_path):
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=lhs, rhs=rhs))
    model8 = fp8.quantize_model(Net(), recipe, include="layers")
    model, served = fp8.freeze(model8, variables_of(model8, TOKENS))
    path = tmp_path / "model"
    with pytest.raises(
        ValueError, match="config was given, but no quantization_config can describe this model"
    ):
        fp8.save_safetensors(path, model, served, config=CONFIG)
    assert not list(tmp_path.iterdir())
    fp8.save_safetensors(path, model, served)
    with safetensors.safe_open(path, "np") as file:
        assert "quantization_config" not in file.metadata()


def test_no_config_describes_convolutions(tmp_path):
    model8, x = fp8.quantize_model(nn.Conv(16, (2, 2), strides=2), include=".*"), normal(0, 1, 4, 4, 16)
    variables = fp8.calibrate(model8.apply, variables_of(model8, x), [x])
    model, served = fp8.freeze(model8, variables)
    with pytest.raises(ValueError, match="the kernel of a convolution in FP8"):
        fp8.save_safetensors(tmp_path / "model", model, served, config=CONFIG)
    fp8.save_safetensors(tmp_path / "model", model, served)
    with safetensors.safe_open(tmp_path / "model", "np") as file:
        assert "quantization_config" not in file.metadata()
        assert file.get_slice("kernel").get_dtype() == "F8_E4M3"


def test_inputs_and_kernels_may_differ_in_strategy(tmp_path):
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=TENSOR, rhs=CHANNEL))
    model8 = fp8.quantize_model(Net(), recipe, include="layers")
    model, served = fp8.freeze(model8, variables_of(model8, TOKENS))
    fp8.save_safetensors(tmp_path / "model", model, served, config=CONFIG)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["input_activations"]["strategy"]) == ("channel", "tensor")


def test_fp8_kernels_are_not_transposed_twice(tmp_path):
    """Kernels of a convolution keep their own layout, also in FP8."""

    class Conv(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(8, (2,), strides=2, name="patches")(x)

    model8 = fp8.quantize_model(Conv(), include=".*")
    variables = variables_of(model8, normal(0, 1, 4, 8))
    with pytest.warns(UserWarning, match="no data"):
        model, served = fp8.freeze(model8, variables)
    fp8.save_safetensors(tmp_path / "model", model, served, rename={"patches": "embed"})
    tensors = read(tmp_path / "model")
    assert all(name.startswith("embed.") for name in tensors)
    assert_same(fp8.load_safetensors(tmp_path / "model"), served)

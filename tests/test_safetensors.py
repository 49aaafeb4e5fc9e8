"""safetensors files: read back with the library that defines the format, and by NumPy alone."""

import json
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import fp8flax as fp8
from tests.test_freeze import RECIPES, TOKENS, LanguageModel, trained
from tests.test_models import ALL, MODELS, assert_same, normal

DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F32": np.float32}


def read(path):
    """What a server reads: names, arrays, the config."""
    tensors = {
        name: np.frombuffer(info["data"], DTYPES[info["dtype"]]).reshape(info["shape"])
        for name, info in safetensors.deserialize(path.read_bytes())
    }
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(tensors)
        config = file.metadata().get("quantization_config")
    return tensors, None if config is None else json.loads(config)


def linear(tensors, name, x, fixed=False):
    """A PyTorch linear layer from such a file, in NumPy: ``x @ (weight * scale).T + bias``."""
    weight = tensors[f"{name}.weight"].astype(np.float32)
    if f"{name}.weight_scale_inv" in tensors:
        scale = tensors[f"{name}.weight_scale_inv"]
        scale = scale.repeat(128, 0).repeat(128, 1)[: weight.shape[0], : weight.shape[1]]
    else:
        scale = tensors[f"{name}.weight_scale"].astype(np.float32)
        if scale.ndim == 2 and scale.shape[1] > 1:
            scale = scale.repeat(32, 1)[:, : weight.shape[1]]
    if fixed:
        s = tensors[f"{name}.input_scale"]
        x = np.clip(x / s, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * s
    return x @ (weight * scale).T + tensors[f"{name}.bias"]


class Net(nn.Module):
    """A layer of each form: a matrix, several output dimensions, several input dimensions."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(160, name="up")(x)
        x = nn.DenseGeneral((2, 48), name="heads")(x)
        x = nn.DenseGeneral(40, axis=(-2, -1), name="out")(x)
        return nn.Dense(3, name="last")(x)


SHAPES = {"up": (160, 64), "heads": (96, 160), "out": (40, 96)}
SCALES = {
    "delayed": lambda out, width: (1,),
    "current": lambda out, width: (1,),
    "axiswise": lambda out, width: (out, 1),
    "mxfp8": lambda out, width: (out, -(-width // 32)),
    "block128": lambda out, width: (-(-out // 128), -(-width // 128)),
    "weight_only": lambda out, width: (out, 1),
}


@pytest.mark.parametrize("recipe", SCALES)
def test_what_a_server_reads(recipe, tmp_path, request):
    if recipe in ("current", "mxfp8"):
        request.getfixturevalue("_all_cells")
    x = np.asarray(normal(0, 8, 64))
    model8, variables = trained(Net(), x, recipe=RECIPES.get(recipe), exclude="last")
    variables["params"]["heads"]["bias"] = normal(1, 2, 48)
    model, served = fp8.freeze(model8, variables, weight_only=recipe == "weight_only")
    path = tmp_path / "model.safetensors"
    fp8.save_safetensors(path, model, served)
    tensors, config = read(path)
    names = ("weight", "weight_scale_inv" if recipe == "block128" else "weight_scale", "bias")
    expected = {f"{layer}.{name}" for layer in SHAPES for name in names} | {"last.kernel", "last.bias"}
    if recipe == "delayed":
        expected |= {f"{layer}.input_scale" for layer in SHAPES}
    assert set(tensors) == expected
    for layer, shape in SHAPES.items():
        assert tensors[f"{layer}.weight"].shape == shape
        assert tensors[f"{layer}.weight"].dtype == ml_dtypes.float8_e4m3fn
        assert tensors[f"{layer}.{names[1]}"].shape == SCALES[recipe](*shape)
        assert tensors[f"{layer}.bias"].shape == shape[:1]
    # Multiplied as a server would, it gives the model's logits.
    out = x
    for layer in SHAPES:
        out = linear(tensors, layer, out, fixed=recipe == "delayed")
    out = out @ tensors["last.kernel"] + tensors["last.bias"]
    expected = np.asarray(jax.jit(model.apply)(served, x))
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    # The others quantize inputs as they come, which NumPy does not do here.
    assert error < (1e-5 if recipe == "weight_only" else 0.02 if recipe == "delayed" else 0.1)
    if recipe in ("delayed", "current", "block128"):
        assert config["quant_method"] == "fp8"
        assert config["activation_scheme"] == ("static" if recipe == "delayed" else "dynamic")
        assert config["modules_to_not_convert"] == ["last"]
        assert config.get("weight_block_size") == ([128, 128] if recipe == "block128" else None)
    elif recipe == "mxfp8":
        assert config is None
    else:
        assert config["quant_method"] == "compressed-tensors"
        assert config["ignore"] == ["last"]
        inputs = config["config_groups"]["group_0"]["input_activations"]
        assert (inputs is None) == (recipe == "weight_only")
    # And read back, it is the same model.
    loaded = fp8.load_safetensors(path)
    assert_same(loaded, served)
    np.testing.assert_array_equal(jax.jit(model.apply)(loaded, x), expected)


@pytest.mark.filterwarnings("ignore:These scales are frozen")
@pytest.mark.parametrize("name", ["own", "scan", "vmap", "patches", "decoder"])
def test_any_model_comes_back(name, tmp_path):
    """Stacked layers, experts, convolutions, a cache in FP8: whatever freeze returns."""
    options = {}
    if name == "decoder":
        model, x = LanguageModel(decode=True), np.asarray(TOKENS)
        options["kv_cache_dtype"] = jnp.float8_e5m2
    else:
        model, x = MODELS[name][0](), normal(0, 2, 4, 8)
    model8 = fp8.quantize_model(model, **ALL)
    variables = jax.jit(model8.init)(jax.random.key(0), x)
    model, served = fp8.freeze(model8, variables, **options)
    fp8.save_safetensors(tmp_path / "model", model, served)
    assert_same(fp8.load_safetensors(str(tmp_path / "model")), served)
    tensors = dict(safetensors.deserialize((tmp_path / "model").read_bytes()))
    if name == "scan":
        assert tensors["layers.Dense_0.weight"]["shape"] == [3, 8, 8]
        assert tensors["layers.Dense_0.weight_scale"]["shape"] == [3, 1]


def test_what_a_file_cannot_hold(tmp_path):
    class Two(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("losses", "norm", jnp.sum(x))
            w = self.param("weight", nn.initializers.ones, (4, 4))
            return x @ self.param("kernel", nn.initializers.ones, (4, 4)) + w.sum()

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Two(name="two")(x)

    x = np.ones((2, 4), np.float32)
    model8 = fp8.quantize_model(Outer(), RECIPES["current"], **ALL)
    variables = model8.init(jax.random.key(0), x)
    model, served = fp8.freeze(model8, variables)
    with pytest.raises(ValueError, match=r"two/weight and params/two/kernel would both be 'two.weight'"):
        fp8.save_safetensors(tmp_path / "model", model, {"params": served["params"]})
    with pytest.raises(ValueError, match=r"'losses' must be dicts of arrays; .* sown values"):
        fp8.save_safetensors(tmp_path / "model", model, {"losses": served["losses"]})
    with pytest.raises(ValueError, match=r"params/a is int4, which safetensors files do not hold"):
        fp8.save_safetensors(tmp_path / "model", model, {"params": {"a": jnp.ones(2, jnp.int4)}})
    numbers = {"params": {"a": np.arange(3, dtype=np.uint16)}}
    fp8.save_safetensors(tmp_path / "model", model, numbers)
    assert_same(fp8.load_safetensors(tmp_path / "model"), numbers)
    assert not list(tmp_path.glob("*.tmp"))


def test_errors(tmp_path, monkeypatch):
    x = np.ones((2, 8), np.float32)
    model8, variables = trained(nn.Dense(4), x)
    with pytest.raises(TypeError, match=r"must come from fp8flax.freeze; got Dense"):
        fp8.save_safetensors(tmp_path / "model", model8, variables)
    safetensors.numpy.save_file({"a": x}, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"foreign was not written by fp8flax.save_safetensors"):
        fp8.load_safetensors(tmp_path / "foreign")
    safetensors.numpy.save_file({"a": x}, tmp_path / "newer", {"fp8flax": '{"version": 2, "tensors": {}}'})
    with pytest.raises(ValueError, match=r"newer was not written by"):
        fp8.load_safetensors(tmp_path / "newer")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'fp8flax\[safetensors\]'"):
        fp8.load_safetensors(tmp_path / "newer")

"""safetensors files can be read by the library that defines the format, and by NumPy alone."""

import os
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import fp8flax as fp8
from tests.cases import RECIPES
from tests.models import ALL, trained
from tests.serve.net import X, frozen_net, read


def linear(tensors, name, x, fixed=False):
    """Computes a PyTorch linear layer of a file in NumPy: ``x @ (weight * scale).T + bias``."""
    weight = tensors[f"{name}.weight"].astype(np.float32)
    if f"{name}.weight_scale_inv" in tensors:
        scale = tensors[f"{name}.weight_scale_inv"]
        scale = scale.repeat(128, 0).repeat(128, 1)[: weight.shape[0], : weight.shape[1]]
    else:
        scale = tensors[f"{name}.weight_scale"]
    if fixed:
        s = tensors[f"{name}.input_scale"]
        x = np.clip(x / s, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * s
    return x @ (weight * scale).T + tensors[f"{name}.bias"]


SHAPES = {"up": (160, 64), "heads": (96, 160), "out": (40, 96)}
SCALES = {
    "delayed": lambda out, width: (1,),
    "axiswise": lambda out, width: (out, 1),
    "block128": lambda out, width: (-(-out // 128), -(-width // 128)),
    "weight_only": lambda out, width: (out, 1),
}


@pytest.mark.parametrize("recipe", SCALES)
def test_what_a_server_reads(recipe, tmp_path):
    _, _, model, served = frozen_net(recipe)
    path = tmp_path / "model.safetensors"
    fp8.save_safetensors(path, model, served)
    tensors, config = read(path)
    names = ("weight", "weight_scale_inv" if recipe == "block128" else "weight_scale", "bias")
    expected = {f"{layer}.{name}" for layer in SHAPES for name in names}
    expected |= {"last.kernel", "last.bias", "norm.scale", "norm.bias"}
    if recipe == "delayed":
        expected |= {f"{layer}.input_scale" for layer in SHAPES}
    assert set(tensors) == expected
    for layer, shape in SHAPES.items():
        assert tensors[f"{layer}.weight"].shape == shape
        assert tensors[f"{layer}.weight"].dtype == ml_dtypes.float8_e4m3fn
        assert tensors[f"{layer}.{names[1]}"].shape == SCALES[recipe](*shape)
        assert tensors[f"{layer}.bias"].shape == shape[:1]
    # The arithmetic of a server gives the logits of the model.
    out = X
    for layer in SHAPES:
        out = linear(tensors, layer, out, fixed=recipe == "delayed")
    out = (out - out.mean(1, keepdims=True)) / np.sqrt(out.var(1, keepdims=True) + np.float32(1e-6))
    out = out @ tensors["last.kernel"] + tensors["last.bias"]
    expected = np.asarray(jax.jit(model.apply)(served, X))
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    # The other recipes quantize inputs by current scales, which NumPy does not do here.
    assert error < (1e-5 if recipe == "weight_only" else 0.02 if recipe == "delayed" else 0.1)
    if recipe == "block128":
        assert config == {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["last"],
        }
    else:
        assert config["quant_method"] == "compressed-tensors"
        assert config["ignore"] == ["last"]
        inputs = config["config_groups"]["group_0"]["input_activations"]
        if recipe == "weight_only":
            assert inputs is None
        else:
            strategy = "token" if recipe == "axiswise" else "tensor"
            assert (inputs["strategy"], inputs["dynamic"]) == (strategy, recipe != "delayed")


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
    model, served = fp8.freeze(model8, variables, x)
    with pytest.raises(ValueError, match=r"two/kernel and params/two/weight would both be 'two.weight'"):
        fp8.save_safetensors(tmp_path / "model", model, {"params": served["params"]})
    fp8.save_safetensors(tmp_path / "model", model, {"losses": served["losses"]})
    assert list(safetensors.numpy.load_file(tmp_path / "model")) == ["losses.two.norm.0"]
    with pytest.raises(ValueError, match=r"params/a is int4, which safetensors files do not hold"):
        fp8.save_safetensors(tmp_path / "model", model, {"params": {"a": jnp.ones(2, jnp.int4)}})
    for array in (np.arange(3, dtype=np.uint16), np.array([2**40, 1]), np.array(1 + 2**-40)):
        fp8.save_safetensors(tmp_path / "model", model, {"params": {"a": {"b": array}}})
        written = safetensors.numpy.load_file(tmp_path / "model")["a.b"]
        assert written.dtype == array.dtype
        np.testing.assert_array_equal(written, array)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_that_is_not_frozen(tmp_path):
    model8, variables = trained(nn.Dense(4), np.ones((2, 8), np.float32))
    with pytest.raises(TypeError, match=r"must come from fp8flax.freeze; got Dense"):
        fp8.save_safetensors(tmp_path / "model", model8, variables)


@pytest.fixture(scope="module")
def frozen():
    x = np.ones((2, 8), np.float32)
    return fp8.freeze(*trained(nn.Dense(4), x), x)


def test_without_the_library(frozen, tmp_path, monkeypatch):
    """The library is needed to read files, whose headers it checks."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    fp8.save_safetensors(tmp_path / "file", *frozen)
    with pytest.raises(ImportError, match="safetensors"):
        fp8.read_checkpoint(tmp_path / "file")


def test_a_full_disk_leaves_the_old_file(frozen, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"as it was")
    before, ours = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        with pytest.raises(OSError, match="stays unchanged") as caught:
            fp8.save_safetensors(path, *frozen)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ours)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == b"as it was"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_file_stays_a_link(frozen, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    fp8.save_safetensors(link, *frozen)
    assert link.is_symlink()
    assert "kernel.weight" in fp8.read_checkpoint(tmp_path / "file")


def test_several_writers_of_one_file(frozen, tmp_path):
    """Each call has a temporary file of its own, also in equal processes of two containers."""
    path, before = tmp_path / "file", os.umask(0o027)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: fp8.save_safetensors(path, *frozen), range(24)))
    finally:
        os.umask(before)
    assert (path.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (0o640, [path])
    with pytest.raises(FileNotFoundError, match="cannot be written"):
        fp8.save_safetensors(tmp_path / "missing" / "file", *frozen)


def test_equal_saves_give_equal_files(frozen, tmp_path):
    for i in range(12):
        fp8.save_safetensors(tmp_path / str(i), *frozen)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_into_a_folder_with_an_index(frozen, tmp_path):
    """Loaders would read the files that the index lists, so nothing is written."""
    index, path = tmp_path / "model.safetensors.index.json", tmp_path / "model.safetensors"
    index.write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match=r"has model\.safetensors\.index\.json"):
        fp8.save_safetensors(path, *frozen)
    assert list(tmp_path.iterdir()) == [index]
    fp8.save_safetensors(tmp_path / "other.safetensors", *frozen)
    index.unlink()
    fp8.save_safetensors(path, *frozen)

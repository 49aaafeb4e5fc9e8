"""safetensors files can be read by the library that defines the format, and by NumPy alone."""

import copy
import errno
import json
import os
import random
import sys
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import fp8flax as fp8
from tests.cases import RECIPES, assert_same, normal, variables_of
from tests.models import ALL, MODELS, TOKENS, LanguageModel, trained

DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "F32": np.float32}


def read(path):
    """Returns what a server reads from a file: names, arrays and the config."""
    tensors = {
        name: np.frombuffer(info["data"], DTYPES[info["dtype"]]).reshape(info["shape"])
        for name, info in safetensors.deserialize(path.read_bytes())
    }
    with safetensors.safe_open(path, "np") as file:
        assert set(file.keys()) == set(tensors)
        config = file.metadata().get("quantization_config")
    return tensors, None if config is None else json.loads(config)


def linear(tensors, name, x, fixed=False):
    """Computes a PyTorch linear layer of a file in NumPy: ``x @ (weight * scale).T + bias``."""
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
    # The arithmetic of a server gives the logits of the model.
    out = x
    for layer in SHAPES:
        out = linear(tensors, layer, out, fixed=recipe == "delayed")
    out = out @ tensors["last.kernel"] + tensors["last.bias"]
    expected = np.asarray(jax.jit(model.apply)(served, x))
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
    elif recipe == "mxfp8":
        assert config is None
    else:
        assert config["quant_method"] == "compressed-tensors"
        assert config["ignore"] == ["last"]
        inputs = config["config_groups"]["group_0"]["input_activations"]
        if recipe == "weight_only":
            assert inputs is None
        else:
            strategy = "token" if recipe == "axiswise" else "tensor"
            assert (inputs["strategy"], inputs["dynamic"]) == (strategy, recipe != "delayed")
    # The file read back is the same model.
    loaded = fp8.load_safetensors(path)
    assert_same(loaded, served)
    np.testing.assert_array_equal(jax.jit(model.apply)(loaded, x), expected)


@pytest.mark.oldest
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
    variables = variables_of(model8, x)
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


def test_errors(tmp_path):
    x = np.ones((2, 8), np.float32)
    model8, variables = trained(nn.Dense(4), x)
    with pytest.raises(TypeError, match=r"must come from fp8flax.freeze; got Dense"):
        fp8.save_safetensors(tmp_path / "model", model8, variables)
    safetensors.numpy.save_file({"a": x}, tmp_path / "foreign")
    with pytest.raises(ValueError, match=r"foreign was not written by fp8flax.save_safetensors"):
        fp8.load_safetensors(tmp_path / "foreign")
    for version in (1, 4):  # 1 had no dtypes
        metadata = {"fp8flax": json.dumps({"version": version, "tensors": {}})}
        safetensors.numpy.save_file({"a": x}, tmp_path / "other", metadata)
        with pytest.raises(
            ValueError, match=rf"other has .* version {version}, and .* reads versions \[2, 3\]. Load"
        ):
            fp8.load_safetensors(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        fp8.load_safetensors(tmp_path / "none")


class Products(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(32, name="up")(x)
        return x @ x.T


def test_a_config_for_stored_weights_beside_products_of_activations(tmp_path):
    """With weight_only the products are computed as without FP8, so the config is not about them."""
    x = np.ones((32, 64), np.float32)
    model8 = fp8.quantize_model(Products(), RECIPES["current"], include=".*", products=True)
    model, served = fp8.freeze(model8, variables_of(model8, x), x, weight_only=True)
    fp8.save_safetensors(tmp_path / "model.safetensors", model, served, config={"model_type": "x"})
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["ignore"] == []


def test_without_the_library(small, tmp_path, monkeypatch):
    """Files can be read, but not written."""
    model, data, served = small
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert_same(fp8.load_safetensors(tmp_path / "file"), served)
    with pytest.raises(ImportError, match=r"pip install 'fp8flax\[safetensors\]'"):
        fp8.save_safetensors(tmp_path / "file", model, served)


class Small(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral((2, 4), name="heads")(x)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model with a matrix, a stored file of it, and the variables that are in the file."""
    x = np.ones((2, 8), np.float32)
    model8 = fp8.quantize_model(Small(), RECIPES["mxfp8"], include="")
    model, served = fp8.freeze(model8, variables_of(model8, x))
    # A file may hold arrays that no layer needs.
    served = {
        **served,
        "more": {"scalar": np.float32(3), "none": np.zeros((0, 4), np.int8), "square": x[:, :2]},
    }
    path = tmp_path_factory.mktemp("small") / "model.safetensors"
    fp8.save_safetensors(path, model, served)
    return model, path.read_bytes(), served


def split(data):
    """Returns the header, our metadata and the rest of a file."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    own = json.loads(header["__metadata__"].pop("fp8flax"))
    return header, own, data[end:]


def join(header, own, rest):
    header = copy.deepcopy(header)
    if isinstance(header.get("__metadata__"), dict):
        header["__metadata__"]["fp8flax"] = json.dumps(own)
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + rest


def test_what_is_in_the_metadata(small):
    _, data, served = small
    header, own, rest = split(data)
    assert join(header, own, rest)[8:20] == data[8:20]
    assert set(own) == {"version", "tensors", "checksum"}
    for name, entry in own["tensors"].items():
        array = served
        for part in entry["path"]:
            array = array[part]
        assert (entry["dtype"], entry["shape_in_file"]) == (header[name]["dtype"], header[name]["shape"])
        assert entry["shape"] == list(np.shape(array))
        start, end = header[name]["data_offsets"]
        assert entry["crc32"] == zlib.crc32(rest[start:end])
    assert own["tensors"]["heads.weight"]["shape_in_file"] == [8, 8]
    assert own["tensors"]["heads.weight"]["shape"] == [8, 2, 4]
    assert own["tensors"]["more.scalar"]["shape_in_file"] == []


WEIGHT, BIAS = "heads.weight", "heads.bias"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda h, o: h.update(x=h.pop(BIAS)),
            r"\['heads.bias'\], which the file has not, and not \['x'\]",
        ),
        (
            lambda h, o: o["tensors"][WEIGHT].update(path=["params", "w"]),
            r"damaged: .* checksum does not match",
        ),
        (lambda h, o: o["tensors"][WEIGHT].update(matrix=[[0, 0], [1]]), r"checksum does not match"),
        (lambda h, o: o["tensors"][BIAS].update(shape=[2, 3]), r"checksum does not match"),
        (lambda h, o: o["tensors"][BIAS].update(dtype="I32"), r"checksum does not match"),
        (lambda h, o: o["tensors"].pop(BIAS), r"checksum does not match"),
        (lambda h, o: o.update(tensors=[1]), r"checksum does not match"),
        (
            lambda h, o: h[WEIGHT].update(dtype="I8"),
            r"'heads.weight' is I8\[8, 8\] in the file, and was written as F8_E4M3\[8, 8\]",
        ),
        (lambda h, o: h[WEIGHT].update(dtype="F8_E5M2"), r"is F8_E5M2.*was written as F8_E4M3"),
        (lambda h, o: h[WEIGHT].update(shape=[4, 16]), r"is F8_E4M3\[4, 16\].* as F8_E4M3\[8, 8\]"),
        (lambda h, o: h[BIAS].update(dtype="BOOL"), r"is damaged: 'heads.bias' is BOOL\[8\], of 8 bytes"),
        (lambda h, o: o.pop("tensors"), r"was not written by fp8flax.save_safetensors, or is damaged"),
        (lambda h, o: o.pop("version"), r"was not written by fp8flax.save_safetensors, or is damaged"),
        (lambda h, o: o.update(version="two"), r"has metadata of version 'two'"),
        (lambda h, o: o.pop("checksum"), r"its checksum does not match"),
        (lambda h, o: h.update(__metadata__=3), r"is damaged: its metadata must be strings; got 3"),
    ],
)
def test_damaged_metadata(small, tmp_path, damage, message):
    header, own, rest = split(small[1])
    damage(header, own)
    (tmp_path / "file").write_bytes(join(header, own, rest))
    with pytest.raises(ValueError, match=rf"file:? .*({message})"):
        fp8.load_safetensors(tmp_path / "file")


def test_a_file_that_is_none(small, tmp_path):
    data = small[1]
    header, _, rest = split(data)
    texts = ["", "null", "3", "[]", "{", "[" * 100_000, '"fp8flax"', "{}", '{"version": 2}']
    headers = [json.dumps({**header, "__metadata__": {"fp8flax": text}}).encode() for text in texts]
    contents = [len(h).to_bytes(8, "little") + h + rest for h in headers]
    for broken in (*contents, b"", b"abc", b"\xff" * 40, data[:100], data[:-1], data + b"0", data[1:]):
        (tmp_path / "file").write_bytes(broken)
        with pytest.raises(ValueError, match=r"file (is no|is damaged|was not written by fp8flax)"):
            fp8.load_safetensors(tmp_path / "file")


def fields(tree, above=()):
    """Yields the keys that lead to everything in JSON."""
    for key in tree if isinstance(tree, dict) else range(len(tree)):
        yield (*above, key)
        if isinstance(tree[key], (dict, list)):
            yield from fields(tree[key], (*above, key))


@pytest.mark.parametrize("seed", range(3))
def test_random_damages(small, tmp_path, seed):
    """Reading a damaged file returns what was written, or raises an error of this package."""
    choose = random.Random(seed)
    _, data, served = small
    values = [
        None,
        True,
        -1,
        0,
        1,
        2,
        8,
        10**30,
        1.5,
        "",
        "x",
        "F32",
        "I8",
        [],
        {},
        [0],
        [1, 0],
        ["params"],
    ]
    header, own, rest = split(data)
    seen = set()
    for _ in range(150):
        new = copy.deepcopy([header, own])
        if choose.random() < 0.3:  # a byte of the header
            broken = bytearray(data)
            broken[choose.randrange(len(data) - len(rest))] = choose.randrange(256)
            broken = bytes(broken)
        else:
            *above, last = choose.choice([f for f in fields(new) if len(f) > 1])
            node = new
            for key in above:
                node = node[key]
            old = node[last]
            match choose.randrange(5):
                case 0:
                    del node[last]
                case 1 if isinstance(old, (int, str)):
                    node[last] = old + (1 if isinstance(old, int) else "x")
                case 2 if isinstance(old, list) and old:
                    choose.shuffle(old)
                case 3 if isinstance(node, dict):
                    node[choose.choice(["x", *node])] = node.pop(last)
                case _:
                    node[last] = choose.choice(values)
            broken = join(*new, rest)
        (tmp_path / "file").write_bytes(broken)
        try:
            loaded = fp8.load_safetensors(tmp_path / "file")
        except ValueError as error:
            assert str(tmp_path / "file") in str(error)  # noqa: PT017
            seen.add("error")
        else:
            assert_same(loaded, served)
            seen.add("right")
    assert seen == {"error", "right"}


def test_flipped_bits(small, tmp_path):
    """A flipped bit is found in any tensor, and in all other parts of the file that are read."""
    _, data, served = small
    _, _, rest = split(data)
    start, path = len(data) - len(rest), tmp_path / "file"
    for i in range(start, len(data)):
        broken = bytearray(data)
        broken[i] ^= 1 << (i % 8)
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=rf"{path} is damaged: the checksum of '.*' does not match"):
            fp8.load_safetensors(path)
    path.write_bytes(data)
    assert_same(fp8.load_safetensors(path), served)


def test_version_2(small, tmp_path):
    """A file of version 2 can be read; it has no checksums of single tensors."""
    _, data, served = small
    header, own, rest = split(data)
    for entry in own["tensors"].values():
        del entry["crc32"]
    own["checksum"] = zlib.crc32(json.dumps(own["tensors"], sort_keys=True).encode())
    (tmp_path / "file").write_bytes(join(header, {**own, "version": 2}, rest))
    assert_same(fp8.load_safetensors(tmp_path / "file"), served)


@pytest.mark.parametrize("where", ["library", "disk"])
def test_a_full_disk_leaves_the_old_file(where, small, tmp_path, monkeypatch):
    """Also with safetensors 0.6 and 0.7, which write into the file that is there."""

    def save_file(tensors, path, metadata):
        with open(path, "wb") as file:
            file.write(b"half")
        raise safetensors.SafetensorError("No space left on device (os error 28)")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model, data, served = small
    path = tmp_path / "file"
    path.write_bytes(data)
    if where == "library":
        monkeypatch.setattr(safetensors.numpy, "save_file", save_file)
    else:
        monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        fp8.save_safetensors(path, model, served)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_arrays_of_64_bits(small, tmp_path):
    model, path = small[0], tmp_path / "file"
    for value, narrow in (
        (np.array([2**40, 1]), "int32"),
        (np.array(1 + 2**-40), "float32"),
        (2**40, "int32"),
    ):
        fp8.save_safetensors(path, model, {"params": {"a": {"b": value}}})
        written = safetensors.numpy.load_file(path)["a.b"]
        np.testing.assert_array_equal(written, value)
        dtype = written.dtype.name
        with pytest.raises(
            ValueError, match=rf"file: params/a/b is {dtype}, .* narrow to {narrow}. Enable jax_enable_x64"
        ):
            fp8.load_safetensors(path)
        with jax.enable_x64(True):
            loaded = fp8.load_safetensors(path)["params"]["a"]["b"]
        assert loaded.dtype == written.dtype
        np.testing.assert_array_equal(np.asarray(loaded), value)


def test_what_the_library_writes_is_checked(small, tmp_path, monkeypatch):
    def save_file(tensors, path, metadata):
        wide = {name: array.astype(np.float32) for name, array in tensors.items()}
        original(wide, path, metadata)

    original = safetensors.numpy.save_file
    monkeypatch.setattr(safetensors.numpy, "save_file", save_file)
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/file: .* is F32\[8, .\] in the file, and was written as F8_E.M"
    ):
        fp8.save_safetensors(tmp_path / "file", small[0], small[2])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert not (tmp_path / "file").read_bytes()

"""Layers that are fused or stacked in the model or in the file: split, joined and numbered by rename."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import fp8flax as fp8
from tests.cases import OWG, RECIPES, assert_same, normal
from tests.models import trained

X = np.asarray(normal(0, 8, 64))
DTYPES = {"F8_E4M3": np.uint8, "F8_E8M0": np.uint8, "F32": np.float32}


def read(path):
    """Returns the tensors of a file; those of one byte as uint8."""
    return {
        name: np.frombuffer(info["data"], DTYPES[info["dtype"]]).reshape(info["shape"])
        for name, info in safetensors.deserialize(path.read_bytes())
    }


def zeros_like(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


class Fused(nn.Module):
    """Queries, keys and values from one kernel, and an output from several input dimensions."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(512, name="qkv_proj")(x)
        x = nn.DenseGeneral((2, 48), name="heads")(x)
        return nn.Dense(3, name="last")(x)


class Split(nn.Module):
    """Queries, keys and values from three kernels; the keys have two output dimensions."""

    @nn.compact
    def __call__(self, x):
        q, v = nn.Dense(128, name="q_proj")(x), nn.Dense(40, name="v_proj")(x)
        k = nn.DenseGeneral((2, 128), name="k_proj")(x)
        return jnp.concatenate([q, k.reshape(*k.shape[:-2], -1), v], -1)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(64, name="out")(nn.DenseGeneral((3, 64), name="qkv")(x).sum(-2)), None


class Stack(nn.Module):
    """Three layers that ``nn.scan`` stacks."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan(Layer, variable_axes={"params": 0, OWG: 0}, split_rngs={"params": True}, length=3)
        x = nn.LayerNorm(name="norm")(x)
        return scan(name="layers")(x, None)[0]


SPLIT = {r"qkv_proj": {"q_proj": 256, "k_proj": 128, "v_proj": 128}, "^": "model."}
JOIN = {("^q_proj", "k_proj", "v_proj"): "qkv_proj"}
NUMBERED = {
    r"^layers\.": "model.layers.{0}.",
    r"qkv\b": {"self_attn.q_proj": 64, "self_attn.k_proj": 64, "self_attn.v_proj": 64},
}
MODELS = {
    "split": (Fused(), SPLIT),
    "joined": (Split(), JOIN),
    "numbered": (Stack(), NUMBERED),
}


def in_parts(name, whole):
    """Returns the tensors of the file, made in NumPy from the tensors of the file without ``rename``."""
    if name == "split":
        parts = {}
        for key, array in whole.items():
            layer, last = key.split(".")
            if layer != "qkv_proj":
                parts["model." + key] = array
                continue
            half = len(array) // 2
            pieces = np.split(array, [half, half + half // 2]) if half else [array] * 3
            parts |= {f"model.{x}_proj.{last}": piece for x, piece in zip("qkv", pieces)}
        return parts
    if name == "joined":
        lasts = {key.split(".")[1] for key in whole}
        return {
            f"qkv_proj.{last}": np.concatenate([whole[f"{x}_proj.{last}"] for x in "qkv"]) for last in lasts
        }
    parts = {}
    for key, array in whole.items():
        if key.startswith("norm."):
            parts[key] = array
            continue
        _, layer, last = key.split(".")
        for i in range(3):
            if layer == "out":
                parts[f"model.layers.{i}.out.{last}"] = array[i]
                continue
            thirds = np.split(array[i], 3) if len(array[i]) > 1 else [array[i]] * 3
            parts |= {f"model.layers.{i}.self_attn.{x}_proj.{last}": t for x, t in zip("qkv", thirds)}
    return parts


CELLS = [
    ("split", "delayed"),
    ("split", "block128"),
    ("joined", "axiswise"),
    ("joined", "block128"),
    ("numbered", "mxfp8"),
    ("numbered", "delayed"),
]


@pytest.mark.oldest
@pytest.mark.parametrize(("name", "recipe"), CELLS)
def test_files_in_parts(name, recipe, tmp_path):
    """The file has the bits of the whole tensors, and loads into the frozen model and into the wide one."""
    model, rename = MODELS[name]
    model8, variables = trained(model, X, recipe=RECIPES[recipe], exclude="last")
    model, served = fp8.freeze(model8, variables)
    fp8.save_safetensors(tmp_path / "whole", model, served)
    fp8.save_safetensors(tmp_path / "parts", model, served, rename=rename)
    found, expected = read(tmp_path / "parts"), in_parts(name, read(tmp_path / "whole"))
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(found[key], array, err_msg=key)
    checkpoint = fp8.read_checkpoint(tmp_path / "parts")
    assert_same(fp8.load_into(zeros_like(served), checkpoint, rename=rename), served)
    whole = fp8.load_into(zeros_like(variables), fp8.read_checkpoint(tmp_path / "whole"))
    assert_same(fp8.load_into(zeros_like(variables), checkpoint, rename=rename), whole)
    weights = fp8.weights_for_serving(model8, variables, rename=rename)
    assert weights.keys() == found.keys()
    for key, array in found.items():
        assert np.asarray(weights[key]).tobytes() == array.tobytes()
    with pytest.raises(
        ValueError, match=r"parts was written with a rename that splits.* fp8flax\.load_into"
    ):
        fp8.load_safetensors(tmp_path / "parts")

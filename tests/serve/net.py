"""A model with a layer of each form, and what files of it hold by the library of the format."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors

import fp8flax as fp8
from tests import cases
from tests.cases import assert_same, normal
from tests.models import trained

X = np.asarray(normal(0, 8, 64))
RECIPES = {**cases.RECIPES, "nvfp4": fp8.NVFP4BlockScaling()}
DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F32": np.float32,
    "U8": np.uint8,
}


class Net(nn.Module):
    """A matrix, several output dimensions, several input dimensions, a norm, and a wide layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(160, name="up")(x)
        x = nn.DenseGeneral((8, 12), name="heads")(x)
        x = nn.DenseGeneral(40, axis=(-2, -1), name="out")(x)
        x = nn.LayerNorm(name="norm")(x)
        return nn.Dense(3, name="last")(x)


def frozen_net(recipe):
    """Returns the variables of the net in training, and the frozen net with its variables."""
    model8, variables = trained(Net(), X, recipe=RECIPES.get(recipe), exclude="last")
    variables["params"]["heads"]["bias"] = normal(1, 8, 12)
    return model8, variables, *fp8.freeze(model8, variables, X, weight_only=recipe == "weight_only")


def written_and_read(path, model, served, rename=None):
    """Returns the checkpoint in the file of a frozen model, which loads bit for bit into that model."""
    fp8.save_safetensors(path, model, served, rename=rename)
    checkpoint = fp8.read_checkpoint(path)
    assert_same(fp8.load_into(jax.tree.map(jnp.zeros_like, served), checkpoint, rename=rename), served)
    return checkpoint


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

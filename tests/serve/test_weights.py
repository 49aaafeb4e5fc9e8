"""The weights for a server are the tensors of the file, made on the devices by one program."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import RECIPES, normal
from tests.models import trained
from tests.serve.net import X, frozen_net

RENAME = {"^(up|heads|out)": r"model.\1_proj", "last.kernel": "last.weight"}


def assert_as_in_file(weights, path):
    """Asserts that the bits of all tensors are those that the library of the format reads."""
    file = dict(safetensors.deserialize(path.read_bytes()))
    assert weights.keys() == file.keys()
    for name, array in weights.items():
        assert isinstance(array, jax.Array)
        assert list(array.shape) == file[name]["shape"]
        assert np.asarray(array).tobytes() == bytes(file[name]["data"]), name


@pytest.mark.newest
@pytest.mark.parametrize("recipe", ["delayed", "block128", "nvfp4"])
def test_bits_are_those_of_the_file(recipe, tmp_path):
    model8, variables, *frozen = frozen_net(recipe)
    fp8.save_safetensors(tmp_path / "a", *frozen, rename=RENAME)
    weights_of = lambda v: fp8.weights_for_serving(model8, v, X, rename=RENAME)  # noqa: E731
    for weights in (weights_of(variables), jax.jit(weights_of)(variables)):
        assert_as_in_file(weights, tmp_path / "a")
    assert "model.heads_proj.bias" in weights


def test_errors():
    model8, variables = trained(nn.Dense(4), X, recipe=RECIPES["current"])
    state = fp8.TrainState.create(apply_fn=model8.apply, params=variables, tx=optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"must be the collections .*; got TrainState\. Pass state\.params"):
        fp8.weights_for_serving(model8, state, X)
    with pytest.raises(TypeError, match="rename must"):
        fp8.weights_for_serving(model8, variables, X, rename=["up"])
    with pytest.raises(ValueError, match="which matches none of"):
        fp8.weights_for_serving(model8, variables, X, rename={"down": "up"})
    with pytest.raises(ValueError, match="it is frozen already"):
        fp8.weights_for_serving(*fp8.freeze(model8, variables, X), X)
    with pytest.raises(TypeError, match=r"variables must be the collections of the model; got ndarray"):
        fp8.weights_for_serving(model8, X)
    with pytest.raises(TypeError, match=r"must be a flax\.nnx\.Module or a flax\.linen\.Module; got dict"):
        fp8.weights_for_serving(variables, X)


LONG_NVFP4 = pytest.param("nvfp4", "weight_packed", marks=pytest.mark.long)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize(("recipe", "end"), [("block128", "weight"), LONG_NVFP4])
def test_sharded_variables(recipe, end, tmp_path):
    """The weights of sharded kernels are sharded along the same dimension, and have the same bits."""
    model8, variables, *frozen = frozen_net(recipe)
    fp8.save_safetensors(tmp_path / "a", *frozen, rename=RENAME)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))

    def sharded(x, dim):
        spec = PartitionSpec(*(None,) * dim, "x") if x.ndim > 1 and x.shape[dim] % 8 == 0 else ()
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    for dim, in_file in ((0, 1), (1, 0)):
        shards = jax.tree.map(lambda x, dim=dim: sharded(x, dim), variables)
        with jax.set_mesh(mesh):
            weights = jax.jit(lambda v: fp8.weights_for_serving(model8, v, X, rename=RENAME))(shards)
        assert_as_in_file(weights, tmp_path / "a")
        for name in ("up", "heads"):
            weight = weights[f"model.{name}_proj.{end}"]
            expected = [n // 8 if i == in_file else n for i, n in enumerate(weight.shape)]
            assert [s.data.shape for s in weight.addressable_shards] == [tuple(expected)] * 8


class NnxNet(nnx.Module):
    """Layers in FP8, a list of layers, a stack, and variables that are in no file."""

    def __init__(self, recipe):
        op, rngs = fp8nnx.Fp8DotGeneralOp(recipe=recipe), nnx.Rngs(0)
        self.layers = nnx.List([nnx.LinearGeneral(16, (2, 32), dot_general=op, rngs=rngs)])
        self.last = nnx.LinearGeneral((2, 32), 3, axis=(-2, -1), rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.last(self.layers[0](x)), deterministic=True)


TO_HUB = {"^layers": "model.layers"}


@pytest.mark.filterwarnings("ignore:These scales are frozen")
def test_nnx(tmp_path):
    model, x = NnxNet(RECIPES["delayed"]), normal(0, 4, 16)
    weights_of = nnx.jit(lambda model: fp8.weights_for_serving(model, x, rename=TO_HUB))
    seen = set()
    for _ in range(2):
        nnx.update(model, jax.tree.map(lambda x: x * np.float32(1.5), nnx.state(model, nnx.Param)))
        weights = weights_of(model)
        seen.add(np.asarray(weights["last.kernel"]).tobytes())
    assert len(seen) == 2
    frozen, other = fp8.freeze(model, x), fp8.freeze(model, x)
    fp8.save_safetensors(tmp_path / "a", frozen, rename=TO_HUB)
    assert_as_in_file(weights, tmp_path / "a")
    assert weights["model.layers.0.weight"].shape == (64, 16)
    target = jax.tree.map(jnp.zeros_like, nnx.state(other, nnx.Not(nnx.RngState)))
    for checkpoint in (fp8.read_checkpoint(tmp_path / "a"), weights):
        nnx.update(other, fp8.load_into(target, checkpoint, rename=TO_HUB))
        np.testing.assert_array_equal(other(x), frozen(x))
    with pytest.raises(ValueError, match="it is frozen already"):
        fp8.weights_for_serving(frozen, x)
    assert model.layers[0].kernel.get_value().dtype == jnp.float32

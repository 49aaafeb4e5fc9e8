"""Orbax saves and restores frozen models, as it does any tree or state."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import RECIPES, assert_same, normal
from tests.models import MODELS, trained
from tests.nnx.test_serving import Twin


def saved_and_restored(folder, tree, target):
    """Returns what Orbax restores into the shapes of ``target`` after it has saved ``tree``."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "model", tree)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "model", target)


@pytest.mark.newest
def test_linen(tmp_path):
    """The target has the shapes that ``freeze`` returns; the outputs have the same bits."""
    x = normal(0, 2, 4, 8)
    model8, variables = trained(MODELS["scan"][0](), x, recipe=RECIPES["mxfp8"])
    serve, served = fp8.freeze(model8, variables, x)
    target = jax.eval_shape(lambda v: fp8.freeze(model8, v, x)[1], variables)
    restored = saved_and_restored(tmp_path, served, target)
    assert_same(restored, served)
    apply = jax.jit(serve.apply)
    np.testing.assert_array_equal(apply(restored, x), apply(served, x))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:These scales are frozen")
def test_nnx(tmp_path):
    x = normal(0, 4, 16)
    model = Twin(nnx.Rngs(0))
    fp8nnx.calibrate(lambda model, x: model(x), model, [x])
    frozen = fp8nnx.freeze(model, x)
    # A new process makes the target without values.
    other = nnx.eval_shape(lambda: fp8nnx.freeze(Twin(nnx.Rngs(1)), x))
    graphdef, target = nnx.split(other)
    restored = nnx.merge(graphdef, saved_and_restored(tmp_path, nnx.state(frozen), target))
    assert restored.first.kernel.get_value().dtype.name == "float8_e4m3fn"
    np.testing.assert_array_equal(restored(x), frozen(x))

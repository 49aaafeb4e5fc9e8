"""Kernels of experts, of ragged dots, batched matmuls and loops: frozen, in files, and read back."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import OWG, largest_array, normal, variables_of
from tests.gpus import compiled_for_gpus
from tests.serve.net import RECIPES, X, read, written_and_read

EXPERTS, DEPTH, COLUMNS = 3, 64, 160
ROWS, SIZES = np.tile(X, (6, 1)), jnp.array([10, 0, 30])  # 48 rows, of which 8 belong to no expert


def products(way, rows, kernel):
    """Returns the rows of each expert times its kernel."""
    rows = rows.reshape(EXPERTS, -1, DEPTH)
    if way == "batched":
        return jnp.einsum("ecd,edf->ecf", rows, kernel)
    return jnp.stack([x @ kernel[i] for i, x in enumerate(rows)])


class Experts(nn.Module):
    """Experts whose op is given by hand, or left to ``quantize_model``."""

    way: str = "by hand"

    @nn.compact
    def __call__(self, rows, sizes):
        init = nn.initializers.lecun_normal(batch_axis=0)
        kernel = self.param("kernel", init, (EXPERTS, DEPTH, COLUMNS)).astype(rows.dtype)
        if self.way in ("batched", "loop"):
            return products(self.way, rows, kernel)
        multiply = fp8.Fp8RaggedDotOp() if self.way == "by hand" else jax.lax.ragged_dot
        return multiply(rows, kernel, sizes)


class Stack(nn.Module):
    way: str = "by hand"

    @nn.compact
    def __call__(self, x, sizes):
        axes = {"variable_axes": {"params": 0, OWG: 0}, "split_rngs": {"params": True}}
        body = nn.scan(lambda layer, x, _: (layer(x, sizes)[..., :DEPTH], None), length=2, **axes)
        shape = (EXPERTS, -1, DEPTH) if self.way == "loop" else x.shape
        return body(Experts(self.way, name="kernel"), x.reshape(shape), None)[0]


def frozen_experts(way, recipe, x=ROWS):
    """Returns experts in training and frozen, each with its variables."""
    model = Stack(way[8:] or "by hand") if way.startswith("stacked") else Experts(way)
    model8 = model if way in ("by hand", "stacked") else fp8.quantize_model(model, include="")
    variables = variables_of(model8, x, SIZES)
    if recipe == "delayed":
        variables = fp8.calibrate(lambda v, x: model8.apply(v, x, SIZES), variables, [x])
    return model8, variables, *fp8.freeze(model8, variables, x, SIZES, weight_only=recipe == "weight_only")


@pytest.mark.parametrize(
    ("way", "recipe", "name", "shape"),
    [
        ("by hand", "delayed", "weight_scale", (EXPERTS, 1)),
        ("by hand", "block128", "weight_scale_inv", (EXPERTS, 2, 1)),
        ("by hand", "weight_only", "weight_scale", (EXPERTS, COLUMNS, 1)),
        ("converted", "current", "weight_scale", (EXPERTS, 1)),
        ("converted", "mxfp8", "weight_scale", (EXPERTS, COLUMNS, 2)),
        ("batched", "delayed", "weight_scale", (EXPERTS, 1)),
        ("batched", "axiswise", "weight_scale", (EXPERTS, COLUMNS, 1)),
        ("batched", "block128", "weight_scale_inv", (EXPERTS, 2, 1)),
        ("batched", "nvfp4", "weight_global_scale", (EXPERTS, 1)),
        ("stacked", "delayed", "weight_scale", (2, EXPERTS, 1)),
        ("loop", "delayed", "weight_scale", (EXPERTS, 1)),
        ("loop", "mxfp8", "weight_scale", (EXPERTS, COLUMNS, 2)),
        ("loop", "nvfp4", "weight_global_scale", (EXPERTS, 1)),
        ("stacked loop", "delayed", "weight_scale", (2, EXPERTS, 1)),
        ("stacked loop", "block128", "weight_scale_inv", (2, EXPERTS, 2, 1)),
    ],
)
def test_experts(way, recipe, name, shape, tmp_path):
    """The bits of training; the shapes that vLLM documents; and back, bit for bit and dequantized."""
    with fp8.autocast(recipe=RECIPES.get(recipe, RECIPES["current"])):
        model8, variables, serve, served = frozen_experts(way, recipe)
        out, expected = (
            jax.jit(m.apply)(v, ROWS, SIZES) for m, v in ((serve, served), (model8, variables))
        )
    rename = {r"^kernel\.": "experts.w13_"}
    checkpoint = written_and_read(tmp_path / "a", serve, served, rename)
    assert read(tmp_path / "a")[0][f"experts.w13_{name}"].shape == shape
    weight = checkpoint["experts.w13_weight"]
    assert weight.shape[-3:] == (EXPERTS, COLUMNS, DEPTH)
    wide = {"params": variables["params"]}
    (values,) = jax.tree.leaves(fp8.load_into(wide, checkpoint, rename=rename))
    np.testing.assert_array_equal(values, weight.dequantize().swapaxes(-1, -2))
    if recipe == "weight_only":
        expected = [ROWS[:10] @ values[0], ROWS[10:40] @ values[2], np.zeros((8, COLUMNS))]
        np.testing.assert_allclose(out, np.concatenate(expected), rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(out, expected)
    if way == "by hand" and recipe == "delayed":  # the gradient of the dequantized kernels
        of_rows = [np.tile(values[e].sum(1), (SIZES[e], 1)) for e in (0, 2)]
        grad = jax.grad(lambda x: serve.apply(served, x, SIZES).sum())(ROWS)
        np.testing.assert_allclose(grad, np.concatenate([*of_rows, np.zeros((8, DEPTH))]), atol=1e-4)
    if way == "batched" and recipe == "delayed":  # one scale for all kernels: several cannot be held
        checkpoint["experts.w13_weight"] = weight._replace(
            scale=weight.scale * np.float32([[[1]], [[1]], [[2]]])
        )
        with pytest.raises(ValueError, match="with the recipe of the checkpoint"):
            fp8.load_into(served, checkpoint, rename=rename)


class NnxExperts(nnx.Module):
    def __init__(self, way, recipe):
        self.kernel, self.way = nnx.Param(normal(0, EXPERTS, DEPTH, COLUMNS) / 8), way
        if way == "by hand":
            self.op = fp8nnx.Fp8RaggedDotOp(EXPERTS, recipe=recipe)

    def __call__(self, rows):
        if self.way in ("batched", "loop"):
            return products(self.way, rows, self.kernel[...] if self.way == "batched" else self.kernel)
        multiply = self.op if self.way == "by hand" else jax.lax.ragged_dot
        return multiply(rows, self.kernel[...], SIZES)


@pytest.mark.parametrize(
    ("way", "recipe"),
    [
        ("by hand", "delayed"),
        ("converted", "block128"),
        ("batched", "axiswise"),
        ("loop", "delayed"),
        ("loop", "axiswise"),
    ],
)
def test_experts_of_nnx(way, recipe, tmp_path):
    """The bits of training, also after the file is read back. A loop makes no array of two experts."""
    model = NnxExperts(way, RECIPES[recipe])
    if way != "by hand":
        model = fp8.quantize_model(model, ROWS, recipe=RECIPES[recipe], include="")
    if recipe == "delayed":
        fp8nnx.calibrate(lambda model, x: model(x), model, [ROWS])
    frozen = fp8.freeze(model, ROWS)
    fp8.save_safetensors(tmp_path / "a", frozen)
    nnx.update(frozen, jax.tree.map(jnp.zeros_like, nnx.state(frozen)))
    fp8.load_into(frozen, fp8.read_checkpoint(tmp_path / "a"))
    assert frozen.kernel.get_value().dtype == jnp.float8_e4m3fn
    if way == "loop":
        graphdef, state = nnx.split(frozen)
        size = largest_array(lambda state, x: nnx.merge(graphdef, state)(x), state, ROWS[:3])
        assert size < 2 * DEPTH * COLUMNS
    np.testing.assert_array_equal(*(nnx.jit(lambda model: model(ROWS))(each) for each in (frozen, model)))


CASES = [("stacked", name) for name in ("current", "block128", "weight_only")]


@pytest.mark.parametrize(("way", "recipe"), [*CASES, ("stacked loop", "current")])
def test_no_kernel_of_experts_is_made_wide(gpu, way, recipe):
    """All arrays of a program for an H200 that are as large as the kernels of the experts are codes."""
    x = normal(0, 528, DEPTH, dtype=jnp.bfloat16)
    with fp8.autocast(recipe=RECIPES.get(recipe, RECIPES["current"])):
        _, _, serve, served = frozen_experts(way, recipe, x)
    program = compiled_for_gpus("h200", serve.apply, served, x, SIZES)
    arrays = re.findall(r"(\w+)\[([\d,]+)\]", program)
    assert {dtype for dtype, dims in arrays if {"3", "64", "160"} <= {*dims.split(",")}} == {"f8e4m3fn"}

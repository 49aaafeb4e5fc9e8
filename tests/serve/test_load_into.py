"""Checkpoints go into the variables of models: dequantized into wide ones, bit for bit into frozen ones."""

import json
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import OWG, assert_same, normal
from tests.models import trained
from tests.serve.net import RECIPES, X, frozen_net, written_and_read
from tests.serve.test_checkpoints import codes_of, in_blocks, scales_of, write

E4M3 = ml_dtypes.float8_e4m3fn
TO_HUB = {r"^": "model.", r"\.(kernel|scale)$": ".weight"}


def zeros_like(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def wide_kernel(params, name, scale_rows, scale_columns):
    """Computes the wide kernel of a frozen layer in NumPy, from its codes and its scale."""
    kernel = np.asarray(params[name]["kernel"]).astype(np.float32)
    scale = np.asarray(params[name]["Fp8DotGeneralOp_0"]["kernel_scale"]).astype(np.float32)
    if scale_rows is None:
        return kernel * scale
    summed = {"up": 64, "heads": 160, "out": 96}[name]
    matrix = kernel.reshape(summed, -1).T
    scale = scale.repeat(scale_rows, 1).repeat(scale_columns, 2)[0, : matrix.shape[0], : matrix.shape[1]]
    tensor_scale = np.asarray(params[name]["Fp8DotGeneralOp_0"].get("kernel_tensor_scale", 1), np.float32)
    return (matrix * scale * tensor_scale).T.reshape(kernel.shape)


@pytest.mark.newest
@pytest.mark.parametrize("recipe", ["delayed", "block128", "mxfp8", "nvfp4"])
def test_own_files(recipe, tmp_path):
    """The file of a frozen model loads bit for bit into that model, and dequantized into a wide one."""
    rename = None if recipe == "block128" else TO_HUB
    model8, variables, model, served = frozen_net(recipe)
    checkpoint = written_and_read(tmp_path / "a", model, served, rename)
    weights = fp8.weights_for_serving(model8, variables, X, rename=rename)
    assert_same(fp8.load_into(zeros_like(served), weights, rename=rename), served)
    # Into the wide model: scaling state is left as it is.
    target = zeros_like(variables)
    loaded = fp8.load_into(target, checkpoint, rename=rename)
    assert_same(fp8.load_into(target, weights, rename=rename), loaded)
    rows, columns = {"block128": (128, 128), "mxfp8": (1, 32), "nvfp4": (1, 16)}.get(recipe, (None, None))
    for name in ("up", "heads", "out"):
        expected = wide_kernel(served["params"], name, rows, columns)
        np.testing.assert_array_equal(loaded["params"][name]["kernel"], expected)
        np.testing.assert_array_equal(loaded["params"][name]["bias"], served["params"][name]["bias"])
    assert_same(loaded["params"]["norm"], variables["params"]["norm"])
    assert_same(loaded["params"]["last"], variables["params"]["last"])
    assert_same(loaded.get(OWG, {}), target.get(OWG, {}))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(64, name="dense")(x), None


@pytest.mark.parametrize(
    ("axes", "name", "recipe"),
    [
        *(((0,), "weight", "axiswise"), ((1,), "kernel", "axiswise"), ((0, 0), "weight", "axiswise")),
        *(((-1,), "kernel", "delayed"), ((-1,), "kernel", "block128")),
        pytest.param((0, 0), "weight", "nvfp4", marks=pytest.mark.long),
    ],
)
def test_stacked_layers(axes, name, recipe, tmp_path):
    """A file of layers that ``nn.scan`` stacked, once or twice, loads into the same stack."""

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan, options = Block, {"split_rngs": {"params": True}}
            for axis, length in zip(axes, (3, 2)):
                scan = nn.scan(scan, variable_axes={"params": axis}, length=length, **options)
            return scan(name="layers")(x, None)[0]

    model8, variables = trained(Stack(), X, recipe=RECIPES[recipe])
    model, served = fp8.freeze(model8, variables, X)
    out, changed = model.apply(served, X, mutable=True)
    np.testing.assert_array_equal(out, model8.apply(variables, X))
    assert_same(changed, served)  # a call of a frozen model changes no parameter
    checkpoint = written_and_read(tmp_path / "a", model, served)
    assert f"layers.dense.{name}" in checkpoint
    weights = fp8.weights_for_serving(model8, variables, X)
    assert_same(fp8.load_into(zeros_like(served), weights), served)
    if name == "weight":
        loaded = fp8.load_into(zeros_like(variables), checkpoint)["params"]["layers"]["dense"]["kernel"]
        kernel = served["params"]["layers"]["dense"]
        scale = kernel["Fp8DotGeneralOp_0"]["kernel_scale"]
        values = kernel["kernel"].astype(jnp.float32)
        if recipe == "nvfp4":
            values *= scale.astype(jnp.float32).repeat(16, -1).squeeze(-3).swapaxes(-1, -2)
            scale = kernel["Fp8DotGeneralOp_0"]["kernel_tensor_scale"][..., None]
        np.testing.assert_array_equal(loaded, values * scale)


@pytest.mark.parametrize(
    ("params", "state", "length", "history"), [(1, 0, 3, 1), (-1, 1, 3, 3), (2, -1, 1, 1024)]
)
def test_stacks_of_ops_by_hand(params, state, length, history, tmp_path):
    """Parameters and state along any axes: a step and the frozen model are those of a loop of layers."""
    x, axes = normal(0, 4, 8), {"params": params, OWG: state}
    op = partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=history))
    dense = partial(nn.Dense, 8, use_bias=False, dot_general_cls=op)

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"variable_axes": axes, "split_rngs": {"params": True}, "length": length}
            return nn.scan(lambda layer, x, _: (layer(x), None), **options)(dense(name="up"), x, None)[0]

    def layers(variables):
        one = [partial(jnp.take, indices=i) for i in range(length)]
        return [
            {c: jax.tree.map(partial(take, axis=axes[c]), variables[c]["up"]) for c in axes} for take in one
        ]

    def one_by_one(layers):
        out = x
        for each in layers:
            out = dense().apply(each, out)
        return jnp.mean(out**2), out

    @jax.jit
    def step(train_state):
        grads = fp8.grad(lambda v: jnp.mean(train_state.apply_fn(v, x) ** 2))(train_state.params)
        return train_state.apply_gradients(grads=grads)

    model, close = Stack(), partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    variables = model.init(jax.random.key(0), x)
    before = step(fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1)))
    old, variables = layers(before.params), step(before).params
    expected = jax.jit(fp8.grad(lambda layers: one_by_one(layers)[0]))(old)
    for each, grads in zip(old, expected):
        grads["params"]["kernel"] = each["params"]["kernel"] - 0.1 * grads["params"]["kernel"]
    jax.tree.map(close, layers(variables), expected)
    frozen, served = fp8.freeze(model, variables, x)
    close(frozen.apply(served, x), one_by_one(layers(variables))[1])
    assert served["params"]["up"]["kernel"].dtype == E4M3
    written_and_read(tmp_path / "a", frozen, served)


@pytest.mark.filterwarnings("ignore:These scales are frozen")
def test_stacks_that_are_refused():
    """State has one dimension. NNX slices the kernel and the scales of a frozen layer alike."""
    scan = nn.scan(Block, variable_axes={"params": 2}, length=3, split_rngs={"params": True})
    with pytest.raises(AssertionError) as error:
        fp8.quantize_model(scan(), include=".*").init(jax.random.key(0), X, None)
    assert "along axis 0, 1 or -1" in error.value.__notes__[0]


@pytest.mark.filterwarnings("ignore:These scales are frozen")
@pytest.mark.parametrize("features", [8, 3])
def test_nnx_stacks_along_another_axis_stay_wide(features):
    """Three layers with as many features could be stacked along the first axis, by their shape."""
    axes, x = nnx.StateAxes({nnx.Param: 1, ...: 0}), normal(0, 3, 4, features)

    class Stack(nnx.Module):
        def __init__(self):
            def layer(rngs):
                op = fp8nnx.Fp8DotGeneralOp()
                return nnx.Linear(features, 6, use_bias=False, dot_general=op, rngs=rngs)

            self.layers = nnx.vmap(layer, out_axes=axes)(nnx.Rngs(0).split(3))

        def __call__(self, x):
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(axes, 0))(self.layers, x)

    model = Stack()
    with pytest.warns(UserWarning, match="in NNX only the first"):
        frozen = fp8.freeze(model, x)
    np.testing.assert_array_equal(frozen(x), model(x))


@pytest.mark.parametrize(
    ("equation", "recipe"),
    [
        *(("bi,oi->bo", "axiswise"), ("bi,iho->bho", "axiswise")),
        *(("bi,hio->bho", recipe) for recipe in ("block128", "axiswise", "delayed")),
    ],
)
def test_files_have_the_layout_of_pytorch(equation, recipe, tmp_path):
    """A kernel is ``(out, in)`` in the file, in whatever order its equation has the dimensions."""
    shape = {"oi": (96, 64), "hio": (3, 64, 32), "iho": (64, 3, 32)}[equation[3:].partition("->")[0]]

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Einsum(shape, equation, use_bias=False, name="layer")(x)

    model8, variables = trained(Own(), X, recipe=RECIPES[recipe])
    model, served = fp8.freeze(model8, variables, X)
    fp8.save_safetensors(tmp_path / "a", model, served)
    checkpoint = fp8.read_checkpoint(tmp_path / "a")
    weight, kernel = checkpoint["layer.weight"], np.asarray(served["params"]["layer"]["kernel"])
    order = {"oi": (0, 1), "hio": (0, 2, 1), "iho": (1, 2, 0)}[equation[3:].partition("->")[0]]
    np.testing.assert_array_equal(weight.codes, kernel.transpose(order).reshape(96, 64))
    if equation == "bi,oi->bo":  # Flax sums over the first dimensions, so the shape does not fit
        with pytest.raises(ValueError, match="does not become"):
            fp8.load_into(variables, checkpoint)
        return
    assert_same(fp8.load_into(zeros_like(served), checkpoint), served)
    expected = weight.dequantize().reshape([kernel.shape[i] for i in order]).transpose(np.argsort(order))
    loaded = fp8.load_into(variables, checkpoint)["params"]["layer"]["kernel"]
    np.testing.assert_array_equal(loaded, expected)


def test_kernels_in_the_order_of_the_model_are_renamed_to_no_weight(tmp_path):
    """A file has weights as ``(out, in)``, and ``load_into`` would transpose them."""

    class Halves(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("kernel", nn.initializers.lecun_normal(), (64, 64))
            return x @ w[:, :32], x @ w[:, 32:]

    model8, variables = trained(Halves(), X, recipe=RECIPES["current"])
    model, served = fp8.freeze(model8, variables, X)
    assert served["params"]["kernel"].dtype == E4M3
    written_and_read(tmp_path / "a", model, served)
    with pytest.raises(ValueError, match="rename makes a weight of params/kernel"):
        fp8.save_safetensors(tmp_path / "b", model, served, rename={"kernel$": "weight"})


def test_a_bias_in_another_order_than_the_weight(tmp_path):
    """The rows of the weight are (h, b), and the bias is (b, h): it is not merged to the wrong rows."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Einsum((64, 2, 4), "td,dhb->tbh", bias_init=nn.initializers.normal(), name="layer")(x)

    model8, variables = trained(Own(), X, recipe=RECIPES["current"])
    model, served = fp8.freeze(model8, variables, X)
    checkpoint = written_and_read(tmp_path / "a", model, served)
    assert (checkpoint["layer.weight"].shape, checkpoint["layer.bias"].shape) == ((8, 64), (4, 2))


@pytest.mark.parametrize("recipe", ["delayed", "axiswise", "block128"])
@pytest.mark.parametrize(
    ("equation", "shape"),
    [("bi,oi->bo", (64, 64)), ("bi,ohi->boh", (8, 8, 64)), ("abi,aoi->abo", (2, 64, 64))],
)
def test_square_kernels_that_sum_over_the_last_dimension(equation, shape, recipe, tmp_path):
    """``load_into`` would take them for ``(in, out)``, so they keep their order, name and scales."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.lecun_normal(), shape)
            dense = nn.Dense(64, use_bias=False)(x)  # a square kernel of Flax
            return jnp.einsum(equation, x, w).reshape(dense.shape) + dense

    x = normal(0, *(2,) * (equation[0] == "a"), 8, 64)
    model8, variables = trained(Own(), x, recipe=RECIPES[recipe])
    model, served = fp8.freeze(model8, variables, x)
    assert {"w", "Dense_0.weight"} <= written_and_read(tmp_path / "a", model, served).keys()
    assert served["params"]["w"].dtype == E4M3


@pytest.mark.parametrize(("recipe", "name"), [("delayed", "weight"), ("block128", "kernel")])
def test_einsums_that_sum_over_several_dimensions(recipe, name, tmp_path):
    """The file has them in the order of the kernel; ``jnp.einsum`` sums over them in alphabetical order."""

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Einsum((4, 16, 96), "bhd,hdo->bo", use_bias=False, name="layer")(x.reshape(-1, 4, 16))

    model8, variables = trained(Own(), X, recipe=RECIPES[recipe])
    model, served = fp8.freeze(model8, variables, X)
    checkpoint = written_and_read(tmp_path / "a", model, served)
    kernel = np.asarray(served["params"]["layer"]["kernel"])
    if name == "weight":
        kernel = kernel.reshape(64, 96).T
        np.testing.assert_array_equal(checkpoint["layer.weight"].codes, kernel)
    else:  # blocks are in the order of the einsum
        np.testing.assert_array_equal(checkpoint["layer.kernel"], kernel)


@pytest.mark.parametrize(
    ("shape", "matrix"), [((8, 64), lambda w: w.T), ((1, 64, 8), lambda w: w[0])], ids=["w.T", "w[0]"]
)
def test_kernels_that_stay_codes_under_their_own_names(shape, matrix, tmp_path):
    """A kernel that is transposed, or alone in its stack, is in the file as in the model."""

    class Moved(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ matrix(self.param("kernel", nn.initializers.lecun_normal(), shape))

    model8, variables = trained(Moved(), X, recipe=RECIPES["delayed"])
    model, served = fp8.freeze(model8, variables, X)
    checkpoint = written_and_read(tmp_path / "a", model, served)
    with pytest.raises(
        ValueError, match=r"params/kernel from kernel: it must be float32, and is .* without"
    ):
        fp8.load_into(variables, checkpoint)


@pytest.mark.parametrize("recipe", ["delayed", "axiswise", "block128", "mxfp8", "nvfp4"])
def test_matrix_times_vector(recipe, tmp_path):
    """A vector that the model multiplies by is a weight with one output feature."""

    class Vector(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("w", nn.initializers.normal(), (64,))

    model8, variables = trained(Vector(), X, recipe=RECIPES[recipe])
    model, served = fp8.freeze(model8, variables, X)
    checkpoint = written_and_read(tmp_path / "a", model, served)
    assert checkpoint["w.weight"].shape == (1, 64)
    loaded = fp8.load_into(variables, checkpoint)["params"]["w"]
    np.testing.assert_array_equal(loaded, checkpoint["w.weight"].dequantize()[0])


LAYER = {"up.weight": codes_of(0, 200, 300), "up.bias": scales_of(2, 200)}
CHANNEL = {**LAYER, "up.weight_scale": scales_of(1, 200, 1)}
SQUARE = {**LAYER, "up.weight_scale_inv": scales_of(1, 2, 3)}


def read(folder, tensors):
    return fp8.read_checkpoint(write(folder / "model.safetensors", tensors))


def dense(dtype=jnp.float32, shape=(300, 200)):
    bias = jax.ShapeDtypeStruct(shape[1:], dtype)
    return {"params": {"up": {"kernel": jax.ShapeDtypeStruct(shape, dtype), "bias": bias}}}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("features", [(200,), (4, 50)])
def test_wide_variables(features, dtype, tmp_path):
    variables = dense(dtype, shape=(300, *features))
    variables["params"]["up"]["bias"] = jax.ShapeDtypeStruct((200,), dtype)
    loaded = fp8.load_into(variables, read(tmp_path, SQUARE))["params"]["up"]
    expected = in_blocks(LAYER["up.weight"], SQUARE["up.weight_scale_inv"], 128, 128).T
    np.testing.assert_array_equal(loaded["kernel"], expected.astype(dtype).reshape(300, *features))
    np.testing.assert_array_equal(loaded["bias"], LAYER["up.bias"].astype(dtype))
    assert isinstance(loaded["kernel"], jax.Array)


def test_embeddings_are_not_transposed(tmp_path):
    table = scales_of(0, 6, 6, dtype=ml_dtypes.bfloat16)
    checkpoint = read(tmp_path, {"tok.weight": table})
    variables = {"params": {"embed": {"embedding": jnp.zeros((6, 6))}}}
    for rename in (
        {"^embed.embedding$": "tok.weight"},
        {"^embed.*": "tok.weight"},
        lambda name: "tok.weight",
    ):
        loaded = fp8.load_into(variables, checkpoint, rename=rename)
        np.testing.assert_array_equal(loaded["params"]["embed"]["embedding"], table.astype(np.float32))
    kernel = {"params": {"embed": {"kernel": jnp.zeros((6, 6))}}}
    loaded = fp8.load_into(kernel, checkpoint, rename={"^embed": "tok"})
    np.testing.assert_array_equal(loaded["params"]["embed"]["kernel"], table.T.astype(np.float32))
    quantized = read(tmp_path, {"tok.weight": codes_of(0, 6, 6), "tok.weight_scale": scales_of(1, 6, 1)})
    loaded = fp8.load_into(variables, quantized, rename={"^embed.*": "tok.weight"})
    expected = quantized["tok.weight"].dequantize(np.float32)
    np.testing.assert_array_equal(loaded["params"]["embed"]["embedding"], expected)


@pytest.mark.parametrize(
    ("variable", "rename"),
    [
        ("kernel", {"kernel": "proj"}),
        ("kernel", lambda name: "layer.proj"),
        ("w", {r"\.w": ".proj"}),
        ("w", {r"\.w(eight)?$": ".proj"}),
    ],
)
def test_square_weights_with_scales_are_transposed(variable, rename, tmp_path):
    """The formats store (out, in), whatever the name of the weight is; the shape does not show it."""
    checkpoint = read(tmp_path, {"layer.proj": codes_of(0, 5, 5), "layer.proj_scale": scales_of(1, 5, 1)})
    loaded = fp8.load_into({"params": {"layer": {variable: jnp.zeros((5, 5))}}}, checkpoint, rename=rename)
    expected = checkpoint["layer.proj"].dequantize(np.float32).T
    np.testing.assert_array_equal(loaded["params"]["layer"][variable], expected)


EXPERTS = {"experts.up": codes_of(0, 3, 6, 4), "experts.up_scale": scales_of(1, 3, 1, 4)}


def test_fused_experts_in_both_orders(tmp_path):
    """Only the shape shows whether such a tensor is (experts, in, out); a name that ends in weight does."""
    checkpoint = read(tmp_path, EXPERTS)
    values = checkpoint["experts.up"].dequantize()
    for kernel, expected in (((3, 6, 4), values), ((3, 4, 6), values.swapaxes(1, 2))):
        loaded = fp8.load_into({"experts": {"up": jnp.zeros(kernel)}}, checkpoint)
        np.testing.assert_array_equal(loaded["experts"]["up"], expected)
    square = {"up": codes_of(0, 3, 4, 4), "up_scale": scales_of(1, 3, 1, 4)}
    with pytest.raises(ValueError, match=r"does not show whether it is \(\.\.\., out, in\)"):
        fp8.load_into({"params": {"up": jnp.zeros((3, 4, 4))}}, read(tmp_path, square))
    for weight in ("up.weight", "w13_weight"):
        checkpoint = read(tmp_path, {f"{weight}{name[2:]}": x for name, x in square.items()})
        variables, rename = {"params": {"up": {"kernel": jnp.zeros((3, 4, 4))}}}, {r"^up\.\w+": weight}
        loaded = fp8.load_into(variables, checkpoint, rename=rename)
        expected = checkpoint[weight].dequantize().swapaxes(1, 2)
        np.testing.assert_array_equal(loaded["params"]["up"]["kernel"], expected)


def test_arrays_do_not_depend_on_the_file(tmp_path):
    path, values = tmp_path / "a", np.arange(4096, dtype=np.int32).reshape(64, 64)

    def aligned(entries, data):
        """Starts the data at a multiple of 64 bytes, so that JAX could use the mapped memory."""
        return json.dumps(entries).ljust(120), data

    checkpoint = fp8.read_checkpoint(write(path, {"a": values}, change=aligned))
    zeros = jnp.zeros((64, 64), jnp.int32)
    everywhere = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec())
    targets = [zeros, *(jax.device_put(zeros, place) for place in (jax.devices()[0], everywhere))]
    loaded = [fp8.load_into({"params": {"a": target}}, checkpoint) for target in targets]
    write(path, {"a": np.zeros((64, 64), np.int32)}, change=aligned)
    for each in loaded:
        np.testing.assert_array_equal(each["params"]["a"], values)


def test_all_faults_are_in_one_error(tmp_path):
    checkpoint = read(tmp_path, {**CHANNEL, "more.weight": scales_of(0, 3), "norm.scale": scales_of(0, 4)})
    variables = dense(shape=(200, 300))
    variables["params"] |= {"norm": {"scale": jnp.zeros(5)}, "down": {"kernel": jnp.zeros((2, 3))}}
    with pytest.raises(ValueError, match="Nothing was loaded") as error:
        fp8.load_into(variables, checkpoint)
    for part in (
        "missing from the checkpoint: params/down/kernel (as down.kernel or down.weight)",
        "left over in it: more.weight",
        "params/up/kernel from up.weight: its shape [200, 300] does not become [200, 300]",
        "params/norm/scale from norm.scale: its shape [4] does not become [5]",
        "params/up/bias from up.bias: its shape [200] does not become [300]",
    ):
        assert part in str(error.value)


def layer_of(kernel, **others):
    return {"params": {"up": {"kernel": jnp.zeros(*kernel), **others}}}


def frozen_layer(**others):
    return layer_of(((300, 200), E4M3), bias=jnp.zeros(200), **others)


CONV = {"up.weight": scales_of(0, 3, 3, 3, 3)}
STACK = {"up.weight": scales_of(0, 2, 3, 3)}
OP = {"Fp8DotGeneralOp_0": {"kernel_scale": jnp.zeros((1, 200))}}


@pytest.mark.parametrize(
    ("tensors", "variables", "message"),
    [
        (
            {"up.weight": codes_of(0, 3, 3), "up.weight_scale": scales_of(0, 1)},
            layer_of(((3, 3), jnp.int32)),
            "must be int32, and is float8_e4m3fn with scales",
        ),
        (CONV, layer_of(((3, 3, 3, 3),)), "does not become"),
        (STACK, layer_of(((2, 3, 3),)), "does not become"),
        ({"up.weight": codes_of(0, 3, 3)}, layer_of(((3, 3),)), "is float8_e4m3fn without scales"),
        ({"up.kernel": np.int32([[1]])}, layer_of(((1, 1),)), "must be float32, and is int32"),
        (
            {"up.weight": scales_of(0, 200, 300)},
            layer_of(((300, 200), E4M3), **OP),
            "must be float8_e4m3fn, and is float32",
        ),
        (
            {"up.kernel": scales_of(0, 2, 3), "up.weight": scales_of(0, 3, 2)},
            layer_of(((2, 3),)),
            "up.kernel or up.weight",
        ),
        (
            {**CHANNEL, "up.weight": LAYER["up.weight"].view(ml_dtypes.float8_e5m2)},
            frozen_layer(**OP),
            "must be float8_e4m3fn, and is float8_e5m2",
        ),
        (SQUARE, frozen_layer(**OP), "recipe of the checkpoint"),
        (CHANNEL, frozen_layer(Op_0={"kernel_scale": jnp.zeros((1, 2, 3))}), "recipe of the checkpoint"),
        (
            CHANNEL,
            frozen_layer(Op_0={"kernel_scale": jnp.zeros((1, 200)), "input_scale": jnp.zeros(1)}),
            "input_scale of the frozen model is",
        ),
        (
            CHANNEL,
            frozen_layer(Op_1={"kernel_scale": jnp.zeros(1)}, **OP),
            "one frozen kernel with one scale",
        ),
    ],
)
def test_tensors_that_do_not_fit(tensors, variables, message, tmp_path):
    with pytest.raises(ValueError, match="Nothing was loaded") as error:
        fp8.load_into(variables, read(tmp_path, tensors))
    assert message in str(error.value)


def test_a_layout_that_the_shape_does_not_show_is_refused(tmp_path):
    """The scale (1, 1, 8) of a kernel (1024, 1, 8) may be one per feature, or one per block."""
    kernel = layer_of(((1024, 1, 8), E4M3), Op_0={"kernel_scale": jnp.zeros((1, 1, 8))})
    for scale in (scales_of(0, 8, 1), scales_of(0, 1, 8)):
        checkpoint = read(tmp_path, {"up.weight": codes_of(0, 8, 1024), "up.weight_scale": scale})
        with pytest.raises(ValueError, match="recipe of the checkpoint"):
            fp8.load_into(kernel, checkpoint)


@pytest.mark.parametrize("shape", [(1,), (1, 200), (1, 2, 3)])
def test_one_scale_per_tensor_serves_all_features_and_blocks(shape, tmp_path):
    checkpoint = read(tmp_path, {**LAYER, "up.weight_scale": scales_of(1, 1)})
    loaded = fp8.load_into(frozen_layer(Op_0={"kernel_scale": jnp.zeros(shape)}), checkpoint)
    expected = np.broadcast_to(scales_of(1, 1), shape)
    np.testing.assert_array_equal(loaded["params"]["up"]["Op_0"]["kernel_scale"], expected)


def test_wrong_arguments(tmp_path):
    checkpoint = read(tmp_path, CHANNEL)
    with pytest.raises(TypeError, match="checkpoint must be a mapping"):
        fp8.load_into(dense(), str(tmp_path))
    with pytest.raises(TypeError, match="must be a tree of arrays; got str at .params/up"):
        fp8.load_into({"params": {"up": "kernel"}}, checkpoint)
    with pytest.raises(TypeError, match="variables must be a tree of arrays; got Array"):
        fp8.load_into(jnp.zeros(2), checkpoint)
    with pytest.raises(ValueError, match="of type list"):
        fp8.load_into({"params": {"up": jnp.zeros(2)}}, {"up": [1.0, 2.0]})
    with pytest.raises(ValueError, match="matches none"):
        fp8.load_into(dense(), checkpoint, rename={"dense": "up"})
    both = {"params": {"a": jnp.zeros(200), "b": jnp.zeros(200)}}
    with pytest.raises(ValueError, match=r"up\.bias is for both params/a and params/b"):
        fp8.load_into(both, {"up.bias": checkpoint["up.bias"]}, rename=lambda name: "up.bias")


class Adapted(nnx.Module):
    """A linear layer in FP8 with a LoRA adapter beside it."""

    def __init__(self, recipe):
        op = fp8nnx.Fp8DotGeneralOp(recipe=recipe)
        self.up = nnx.Linear(300, 200, dot_general=op, rngs=nnx.Rngs(0))
        self.adapter = nnx.LoRA(300, 4, 200, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.up(x) + self.adapter(x)


def test_nnx_keeps_its_scaling_state(tmp_path):
    """The state of delayed scaling is not in the file, although an NNX state has it beside weights."""
    model, checkpoint = Adapted(fp8.DelayedScaling(amax_history_len=2)), read(tmp_path, CHANNEL)
    model.up.dot_general.input_scale[...] = jnp.full(1, 7.0)
    nnx.update(model, fp8.load_into(nnx.state(model, nnx.Not(nnx.LoRAParam)), checkpoint))
    np.testing.assert_array_equal(model.up.dot_general.input_scale[...], [7.0])
    expected = LAYER["up.weight"].astype(np.float32) * CHANNEL["up.weight_scale"]
    np.testing.assert_array_equal(model.up.kernel[...], expected.T)


def test_nnx_below_adapters(tmp_path):
    """The codes of a frozen NNX model come from the file, and its adapter stays."""
    frozen = fp8nnx.freeze(Adapted(fp8.Float8CurrentScaling(granularity="axiswise")), normal(0, 4, 300))
    checkpoint = read(tmp_path, CHANNEL)
    before = nnx.to_flat_state(nnx.state(frozen, nnx.LoRAParam))
    nnx.update(frozen, fp8.load_into(nnx.state(frozen, nnx.Not(nnx.LoRAParam)), checkpoint))
    np.testing.assert_array_equal(frozen.up.kernel.get_value(), LAYER["up.weight"].T)
    np.testing.assert_array_equal(
        frozen.up.dot_general.kernel_scale.get_value(), CHANNEL["up.weight_scale"].T
    )
    for (_, old), (_, new) in zip(before, nnx.to_flat_state(nnx.state(frozen, nnx.LoRAParam))):
        np.testing.assert_array_equal(old.get_value(), new.get_value())


@pytest.mark.skipif(jax.device_count() < 2, reason="needs several devices")
def test_arrays_are_where_the_variables_are(tmp_path):
    """The sharding is that of the variable. An array is committed to its devices if the variable is."""
    second, mesh = jax.devices()[1], jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    zeros = np.zeros((300, 200), np.float32)
    checkpoint = {"up.weight": read(tmp_path, CHANNEL)["up.weight"]}
    expected = LAYER["up.weight"].astype(np.float32) * CHANNEL["up.weight_scale"]
    for kernel in (
        jax.device_put(zeros, NamedSharding(mesh, PartitionSpec("x"))),
        jax.device_put(zeros, second),
        jnp.array(zeros),
    ):
        loaded = fp8.load_into({"params": {"up": {"kernel": kernel}}}, checkpoint)["params"]["up"]["kernel"]
        assert (loaded.sharding, loaded.committed) == (kernel.sharding, kernel.committed)
        np.testing.assert_array_equal(loaded, expected.T)


def rotated(x):
    """Rotates queries or keys ``(batch, length, heads, dim)`` by their positions."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(half) / half)[None, :]
    sin, cos = (f(angle).astype(np.float32)[None, :, None, :] for f in (np.sin, np.cos))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attended(q, k, v):
    """Returns causal attention of 4 heads of queries to 2 heads of keys and values, each of width 8."""
    q, k, v = (x.reshape(*x.shape[:2], -1, 8) for x in (q, k, v))
    k, v = jnp.repeat(rotated(k), 2, 2), jnp.repeat(v, 2, 2)
    weights = jnp.einsum("bqhd,bkhd->bhqk", rotated(q), k) / np.float32(np.sqrt(8))
    causal = np.tril(np.ones(weights.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal[None, None], weights, -jnp.inf))
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return out.reshape(*out.shape[:2], -1)


class Llama(nn.Module):
    """The Llama of transformers_llama in Flax, by the description of the architecture."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(24, 32, name="embed_tokens")(tokens)
        for i in range(2):
            layer, linear = f"layers_{i}", partial(nn.Dense, use_bias=False)
            h = nn.RMSNorm(1e-6, name=f"{layer}_input_layernorm")(x)
            q, k, v = (
                linear(8 * heads, name=f"{layer}_self_attn_{name}_proj")(h)
                for name, heads in (("q", 4), ("k", 2), ("v", 2))
            )
            x = x + linear(32, name=f"{layer}_self_attn_o_proj")(attended(q, k, v))
            h = nn.RMSNorm(1e-6, name=f"{layer}_post_attention_layernorm")(x)
            gate, up = (linear(48, name=f"{layer}_mlp_{name}_proj")(h) for name in ("gate", "up"))
            x = x + linear(32, name=f"{layer}_mlp_down_proj")(nn.silu(gate) * up)
        return nn.Dense(24, use_bias=False, name="lm_head")(nn.RMSNorm(1e-6, name="norm")(x))


TO_LLAMA = {
    r"\.(kernel|scale|embedding)$": ".weight",
    r"^layers_(\d)_": r"layers.\1.",
    r"_(attn|mlp)_(\w+_proj)": r"_\1.\2",
    r"\.mlp_": ".mlp.",
    r"^(?!lm_head)": "model.",
}


@pytest.mark.long
def test_logits_of_a_llama(tmp_path):
    """The wide and the frozen Llama have the logits that transformers computes from the same folder.

    ``save_safetensors`` writes the same codes and scales under the same names.
    """
    folder = Path(__file__).parent / "files" / "transformers_llama"
    expected = safetensors.numpy.load_file(folder / "expected.safetensors")
    checkpoint, tokens = fp8.read_checkpoint(folder), expected["tokens"].astype(np.int32)
    model8 = fp8.quantize_model(Llama(), fp8.Float8CurrentScaling(), include=".*proj")
    variables = jax.jit(model8.init)(jax.random.key(0), tokens)
    for model, target in ((Llama(), variables), fp8.freeze(model8, variables, tokens, weight_only=True)):
        loaded = fp8.load_into(target, checkpoint, rename=TO_LLAMA)
        error = np.abs(model.apply(loaded, tokens) - expected["logits"]).max()
        error /= np.abs(expected["logits"]).max()
        assert error < 1e-5
    fp8.save_safetensors(tmp_path / "file", model, loaded, rename=TO_LLAMA)
    written = fp8.read_checkpoint(tmp_path / "file")
    assert written.keys() == checkpoint.keys()
    for name, tensor in checkpoint.items():
        if "proj" in name:
            np.testing.assert_array_equal(written[name].codes, tensor.codes)
            np.testing.assert_array_equal(written[name].scale, tensor.scale)
    kernel = loaded["params"]["layers_1_mlp_up_proj"]["kernel"]
    np.testing.assert_array_equal(kernel, checkpoint["model.layers.1.mlp.up_proj.weight"].codes.T)

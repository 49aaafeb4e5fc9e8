"""Layers that are fused or stacked in the model or in the file: split, joined and numbered by rename."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
from flax import nnx

import fp8flax as fp8
from fp8flax._serve.checkpoints import CheckpointTensor
from fp8flax._serve.parts import Misfit, joined
from tests.cases import OWG, RECIPES, assert_same, normal
from tests.models import trained
from tests.serve.test_checkpoints import codes_of, in_blocks, scales_of, write

X = np.asarray(normal(0, 8, 64))
E4M3 = ml_dtypes.float8_e4m3fn
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
    "out.kernel": "out.weight",
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
            if key == "layers.out.kernel":  # it is wide
                parts[f"model.layers.{i}.out.weight"] = array[i].T
            elif layer == "out":
                parts[f"model.layers.{i}.out.{last}"] = array[i]
            else:
                thirds = np.split(array[i], 3) if len(array[i]) > 1 else [array[i]] * 3
                parts |= {f"model.layers.{i}.self_attn.{x}_proj.{last}": t for x, t in zip("qkv", thirds)}
    return parts


CELLS = [("split", "current"), ("joined", "block128"), ("numbered", "mxfp8")]
MORE = [("split", "delayed"), ("split", "block128"), ("joined", "axiswise"), ("numbered", "delayed")]


@pytest.mark.oldest
@pytest.mark.parametrize(("name", "recipe"), CELLS + MORE)
def test_files_in_parts(name, recipe, tmp_path, request):
    """The file has the bits of the whole tensors, and loads into the frozen model and into the wide one."""
    if (name, recipe) in MORE:
        request.getfixturevalue("_all_cells")
    model, rename = MODELS[name]
    model8, variables = trained(model, X, recipe=RECIPES[recipe], exclude="last|.*out")
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


def test_parts_of_a_kernel_whose_summed_dimensions_are_not_first(tmp_path):
    """The file has the layout of a square kernel, which its shape does not show."""
    layer = nn.Einsum((64, 64), "bi,oi->bo", use_bias=False, name="layer")
    model8, variables = trained(nn.Sequential([layer]), X, recipe=RECIPES["axiswise"])
    model, served = fp8.freeze(model8, variables)
    rename = {"^layers_0": {"k": 40, "v": 24}}
    fp8.save_safetensors(tmp_path / "file", model, served, rename=rename)
    checkpoint = fp8.read_checkpoint(tmp_path / "file")
    [kernel] = (x for x in jax.tree.leaves(served) if x.dtype == E4M3)
    np.testing.assert_array_equal(checkpoint["k.weight"].codes, kernel[:40])
    assert_same(fp8.load_into(zeros_like(served), checkpoint, rename=rename), served)


def kernels(shapes, dtype=jnp.float32, scales=None):
    """Returns the shapes of layers' kernels, wide, or frozen with scales of the given shapes."""
    params = {name: {"kernel": jax.ShapeDtypeStruct(shape, dtype)} for name, shape in shapes.items()}
    for name, shape in (scales or {}).items():
        params[name]["Op_0"] = {"kernel_scale": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return {"params": params}


QKV = {"qkv.weight": codes_of(0, 300, 200), "qkv.weight_scale_inv": scales_of(1, 3, 2)}
PARTS = {
    f"{name}.{last}": make(seed, *shape)
    for seed, (name, rows) in enumerate((("q", 128), ("k", 100), ("v", 72)))
    for last, make, shape in (
        ("weight", codes_of, (rows, 200)),
        ("weight_scale_inv", scales_of, (1, 2)),
        ("bias", scales_of, (rows,)),
    )
}
JOIN_3 = {(r"^q\b", r"^k\b", r"^v\b"): "qkv"}
SPLIT_3 = {"^qkv": {"q": 128, "k": 100, "v": 72}}


def load(folder, tensors, variables, rename):
    checkpoint = fp8.read_checkpoint(write(folder / "file", tensors))
    return fp8.load_into(variables, checkpoint, rename=rename)["params"]


def test_a_fused_weight_becomes_three_kernels(tmp_path):
    """The rows of the weight are the outputs of q, k and v, also where a block has rows of two of them."""
    variables = kernels({"q": (200, 128), "k": (200, 2, 50), "v": (200, 72)})
    loaded = load(tmp_path, QKV, variables, JOIN_3)
    wide = in_blocks(QKV["qkv.weight"], QKV["qkv.weight_scale_inv"], 128, 128)
    np.testing.assert_array_equal(loaded["q"]["kernel"], wide[:128].T)
    np.testing.assert_array_equal(np.asarray(loaded["k"]["kernel"]).reshape(200, 100), wide[128:228].T)
    np.testing.assert_array_equal(loaded["v"]["kernel"], wide[228:].T)


def test_three_weights_become_a_fused_kernel(tmp_path):
    variables = kernels({"qkv": (200, 300)})
    variables["params"]["qkv"]["bias"] = jnp.zeros(300)
    loaded = load(tmp_path, PARTS, variables, SPLIT_3)["qkv"]
    wide = [in_blocks(PARTS[f"{x}.weight"], PARTS[f"{x}.weight_scale_inv"], 128, 128) for x in "qkv"]
    np.testing.assert_array_equal(loaded["kernel"], np.concatenate(wide).T)
    np.testing.assert_array_equal(loaded["bias"], np.concatenate([PARTS[f"{x}.bias"] for x in "qkv"]))


@pytest.mark.parametrize("scale", ["tensor", "channel"])
def test_codes_of_one_scale_become_frozen_parts(scale, tmp_path):
    """A scale per tensor is that of each part, and of each feature of a part."""
    tensors = {"qkv.weight": codes_of(0, 12, 8), "qkv.weight_scale": scales_of(1, 1)}
    shapes = {"q": (8, 4), "k": (8, 6), "v": (8, 2)}
    of_features = {name: (1, out) if scale == "channel" else (1,) for name, (_, out) in shapes.items()}
    loaded = load(tmp_path, tensors, kernels(shapes, E4M3, of_features), JOIN_3)
    np.testing.assert_array_equal(loaded["k"]["kernel"], tensors["qkv.weight"][4:10].T)
    for name, shape in of_features.items():
        expected = np.broadcast_to(tensors["qkv.weight_scale"], shape)
        np.testing.assert_array_equal(loaded[name]["Op_0"]["kernel_scale"], expected)


def test_codes_of_three_scales_become_one_per_feature(tmp_path):
    tensors = {name: x for name, x in PARTS.items() if name.endswith("weight")}
    tensors |= {f"{x}.weight_scale": scales_of(i, 1) for i, x in enumerate("qkv")}
    loaded = load(tmp_path, tensors, kernels({"qkv": (200, 300)}, E4M3, {"qkv": (1, 300)}), SPLIT_3)["qkv"]
    codes = np.concatenate([tensors[f"{x}.weight"] for x in "qkv"])
    np.testing.assert_array_equal(loaded["kernel"], codes.T)
    scales = np.repeat([tensors[f"{x}.weight_scale"][0] for x in "qkv"], [128, 100, 72])
    np.testing.assert_array_equal(loaded["Op_0"]["kernel_scale"], scales[None])
    with pytest.raises(ValueError, match="the recipe of the checkpoint"):
        load(tmp_path, tensors, kernels({"qkv": (200, 300)}, E4M3, {"qkv": (1,)}), SPLIT_3)


def test_layers_and_experts_become_one_stack(tmp_path):
    """Two stacked dimensions, in a model of NNX; each expert of each layer is a tensor of its own."""

    class Experts(nnx.Module):
        def __init__(self):
            self.up = nnx.Param(jnp.zeros((2, 3, 8, 5)))
            self.norm = nnx.Param(jnp.zeros((2, 8)))

    tensors = {
        f"layers.{i}.experts.{j}.up.weight{last}": make(10 * i + j, *shape)
        for i in range(2)
        for j in range(3)
        for last, make, shape in (("", codes_of, (5, 8)), ("_scale", scales_of, (5, 1)))
    }
    tensors |= {f"layers.{i}.norm.weight": scales_of(i, 8) for i in range(2)}
    checkpoint = fp8.read_checkpoint(write(tmp_path / "file", tensors))

    def rename(name):
        return name.replace("up", "layers.{0}.experts.{1}.up").replace("norm", "layers.{0}.norm.weight")

    model = Experts()
    nnx.update(model, fp8.load_into(nnx.state(model), checkpoint, rename=rename))
    for i in range(2):
        np.testing.assert_array_equal(model.norm[i], tensors[f"layers.{i}.norm.weight"])
        for j in range(3):
            name = f"layers.{i}.experts.{j}.up.weight"
            expected = tensors[name].astype(np.float32) * tensors[f"{name}_scale"]
            np.testing.assert_array_equal(model.up[i, j], expected.T)


WIDE = {"qkv": (200, 300)}
THREE = {"q": (200, 128), "k": (200, 100), "v": (200, 72)}


@pytest.mark.parametrize(
    ("tensors", "variables", "rename", "message"),
    [
        (
            {name: x for name, x in PARTS.items() if name.startswith(("q.w", "k.w"))},
            kernels(WIDE),
            SPLIT_3,
            r"missing from the checkpoint: params/qkv/kernel \(as q\.weight with .*, without v\.weight\)",
        ),
        (
            PARTS,
            kernels(WIDE),
            {"^qkv": {"q": 100, "k": 128, "v": 72}},
            r"q\.weight must have 100 output features, and has 128",
        ),
        (
            {**PARTS, "v.weight": codes_of(0, 72, 128), "v.weight_scale_inv": scales_of(1, 1, 1)},
            kernels(WIDE),
            SPLIT_3,
            r"must be alike to become one variable; they are \w+\[128, 200\] .* and \w+\[72, 128\] with",
        ),
        (
            QKV,
            kernels({"q": (200, 128), "v": (200, 72)}),
            {("^q", "^k|^v", "^v$|^params"): "qkv"},
            "matches none of",
        ),
        (
            QKV,
            kernels({"q": (200, 128), "k": (200, 100), "v": (200, 73)}),
            JOIN_3,
            r"qkv\.weight has 300 output features, and the variables .* have 128 \+ 100 \+ 73",
        ),
        (
            QKV,
            kernels(
                {"q": (200, 128), "k": (200, 100), "v": (200, 72)}, E4M3, dict.fromkeys("qkv", (1, 1, 2))
            ),
            JOIN_3,
            r"not matching: params/v/kernel from qkv\.weight: its scale is float32\[72, 2\], for blocks of",
        ),
        (
            QKV,
            kernels({**THREE, "qkv": (200, 300)}),
            JOIN_3,
            r"qkv\.weight is for both params/\w+/kernel and params/\w+/kernel",
        ),
        (
            {f"l.{i}.weight": codes_of(i, 4, 4) for i in range(3)}
            | {f"l.{i}.weight_scale": scales_of(i, 4 if i else 1, 1) for i in range(3)},
            kernels({"l": (3, 4, 4)}),
            {"^l": "l.{0}"},
            r"must be alike .* blocks of \[4, 4\] and .* blocks of \[1, 4\]",
        ),
        (
            {f"l.{i}.weight": scales_of(i, 4, 4) for i in range(4)},
            kernels({"l": (3, 4, 4)}),
            {"^l": "l.{0}"},
            r"left over in it: l\.3\.weight",
        ),
        (
            {f"l.{i}.weight": scales_of(i, 4, 4, 4) for i in range(3)},
            kernels({"l": (3, 4, 4, 4)}),
            {"^l": "l.{0}"},
            r"a weight \(out, in\) of shape \[3, 4, 4, 4\] does not become",
        ),
    ],
)
def test_tensors_that_do_not_fit_together(tensors, variables, rename, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(tmp_path, tensors, variables, rename)


def test_the_error_shows_a_layout_that_differs():
    one = CheckpointTensor(np.zeros((4, 4), E4M3), np.ones((1, 1), np.float32), (4, 4), None)
    other = one._replace(layout=((0,), (1,)))
    with pytest.raises(Misfit, match=r"of \[4, 4\] and .* of \[4, 4\] and the layout \(\(0,\), \(1,\)\)$"):
        joined([one, other], -2, is_outline=True)


def test_a_damaged_part_is_named(tmp_path):
    """The file is checked before anything is loaded. A file that became shorter is found later."""
    checkpoint = fp8.read_checkpoint(write(tmp_path / "file", PARTS))
    data = (tmp_path / "file").read_bytes()
    (tmp_path / "file").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"file has become shorter since it was opened: 'v\.bias'"):
        fp8.load_into({"params": {"qkv": {"bias": jnp.zeros(300)}}}, checkpoint, rename=SPLIT_3)
    with pytest.raises(ValueError, match=r"file is damaged: 'v\.bias'"):
        fp8.read_checkpoint(tmp_path / "file")


@pytest.fixture(name="save", scope="module")
def _save(tmp_path_factory):
    """Returns a function that saves a frozen model of a name in ``MODELS``."""
    folder, frozen = tmp_path_factory.mktemp("files"), {}

    def save(name, recipe, rename):
        if (name, recipe) not in frozen:
            frozen[name, recipe] = fp8.freeze(
                *trained(MODELS[name][0], X, recipe=RECIPES[recipe], exclude="last|out")
            )
        fp8.save_safetensors(folder / "file", *frozen[name, recipe], rename=rename)

    return save


@pytest.mark.parametrize(
    ("name", "recipe", "rename", "error", "message"),
    [
        (
            "joined",
            "current",
            JOIN,
            ValueError,
            "each of them has one scale. A joined layer would need one",
        ),
        (
            "joined",
            "block128",
            {("v_p", "q_p"): "qv_p"},
            ValueError,
            "cuts params/v_proj/.* feature 40, inside",
        ),
        ("joined", "axiswise", {("q_", "k_|v_"): "a_"}, ValueError, r"joins .* at one place of 'a_proj\."),
        ("joined", "axiswise", {("q_", "k_", "_proj"): "a"}, ValueError, "matches two of these patterns"),
        (
            "joined",
            "axiswise",
            {("q_", r"k_.*(e|s)$"): "a"},
            ValueError,
            "changes 'k_proj.weight_scale' to",
        ),
        (
            "joined",
            "axiswise",
            {("q_", "k_(?=.*weight)"): "a_"},
            ValueError,
            r"joins 2 variables in 'a_proj\.bias', but only params/q_proj/bias",
        ),
        ("joined", "axiswise", {**JOIN, "qkv": {"a": 3}}, ValueError, "splits or joins .* a second time"),
        (
            "joined",
            "axiswise",
            {"q_": {"a": 100}},
            ValueError,
            r"into \[100\] output features, and it has 128",
        ),
        ("joined", "axiswise", {"q_": {"a": 0}}, TypeError, "must give the number of output features"),
        ("joined", "axiswise", {"q_": {}}, TypeError, "must give the number of output features"),
        ("joined", "axiswise", {("q_", 3): "a"}, TypeError, "must map each pattern, or tuple"),
        ("joined", "axiswise", {"q_": ["a"]}, TypeError, "must map each pattern, or tuple"),
        ("joined", "axiswise", {(): "a"}, TypeError, r"must map each pattern, .*; got \(\): 'a'"),
        (
            "joined",
            "axiswise",
            {
                "q_.*t$": {"a.weight": 28, "b.weight": 100},
                "q_.*e$": {"a.weight_scale": 64, "b.weight_scale": 64},
            },
            ValueError,
            "to 'a.weight' with 28 output features .*looks for 'a.weight' with 64 output features and 'b",
        ),
        ("joined", "axiswise", {"q_": "a{1}"}, ValueError, r"numbers in braces must be \{0\}"),
        ("numbered", "block128", {r"layers\.qkv": {"a": 100, "b": 92}}, ValueError, "feature 100, inside"),
        ("numbered", "block128", {r"norm": "{0}{1}"}, ValueError, r"numbers 2 dimensions of params/norm/"),
        ("numbered", "block128", {r"out": {"a": 32, "b": 32}}, ValueError, "output features are not known"),
    ],
)
def test_errors_of_rename(name, recipe, rename, error, message, save):
    with pytest.raises(error, match=message):
        save(name, recipe, rename)

"""``freeze`` keeps the logits with kernels in FP8; decoding, export, and programs for GPUs work."""

import re
import warnings
from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.gemm.gpus import GPUS, compiling_for
from fp8flax._serve import freeze_ops
from tests import reference
from tests.cases import OWG, RECIPES, flat, largest_array, normal, ties, variables_of
from tests.gpus import compiled_for_gpus
from tests.models import ALL, MODELS, TOKENS, LanguageModel, in_scan, trained
from tests.serve.net import written_and_read

E4M3 = jnp.float8_e4m3fn


def frozen_alike(model8, variables, x):
    """Returns a frozen model and its variables; its results have the bits of the trained model's."""
    serve, served = fp8.freeze(model8, variables, x)
    out, expected = (jax.jit(m.apply)(v, x) for m, v in ((serve, served), (model8, variables)))
    compare = np.testing.assert_array_equal
    if jax.__version_info__ >= (0, 12):
        # For some CPUs XLA fuses what is around the ops in another way, which changes last bits.
        compare = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
    jax.tree.map(compare, out, expected)
    return serve, served


def narrow(served):
    """Returns the names of the parameters in FP8."""
    return {path.rpartition("/")[2] for path, x in flat(served["params"]).items() if x.dtype == E4M3}


@pytest.mark.newest
@pytest.mark.filterwarnings("ignore:These layers were not calibrated", "ignore:These scales are frozen")
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *((name, "delayed") for name in ("layers", "own", "scan", "jit and cond")),
        ("scan", "block128"),
        ("vmap", "axiswise"),
    ],
)
def test_same_logits(name, recipe):
    model, _, _ = MODELS[name]
    x = normal(0, 2, 4, 8)
    model8, variables = trained(model(), x, recipe=RECIPES[recipe])
    _, served = frozen_alike(model8, variables, x)
    assert list(served) == ["params"]
    # Every kernel is in its old place, in FP8, with its scale beside it.
    before, after = flat(variables["params"]), flat(served["params"])
    for path, leaf in before.items():
        assert after[path].shape == leaf.shape
        assert after[path].dtype == (leaf.dtype if path.endswith("bias") else E4M3), path
    added = {path.rpartition("/")[2] for path in set(after) - set(before)}
    expected = ["kernel_scale"] + ["input_scale"] * (recipe == "delayed")
    assert sorted(added) == sorted(expected)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("recipe", "spec"), [("block128", P("x")), ("mxfp8", P(None, "x")), (fp8.NVFP4BlockScaling(), P("x"))]
)
def test_kernels_on_explicit_axes_of_a_mesh(recipe, spec):
    """The codes are those of one device, sharded as the kernel; JAX derives no sharding of blocks."""
    x, model = normal(0, 8, 256), nn.Dense(256, use_bias=False)
    model8 = fp8.quantize_model(model, RECIPES.get(recipe, recipe), include=".*")
    variables = variables_of(model8, x)
    _, expected = fp8.freeze(model8, variables, x)
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        on_mesh = jax.device_put(variables, NamedSharding(mesh, spec))
        serve, served = fp8.freeze(model8, on_mesh, x)
        out = jax.eval_shape(serve.apply, served, jax.device_put(x, NamedSharding(mesh, P())))
    assert served["params"]["kernel"].sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
    jax.tree.map(np.testing.assert_array_equal, served, expected)
    assert out.shape == x.shape


def test_the_codes_are_those_of_the_newest_scale():
    """The scale is the one that the next step would compute from the history, by NumPy."""
    x, model = np.asarray(3 * normal(0, 4, 8)), nn.Dense(6)
    model8 = fp8.quantize_model(model, **ALL)
    variables = fp8.calibrate(model8.apply, variables_of(model8, x), [x])
    kernel = np.asarray(variables["params"]["kernel"])
    served = fp8.freeze(model8, variables, x)[1]["params"]
    scale = np.float32(np.abs(kernel).max()) / np.float32(448)
    np.testing.assert_allclose(served["Fp8DotGeneralOp_0"]["kernel_scale"], [scale], rtol=1e-6)
    scale = np.asarray(served["Fp8DotGeneralOp_0"]["kernel_scale"])
    codes = np.clip(kernel / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(served["kernel"].astype(np.float32), codes.astype(np.float32))
    np.testing.assert_allclose(
        served["Fp8DotGeneralOp_0"]["input_scale"], [np.abs(x).max() / 448], rtol=1e-6
    )


def test_equal_layers_have_one_program(monkeypatch):
    """The codes of all kernels of a shape are computed by one compiled program."""
    traced, x, pack = [], normal(0, 2, 24), freeze_ops.packed_kernel
    model8, variables = trained(nn.Sequential([nn.Dense(24) for _ in range(3)]), x)
    monkeypatch.setattr(freeze_ops, "packed_kernel", lambda *args: traced.append(args) or pack(*args))
    fp8.freeze(model8, variables, x)
    assert len(traced) == 1


@pytest.mark.optimized
def test_half_way_between_two_codes():
    """The trained and the frozen model round a value as NumPy's quotient does."""
    dtype = jnp.float16
    (x, x_scale), (kernel, kernel_scale) = ties(0, 8, 64, dtype=dtype), ties(10, 64, 16, dtype=dtype)
    op = partial(fp8.Fp8DotGeneralOp, recipe=RECIPES["delayed"])
    model = nn.Dense(16, dtype=dtype, use_bias=False, dot_general_cls=op)
    variables = {**variables_of(model, x), "params": {"kernel": kernel.astype(jnp.float32)}}
    variables = fp8.calibrate(model.apply, variables, [x])
    codes = [reference.quantize(a, "float8_e4m3fn", s) for a, s in ((x, x_scale), (kernel, kernel_scale))]
    product = np.matmul(*(code.astype(np.float64) for code in codes)) * x_scale * kernel_scale
    expected = model.apply(variables, x)
    np.testing.assert_allclose(np.float64(expected), product, rtol=0.01, atol=0.01 * np.abs(product).max())
    serve, served = fp8.freeze(model, variables, x)
    for out in (jax.jit(serve.apply)(served, x), jax.jit(partial(serve.apply, served))(x)):
        np.testing.assert_array_equal(out, expected)  # also with constant variables


def test_a_kernel_of_a_wider_dtype_than_the_input():
    x = normal(0, 2, 8).astype(jnp.bfloat16)
    model = nn.Dense(6, use_bias=False, promote_dtype=lambda *operands, **_: operands)
    frozen_alike(*trained(model, x), x)


def test_weights_only_reads_the_codes_alone(gpu):
    """No call writes a kernel in bfloat16, as it did when the kernel was scaled before its GEMM."""
    x = normal(0, 128, 1024, dtype=jnp.bfloat16)
    model8, variables = trained(nn.Dense(2048, use_bias=False, dtype=jnp.bfloat16), x)
    serve, served = fp8.freeze(model8, variables, x, weight_only=True)
    program = compiled_for_gpus("h200", serve.apply, served, x)
    entry = program[program.index("\nENTRY") :]
    assert "f8e4m3fn[1024,2048]" in entry
    assert "bf16[1024,2048]" not in entry


def test_no_loop_makes_the_kernels_of_all_layers_wide(gpu):
    """XLA moves what does not change out of a loop, and so would cast all kernels before it."""
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    serve, served = fp8.freeze(*trained(in_scan()(), x), x)
    program = compiled_for_gpus("h200", serve.apply, served, x)
    assert set(re.findall(r"(\w+)\[3,1024,1024\]", program)) == {"f8e4m3fn"}


HIDDEN = ("scan", "carried", "cond", "while", "checkpoint", "derivative", "jit", "vmap")


class ReadTwice(nn.Module):
    """Kernels that something else reads too, where no op is made of what it computes; one that is not."""

    @nn.compact
    def __call__(self, x):
        weights = []
        for name in (*HIDDEN, "alone"):
            weights.append(self.param(name, nn.initializers.lecun_normal(), (8, 8)))
            x = x @ weights[-1]
        a, b, c, d, e, f, g, h, _ = weights
        x = lax.scan(lambda x, _: (x @ a, None), x, length=2)[0]
        x += lax.scan(lambda b, _: (b, None), b, length=2)[0].sum()
        x = lax.cond(jnp.mean(x) > 9, lambda: x, lambda: x + c[:4])
        x = lax.while_loop(lambda x: jnp.sum(x * d[:4]) > 1e9, lambda x: x * jnp.sum(d), x)
        x = jax.checkpoint(lambda x, e: jnp.tanh(x @ e))(x, e)
        x += jax.nn.relu(f)[:4]
        x = jax.jit(lambda x, g: x * jnp.sum(jnp.sin(g)))(x, g)
        return jax.vmap(lambda row: row * h[0])(x)


class Heads(nn.Module):
    """One op for two kernels, as the caller chooses."""

    def setup(self):
        self.kernels = [self.param(f"w{i}", nn.initializers.lecun_normal(), (8, 8)) for i in range(2)]

    def __call__(self, x, i=0):
        return x @ self.kernels[i]


class OneOp(Heads):
    """The same with an op by hand, which has one state for both kernels."""

    def setup(self):
        super().setup()
        self.op = fp8.Fp8DotGeneralOp()

    def __call__(self, x, i=0):
        return self.op(x, self.kernels[i], (((x.ndim - 1,), (0,)), ((), ())))


class BothHeads(nn.Module):
    heads: type = OneOp

    def setup(self):
        self.both = self.heads(name=f"{self.heads.__name__}_0")

    def first(self, x):
        return self.both(x, 0)

    def second(self, x):
        return self.both(x, 1)

    def __call__(self, x):
        return self.first(x) + 2 * jnp.tanh(self.second(x))


class Penalized(nn.Module):
    def setup(self):
        self.layer = nn.Dense(8)

    def __call__(self, x):
        return self.layer(x)

    def penalty(self):
        return jnp.sum(self.layer.variables["params"]["kernel"] ** 2)


class Parts(nn.Module):
    """Kernels that are slices of a parameter, or joined from several; and one that is used twice."""

    @nn.compact
    def __call__(self, x, _):
        init = nn.initializers.lecun_normal()
        qkv, layers = self.param("qkv", init, (8, 24)), self.param("layers", init, (2, 8, 8))
        q, k, v = (x @ w for w in jnp.split(qkv, 3, axis=1))
        x = q * k + v
        for i in range(2):
            x = x @ layers[i]
        gates = [self.param(name, init, (8, 4)) for name in ("gate", "up")]
        x = nn.tanh(x @ jnp.concatenate(gates, axis=1))
        twice = self.param("twice", init, (8, 8))
        return nn.tanh(x @ twice) @ twice, None


class StackOfParts(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Parts, length=3, **axes)(name="blocks")(x, None)[0]


class TiedEmbedding(nn.Module):
    @nn.compact
    def __call__(self, x):
        embed = nn.Embed(8, 8)
        return embed.attend(nn.Dense(8)(embed(jnp.argmax(x, -1))))


class NotAsAWhole(nn.Module):
    """Kernels that cannot be stored in FP8, each for another reason."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        half, tied, scaled, read = (
            self.param(name, init, (8, 8)) for name in ("half", "tied", "scaled", "read")
        )
        x = jnp.concatenate([x @ half[:, :4]] * 2, -1)
        x = (x @ tied) @ tied.T
        return x @ (2 * scaled) @ read + jnp.sum(read)


class Returned(nn.Module):
    """The kernel is a result, too."""

    @nn.compact
    def __call__(self, x):
        kernel = self.param("w", nn.initializers.lecun_normal(), (8, 8))
        return x @ kernel, kernel.T


class MoreDims(nn.Module):
    """The matmul reads the kernel with one more dimension, of size 1."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (8, 6))
        return jnp.einsum("bi,nio->bno", x, w[None])


class Sliced(nn.Module):
    """A parameter that matmuls multiply by in slices."""

    multiply: Callable
    shape: tuple = (2, 8, 8)

    @nn.compact
    def __call__(self, x):
        return self.multiply(x, self.param("w", nn.initializers.normal(0.3), self.shape))


def in_turn(x, kernels):
    for kernel in kernels:
        x = nn.tanh(x.astype(kernel.dtype) @ kernel)
    return x


def joined(x, *kernels):
    return jnp.concatenate([x @ kernel for kernel in kernels], -1)


def gated(x, w):
    gate, up = (lax.ragged_dot(x, part, jnp.array([1, 3])) for part in jnp.split(w, 2, axis=-1))
    return nn.silu(gate) * up


SLICES = {
    "indices": Sliced(lambda x, w: in_turn(x, (w[0], w[-1], w[0]))),
    "iterations": Sliced(lambda x, w: in_turn(x, w)),
    "last axis": Sliced(lambda x, w: in_turn(x, (w[..., 1], w[..., 0])), (8, 8, 2)),
    "casts": Sliced(lambda x, w: in_turn(x, (w.astype(jnp.bfloat16)[0], w[1].T.astype(jnp.bfloat16)))),
    "split": Sliced(lambda x, w: joined(x, *jnp.split(w, 3, axis=1)), (8, 24)),
    "qkv": Sliced(lambda x, w: joined(x, w[:, 12:], w[:, :8], w[:, 8:12]), (8, 16)),
    "summed": Sliced(lambda x, w: x[:, :3] @ w[:3] + x[:, 3:] @ w[3:], (8, 16)),
    "under jit": Sliced(jax.jit(lambda x, w: in_turn(x, (w[0], w[1])))),
    "of experts": Sliced(gated),
    "batched": Sliced(lambda x, w: in_turn(x[None, None], (w[:, 0], w[:, 1])), (3, 2, 8, 8)),
}


@pytest.mark.parametrize("name", SLICES)
def test_slices(name, tmp_path):
    """Each slice has the scale of its op; all of them are read back from a file."""
    x = normal(0, 4, 8)
    serve, served = frozen_alike(*trained(SLICES[name], x), x)
    assert narrow(served) == {"w"}
    written_and_read(tmp_path / "a", serve, served)


class OpsOfSlices(nn.Module):
    """Ops by hand, whose names do not have the slices in them."""

    @nn.compact
    def __call__(self, x, order=(0, 1)):
        w = self.param("w", nn.initializers.normal(0.3), (2, 8, 8))
        ops = [fp8.Fp8DotGeneralOp(name=f"op{i}") for i in range(2)]
        return sum(op(x, w[i], (((1,), (0,)), ((), ()))) for op, i in zip(ops, order))


class BothWays(nn.Module):
    """One op by hand multiplies by a kernel, and by its transpose."""

    recipe: object

    @nn.compact
    def __call__(self, x):
        op, w = fp8.Fp8DotGeneralOp(self.recipe), self.param("w", nn.initializers.lecun_normal(), (8, 8))
        return op(op(x, w, (((1,), (0,)), ((), ()))), w, (((1,), (1,)), ((), ())))


@pytest.mark.parametrize("recipe", ["axiswise", "mxfp8", "current"])
def test_one_op_that_multiplies_in_two_ways(recipe):
    """Each way needs scales of its own, unless the whole kernel has one scale."""
    x, model = normal(0, 4, 8), BothWays(RECIPES[recipe])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        serve, served = fp8.freeze(model, variables_of(model, x), x)
    assert (narrow(served) == {"w"}) == (recipe == "current")
    assert any(READ in str(warning.message) for warning in told) == (recipe != "current")
    np.testing.assert_array_equal(serve.apply(served, x), model.apply(variables_of(model, x), x))


PART, READ = "its matmul does not multiply", "something else reads it"
OF_PARTS = dict.fromkeys(("gate", "up"), PART)
UNSTORED_SLICES = {
    "overlapping": (lambda x, w: joined(x, w[:, :5], w[:, 4:]), PART),
    "strided": (lambda x, w: joined(x, w[:, ::2], w[:, 1::2]), PART),
    "two axes": (lambda x, w: joined(x[:, :4], w[:4, :4], w[:4, 4:]) + x[:, 4:] @ w[4:], PART),
    "also whole": (lambda x, w: joined(x, w, w[:, :4], w[:, 4:]), PART),
    "also read": (lambda x, w: joined(x, w[:, :4], w[:, 4:]) * jnp.sum(w[0]), READ),
    "also by a dynamic index": (lambda x, w: joined(x, w[:4].T, w[4:].T) * w[jnp.argmax(x), 0], READ),
}
ROTATING = fp8.NVFP4Quantizer(rotation=True)
ROTATED = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=ROTATING, rhs=ROTATING))
STAYS = {
    # The embedding is also the kernel of the logits.
    "tied": (TiedEmbedding(), "delayed", {"kernel"}, {"Embed_0/embedding": READ}),
    "returned": (Returned(), "delayed", set(), {"w": READ}),
    "hidden": (ReadTwice(), "current", {"alone"}, dict.fromkeys(HIDDEN, READ)),
    "two kernels": (BothHeads(), "delayed", set(), {"OneOp_0/w0": PART, "OneOp_0/w1": PART}),
    "stacked parts": (StackOfParts(), "axiswise", {"qkv", "layers", "twice"}, OF_PARTS),
    **{
        name: (Sliced(multiply, (8, 8)), "current", set(), {"w": reason})
        for name, (multiply, reason) in UNSTORED_SLICES.items()
    },
    "others": (
        NotAsAWhole(),
        "delayed",
        set(),
        {"half": PART, "tied": READ, "scaled": PART, "read": READ},
    ),
    "nvfp4": (nn.Dense(4), fp8.NVFP4BlockScaling(), set(), {"kernel": "NVFP4 is stored in groups of 16"}),
    "rotated": (nn.Dense(4), ROTATED, set(), {"kernel": "its recipe rotates it"}),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_wide(name):
    """Codes are never taken for values: the logits are right, and a warning says why kernels stay wide."""
    model, recipe, expected, reasons = STAYS[name]
    x = normal(0, 4, 8)
    model8, variables = trained(model, x, recipe=RECIPES.get(recipe, recipe))
    with pytest.warns(UserWarning, match="stay wide") as caught:
        _, served = frozen_alike(model8, variables, x)
    text = "".join(str(warning.message) for warning in caught)
    assert not [kernel for kernel, reason in reasons.items() if f"{kernel} ({reason}" not in text]
    assert narrow(served) == expected


def test_a_kernel_whose_input_is_rounded_at_random_stays_wide():
    """The op needs a random key at each call, so it computes as in training."""
    lhs, rhs = fp8.NVFP4Quantizer(stochastic_rounding=True), fp8.NVFP4Quantizer()
    recipe = fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=lhs, rhs=rhs))
    x, rngs = normal(0, 4, 16), {"fp8": jax.random.key(0)}
    model8 = fp8.quantize_model(nn.Dense(16), recipe=recipe, include=".*")
    variables = model8.init(rngs | {"params": jax.random.key(1)}, x)
    with pytest.warns(UserWarning, match=r"stay wide: kernel \(its recipe rounds the input at random"):
        serve, served = fp8.freeze(model8, variables, x)
    out, expected = serve.apply(served, x, rngs=rngs), model8.apply(variables, x, rngs=rngs)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("model", "names"), [(MoreDims(), {"w"}), (BothHeads(Heads), {"w0", "w1"})])
def test_what_is_stored_nevertheless(model, names):
    """A kernel that gets one more dimension on its way; two kernels of a module, each with its own op."""
    x = normal(0, 4, 8)
    _, served = frozen_alike(*trained(model, x), x)
    assert narrow(served) == names


def test_ops_of_wide_kernels_are_switched_off():
    """By ``weight_only``, and by ``autocast`` around the call."""
    x = normal(0, 4, 8)
    model8, variables = trained(NotAsAWhole(), x)
    plain = NotAsAWhole().apply({"params": variables["params"]}, x)
    with pytest.warns(UserWarning, match="stay wide"):
        (serve, served), (of_weights, weights) = (
            fp8.freeze(model8, variables, x, weight_only=weight_only) for weight_only in (False, True)
        )
    assert set(served) == {"params", OWG}
    assert set(weights) == {"params"}
    with fp8.autocast(enabled=False):
        np.testing.assert_allclose(serve.apply(served, x), plain, rtol=1e-5)
    np.testing.assert_allclose(of_weights.apply(weights, x), plain, rtol=1e-5)


class TestOtherCalls:
    """What the frozen model does not know is an error."""

    x = np.asarray(normal(0, 4, 8))

    @pytest.mark.parametrize(("model", "other"), [(OneOp(), 1), (OpsOfSlices(), (1, 0))])
    def test_another_kernel_or_slice_than_was_seen(self, model, other):
        serve, served = frozen_alike(*trained(model, self.x), self.x)
        with pytest.raises(ValueError, match="did not run with this kernel"):
            serve.apply(served, self.x, other)

    def test_an_op_that_did_not_run(self):
        """It computes as in training, with its state."""
        model8, variables = trained(BothHeads(Heads), self.x)
        with pytest.warns(UserWarning, match=r"Heads_0/Fp8DotGeneralOp_w1 \(it did not run"):
            serve, served = fp8.freeze(model8, variables, methods={"first": (self.x,)})
        assert narrow(served) == {"w0"}
        np.testing.assert_array_equal(serve.apply(served, self.x), model8.apply(variables, self.x))

    def test_a_method_that_was_not_seen(self):
        """If freeze traces the method, too, the kernel stays wide."""
        model8, variables = trained(Penalized(), self.x)
        serve, served = fp8.freeze(model8, variables, self.x)
        for method in (
            "penalty",
            lambda m: jnp.sum(jnp.abs(m.layer.variables["params"]["kernel"])),
            lambda m: [jnp.sum(x.astype(x.dtype)) for x in jax.tree.leaves(m.layer.variables["params"])],
        ):
            with pytest.raises(ValueError, match="layer/kernel is stored in FP8"):
                serve.apply(served, method=method)
        with pytest.warns(UserWarning, match=READ):
            assert not narrow(fp8.freeze(model8, variables, self.x, methods={"penalty": ()})[1])


class Autoencoder(nn.Module):
    """Two methods, and a call that has no inputs."""

    def setup(self):
        self.encoder, self.decoder = nn.Dense(8), nn.Dense(8)

    def encode(self, x, *, scale=1.0):
        return self.encoder(x) * scale

    def decode(self, z, method="mean"):
        return self.decoder(z) if method == "mean" else z

    def __call__(self):
        return self.decoder(self.encoder(jnp.ones((2, 8))))


@pytest.mark.parametrize("name", ["own", "scan"])
def test_a_call_makes_no_wide_kernel(name):
    x = normal(0, 1, 8)
    serve, served = fp8.freeze(*trained(MODELS[name][0](), x), x)
    assert largest_array(serve.apply, served, x) == (8 * 8 if name == "own" else 8 * 4)


class TestMethods:
    """``freeze`` traces the methods that it is given inputs of, and nothing that ran before."""

    x = np.asarray(normal(0, 4, 8))

    def test_of_each_kind(self):
        model8, variables = trained(Autoencoder())
        encode, decode = {"x": self.x, "scale": 2.0}, (jax.ShapeDtypeStruct((1, 8), jnp.float32), "mean")
        for methods, names in (
            ({"encode": encode}, {"encoder"}),
            ({"decode": decode}, {"decoder"}),
            ({"encode": encode, "decode": decode}, {"encoder", "decoder"}),
            ({"__call__": ()}, {"encoder", "decoder"}),
        ):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "These kernels of FP8 ops stay wide: .*did not run")
                serve, served = fp8.freeze(model8, variables, methods=methods)
            stored = {path for path, x in flat(served["params"]).items() if x.dtype == E4M3}
            assert stored == {f"{name}/kernel" for name in names}
            for method in {"encode", "decode"} & {*methods}:
                out, expected = (
                    m.apply(v, self.x, method=method) for m, v in ((serve, served), (model8, variables))
                )
                np.testing.assert_array_equal(out, expected)
        with pytest.warns(UserWarning, match="encoder/"):
            weights = fp8.weights_for_serving(model8, variables, methods={"decode": {"z": self.x}})
        assert {name for name, x in weights.items() if x.dtype == E4M3} == {"decoder.weight"}

    def test_of_equal_models_under_jit(self):
        """The second model has the compiled program of the first, so none of its methods has run."""
        apply = jax.jit(lambda model, v, x: model.apply(v, x), static_argnums=0)
        for _ in range(2):
            model8, variables = trained(nn.Dense(4), self.x)
            apply(model8, variables, self.x)
            assert narrow(fp8.freeze(model8, variables, self.x)[1]) == {"kernel"}

    @pytest.mark.parametrize(
        ("inputs", "keywords", "match"),
        [
            ((), {}, "needs inputs"),
            ((x,), {"method": "decode"}, "methods="),
            ((), {"methods": "decode"}, "got str"),
            ((), {"methods": {"decode": x}}, "'decode': "),
            ((x,), {"methods": {"__call__": (x,)}}, "twice"),
        ],
    )
    def test_errors(self, inputs, keywords, match):
        model8, variables = trained(nn.Dense(4), self.x)
        for function in (fp8.freeze, fp8.weights_for_serving):
            with pytest.raises(TypeError, match=match):
                function(model8, variables, *inputs, **keywords)


def test_sharded_parameters_stay_where_they_are():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    x, init = normal(0, 4, 8), nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    model8 = fp8.quantize_model(nn.Dense(6, kernel_init=init), **ALL)
    variables = fp8.calibrate(model8.apply, variables_of(model8, x), [x])
    boxed = variables["params"]["kernel"]
    variables["params"]["kernel"] = boxed.replace_boxed(jax.device_put(boxed.value, sharding))
    serve, served = fp8.freeze(model8, variables, x)
    assert served["params"]["kernel"].value.sharding == sharding
    assert nn.get_partition_spec(served)["params"]["kernel"] == sharding.spec
    np.testing.assert_array_equal(serve.apply(served, x), model8.apply(variables, x))


@pytest.mark.parametrize(
    ("axis", "state_axis", "recipe"),
    [(1, 0, "delayed"), (-1, None, "axiswise")],
)
def test_as_many_layers_as_features(axis, state_axis, recipe):
    """Shapes do not say which axis of a kernel counts the layers, so it stays wide."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(4, use_bias=False)(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": axis} if state_axis is None else {"params": axis, OWG: state_axis}
            layers = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=4)
            return layers(name="layers")(x, None)[0]

    x = normal(0, 3, 4)
    with pytest.warns(UserWarning, match="along which axes"):
        assert not narrow(frozen_alike(*trained(Model(), x, recipe=RECIPES[recipe]), x)[1])


class Shared(nn.Module):
    """Three layers with the same parameters, as ``nn.scan`` makes them."""

    op: type | None = None

    @nn.compact
    def __call__(self, x):
        axes = {} if self.op is None else {OWG: 0}
        options = {"variable_broadcast": "params", "variable_axes": axes, "split_rngs": {"params": False}}
        scan = nn.scan(lambda layer, x, _: (layer(x), None), length=3, **options)
        return scan(nn.Dense(16, use_bias=False, dot_general_cls=self.op), x, None)[0]


@pytest.mark.filterwarnings("ignore:These scales are frozen")
def test_layers_that_share_their_parameters():
    x = normal(0, 3, 16)
    frozen_alike(*trained(Shared(), x, recipe=RECIPES["delayed"]), x)
    by_hand = Shared(fp8.Fp8DotGeneralOp)  # with a state for each use of the one kernel
    with pytest.warns(UserWarning, match="its shape and its state do not show"):
        assert not narrow(frozen_alike(by_hand, by_hand.init(jax.random.key(0), x), x)[1])


@pytest.mark.parametrize("recipe", ["axiswise", "mxfp8"])
def test_derivatives(recipe):
    """Inputs and wide parameters have those of the dequantized kernel; the codes have none."""

    class Adapted(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="base")(x * self.param("wide", nn.initializers.ones, (1, 8)))

    x = np.asarray(normal(0, 2, 8))
    model8, variables = trained(Adapted(), x, recipe=RECIPES[recipe], include="base")
    serve, served = fp8.freeze(model8, variables, x)
    wide, base = served["params"]["wide"], served["params"]["base"]
    scale = np.asarray(base["Fp8DotGeneralOp_0"]["kernel_scale"]).astype(np.float32)
    if recipe == "mxfp8":  # (1, columns of the kernel, blocks)
        scale = scale[0].T.repeat(32, 0)[:8]
    row = (np.asarray(base["kernel"]).astype(np.float32) * scale).sum(1)
    expected = np.broadcast_to(row * np.asarray(wide), (2, 8))
    loss = lambda x, wide, base: serve.apply({"params": {"wide": wide, "base": base}}, x).sum()  # noqa: E731
    of_x, of_wide = jax.grad(loss, (0, 1))(x, wide, base)
    np.testing.assert_allclose(of_x, expected, rtol=1e-5)
    np.testing.assert_allclose(of_wide, (row * x).sum(0, keepdims=True), rtol=1e-4)
    of_examples = jax.jit(jax.vmap(jax.grad(loss), (0, None, None)))(x[:, None], wide, base)
    np.testing.assert_allclose(of_examples[:, 0], expected, rtol=1e-5)
    value, tangent = jax.jvp(lambda x: loss(x, wide, base), (x,), (x,))
    assert value == loss(x, wide, base)
    np.testing.assert_allclose(tangent, np.sum(expected * x), rtol=1e-4)
    with pytest.raises(TypeError, match="have no gradient"):
        jax.grad(loss, 2, allow_int=True)(x, wide, base)


def test_goes_by_the_variables_it_is_given():
    """Earlier calls do not matter: one model gets parameters that are cast and parameters that are not."""
    model8, x = fp8.quantize_model(nn.Dense(16), include=".*"), normal(0, 4, 32)
    wide = variables_of(model8, x)
    narrow = {**wide, "params": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide["params"])}
    with jax.numpy_dtype_promotion("standard"):  # as the layer's own
        for variables in (narrow, wide):
            variables = fp8.calibrate(model8.apply, variables, [x])
            model8.apply(variables, x.astype(jnp.bfloat16))
            serve, served = fp8.freeze(model8, variables, x)
            assert served["params"]["kernel"].dtype == E4M3
            np.testing.assert_array_equal(serve.apply(served, x), model8.apply(variables, x))


@pytest.mark.long
@pytest.mark.newest
def test_decoding():
    """One token after the other: a frozen decoder has the bits of the decoder in training."""
    _, variables = trained(LanguageModel(layers=1), TOKENS)
    decoder = fp8.quantize_model(LanguageModel(layers=1, decode=True), **ALL)
    variables = {**variables, "cache": variables_of(decoder, jnp.zeros_like(TOKENS))["cache"]}

    def decoded(model, variables):
        @jax.jit
        def step(variables, token):
            logits, changed = model.apply(variables, token, mutable=["cache"])
            return logits, {**variables, **changed}

        logits = []
        for i in range(TOKENS.shape[1]):
            out, variables = step(variables, TOKENS[:, i : i + 1])
            logits.append(out)
        assert step._cache_size() == 1
        return np.concatenate(logits, 1)

    frozen = fp8.freeze(decoder, variables, TOKENS[:, :1])
    np.testing.assert_array_equal(decoded(*frozen), decoded(decoder, variables))


CHECKS = [
    jax.export.DisabledSafetyCheck.custom_call(name)
    for name in ("LayoutConstraint", "__gpu$xla.gpu.triton", "__op$block_scaled_dot")
]


def test_export_for_a_gpu():
    """With the checks off that docs/serving.md turns off; JAX refuses other custom calls."""
    x = normal(0, 256, 128)
    serve, served = fp8.freeze(*trained(nn.Dense(256), x), x)
    export = jax.export.export(jax.jit(serve.apply), platforms=["cuda"], disabled_checks=CHECKS)
    with compiling_for(GPUS["h200"]):
        assert export(served, x).platforms == ("cuda",)


@pytest.mark.parametrize(
    ("recipe", "target"),
    [
        ("delayed", None),  # JAX 0.12 cannot write an FP8 dot with an algorithm
        pytest.param("block128", "h200", marks=pytest.mark.newest),
        ("mxfp8", "b200"),
    ],
)
def test_export_for_a_cpu_and_a_gpu_at_once(recipe, target):
    """A frozen model and a gradient: written, read again, and called here. The bits are the usual ones.

    The number of rows is symbolic for scales per block.
    """
    model8, variables = trained(nn.Dense(256), x := normal(0, 256, 128), recipe=RECIPES[recipe])
    rows = 256 if recipe == "delayed" else jax.export.symbolic_shape("rows")[0]
    serve, served = fp8.freeze(model8, variables, x)

    def step(variables, x):
        return fp8.value_and_grad(lambda v: jnp.sum(model8.apply(v, x) ** 2))(variables)

    for f, v in ((serve.apply, served), (step, variables)):
        export = jax.export.export(jax.jit(f), platforms=("cpu", "cuda"), disabled_checks=CHECKS)
        with compiling_for(GPUS.get(target)):
            exported = export(v, jax.ShapeDtypeStruct((rows, 128), jnp.float32))
        found = jax.export.deserialize(exported.serialize()).call(v, x)
        jax.tree.map(np.testing.assert_array_equal, found, jax.jit(f)(v, x))


@pytest.mark.parametrize(
    ("rows", "accumulation", "target", "backend"),
    [
        (32, "fast", "h200", "Triton"),
        (256, "fast", "h200", "Triton"),
        (512, "fast", "h200", "cublasLt"),
        (32, "exact", "h200", "cublasLt"),
        (32, "fast", "b200", "cublasLt"),  # reads either order
    ],
)
def test_a_few_rows_read_the_kernel_as_it_lies(gpu, rows, accumulation, target, backend):
    """Hopper's FP8 units would need the kernel transposed for each token."""
    recipe = fp8.DelayedScaling(accumulation=(accumulation, "exact", "exact"))
    x = normal(0, rows, 1024, dtype=jnp.bfloat16)
    layer = nn.Dense(2048, use_bias=False, dtype=jnp.bfloat16)
    serve, served = fp8.freeze(*trained(layer, x, recipe=recipe), x)
    report = fp8.audit(serve.apply, served, x, target=target)
    (gemm,) = report.gemms
    assert gemm.backend == backend
    if rows == 32:
        transposes = backend == "cublasLt" and target == "h200"
        assert (report.other_bytes > 2 * 1024 * 2048) == transposes


class Decaying(nn.Module):
    """A mean over calls in the collection ``cache``, in a box, and a tuple with a counter."""

    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = nn.Dense(4, kernel_init=init)(x)
        mean = self.variable("cache", "mean", nn.with_partitioning(jnp.zeros, ("model",)), 4)
        mean.value = (mean.value + y.mean(0)) / 2
        count = self.variable("cache", "count", lambda: (jnp.zeros((), jnp.int32),))
        count.value = (count.value[0] + 1,)
        return mean.value


def test_other_collections_keep_their_structure():
    """``freeze`` and each call of the frozen model return the same structure and dtypes."""
    x = normal(0, 4, 8)
    model8 = fp8.quantize_model(Decaying(), RECIPES["current"], **ALL)
    variables = variables_of(model8, x)
    serve, served = fp8.freeze(model8, variables, x)
    assert (
        nn.get_partition_spec(served["cache"])["mean"] == nn.get_partition_spec(variables["cache"])["mean"]
    )
    _, expected = model8.apply(variables, x, mutable=["cache"])
    _, cache = serve.apply(served, x, mutable=["cache"])
    jax.tree.map(np.testing.assert_array_equal, cache, expected)
    shapes = [jax.eval_shape(lambda cache: cache, tree) for tree in (served["cache"], cache["cache"])]
    assert shapes[0] == shapes[1]
    with pytest.raises(ValueError, match="init of the original model"):
        serve.init(jax.random.key(0), x)


@pytest.mark.newest
class TestErrors:
    x = np.ones((2, 8), np.float32)

    def test_variables_of_another_model(self):
        model8, variables = trained(nn.Dense(4), self.x)
        with pytest.raises(fp8.MissingStateError, match=r"input_scale is missing .* fp8flax.calibrate"):
            fp8.freeze(model8, {"params": variables["params"]}, self.x)
        serve, served = fp8.freeze(model8, variables, self.x)
        del served["params"]["Fp8DotGeneralOp_0"]["input_scale"]
        with pytest.raises(ValueError, match="input_scale .* missing"):
            serve.apply(served, self.x)

    def test_scales_that_have_seen_no_data(self):
        model8 = fp8.quantize_model(nn.Dense(4), **ALL)
        variables = variables_of(model8, self.x)
        with pytest.warns(UserWarning, match=r"no data: Fp8DotGeneralOp_0/input_scale, Fp8.*kernel_scale"):
            fp8.freeze(model8, variables, self.x)
        fp8.freeze(model8, variables, self.x, weight_only=True)

    def test_fp8_is_off(self):
        dense = *trained(nn.Dense(4), self.x), self.x
        serve, served = fp8.freeze(*dense)
        with fp8.autocast(enabled=False):
            with pytest.raises(ValueError, match="No FP8 op ran"):
                fp8.freeze(*dense)
            with pytest.raises(ValueError, match="cannot turn FP8 off"):
                serve.apply(served, self.x)

"""Statistics agree with NumPy under every transformation."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.tables import table_lines
from tests import reference_recipes as ref
from tests.cases import (
    MATMUL,
    OWG,
    RECIPES,
    assert_trees_equal,
    codes_and_scales,
    mesh,
    normal,
    scale_of_each,
)
from tests.reference import MAX

FIELDS = ["underflow", "saturation", "sqnr", "headroom", "amax", "scale", "kurtosis", "nonfinite"]
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOOR = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(2, 16), scale_rounding="floor")
CUSTOM = fp8.CustomRecipe(  # the output gradient wide in one of its products, the kernel in both
    forward=fp8.GemmRecipe(lhs=FLOOR),
    wgrad=fp8.GemmRecipe(lhs=FLOOR, rhs=fp8.CurrentQuantizer(dtype=jnp.float8_e5m2)),
)
ALL = {**RECIPES, "custom": CUSTOM}
SHAPES = {"input": (5, 70), "kernel": (70, 33), "output_grad": (5, 33)}
# The two products of each tensor: the GEMM, the side, and the axis that it sums over.
PRODUCTS = {
    "input": (("forward", "lhs", 1), ("wgrad", "lhs", 0)),
    "kernel": (("forward", "rhs", 0), ("dgrad", "rhs", 1)),
    "output_grad": (("dgrad", "lhs", 1), ("wgrad", "rhs", 0)),
}
# The dtype of output gradients for delayed and current scaling.
BACKWARD = {"output_grad": E5M2}


def each_use(recipe, role, x, scale):
    """Yields dequantized ``x``, its codes, their scales and their dtype, for each use with other codes."""
    uses = [(getattr(getattr(ALL[recipe].gemms, gemm), side), axis) for gemm, side, axis in PRODUCTS[role]]
    uses = [(quantizer, axis) for quantizer, axis in uses if quantizer is not None]
    is_square = recipe == "block128" and role == "kernel"
    for quantizer, axis in uses[:1] if uses[0][0].has_one_scale or is_square else uses:
        name = quantizer.dtype.name
        if recipe == "delayed":
            codes = ref.codes_of(x, scale, name)
        else:
            codes, scale = codes_and_scales(quantizer, x, axis)
        scales = scale_of_each(quantizer, scale, axis, x.shape)
        yield ref.dequantize(codes, scales), codes, scales, name


def expected(recipe, role, x, scale):
    """Returns the numbers of ``fp8.statistics`` in float64."""
    x = ref.as_float32(x)
    finite = np.isfinite(x)
    values = finite & (x != 0)
    kept, codes, scales, dtypes = zip(*each_use(recipe, role, x, scale))
    count, wide = max(1, len(kept) * values.sum()), np.where(values, x, 0).astype(np.float64)
    largest = [MAX[dtype] * np.where(values, s, 0).astype(np.float64) for s, dtype in zip(scales, dtypes)]
    noise = sum(np.sum((wide - np.where(values, ref.as_float32(k), 0)) ** 2) for k in kept)
    signal = len(kept) * np.sum(wide**2)
    with np.errstate(all="ignore"):
        return {
            "underflow": sum(np.sum(values & (np.asarray(c, np.float32) == 0)) for c in codes) / count,
            "saturation": sum(np.sum(np.abs(wide) > m * (1 + 1e-6)) for m in largest) / count,
            "sqnr": 10 * np.log10(signal / noise) if noise else np.inf,
            "headroom": min(np.min(m[values] / np.abs(wide[values]), initial=np.inf) for m in largest),
            "amax": np.max(np.abs(wide), initial=0),
            "scale": max(
                np.max(s[values] if values.any() else s, initial=0).astype(np.float64) for s in scales
            ),
            "kurtosis": count * len(kept) * np.sum(wide**4) / signal**2 if signal else 0,
            "nonfinite": np.sum(~finite),
        }


def operands(shape_of=SHAPES):
    """Returns one tensor of each role for each kind of unusual data."""
    made = {role: ref.tensors(shape, seed) for seed, (role, shape) in enumerate(shape_of.items())}
    return {name: {role: made[role][name] for role in made} for name in made["input"]}


OPERANDS = operands()


def loss(op, variables, x, g):
    state = {OWG: variables[OWG]} if OWG in variables else {}
    return jnp.sum(op.apply(state, x, variables["w"], MATMUL) * g)


def measure_of(recipe):
    return fp8.statistics(partial(loss, fp8.Fp8DotGeneralOp(recipe=recipe)))


MEASURES = {name: measure_of(recipe) for name, recipe in ALL.items()}
# With these scales some values saturate and some underflow.
SCALES = {"input": np.float32(0.01), "kernel": np.float32(3e-3), "output_grad": np.float32(1e-6)}


def with_state(recipe, w):
    if recipe != "delayed":
        return {"w": w}
    state = {}
    for role, scale in SCALES.items():
        dtype = BACKWARD.get(role, E4M3)
        state[f"{role}_scale"] = np.ones(1, np.float32)
        state[f"{role}_amax_history"] = np.full(4, scale * np.float32(MAX[dtype]), np.float32)
    return {"w": w, OWG: state}


def scale_in_use(role):
    """Returns the scale that the package computes in float32 from the histories above."""
    limit = np.float32(MAX[BACKWARD.get(role, E4M3)])
    return np.float32(1) / (limit / (SCALES[role] * limit))


@pytest.mark.parametrize("recipe", ALL)
def test_beside_the_reference(recipe):
    for name, tensors in OPERANDS.items():
        variables = with_state(recipe, tensors["kernel"])
        found = MEASURES[recipe](variables, tensors["input"], tensors["output_grad"])["Fp8DotGeneralOp"]
        assert set(found) == set(SHAPES) - ({"kernel"} if recipe == "custom" else set())
        for role, one in found.items():
            x = tensors[role]
            x = np.where(np.isinf(x), np.nan, x) if role == "output_grad" else x
            for field, value in expected(recipe, role, x, scale_in_use(role)).items():
                actual = one[field]
                assert type(actual) is float
                tolerance = {"rtol": 2e-6, "atol": 2.0**-126}
                if field == "sqnr":
                    tolerance = {"rtol": 0, "atol": 1e-3}
                np.testing.assert_allclose(actual, value, err_msg=f"{name} {role} {field}", **tolerance)


def assert_close(actual, expected):
    """Asserts that two trees of statistics are close."""
    compare = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    assert_trees_equal(dict(actual), dict(expected), compare)


X = normal(0, 4, 8)


OP = fp8.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
W = normal(3, 8, 8)


def test_out_of_branches_and_batches():
    """A branch that was not taken reports no numbers, and does not change those of other branches."""

    def branched(w, x, index):
        def last(x):
            return jnp.sum(jnp.sin(OP.apply({}, jnp.abs(x), w, MATMUL)))

        def both(x):
            return last(OP.apply({}, x, w, MATMUL))

        return jax.lax.switch(index, (jnp.sum, last, both), x)

    measure = fp8.statistics(branched)
    with pytest.raises(ValueError, match="No FP8 op was reached"):
        measure(W, X, jnp.int32(0))
    one, two = (measure(W, X, jnp.int32(i)) for i in (1, 2))
    one, two = (found["Fp8DotGeneralOp"]["input"] for found in (one, two))
    assert np.all(np.isfinite([(found["sqnr"], found["headroom"]) for found in (one, two)]))
    assert one["amax"] == jnp.max(jnp.abs(X))
    assert two["amax"] > one["amax"]


@pytest.mark.parametrize("size", [1e-24, 3.3e38])
def test_the_error_of_tiny_and_huge_tensors(size):
    """The squares of these values are no float32."""
    layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
    variables = layer.init(jax.random.key(0), X)

    def sqnr(x):
        calibrated = fp8.calibrate(layer.apply, variables, [x])
        found = fp8.statistics(lambda v, x: jnp.sum(layer.apply(v, x)))(calibrated, x)
        return found["Fp8DotGeneralOp_0"]["input"]["sqnr"]

    assert sqnr(X / jnp.max(jnp.abs(X)) * size) == pytest.approx(sqnr(X), abs=1)


def test_of_a_batch_by_vmap():
    """Each example has a scale of its own; the numbers are over all examples."""
    xs = normal(4, 3, 4, 8)

    def loss(w, x):
        return jnp.sum(jnp.sin(OP.apply({}, x, w, MATMUL)))

    found = fp8.statistics(lambda w, xs: jnp.sum(jax.vmap(partial(loss, w))(xs)))(W, xs)["Fp8DotGeneralOp"]
    each = [expected("current", "input", x, None) for x in xs]
    for field, merge in (("amax", max), ("scale", max), ("headroom", min), ("underflow", np.mean)):
        value = merge([numbers[field] for numbers in each])
        np.testing.assert_allclose(found["input"][field], value, rtol=1e-5, err_msg=field)


KERNELS = jnp.stack([W, 1e-7 * W, W])
STACK = {"block": 1, "remat": 1, "unrolled": 3, "remat of the loop": 1}


@pytest.mark.newest
@pytest.mark.parametrize("how", STACK)
def test_layers_of_a_scan_have_numbers_each(how):
    """Each layer runs its op twice. The last loss is linear, so its cotangent waits for no forward pass."""
    wrap = jax.checkpoint if how in ("remat", "unrolled") else lambda f: f

    def block(x, w):
        return x + jnp.sin(OP.apply({}, OP.apply({}, x, w, MATMUL), w, MATMUL)), None

    def looped(kernels):
        run = lambda x, ws: jax.lax.scan(wrap(block), x, ws, unroll=STACK[how])[0]  # noqa: E731
        return jnp.sum((jax.checkpoint(run) if "loop" in how else run)(X, kernels))

    class Unrolled(nn.Module):
        @nn.compact
        def __call__(self, kernels):
            x = X
            for i, w in enumerate(kernels):
                op = fp8.Fp8DotGeneralOp(recipe=OP.recipe, name=f"layer_{i}")
                x += jnp.sin(op(op(x, w, MATMUL), w, MATMUL))
            return jnp.sum(x)

    found, expected = (fp8.statistics(f)(KERNELS) for f in (looped, partial(Unrolled().apply, {})))
    assert list(found) == [f"Fp8DotGeneralOp[{i}]" for i in range(3)]
    assert list(expected) == [f"layer_{i}" for i in range(3)]
    assert_close(dict(enumerate(found.values())), dict(enumerate(expected.values())))
    assert "Fp8DotGeneralOp[1]/kernel" in str(found)


def test_layers_of_a_vmap_have_numbers_each():
    """The examples of a batch share a kernel, and have none."""
    xs = normal(4, 2, 4, 8)

    def loss(kernels, xs):
        of_layers = jax.vmap(lambda w, x: jnp.sum(jnp.sin(OP.apply({}, x, w, MATMUL))), (0, None))
        return jnp.sum(jax.vmap(of_layers, (None, 0))(kernels, xs))

    found = fp8.statistics(loss)(KERNELS, xs)
    assert list(found) == [f"Fp8DotGeneralOp[{i}]" for i in range(3)]
    one_by_one = fp8.statistics(lambda w, xs: loss(w[None], xs))
    for w, one in zip(KERNELS, found.values()):
        assert_close({"Fp8DotGeneralOp": one}, one_by_one(w, xs))


def test_equal_calls_count_each():
    xs = jnp.broadcast_to(X.at[0, 0].set(np.nan), (4, *X.shape))

    def step(total, x):
        return total + jnp.sum(OP.apply({}, x, W, MATMUL)), None

    scanned = fp8.statistics(lambda w, xs: jax.lax.scan(step, jnp.sum(w), xs)[0])(W, xs)
    batched = fp8.statistics(lambda w, xs: jnp.sum(jax.vmap(partial(step, 0.0))(xs)[0]))(W, xs)
    for found in (scanned, batched):
        assert list(found) == ["Fp8DotGeneralOp"]
        assert found["Fp8DotGeneralOp"]["input"]["nonfinite"] == 4


def test_statistics_inside_of_statistics_is_an_error():
    inner = fp8.statistics(lambda w: jnp.sum(OP.apply({}, X, w, MATMUL)))
    with pytest.raises(ValueError, match="inside of a function that one of them runs"):
        fp8.statistics(lambda w: inner(w)["Fp8DotGeneralOp"]["input"]["amax"])(W)


def test_out_of_while_loops_and_calls_without_a_gradient():
    """The numbers of a while loop are those of all its rounds in one call after another."""

    def step(w, x):
        return jnp.sin(OP.apply({}, 2 * x, w, MATMUL))

    def looped(w):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(w, c[1])), (0, X))[1]

    def unrolled(w):
        return step(w, step(w, step(w, X)))

    def measure(f):
        return fp8.statistics(lambda w: jnp.sum(w) + jnp.sum(f(jax.lax.stop_gradient(w))))(W)

    found, expected = measure(looped), measure(unrolled)
    assert set(found["Fp8DotGeneralOp"]) == {"input", "kernel"}
    assert_close(found, expected)


def test_refuses_what_nothing_comes_out_of():
    with pytest.raises(ValueError, match="No FP8 op was reached"):
        fp8.statistics(jnp.sum)(W)
    with fp8.autocast(enabled=False), pytest.raises(ValueError, match="No FP8 op was reached"):
        fp8.statistics(lambda w: jnp.sum(OP.apply({}, X, w, MATMUL)))(W)


@pytest.mark.long
def test_on_many_devices():
    """Statistics work on automatic and explicit axes; in shard_map they are those of all devices."""
    op = fp8.Fp8DotGeneralOp(recipe=RECIPES["mxfp8"])

    def square(w, x):
        return jnp.sum(jnp.square(op.apply({}, x, w, MATMUL)))

    measure = fp8.statistics(square)
    expected = measure(W, X)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        with jax.set_mesh(mesh(kind, data=2)):
            x = jax.device_put(X, jax.P("data"))
            assert_close(measure(jax.device_put(W, jax.P()), x), expected)
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
    split = jax.shard_map(lambda w, x: jax.lax.psum(square(w, x), "data"), mesh=mesh(data=2), **specs)
    # Blocks along the batch are those of a device.
    found, whole = (f(W, X)["Fp8DotGeneralOp"]["input"] for f in (fp8.statistics(split), measure))
    assert found["amax"] == whole["amax"]
    assert found["sqnr"] == pytest.approx(whole["sqnr"], abs=0.1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls:UserWarning")
def test_of_whole_models_and_all_ops():
    """Paths are those of the scaling state, and numbers are those of the op alone."""

    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.normal(), (2, x.shape[-1], x.shape[-1]))
            rows = x.reshape(-1, x.shape[-1])
            sizes = jnp.array([1, len(rows) - 1])
            return fp8.Fp8RaggedDotOp(recipe=fp8.Float8CurrentScaling())(rows, kernel, sizes).reshape(
                x.shape
            )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = x + Experts(name="experts")(x)
            x = nn.Conv(8, (2,), conv_general_dilated_cls=fp8.Fp8ConvGeneralDilatedOp, name="conv")(x)
            x = nn.Dense(8, dot_general_cls=partial(fp8.Fp8DotGeneralOp, form="qdq"), name="qdq")(x)
            return nn.Dense(8, name="plain")(x)

    model = fp8.quantize_model(Model(), include="plain")
    variables = jax.jit(model.init)(jax.random.key(0), X)
    variables["count"] = jnp.zeros((), jnp.int32)

    def loss(variables, x):
        used = {name: variables[name] for name in ("params", OWG)}
        return jnp.mean(jnp.square(model.apply(used, x))), (variables["count"], 3, "x")

    found = fp8.statistics(loss, has_aux=True)(variables, X)
    assert set(found) == {
        *("experts/Fp8RaggedDotOp_0", "conv/Fp8ConvGeneralDilatedOp_0"),
        *("qdq/Fp8DotGeneralOp_0", "plain/Fp8DotGeneralOp_0"),
    }
    assert all(set(of_op) == {"input", "kernel", "output_grad"} for of_op in found.values())
    assert all(of_op["output_grad"]["amax"] > 0 for of_op in found.values())
    # Each expert's kernel has a scale of its own.
    kernel, of_experts = (
        np.asarray(variables["params"]["experts"]["kernel"]),
        found["experts/Fp8RaggedDotOp_0"],
    )
    noise = np.sum(np.square(kernel - [ref.dequantize(*ref.tensorwise(one, E4M3)) for one in kernel]))
    sqnr = 10 * np.log10(np.sum(np.square(kernel, dtype=np.float64)) / noise)
    assert of_experts["kernel"]["sqnr"] == pytest.approx(sqnr, abs=1e-3)
    assert of_experts["kernel"]["scale"] == pytest.approx(np.abs(kernel).max() / 448, rel=1e-6)
    assert of_experts["kernel"]["headroom"] == pytest.approx(1, rel=1e-6)


def numbers(**values):
    return {name: float(values.get(name, 0)) for name in FIELDS}


HISTORY = {
    0: {
        "a": {
            "input": numbers(scale=0.25, underflow=0.25, saturation=0.5),
            "kernel": numbers(headroom=np.inf),
        }
    },
    10: {
        "a": {"input": numbers(scale=0.5, underflow=1)},
        "b": {"kernel": dict.fromkeys(FIELDS, 0.0)},
    },
}


def test_the_table():
    text = str(MEASURES["current"](with_state("current", W[:, :8]), X, jnp.ones((4, 8))))
    shown = [field for field in FIELDS if field != "kurtosis"]
    assert text.splitlines()[0].split() == ["tensor", *shown]
    assert all(f"Fp8DotGeneralOp/{role}" in text for role in SHAPES)
    assert f"{np.max(np.abs(X)):.3g}" in text
    assert table_lines(("a", "b"), [("long", "longer")]) == ["a     b", 12 * "-", "long  longer"]
    assert table_lines(("a", "b"), []) == ["a  b"]


def test_plot():
    with pytest.raises(ValueError, match="must have the statistics"):
        fp8.plot_statistics({})
    underflow, saturation, scale = fp8.plot_statistics(HISTORY).axes[:3]
    names = [label.get_text() for label in underflow.get_yticklabels()]
    assert names == ["a/input", "a/kernel", "b/kernel"]
    for axes, of_input in ((underflow, [25, 100]), (saturation, [50, 0]), (scale, [-2, -1])):
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array().filled(np.nan)[0], of_input)
        assert axes.get_xlabel() == "step"
    expected = [[25, 100], [0, np.nan], [np.nan, 0]]
    np.testing.assert_array_equal(underflow.images[0].get_array().filled(np.nan), expected)
    assert np.isnan(scale.images[0].get_array().filled(np.nan)[1:]).all()  # of zeros


def test_a_recipe_that_casts_no_output_gradient():
    """The backward pass has nothing to report, and the layer has its own name."""
    recipe = fp8.CustomRecipe(forward=fp8.MXFP8BlockScaling().gemms.forward)
    layer = nn.Dense(32, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=recipe))
    x = normal(0, 4, 32)
    found = fp8.statistics(lambda v, x: jnp.sum(layer.apply(v, x) ** 2))(
        layer.init(jax.random.key(0), x), x
    )
    assert {name: list(roles) for name, roles in found.items()} == {
        "Fp8DotGeneralOp_0": ["input", "kernel"]
    }

"""Convolutions beside JAX in float64: values, gradients and state; what they compile to for a GPU."""

import types
import warnings
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.op import calling
from fp8flax._core.state.state import ScalingState
from tests import reference
from tests.cases import OWG, cells, error_of_product, fp8_dot_general, struct, variables_of

pytestmark = pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls:UserWarning")

ROLES = ("input", "kernel", "output_grad")
DTYPES = ("float8_e4m3fn", "float8_e4m3fn", "float8_e5m2")
RECIPE = fp8.DelayedScaling(amax_history_len=2)
OP = partial(fp8.Fp8ConvGeneralDilatedOp, recipe=RECIPE)


def case(x_shape, w_shape, strides, padding, matmul=False, **kwargs):
    return types.SimpleNamespace(
        x=x_shape, w=w_shape, strides=strides, padding=padding, matmul=matmul, kwargs=kwargs
    )


CASES = {
    "SAME, odd sizes": case((2, 7, 5, 3), (3, 3, 3, 5), (1, 1), [(1, 1), (1, 1)]),
    "strides": case((2, 8, 9, 3), (3, 2, 3, 4), (2, 3), [(0, 0), (0, 0)]),
    "dilated input, cropped": case(
        (2, 5, 4, 3), (2, 3, 3, 4), (2, 1), [(1, -1), (-1, 2)], lhs_dilation=(3, 2)
    ),
    "groups": case((2, 5, 5, 4), (3, 3, 2, 6), (1, 1), [(1, 1), (1, 1)], feature_group_count=2),
    "depthwise, stride": case((2, 6, 5, 3), (3, 3, 1, 6), (2, 2), [(0, 1), (1, 1)], feature_group_count=3),
    "groups of the batch": case((4, 5, 5, 3), (3, 3, 3, 6), (1, 1), [(1, 1), (1, 1)], batch_group_count=2),
    "no batch": case((0, 6, 6, 3), (3, 3, 3, 4), (1, 1), [(1, 1), (1, 1)]),
    "1×1, strides, padding": case((2, 4, 5, 3), (1, 1, 3, 4), (2, 3), [(1, 2), (0, 1)], matmul=True),
    "patches": case((2, 8, 6, 3), (4, 2, 3, 5), (4, 2), [(0, 0), (0, 0)], matmul=True),
    "windows apart, dilated": case((2, 13, 3), (2, 3, 4), (5,), [(-1, 2)], matmul=True, rhs_dilation=(3,)),
    "no patches": case((2, 3, 3), (4, 3, 4), (4,), [(0, 0)], matmul=True),
}


def channels_last(num_spatial):
    spatial = "XYZ"[:num_spatial]
    return f"N{spatial}C", f"{spatial}IO", f"N{spatial}C"


def fp8_conv_general_dilated(x, w, *args, states=None, recipe, **kwargs):
    return calling(Conv, partial(Conv.in_fp8, states=states or {}, recipe=recipe))(x, w, *args, **kwargs)


def convolution_of(case, convolve=fp8_conv_general_dilated, **options):
    return partial(
        convolve,
        window_strides=case.strides,
        padding=case.padding,
        dimension_numbers=channels_last(len(case.strides)),
        **case.kwargs,
        **options,
    )


def in_float64(case, x, w, g=None):
    """Returns the convolution and both gradients, by JAX in float64."""
    convolve = convolution_of(case, lax.conv_general_dilated)
    with jax.enable_x64(True):
        wide = [None if t is None else jnp.asarray(np.asarray(t, np.float64)) for t in (x, w, g)]
        out, vjp = jax.vjp(convolve, *wide[:2])
        return [np.asarray(t) for t in (out, *vjp(jnp.ones_like(out) if g is None else wide[2]))]


def operands(case, dtype=np.float32):
    rng = np.random.default_rng(0)
    out = jax.eval_shape(convolution_of(case, lax.conv_general_dilated), struct(*case.x), struct(*case.w))
    return [
        np.asarray(rng.normal(size=s) * a, np.float32).astype(dtype)
        for s, a in zip((case.x, case.w, out.shape), (3.0, 0.2, 1e-3))
    ]


def states_of(*amaxes, length=2):
    states = (ScalingState(jnp.ones((1,)), jnp.zeros((length,)).at[-1].set(amax)) for amax in amaxes)
    return dict(zip(ROLES, states))


def make_vjp(convolve):
    @jax.jit
    def run(x, w, g, states):
        out, vjp = jax.vjp(lambda x, w, states: convolve(x, w, states=states), x, w, states)
        return out, *vjp(g.astype(out.dtype))

    return run


@pytest.mark.newest
@pytest.mark.parametrize("name", cells(CASES, ("strides", "groups", "patches")))
def test_values_gradients_and_state(name):
    """With amaxes that are too low for some of the data: those saturate."""
    c = CASES[name]
    tensors, amaxes = operands(c), (5.0, 0.3, 2e-3)
    states = states_of(*amaxes)
    traced = make_vjp(convolution_of(c, recipe=RECIPE)).trace(*tensors, states)
    assert ("conv_general_dilated" not in str(traced.jaxpr)) == c.matmul
    *results, new = traced.lower().compile()(*tensors, states)
    x, w, g = quantized = [
        reference.qdq(t, dtype, reference.next_scale([a], np.ones(1), dtype))
        for t, dtype, a in zip(tensors, DTYPES, amaxes)
    ]
    for actual, expected, factors in zip(results, in_float64(c, *quantized), ((x, w), (g, w), (x, g))):
        assert actual.shape == expected.shape
        if expected.size and all(map(np.size, factors)):
            assert error_of_product(actual, expected, *factors) <= 1e-6
        else:
            np.testing.assert_array_equal(actual, np.zeros(expected.shape))
    seen = list(tensors)
    if c.matmul:  # the amax of what enters a window
        enters = in_float64(c, np.ones(c.x), np.ones(c.w))[1] > 0
        seen[0] = np.where(enters, tensors[0], 0) if enters.any() else np.zeros((0,))
    for role, tensor, dtype, amax in zip(ROLES, seen, DTYPES, amaxes):
        state = new[role]
        np.testing.assert_array_equal(state.scale, reference.next_scale([amax], np.ones(1), dtype))
        np.testing.assert_array_equal(state.amax_history, reference.next_history(tensor, [0.0, amax]))


@pytest.mark.parametrize("name", ["strides", "patches"])
def test_layouts(name):
    """The same numbers, with every tensor in another order."""
    c = CASES[name]
    tensors, states = operands(c), states_of(5.0, 0.3, 2e-3)
    expected = make_vjp(convolution_of(c, recipe=RECIPE))(*tensors, states)
    orders = (("NXYC", "CXNY"), ("XYIO", "OXIY"), ("NXYC", "YNCX"))
    convolve = partial(
        fp8_conv_general_dilated,
        window_strides=c.strides,
        padding="VALID",
        dimension_numbers=tuple(order for _, order in orders),
        recipe=RECIPE,
    )
    moved = [np.einsum(f"{a}->{b}", t) for t, (a, b) in zip(tensors, orders)]
    out, dx, dw, new = make_vjp(convolve)(*moved, states)
    back = [np.einsum(f"{b}->{a}", t) for t, (a, b) in zip((dx, dw, out), orders)]
    for actual, wanted in zip(back, (expected[1], expected[2], expected[0])):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, new, expected[3])


@pytest.mark.newest
def test_recipes_of_matmuls():
    """On patches they are the matmul of the patches, in the kernel's order; elsewhere an error."""
    recipe, c = fp8.MXFP8BlockScaling(), CASES["patches"]
    x, w, g = operands(c)
    actual = make_vjp(convolution_of(c, recipe=recipe))(x, w, g, {})
    rows = np.einsum("NXxYyC->NXYxyC", x.reshape(2, 2, 4, 3, 2, 3)).reshape(2, 2, 3, -1)
    dims = (((3,), (0,)), ((), ()))
    out, dx, dw, _ = make_vjp(partial(fp8_dot_general, dimension_numbers=dims, recipe=recipe))(
        rows, w.reshape(-1, 5), g, {}
    )
    dx = np.einsum("NXYxyC->NXxYyC", np.asarray(dx).reshape(2, 2, 3, 4, 2, 3))
    for ours, expected in zip(actual, (out, dx.reshape(c.x), np.asarray(dw).reshape(c.w))):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("options", [{"granularity": "axiswise"}, {"high_precision_wgrad": True}], ids=str)
def test_elsewhere_a_tensor_has_one_scale_in_all_products(options):
    """Quantize-dequantize casts each tensor once."""
    recipe = fp8.Float8CurrentScaling(**options)
    with pytest.raises(ValueError, match="one scale per tensor"):
        jax.eval_shape(convolution_of(CASES["groups"], recipe=recipe), *operands(CASES["groups"])[:2])


LAYER = nn.Conv(4, (3, 3), strides=2, conv_general_dilated_cls=OP)
IMAGES = np.asarray(np.random.default_rng(0).normal(size=(2, 7, 6, 3)), np.float32)
"""Of which the windows of the layer overlap."""


def squares(variables, x):
    return jnp.sum(LAYER.apply(variables, x) ** 2)


gradient = jax.jit(fp8.value_and_grad(squares, (0, 1)))


def new_state(grads):
    return grads[OWG]["Fp8ConvGeneralDilatedOp_0"]


def test_nan_and_inf():
    """NaN reaches the loss and an Inf in the cotangent the gradients; neither enters the state."""
    variables = variables_of(LAYER, IMAGES)
    _, (clean, _) = gradient(variables, IMAGES)
    before = {**variables, OWG: clean[OWG]}
    spoilt = IMAGES.copy()
    spoilt[0, 0, 0, 0] = np.nan
    value, (grads, dx) = gradient(before, spoilt)
    assert np.isnan(value)
    old, new = new_state(before), new_state(grads)
    np.testing.assert_array_equal(new["input_amax_history"], old["input_amax_history"])
    np.testing.assert_array_equal(new["output_grad_amax_history"], old["output_grad_amax_history"])
    assert new["kernel_amax_history"][0] == np.max(np.abs(variables["params"]["kernel"]))
    # Only the windows that hold the NaN are touched.
    assert np.isnan(dx[0]).any()
    assert np.isfinite(dx[1]).all()
    # An Inf in the cotangent is NaN in what it reaches: here one window of the first example.
    infinite = jax.jit(jax.grad(lambda v, x: LAYER.apply(v, x)[0, 0, 0, 0] * np.inf, (0, 1)))
    grads, dx = infinite(before, IMAGES)
    np.testing.assert_array_equal(np.isnan(dx).any((1, 2, 3)), [True, False])
    assert np.isnan(grads["params"]["kernel"]).any()
    np.testing.assert_array_equal(
        new_state(grads)["output_grad_amax_history"], old["output_grad_amax_history"]
    )
    op = partial(fp8.Fp8ConvGeneralDilatedOp, recipe=fp8.Float8CurrentScaling())
    current = LAYER.clone(conv_general_dilated_cls=op)
    dx = jax.jit(jax.grad(lambda x: current.apply(variables, x)[0, 0, 0, 0] * np.inf))(IMAGES)
    np.testing.assert_array_equal(np.isnan(dx).any((1, 2, 3)), [True, False])


def test_second_derivatives():
    """They are those of the convolution of the rounded operands."""
    variables = variables_of(LAYER, IMAGES)

    def second(op):
        model = LAYER.clone(conv_general_dilated_cls=op)
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(model.apply(variables, x))))
        return jax.jit(jax.grad(lambda x: jnp.sum(gradient(x) ** 2)))(IMAGES)

    ours, wide = second(OP), second(None)
    assert np.linalg.norm(ours - wide) < 0.2 * np.linalg.norm(wide)


def test_arguments_are_honoured_or_refused():
    c = CASES["strides"]
    x, w, g = operands(c, dtype=jnp.bfloat16)
    states = states_of(5.0, 0.3, 2e-3)
    convolve = convolution_of(c, recipe=RECIPE, states=states)
    made = str(jax.make_jaxpr(partial(convolve, precision="highest"))(x, w))
    assert "precision=Precision.HIGHEST" in made or "precision=(Precision.HIGHEST" in made
    # A cotangent wider than the operands: float16 does not hold 1e6.
    x16, w16 = x.astype(np.float16), w.astype(np.float16)
    wide = make_vjp(partial(convolution_of(c, recipe=RECIPE), preferred_element_type=jnp.float32))
    out, dx, dw, _ = wide(
        x16, w16 / np.float16(64), np.full(g.shape, 1e6, np.float32), states_of(5.0, 0.3, 1e6)
    )
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.float16, jnp.float16)
    assert np.isfinite(dx).all()
    for padding in ("SAME", "SAME_LOWER", "VALID"):
        shapes = [
            jax.eval_shape(partial(f, padding=padding), x, w).shape
            for f in (convolve, convolution_of(c, lax.conv_general_dilated))
        ]
        assert shapes[0] == shapes[1]
    with pytest.raises(TypeError, match="lhs"):
        convolution_of(c, partial(OP(recipe=fp8.Float8CurrentScaling()).apply, {}))(x.astype(np.int32), w)


@pytest.mark.filterwarnings("always")
def test_one_warning_where_it_is_no_matmul():
    for name in ("groups", "patches"):
        c = CASES[name]
        x, w, _ = operands(c)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("default")
            for _ in range(2):
                jax.eval_shape(convolution_of(c, recipe=fp8.Float8CurrentScaling()), x, w)
        ours = [w for w in seen if "not matmuls" in str(w.message)]
        assert len(ours) == (not c.matmul)
        assert all(issubclass(w.category, fp8.Fp8EmulationWarning) for w in ours)


# Compiled programs.


def step_of(layer, *shape, dtype=jnp.bfloat16):
    layer = layer.clone(dtype=dtype, param_dtype=dtype, use_bias=False)
    x = struct(*shape, dtype=dtype)
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    y = jax.eval_shape(layer.apply, variables, x)

    def step(variables, x, g):
        y, vjp = jax.vjp(layer.apply, variables, x)
        return y, vjp(g)

    return step, variables, x, y


@pytest.mark.newest
@pytest.mark.usefixtures("gpu")
def test_a_patch_embedding_runs_in_fp8():
    layer = nn.Conv(768, (16, 16), (16, 16), conv_general_dilated_cls=OP)
    report = fp8.audit(*step_of(layer, 32, 224, 224, 3), target="h200")
    assert {(g.path, g.backend, g.is_fp8) for g in report.gemms} == {("Conv", "cublasLt", True)}
    assert {g.role: (g.m, g.k, g.n) for g in report.gemms} == {
        "forward": (6272, 768, 768),
        "dgrad": (6272, 768, 768),
        "wgrad": (768, 6272, 768),
    }


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("target", "op", "reason"),
    [
        # XLA would find its way back to FP8, which fails where cuDNN has no such convolution.
        ("h200", OP, "not a matmul: the same FP8 values, convolved in float32"),
        ("h200", None, "layer not converted"),
        ("local", None, "layer not converted"),
    ],
)
def test_other_convolutions_are_listed(target, op, reason):
    options = {} if op is None else {"conv_general_dilated_cls": op}
    layer = nn.Conv(64, (3, 3), 2, feature_group_count=2 if op is None else 1, **options)
    report = fp8.audit(*step_of(layer, 4, 16, 16, 32, dtype=jnp.float32), target=target)
    assert [report.num_fp8_gemms, report.num_gemms] == [0, 3]
    assert {g.backend for g in report.gemms} == {"other" if target == "local" else "cuDNN"}
    assert all(reason in g.reason for g in report.gemms)
    forward = next(g for g in report.gemms if g.role == "forward")
    sizes = forward.batch, forward.m, forward.k, forward.n
    assert sizes == ((1, 256, 288, 64) if op else (2, 256, 144, 32))


@pytest.mark.optimized
@pytest.mark.newest
def test_a_convolution_in_range():
    x, w = (np.float32(np.random.default_rng(i).uniform(-1, 1, (2, 6, 4))) for i in range(2))
    w = w[0, :3, :, None] * np.ones((3, 4, 5), np.float32)

    options = {"window_strides": (1,), "padding": "SAME", "dimension_numbers": ("NHC", "HIO", "NHC")}
    run = make_vjp(partial(fp8_conv_general_dilated, **options, recipe=fp8.Float8CurrentScaling()))
    # Powers of two, by which nothing else may change.
    g = np.ones((2, 6, 5), np.float32)
    plain = run(x, w, g, {})
    scaled = run(x * np.float32(2.0**120), w * np.float32(2.0**-40), g * np.float32(2.0**-10), {})
    for ours, expected, exponent in zip(scaled, plain, (80, -50, 110)):
        np.testing.assert_array_equal(ours, np.ldexp(expected, exponent))

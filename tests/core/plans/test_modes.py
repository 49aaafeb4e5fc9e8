"""``contract`` in each of its modes, beside NumPy and the wide product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.plans.contraction import States
from fp8flax._core.plans.dot_general import dot_plan, fp8_dot_general
from fp8flax._core.plans.modes import packed_kernel
from fp8flax._core.state.state import ScalingState
from tests import reference
from tests.cases import MATMUL, normal

X, W, G = normal(0, 3, 8), normal(1, 8, 4), normal(2, 3, 4)
RECIPE = fp8.DelayedScaling(amax_history_len=2)
STATE = ScalingState(jnp.ones(1), jnp.float32([2.0, 4.0]))
STATES = States(STATE, STATE, STATE)


def dot(x, w, states=STATES, **options):
    return fp8_dot_general(x, w, MATMUL, states=states, **{"recipe": RECIPE, **options})


def rounded(x, name="float8_e4m3fn"):
    """A tensor after a cast with the scale that ``STATE`` gives."""
    scale = reference.next_scale([2.0, 4.0], np.ones(1), name)
    return reference.qdq(np.asarray(x), name, scale)


@pytest.mark.parametrize("form", ["direct", "qdq"])
def test_in_fp8(form):
    out, vjp = jax.vjp(lambda x, w: dot(x, w, form=form), X, W)
    x, w, g = rounded(X), rounded(W), rounded(G, "float8_e5m2")
    for found, expected in zip((out, *vjp(G)), (x @ w, g @ w.T, x.T @ g)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode_of", ["without quantizers", "calibrating"])
def test_wide_products_have_the_sharding_that_the_caller_gives(mode_of):
    """JAX cannot derive the sharding of a sum over devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    recipe = fp8.CustomRecipe() if mode_of == "without quantizers" else fp8.DelayedScaling()
    op = fp8.Fp8DotGeneralOp(recipe=recipe)
    x, w = jnp.ones((4, 8)), jnp.ones((8, 2))
    state = op.init({}, x, w, MATMUL)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, P(None, "data")), jax.device_put(w, P("data", None))

        def multiply(state, x):
            out = op.apply(state, x, split[1], MATMUL, out_sharding=P("data", None))
            assert jax.typeof(out).sharding.spec == P("data", None)
            return out

        if mode_of == "calibrating":
            state = fp8.calibrate(multiply, state, [split[0]])
        np.testing.assert_allclose(jax.jit(multiply)(state, split[0]), np.full((4, 2), 8), rtol=1e-6)


def test_a_packed_kernel_has_the_shape_of_the_kernel():
    kernel = normal(1, 40, 3)
    recipe = fp8.MXFP8BlockScaling().gemms
    plan = dot_plan(jax.ShapeDtypeStruct((2, 40), jnp.float32), kernel, MATMUL, recipe=recipe)
    packed = packed_kernel(plan, kernel, None)
    assert packed.codes.shape == kernel.shape
    view = plan.uses("kernel").first.view
    back = packed.quantizer.unpack(packed, view).dequantize(view, jnp.float32)
    np.testing.assert_allclose(back, kernel, rtol=1 / 16, atol=1e-2)

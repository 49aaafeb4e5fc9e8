"""``contract`` in each of its modes, beside NumPy and the wide product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.ops.dot_general import DotGeneral, dot_plan
from fp8flax._core.ops.stored import frozen, packed_kernel
from tests import reference
from tests.cases import MATMUL, mesh, normal


@pytest.mark.parametrize("mode_of", ["without quantizers", "calibrating"])
def test_wide_products_have_the_sharding_that_the_caller_gives(mode_of):
    """JAX cannot derive the sharding of a sum over devices."""
    recipe = fp8.CustomRecipe() if mode_of == "without quantizers" else fp8.DelayedScaling()
    op = fp8.Fp8DotGeneralOp(recipe=recipe)
    x, w = jnp.ones((4, 8)), jnp.ones((8, 2))
    state = op.init({}, x, w, MATMUL)
    with jax.set_mesh(mesh(AxisType.Explicit, data=2)):
        split = jax.device_put(x, P(None, "data")), jax.device_put(w, P("data", None))

        def multiply(state, x):
            out = op.apply(state, x, split[1], MATMUL, out_sharding=P("data", None))
            assert jax.typeof(out).sharding.spec == P("data", None)
            return out

        if mode_of == "calibrating":
            state = fp8.calibrate(multiply, state, [split[0]])
        np.testing.assert_allclose(jax.jit(multiply)(state, split[0]), np.full((4, 2), 8), rtol=1e-6)


def test_the_derivative_of_a_frozen_product():
    """dx · q(w), with a scale of 1."""
    recipe = fp8.DelayedScaling(amax_history_len=2)
    x, w, dx = normal(0, 5, 8), normal(1, 8, 3), normal(2, 5, 8)
    q_x, q_w = (reference.qdq(t, "float8_e4m3fn", 1) for t in (x, w))
    plan = dot_plan(jnp.asarray(x), jnp.asarray(w), MATMUL, None, None, recipe=recipe.gemms)
    kernel = packed_kernel(plan, jnp.asarray(w), jnp.float32(1))

    @jax.jit
    def derivatives(x, dx, kernel):
        keywords = {"recipe": recipe.gemms, "input_scale": jnp.ones(1)}
        dot = lambda x: frozen(DotGeneral, x, kernel, MATMUL, **keywords)  # noqa: E731
        return jax.jvp(dot, (x,), (dx,)), jax.grad(lambda x: jnp.sum(dot(x)))(x)

    (out, tangent), grad = derivatives(x, dx, kernel)
    np.testing.assert_allclose(out, q_x @ q_w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(tangent, dx @ q_w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad, np.tile(q_w.sum(1), (5, 1)), rtol=1e-5, atol=1e-5)

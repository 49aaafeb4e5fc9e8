"""Products that stay wide: of a recipe without quantizers, and during calibration."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from tests.cases import MATMUL, mesh


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

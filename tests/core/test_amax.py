"""The amax of a tensor is NumPy's maximum, with inf for NaN and -inf for what is empty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core.scaling import delayed_amax
from tests.cases import normal


def numpys(x):
    return np.max(np.where(np.isnan(x), np.inf, np.abs(x)), initial=-np.inf)


def ugly(*shape):
    x = np.array(normal(0, *shape))
    x.flat[::7] = 1e30
    x.flat[::5] = -1e-30
    x.flat[3 % x.size] = -3e38
    return x


@pytest.mark.newest
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("special", [0.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 5)])
def test_the_amax(shape, special, dtype):
    x = ugly(*shape) if shape else np.float32(-2)
    if x.size > 4:
        x.flat[4] = special
    x = jnp.asarray(x, dtype)
    found = jax.jit(delayed_amax)(x)
    assert found.dtype == dtype
    assert (
        found.astype(jnp.float32)
        == delayed_amax(x).astype(jnp.float32)
        == numpys(np.asarray(x, np.float32))
    )


def test_rows_that_do_not_count_and_what_is_empty():
    x, where = jnp.asarray(ugly(8, 16)), jnp.arange(8)[:, None] < 5
    assert delayed_amax(x, where) == numpys(np.asarray(x)[:5])
    assert delayed_amax(x, where & False) == -np.inf
    for shape in ((0, 4), (4, 0)):
        assert delayed_amax(jnp.zeros(shape)) == -np.inf

"""The amax in two stages: of parts of a tensor, and of all tensors of a layer, is NumPy's maximum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8flax._core import amax
from tests.cases import normal


def numpys(x):
    return np.max(np.where(np.isnan(x), np.inf, np.abs(x)), initial=-np.inf)


def ugly(*shape):
    x = np.array(normal(0, *shape))
    x.flat[::7] = 1e30
    x.flat[::5] = -1e-30
    x.flat[3 % x.size] = -3e38
    return x


@pytest.mark.parametrize("special", [0.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    ("shape", "parts"),
    [((), 1), ((5,), 1), ((1, 3), 1), ((6, 5), 6), ((3, 4, 5), 12), ((20000, 2), 1), ((512, 512), 512)],
)
def test_of_parts_is_that_of_the_whole(shape, parts, special):
    x = ugly(*shape) if shape else np.float32(-2)
    if x.size > 4:
        x.flat[4] = special
    x = jnp.asarray(x)
    here = jax.jit(amax.amaxes_of_parts)(x)[0]
    assert here.shape == (parts,)
    assert jnp.max(here) == amax.delayed_amax(x) == numpys(x)
    narrow = np.asarray(x).astype(jnp.bfloat16)
    found = jnp.max(jax.jit(amax.amaxes_of_parts)(jnp.asarray(narrow))[0])
    assert found.astype(jnp.float32) == numpys(narrow.astype(np.float32))
    if parts > 1:
        on_gpu = amax.amaxes_of_equal_parts(shape, len(shape) - 1, x, None, ())[0]
        np.testing.assert_array_equal(on_gpu, [numpys(row) for row in np.asarray(x).reshape(parts, -1)])


@pytest.mark.parametrize(("platform", "read"), [("cpu", "%arg0"), ("cuda", "%arg1")])
def test_a_gpu_reads_what_is_cast(platform, read):
    """Another array would be one more in its memory; for a CPU it would be that of what is cast."""
    found = jax.jit(lambda x, cast: amax.amaxes_of_parts(x, None, cast / 2, as_cast=cast)[0])
    traced = found.trace(jnp.ones((4, 32)), jnp.ones((4, 32)))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert [line for line in program.splitlines() if "stablehlo.abs" in line and read in line]
    assert program.count("stablehlo.abs") == 1


def test_of_a_parameter():
    """A part of a parameter may span several dimensions. Any number of parts can be asked for."""
    x = jnp.asarray(ugly(6, 32, 1024))
    assert amax.amaxes_of_parts(x, is_row_major=True)[0].shape == (6 * 32,)
    assert amax.amaxes_of_parts(jnp.asarray(ugly(6, 2, 8)), is_row_major=True)[0].shape == (6,)
    np.testing.assert_array_equal(amax.amaxes_of_parts(x, num_parts=4)[0], [numpys(np.asarray(x))] * 4)
    quarters = [numpys(quarter) for quarter in np.asarray(x).reshape(4, -1)]
    np.testing.assert_array_equal(amax.amaxes_of_equal_parts((4, x.size // 4), 1, x, None, ())[0], quarters)


def test_rows_that_do_not_count_and_what_is_empty():
    x, where = jnp.asarray(ugly(8, 16)), jnp.arange(8)[:, None] < 5
    expected = numpys(np.asarray(x)[:5])
    for parts in (
        amax.amaxes_of_parts(x, where)[0],
        amax.amaxes_of_equal_parts((8, 16), 1, x, where, ())[0],
    ):
        assert jnp.max(parts) == expected
    assert jnp.max(amax.amaxes_of_equal_parts((8, 16), 1, x, where & False, ())[0]) == -np.inf
    for shape in ((0, 4), (4, 0)):
        np.testing.assert_array_equal(amax.amaxes_of_parts(jnp.zeros(shape))[0], [-np.inf])


def test_the_largest_of_several_at_once():
    """Vectors may have any lengths and dtypes. The marks of empty tensors (-inf) and of NaN (inf) stay."""
    parts = [
        jnp.array([1.0, -np.inf, 3.0]),
        jnp.array([2.5], jnp.bfloat16),
        jnp.array([-np.inf, -np.inf]),
        jnp.array([np.inf, 0.0, 1.0, 2.0]),
        jnp.zeros((2,), jnp.float16),
    ]
    expected = [3, 2.5, -np.inf, np.inf, 0]
    for merge in (amax.max_of_stacked, amax.largest_of):
        merged = jax.jit(merge)(parts)
        assert [x.dtype for x in merged] == [jnp.float32] * 5
        np.testing.assert_array_equal(merged, expected)
    stacked = jnp.array([[1.0, 2.0], [4.0, 3.0]])
    first, second = amax.largest_of([stacked, parts[0]])
    np.testing.assert_array_equal(first, [2, 4])
    assert second == 3

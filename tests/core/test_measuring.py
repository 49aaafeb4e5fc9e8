"""The numbers of one tensor beside NumPy, and how they are merged."""

import jax
import jax.numpy as jnp
import numpy as np

import fp8flax as fp8
from fp8flax._core.measuring import Numbers, measured, merged, merged_calls, numbers_of, report_numbers
from fp8flax._core.qtensor import View
from tests import reference

QUANTIZER = fp8.CurrentQuantizer(dtype=jnp.float8_e4m3fn)
X = np.float32([[1.0, -3.0, 0.0, 1e-6], [np.nan, 448.0, 2.0, np.inf]])


def numbers(x, amax=448.0):
    """The numbers of a tensor by NumPy, whose sums of squares are divided by 256 squared."""
    scale = np.float32(amax) / np.float32(448)
    values = np.abs(x[np.isfinite(x) & (x != 0)]).astype(np.float64)
    back = reference.qdq(values.astype(np.float32), "float8_e4m3fn", scale).astype(np.float64)
    unit = 2.0 ** np.floor(np.log2(amax))
    return Numbers(
        values=values.size,
        underflowed=np.sum(back == 0),
        saturated=np.sum(values > amax),
        signal=np.sum((values / unit) ** 2),
        noise=np.sum(((values - back) / unit) ** 2),
        nonfinite=np.sum(~np.isfinite(x)),
        amax=values.max(),
        scale=scale,
        headroom=amax / values.max(),
    )


def test_numbers_of_a_tensor():
    found = numbers_of(QUANTIZER, View(X.shape, (1,), ()), jnp.asarray(X))
    for name, number, expected in zip(Numbers._fields, found, numbers(X)):
        np.testing.assert_allclose(number, expected, rtol=1e-6, err_msg=name)


def test_the_error_of_the_largest_numbers():
    """The squares are divided by a power of two whose inverse is a normal number."""
    x = X * np.float32(3.3e38 / np.nanmax(np.abs(X), where=np.isfinite(X), initial=0))
    found = numbers_of(QUANTIZER, View(X.shape, (1,), ()), jnp.asarray(x))
    values = np.abs(np.where(np.isfinite(x), x, 0)).astype(np.float64)
    np.testing.assert_allclose(found.signal, np.sum((values / 2.0**126) ** 2), rtol=1e-6)
    assert 0 < found.noise < found.signal


def test_a_scale_of_past_amaxes_saturates():
    delayed = fp8.DelayedQuantizer(dtype=jnp.float8_e4m3fn)
    found = numbers_of(delayed, View(X.shape, (1,), ()), jnp.asarray(X), jnp.float32(0.5))
    assert found.saturated == 1
    assert found.headroom == 0.5


def test_merged_calls_are_one_call_on_all_data():
    first, second = X[:1], X[1:] * np.float32(0.5)
    view = View((1, 4), (1,), ())
    found = merged_calls(
        [
            numbers_of(fp8.DelayedQuantizer(dtype=jnp.float8_e4m3fn), view, jnp.asarray(x), jnp.float32(1))
            for x in (first, second)
        ]
    )
    both = fp8.DelayedQuantizer(dtype=jnp.float8_e4m3fn)
    whole = numbers_of(both, View((2, 4), (1,), ()), jnp.concatenate([first, second]), jnp.float32(1))
    for name, number, expected in zip(Numbers._fields, found, whole):
        np.testing.assert_allclose(number, expected, rtol=1e-6, err_msg=name)
    one = jax.tree.map(lambda x: x[None], whole)
    jax.tree.map(np.testing.assert_array_equal, merged(one), whole)


def test_numbers_come_out_of_a_loop():
    """The numbers of each iteration, and the value of the program."""

    def f(xs):
        def step(total, x):
            found = numbers_of(QUANTIZER, View((4,), (0,), ()), x)
            return total + report_numbers(("layer",), "input", jnp.sum(x), found), None

        return jax.lax.scan(step, jnp.float32(0), xs)[0]

    xs = jnp.arange(1.0, 13).reshape(3, 4)
    total, reports = measured(f, xs)
    assert total == jnp.sum(xs)
    ((call,),) = [reports[("layer",), "input"]]
    np.testing.assert_array_equal(call.amax, [4, 8, 12])

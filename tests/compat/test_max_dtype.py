import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.interpreters import ad

import fp8flax as fp8
from fp8flax._compat import max_dtype

pytestmark = [pytest.mark.optimized, pytest.mark.newest]

MAX = fp8.fp32_max_grad


def eager(f):
    return f


@jax.custom_vjp
def emit(value, x):
    """Contributes ``value`` to the gradient of ``x``."""
    return jnp.float32(0)


emit.defvjp(
    lambda value, x: (jnp.float32(0), value),
    lambda value, g: (None, lax.convert_element_type(jnp.full((2,), value), MAX)),
)

USES = {
    "negative": lambda x: emit(-3.0, x) + emit(-5.0, x),
    "scan": lambda x: lax.scan(lambda c, v: (c + emit(v, x), None), 0.0, jnp.array([2.0, 5.0, 3.0]))[0],
    "checkpoint": lambda x: jax.checkpoint(lambda x: emit(3.0, x) + emit(5.0, x))(x),
    "inner jit": lambda x: jax.jit(lambda x: emit(3.0, x))(x) + jax.jit(lambda x: emit(5.0, x))(x),
    "cond not taken": lambda x: lax.cond(jnp.array(False), lambda: emit(5.0, x), lambda: 0.0),
    "nested": lambda x: emit(1.0, x) + USES["scan"](x) + USES["checkpoint"](x),
}
LARGEST = {"negative": -3.0, "cond not taken": -np.inf}


@pytest.mark.parametrize(
    ("use", "wrap"), [*((use, jax.jit) for use in USES), *((use, eager) for use in ("negative", "nested"))]
)
def test_gradients_merge_by_max(use, wrap):
    gradient = wrap(jax.grad(lambda x: USES[use](x.astype(MAX))))(jnp.zeros((2,)))
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, np.full((2,), LARGEST.get(use, 5.0)))


def test_casts():
    x = jnp.array([1.0, -2.0])
    y = x.astype(MAX)
    assert [max_dtype.is_max_dtype(value) for value in (y, x, "text")] == [True, False, False]
    assert max_dtype.from_max_dtype(x) is x
    np.testing.assert_array_equal(max_dtype.from_max_dtype(y), x)
    assert repr(MAX) == MAX.name == "fp32_max_grad"
    assert MAX.itemsize == 4


@pytest.mark.parametrize(
    ("strides", "element_shape", "wrap"), [(None, (), eager), (None, (6,), jax.jit), ((2, 1), (6,), eager)]
)
def test_what_a_slice_leaves_out_gets_no_gradient(strides, element_shape, wrap):
    dtype = max_dtype.MaxDtype(element_shape)
    starts, limits = (1, 0), (5, 1)
    place = (slice(1, 5, strides and strides[0]), slice(0, 1))
    expected = np.full((7, 2, *element_shape), -np.inf, np.float32)
    of_slice = expected[place].shape
    expected[place] = np.arange(np.prod(of_slice)).reshape(of_slice)

    @wrap
    def gradient(x, g):
        x, g = (max_dtype.of_floats(dtype, each) for each in (x, g))
        _, back = jax.vjp(lambda x: lax.slice(x, starts, limits, strides), x)
        return max_dtype.to_floats(back(g)[0])

    with max_dtype.differentiating():
        found = gradient(np.zeros_like(expected), expected[place])
    np.testing.assert_array_equal(found, expected)


def test_a_rule_of_jax_is_replaced_only_while_a_gradient_runs(monkeypatch):
    """Also in several threads at once, and if the function raises an error. What was there comes back."""
    rule, entered, leave = partial(ad.fancy_transposes[lax.slice_p]), threading.Event(), threading.Event()
    monkeypatch.setitem(ad.fancy_transposes, lax.slice_p, rule)

    def is_replaced():
        return ad.fancy_transposes[lax.slice_p] is not rule

    def in_a_thread(x):
        entered.set()
        leave.wait()
        return x

    def fails(x):
        assert is_replaced()
        raise ZeroDivisionError

    thread = threading.Thread(target=fp8.grad(in_a_thread), args=(1.0,))
    thread.start()
    entered.wait()
    with pytest.raises(ZeroDivisionError):
        fp8.grad(fp8.grad(fails))(1.0)
    assert is_replaced()
    leave.set()
    thread.join()
    assert not is_replaced()


def test_concrete_arrays():
    """A part of an array has all floats of its elements, and no cast returns them."""
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    floats = max_dtype.of_floats(MAX, numbers[0])
    metas = max_dtype.of_floats(max_dtype.MaxDtype((3,)), numbers)
    for x, values in ((floats, numbers[0]), (metas, numbers)):
        assert isinstance(x, max_dtype.MaxArray)
        np.testing.assert_array_equal(max_dtype.to_floats(x[1]), values[1])
    np.testing.assert_array_equal(max_dtype.from_max_dtype(metas), numbers[:, 0])
    np.testing.assert_array_equal(floats.astype(jnp.float32), numbers[0])
    with pytest.raises(ValueError, match="Cannot convert_element_type from fp32_max_grad"):
        metas.astype(jnp.float32)

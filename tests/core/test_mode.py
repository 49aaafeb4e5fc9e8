"""The ambient mode: set for a block of code, and part of the cache key of ``jax.jit``."""

import jax
import jax.numpy as jnp
import pytest

from fp8flax._core.mode import Calibrating, Measuring, in_op, is_measuring, mode


def test_the_path_of_an_op_is_in_the_mode_while_measuring():
    with mode(Measuring("measurement")):
        assert is_measuring()
        with in_op(lambda: ("encoder", "dense")):
            assert mode.value == Measuring("measurement", ("encoder", "dense"))
        assert mode.value.path == ()
    assert mode.value is None


@pytest.mark.parametrize("value", [None, Calibrating()])
def test_no_path_is_computed_in_other_modes(value):
    def path():
        raise AssertionError

    with mode(value), in_op(path):
        assert mode.value == value
        assert not is_measuring()


def test_a_jitted_function_is_traced_once_per_mode():
    seen = []

    @jax.jit
    def f(x):
        seen.append(mode.value)
        return x

    for value in (None, Calibrating(), None, Measuring("first"), Measuring("second"), Calibrating()):
        with mode(value):
            f(jnp.float32(1))
    assert seen == [None, Calibrating(), Measuring("first"), Measuring("second")]

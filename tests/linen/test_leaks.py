"""Un-jitted calls compile nothing after the first ones, and leave no objects in memory."""

import gc
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import fp8flax as fp8
from tests.cases import normal, variables_of

X = normal(0, 32, 32)
LAYER = nn.Dense(32, dot_general_cls=fp8.Fp8DotGeneralOp)
VARIABLES = variables_of(LAYER, X)


@pytest.fixture
def what_calls_leave(small_heap):
    """Returns a function that calls another one, and returns what was compiled and what leaked."""
    compiled = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs.get("fun_name"))

    def measure(call, number):
        for _ in range(3):
            jax.block_until_ready(call())
        gc.collect()
        compiled.clear()
        arrays, objects = len(jax.live_arrays()), len(gc.get_objects())
        for _ in range(number):
            jax.block_until_ready(call())
        gc.collect()
        return list(compiled), len(jax.live_arrays()) - arrays, len(gc.get_objects()) - objects

    jax.monitoring.register_event_duration_secs_listener(listen)
    assert len(measure(lambda: jax.jit(lambda x: x + 1)(X), 3)[0]) == 3  # it counts
    yield measure
    jax.monitoring.unregister_event_duration_listener(listen)


def check(left, number):
    compiled, arrays, objects = left
    assert compiled == []
    assert arrays <= 0
    assert objects < 200 * number  # JAX leaves some weak references of a call under vmap


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fp8flax.Fp8EmulationWarning")
def test_thirty_calls(what_calls_leave):
    def loss(variables, x):
        return jnp.sum(LAYER.apply(variables, x) ** 2)

    for call in (partial(LAYER.apply, VARIABLES, X), partial(fp8.grad(loss, (0, 1)), VARIABLES, X)):
        check(what_calls_leave(call, 30), 30)


@pytest.mark.long
def test_calibrate_compiles_once_a_call_and_lets_go_of_it(what_calls_leave):
    def call():
        return fp8.calibrate(lambda v, x: jnp.sum(LAYER.apply(v, x)), VARIABLES, [X, 2 * X], backward=True)

    compiled, *left = what_calls_leave(call, 4)
    assert len(compiled) == 4
    check(([], *left), 4)

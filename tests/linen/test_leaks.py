"""Un-jitted calls compile nothing after the first ones, and leave no objects in memory."""

import gc
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import fp8flax as fp8
from tests.cases import normal, variables_of
from tests.models import Einsum

X = normal(0, 32, 32)
IMAGES = normal(1, 2, 8, 8, 16)
RECIPES = {
    "delayed": fp8.DelayedScaling(),
    "most_recent": fp8.DelayedScaling(amax_compute_algo="most_recent", use_power_2_scales=True),
    "current": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise", high_precision_wgrad=True),
    "MX": fp8.MXFP8BlockScaling(),
    "128 blocks": fp8.Float8BlockScaling(),
}


def calls_of(module, *args):
    """Returns ``(forward, gradient)``, two functions to call un-jitted."""
    variables = variables_of(module, *args)

    def loss(variables, x):
        return jnp.sum(module.apply(variables, x, *args[1:]) ** 2)

    return (
        lambda: module.apply(variables, *args),
        lambda: fp8.value_and_grad(loss, (0, 1))(variables, args[0]),
    )


def dense(name, form="direct"):
    op = partial(fp8.Fp8DotGeneralOp, recipe=RECIPES[name], form=form)
    return calls_of(nn.Dense(32, dot_general_cls=op), X)


def conv(name, kernel, strides, form="direct"):
    op = partial(fp8.Fp8ConvGeneralDilatedOp, recipe=RECIPES[name], form=form)
    return calls_of(nn.Conv(16, (kernel, kernel), strides, conv_general_dilated_cls=op), IMAGES)


def einsum(name):
    op = partial(fp8.Fp8DotGeneralOp, recipe=RECIPES[name])
    return calls_of(Einsum((32, 32), "ab,bc->ca", op), X)


def under_autocast(**options):
    calls = calls_of(nn.Dense(32, dot_general_cls=fp8.Fp8DotGeneralOp), X)

    def under(call):
        with fp8.autocast(**options):
            return call()

    return tuple(partial(under, call) for call in calls)


def primitives():
    scale, history = jnp.ones((1,)), jnp.zeros((1024,))

    def call(x, scale, history):
        x = fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, scale, history)
        x = fp8.out_qdq(jnp.float32, jnp.float8_e5m2, x, scale, history)
        q, used = fp8.in_q(jnp.float32, jnp.float8_e4m3fn, x, scale, history)
        return jnp.sum(x + fp8.out_dq(jnp.float32, used, used, q.astype(jnp.float32)))

    return partial(call, X, scale, history), lambda: jax.grad(call, (0, 1, 2))(X, scale, history)


def train_state():
    layer = nn.Dense(32, dot_general_cls=fp8.Fp8DotGeneralOp)
    variables = variables_of(layer, X)
    state = fp8.TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.sgd(0.1))

    def step():
        grads = jax.grad(lambda v: jnp.sum(state.apply_fn(v, X)))(state.params)
        return state.apply_gradients(grads=grads).params

    return partial(state.apply_fn, state.params, X), step


def over_examples():
    layer = nn.Dense(32, dot_general_cls=fp8.Fp8DotGeneralOp)
    variables = variables_of(layer, X)

    def call(variables):
        return jnp.sum(jax.vmap(partial(layer.apply, variables))(X))

    return partial(call, variables), lambda: fp8.grad(call)(variables)


def ragged():
    kernels = normal(2, 2, 32, 32)
    return calls_of(fp8.Fp8RaggedDotOp(), X, kernels, jnp.array([20, 12]))


CASES = {
    **{f"Dense-{name}": partial(dense, name) for name in RECIPES},
    "Dense-qdq": partial(dense, "delayed", "qdq"),
    **{f"Conv-{name}": partial(conv, name, 3, (1, 1)) for name in ("delayed", "current")},
    "Conv-qdq": partial(conv, "delayed", 3, (1, 1), "qdq"),
    "patches": partial(conv, "delayed", 2, (2, 2)),
    "Einsum": partial(einsum, "delayed"),
    "autocast": partial(under_autocast, recipe=fp8.DelayedScaling(margin=1)),
    "autocast-off": partial(under_autocast, enabled=False),
    "primitives": primitives,
    "TrainState": train_state,
    "vmap": over_examples,
    "ragged": ragged,
}


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
    yield measure
    jax.monitoring.unregister_event_duration_listener(listen)


def check(left, number):
    compiled, arrays, objects = left
    assert compiled == []
    assert arrays <= 0
    assert objects < 200 * number  # JAX leaves some weak references of a call under vmap


def test_compilations_are_counted(what_calls_leave):
    compiled, *_ = what_calls_leave(lambda: jax.jit(lambda x: x + 1)(X), 3)
    assert len(compiled) == 3


@pytest.mark.filterwarnings("ignore::fp8flax.Fp8EmulationWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("_all_cells")
def test_calls_compile_nothing_and_leave_nothing(case, what_calls_leave):
    forward, backward = CASES[case]()
    check(what_calls_leave(forward, 5), 5)
    check(what_calls_leave(backward, 5), 5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::fp8flax.Fp8EmulationWarning")
def test_thirty_calls(what_calls_leave):
    for call in dense("delayed"):
        check(what_calls_leave(call, 30), 30)


@pytest.mark.long
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_calibrate_compiles_once_a_call_and_lets_go_of_it(backward, what_calls_leave, request):
    if not backward:
        request.getfixturevalue("_all_cells")
    layer = nn.Dense(32, dot_general_cls=fp8.Fp8DotGeneralOp)
    variables = variables_of(layer, X)

    def call():
        fun = (lambda v, x: jnp.sum(layer.apply(v, x))) if backward else layer.apply
        return fp8.calibrate(fun, variables, [X, 2 * X], backward=backward)

    compiled, *left = what_calls_leave(call, 4)
    assert len(compiled) == 4
    check(([], *left), 4)

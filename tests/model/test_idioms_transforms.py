"""Transformations of converted models and of frozen models work as users write them."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8flax as fp8
from tests.cases import OWG, normal, variables_of
from tests.models import ALL, in_scan

KEY = jax.random.key(0)
X = np.asarray(normal(0, 3, 32))
Dense = partial(nn.Dense, dot_general_cls=fp8.Fp8DotGeneralOp)


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), a, b)


class Loop(nn.Module):
    """Applies one layer three times."""

    is_unrolled: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(32)

        def body(module, carry):
            return carry[0] + 1, nn.tanh(module(carry[1]))

        if self.is_initializing() or self.is_unrolled:
            for _ in range(3):
                x = nn.tanh(layer(x))
            return x
        return nn.while_loop(lambda m, c: c[0] < 3, body, layer, (0, x))[1]


def test_calibrate_without_reverse_mode():
    """The state of a ``while_loop`` is that of the same layers unrolled."""
    loop, unrolled = (fp8.quantize_model(Loop(is_unrolled), **ALL) for is_unrolled in (False, True))
    variables = variables_of(loop, X)
    state, expected = (fp8.calibrate(m.apply, variables, [X, 3 * X]) for m in (loop, unrolled))
    assert np.max(expected[OWG]["Dense_0"]["Fp8DotGeneralOp_0"]["input_amax_history"]) > 1
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.mark.long
@pytest.mark.usefixtures("small_heap")
def test_no_tracer_outlives_its_trace():
    model, x = fp8.quantize_model(in_scan(remat=True)(), **ALL), jnp.asarray(X)
    with jax.checking_leaks():
        variables = variables_of(model, x)
        jax.jit(fp8.grad(lambda v: jnp.mean(model.apply(v, x) ** 2))).lower(variables)
        serve, served = fp8.freeze(model, variables, x, weight_only=True)
        jax.jit(serve.apply).lower(served, x)


@pytest.mark.long
def test_no_implicit_transfers():
    """Other ones, ``jax.device_put``, are allowed; what Optax makes of a state is its own."""
    model, x = nn.Sequential([Dense(32), nn.relu, Dense(4)]), jax.device_put(X)
    variables = jax.device_put(variables_of(model, x))

    def loss(v, x):
        return jnp.mean(model.apply(v, x) ** 2)

    grads = fp8.grad(loss)(variables, x)
    with jax.transfer_guard("disallow"):
        fp8.add_fp8_state({"params": variables["params"]}, model, x)
        calibrated = fp8.calibrate(model.apply, variables, [x, x])
        fp8.calibrate(loss, variables, [x], backward=True)
        fp8.freeze(model, calibrated, x)
        state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.identity())
        fp8.check_state(state.apply_gradients(grads=grads).params, variables)

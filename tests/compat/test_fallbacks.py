"""Each private part of JAX without which the package is only slower is taken away: the values stay."""

import importlib.util
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8flax as fp8
from fp8flax._compat import choice_at_lowering, flax_context, hoisting, xla_metadata
from fp8flax._compat.jaxprs import equations
from tests.cases import OWG, normal, variables_of

# A file, what is None in it without its part of JAX, and names of the part that may be missing.
PARTS = {
    "choice": (
        choice_at_lowering,
        ["_unless_cpu_p", "_unless_partitioned_p"],
        ["jax.interpreters.mlir.register_lowering", "jax.extend.core.Primitive"],
    ),
    "metadata": (
        xla_metadata,
        ["_apart_p"],
        ["jax.experimental.xla_metadata.set_xla_metadata", "jax.interpreters.ad.primitive_jvps"],
    ),
    "hoisting": (
        hoisting,
        ["_split"],
        ["jax._src.interpreters.partial_eval.partial_eval_jaxpr_custom", "jax.extend.core.jaxpr_as_fun"],
    ),
}
MODEL, X = nn.Sequential([nn.Dense(16, dot_general_cls=fp8.Fp8DotGeneralOp) for _ in range(2)]), (8, 16)

_taken_away = jax.make_user_context(None)
"""A key of jit's caches, or functions would run as they were traced with all parts."""


@pytest.mark.oldest
@pytest.mark.parametrize("name", PARTS)
def test_a_file_without_its_part_can_be_imported(name, monkeypatch):
    file, private, parts = PARTS[name]
    assert all(getattr(file, it) is not None for it in private)
    for missing in parts:
        module, _, attribute = missing.rpartition(".")
        spec = importlib.util.find_spec(file.__name__)
        copy = importlib.util.module_from_spec(spec)
        with monkeypatch.context() as context:
            context.delattr(sys.modules[module], attribute)
            spec.loader.exec_module(copy)
        assert [getattr(copy, it) for it in private] == [None] * len(private)


@pytest.fixture(params=PARTS)
def part(request, monkeypatch):
    """Makes the package what it is if it is imported without a part; returns the name of the part."""
    file, private, _ = PARTS[request.param]
    for it in private:
        monkeypatch.setattr(file, it, None)
    with _taken_away(request.param):
        yield request.param


def loss(variables, x):
    return jnp.mean(jnp.square(MODEL.apply(variables, x)))


def results():
    """Returns the variables after two training steps, and the gradients of three microbatches."""
    variables = variables_of(MODEL, normal(0, *X))
    state = fp8.TrainState.create(apply_fn=MODEL.apply, params=variables, tx=optax.sgd(0.1))

    @jax.jit
    def step(state, x):
        value, grads = fp8.value_and_grad(loss)(state.params, x)
        return state.apply_gradients(grads=grads), value

    values = []
    for seed in (1, 2):
        state, value = step(state, normal(seed, *X))
        values.append(value)
    microbatches = normal(3, 3, *X)
    return values, state.params, jax.jit(fp8.accumulate_gradients(loss))(state.params, microbatches)


@pytest.fixture(scope="module")
def expected():
    return results()


@pytest.mark.long
def test_values_stay(part, expected):
    del part
    found = results()
    state = found[1][OWG]["layers_1"]["Fp8DotGeneralOp_0"]
    assert state["input_amax_history"][0] != state["input_amax_history"][-1] > 0  # of two steps
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def parts_in_use():
    """Returns the parts that a training step and a step of microbatches show."""
    variables = variables_of(MODEL, normal(0, *X))
    step = str(jax.make_jaxpr(fp8.value_and_grad(loss))(variables, normal(0, *X)))
    several = jax.make_jaxpr(fp8.accumulate_gradients(loss))(variables, normal(0, 3, *X))
    (loop,) = (e.eqn for e in equations(several) if e.eqn.primitive.name == "scan")
    shown = {
        "choice": "fp8_unless_cpu" in step,
        "metadata": "fp8_apart" in step,
        "hoisting": any(x.aval.dtype.itemsize == 1 for x in loop.invars),  # codes
    }
    return {name for name, is_shown in shown.items() if is_shown}


def test_with_all_parts():
    assert parts_in_use() == set(PARTS)


def test_without_a_part(part):
    assert parts_in_use() == set(PARTS) - {part}


def test_without_the_context_of_flax(monkeypatch):
    """An op does not warn of ``mutable`` then."""
    variables, x = variables_of(MODEL, normal(0, *X)), normal(1, *X)
    with pytest.warns(UserWarning, match="mutable names"):
        expected, _ = MODEL.apply(variables, x, mutable=OWG)
    monkeypatch.setattr(flax_context, "nn", types.SimpleNamespace(module=None))
    assert flax_context.running_modules() == []
    found, _ = MODEL.apply(variables, x, mutable=OWG)  # a warning would be an error
    np.testing.assert_array_equal(found, expected)

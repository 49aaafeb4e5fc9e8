"""The ambient recipe: what it reaches, how it nests, and that no compiled function goes stale."""

import asyncio
import sys
from concurrent import futures
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.autocast import _autocasts, recipe_in_use
from tests.cases import OWG, variables_of

X = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
MX, CURRENT = fp8.MXFP8BlockScaling(), fp8.Float8CurrentScaling()
DEFAULT = fp8.DelayedScaling()
LAYER = nn.Dense(16, use_bias=False, dot_general_cls=fp8.Fp8DotGeneralOp)
PLAIN = nn.Dense(16, use_bias=False)
CONTEXTS = {
    "MX": partial(fp8.autocast, recipe=MX),
    "current": partial(fp8.autocast, recipe=CURRENT),
    "off": partial(fp8.autocast, enabled=False),
    "delayed": fp8.autocast,
}


def in_force():
    """Returns the name of the recipe that an op without a recipe of its own uses now."""
    recipe = recipe_in_use(None, DEFAULT)
    names = {None: "off", MX.gemms: "MX", CURRENT.gemms: "current", DEFAULT: "delayed"}
    return names[recipe]


@jax.jit
def compiled_in_force(x):
    """Adds the index of the recipe in ``CONTEXTS``."""
    return x + list(CONTEXTS).index(in_force())


def layer_with(recipe):
    return nn.Dense(16, use_bias=False, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=recipe))


@pytest.fixture(scope="module")
def variables():
    """With the state of delayed scaling."""
    return variables_of(LAYER, X)


@pytest.fixture(scope="module")
def expected(variables):
    """The result under each recipe, given to the op itself."""
    recipes = {"MX": MX, "current": CURRENT, "delayed": fp8.DelayedScaling()}
    results = {name: np.asarray(layer_with(r).apply(variables, X)) for name, r in recipes.items()}
    results["off"] = np.asarray(PLAIN.apply({"params": variables["params"]}, X))
    assert len({result.tobytes() for result in results.values()}) == 4
    return results


def same(actual, wanted):
    np.testing.assert_array_equal(actual, wanted)


def test_nested_and_left():
    assert in_force() == "delayed"
    with fp8.autocast(recipe=MX):
        with fp8.autocast(recipe=CURRENT):
            assert in_force() == "current"
            with fp8.autocast(enabled=False), fp8.autocast():
                assert in_force() == "delayed"
        assert in_force() == "MX"
        with pytest.raises(KeyError), fp8.autocast(enabled=False):
            raise KeyError(in_force())
        assert in_force() == "MX"
    assert in_force() == "delayed"


def test_one_object_entered_again():
    context = fp8.autocast(recipe=MX)
    with context, fp8.autocast(enabled=False), context:
        assert in_force() == "MX"
        assert in_a_thread(lambda: context(in_force)()) == "MX"
    assert in_force() == "delayed"


def test_as_a_decorator():
    function = fp8.autocast(recipe=MX)(in_force)
    assert [function(), function(), in_force()] == ["MX", "MX", "delayed"]


def test_an_own_recipe_comes_first_and_off_is_off(variables, expected):
    layer = layer_with(CURRENT)
    with fp8.autocast(recipe=MX):
        same(layer.apply(variables, X), expected["current"])
    with fp8.autocast(enabled=False):
        same(layer.apply(variables, X), expected["off"])


def test_a_jitted_function_is_traced_again(variables, expected):
    traces = []

    def apply(variables, x):
        traces.append(1)
        return LAYER.apply(variables, x)

    jitted = jax.jit(jax.vmap(apply, (None, 0)))
    # An equal recipe is the same recipe.
    contexts = [*CONTEXTS.items(), ("MX", partial(fp8.autocast, recipe=fp8.MXFP8BlockScaling()))]
    for name, context in 2 * contexts:
        with context():
            same(jitted(variables, X[None])[0], expected[name])
    assert len(traces) == 4


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_the_backward_pass_has_the_precision_of_the_forward_pass(wrapped, variables):
    def vjp_of(layer, wrapped=wrapped):
        apply = wrapped(lambda x: layer.apply({"params": variables["params"]}, x))
        return jax.jit(lambda vjp, g: vjp(g)[0]), jax.vjp(jax.jit(apply), X)[1]

    g = np.ones((8, 16), np.float32)
    for recipe, reference, other in ((MX, layer_with(MX), False), (None, PLAIN, True)):
        with fp8.autocast(enabled=recipe is not None, recipe=recipe):
            run, vjp = vjp_of(LAYER)
        with fp8.autocast(enabled=other, recipe=MX):
            actual = run(vjp, g)
        run, vjp = vjp_of(reference)
        np.testing.assert_allclose(actual, run(vjp, g), rtol=1e-6)


@pytest.mark.parametrize("context", ["off", "MX"])
def test_without_delayed_scaling_state_is_neither_needed_nor_changed(context, variables):
    state = {OWG: jax.tree.map(lambda leaf: leaf + 0.25, variables[OWG])}

    @jax.jit
    def grads(v):
        return fp8.grad(lambda v: jnp.sum(LAYER.apply(v, X)))(v)

    with CONTEXTS[context]():
        assert list(jax.eval_shape(LAYER.init, jax.random.key(0), X)) == ["params"]
        jax.eval_shape(LAYER.apply, {"params": variables["params"]}, X)
        new = grads({**variables, **state})
    jax.tree.map(same, new[OWG], state[OWG])
    assert grads({**variables, **state})[OWG]["Fp8DotGeneralOp_0"]["input_amax_history"][0] != 0.25


def test_einsum_and_the_other_ops(variables):
    x, w = jnp.asarray(X), variables["params"]["kernel"]
    with fp8.autocast(recipe=MX):
        wanted = LAYER.apply(variables, X)
        same(fp8.Fp8Einsum().apply({}, "ab,bc->ac", x, w), wanted)
        same(fp8.NANOOFp8DotGeneralOp().apply({}, x, w, (((1,), (0,)), ((), ()))), wanted)


def test_wrong_arguments():
    with pytest.raises(TypeError, match="enabled must be .* got MXFP8BlockScaling"):
        fp8.autocast(MX)


def in_a_thread(function):
    """Returns what the function returns in a new thread, or raises its error."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_thread_has_its_own():
    with fp8.autocast(recipe=MX):
        assert in_a_thread(in_force) == "delayed"
        assert asyncio.run(asyncio.to_thread(in_force)) == "delayed"

        def enters():
            with fp8.autocast(recipe=CURRENT):
                return in_force(), in_a_thread(in_force)

        assert in_a_thread(enters) == ("current", "delayed")
        assert in_force() == "MX"


async def suspended_under(recipe):
    with fp8.autocast(recipe=recipe):
        before = in_force()
        await asyncio.sleep(0)
        return before, in_force()


def test_two_tasks_cannot_be_suspended_under_autocast():
    async def both():
        return await asyncio.gather(suspended_under(MX), suspended_under(CURRENT), return_exceptions=True)

    first, second = in_a_thread(lambda: asyncio.run(both()))
    assert first == ("MX", "MX")
    assert isinstance(second, RuntimeError)
    assert "Another asyncio task of this thread is suspended" in str(second)


def test_tasks_under_the_autocast_of_their_creator():
    """They may enter another one, and leave it before they are suspended."""

    async def child():
        with fp8.autocast(recipe=CURRENT):
            inside = in_force()
        await asyncio.sleep(0)
        return inside, in_force()

    async def parent():
        with fp8.autocast(recipe=MX):
            return await asyncio.gather(child(), child())

    def run():
        with fp8.autocast(enabled=False):
            return asyncio.run(parent()), in_force()

    assert in_a_thread(run) == ([("current", "MX")] * 2, "off")


def under(recipe):
    with fp8.autocast(recipe=recipe):
        while True:
            yield


def test_contexts_are_left_in_order():
    """Otherwise that is an error. The others stay in force, and the one that was left is no longer."""

    def close_late():
        generator, found = under(MX), []
        next(generator)
        with fp8.autocast(enabled=False), fp8.autocast(recipe=CURRENT):
            with pytest.raises(RuntimeError, match="not the last one"):
                generator.close()
            found.append(in_force())
            with fp8.autocast(recipe=MX):
                found.append(in_force())
        return [*found, in_force()]

    assert in_a_thread(close_late) == ["current", "MX", "delayed"]
    generator = under(MX)
    in_a_thread(lambda: next(generator))
    with fp8.autocast(recipe=CURRENT), pytest.raises(RuntimeError, match="not the last one"):
        generator.close()  # which another thread has entered
    assert in_force() == "delayed"


def test_it_does_not_decorate_a_generator():
    with pytest.raises(TypeError, match="got <function .*Write the with statement in its body"):
        fp8.autocast()(under)


def test_a_recipe_entered_in_a_function_that_is_being_compiled():
    """In a new thread, whose key is another one after the first function than before it."""

    @jax.jit
    def numbers(x):
        with fp8.autocast(recipe=MX):
            inside = compiled_in_force(x)
        return inside, compiled_in_force(x)

    def run():
        results = [numbers(0)]
        for _ in range(2):
            with fp8.autocast(recipe=CURRENT):
                results.append(numbers(0))
            results.append(numbers(0))
        return results

    assert in_a_thread(run) == [(0, 3), (0, 1), (0, 3), (0, 1), (0, 3)]


def test_a_compiled_function_is_found_without_a_line_of_python():
    """One is where another thread may go on, and change jit's table while it is read."""
    x, calls = np.int32(0), []

    def profiled():
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
        result = compiled_in_force(x)
        sys.setprofile(None)
        return result

    for _ in range(2):
        for context in (fp8.autocast(recipe=fp8.MXFP8BlockScaling()), fp8.autocast(False), fp8.autocast()):
            with context:
                assert compiled_in_force(x) == profiled()
        assert compiled_in_force(x) == profiled()
    assert calls == []


def test_recipes_that_nothing_uses_any_more_are_forgotten():
    before = len(_autocasts)
    for length in range(1, 50):
        with fp8.autocast(recipe=fp8.DelayedScaling(amax_history_len=length)):
            pass
    assert len(_autocasts) <= before + 1

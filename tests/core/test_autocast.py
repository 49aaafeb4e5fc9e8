"""The ambient recipe: what it reaches, how it nests, and that no compiled function goes stale."""

import asyncio
import gc
import random
import sys
from concurrent import futures
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax._core.autocast import recipe_in_use
from tests.cases import OWG, variables_of

X = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
MX, CURRENT = fp8.MXFP8BlockScaling(), fp8.Float8CurrentScaling()
LAYER = nn.Dense(16, use_bias=False, dot_general_cls=fp8.Fp8DotGeneralOp)
PLAIN = nn.Dense(16, use_bias=False)


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


def test_without_it_an_op_has_its_default(variables, expected):
    same(LAYER.apply(variables, X), expected["delayed"])


def test_nested_and_left(variables, expected):
    with fp8.autocast(recipe=MX):
        same(LAYER.apply(variables, X), expected["MX"])
        with fp8.autocast(recipe=CURRENT):
            same(LAYER.apply(variables, X), expected["current"])
            with fp8.autocast(enabled=False):
                same(LAYER.apply(variables, X), expected["off"])
                with fp8.autocast(recipe=MX):
                    same(LAYER.apply(variables, X), expected["MX"])
            with fp8.autocast():
                same(LAYER.apply(variables, X), expected["delayed"])
            same(LAYER.apply(variables, X), expected["current"])
        same(LAYER.apply(variables, X), expected["MX"])
    same(LAYER.apply(variables, X), expected["delayed"])


class TwoCalls(nn.Module):
    """One op, called twice under two ambient recipes."""

    first: object
    second: object
    in_setup: bool

    def setup(self):
        self.op = fp8.Fp8DotGeneralOp()

    @nn.compact
    def __call__(self, x, w):
        op = self.op if self.in_setup else fp8.Fp8DotGeneralOp()
        results = []
        for context in (self.first, self.second):
            with context():
                results.append(op(x, w, (((1,), (0,)), ((), ()))))
        return results


@pytest.mark.parametrize(
    ("order", "in_setup"),
    [(("MX", "off"), True), (("off", "delayed"), False), (("delayed", "MX"), True)],
    ids=str,
)
def test_one_op_under_two_recipes(order, in_setup, variables, expected):
    contexts = {
        "MX": partial(fp8.autocast, recipe=MX),
        "off": partial(fp8.autocast, enabled=False),
        "delayed": fp8.autocast,
    }
    w = variables["params"]["kernel"]
    model = TwoCalls(*(contexts[name] for name in order), in_setup)
    own = variables_of(model, X, w)
    assert bool(own) == ("delayed" in order)
    for name, result in zip(order, model.apply(own, X, w)):
        same(result, expected[name])


def test_left_by_an_error(variables, expected):
    with pytest.raises(KeyError), fp8.autocast(recipe=MX):
        raise KeyError
    same(LAYER.apply(variables, X), expected["delayed"])


def test_as_a_decorator(variables, expected):
    @fp8.autocast(recipe=MX)
    def apply():
        return LAYER.apply(variables, X)

    for _ in range(2):
        same(apply(), expected["MX"])
    same(LAYER.apply(variables, X), expected["delayed"])


def test_an_own_recipe_comes_first_and_off_is_off(variables, expected):
    layer = layer_with(CURRENT)
    with fp8.autocast(recipe=MX):
        same(layer.apply(variables, X), expected["current"])
    with fp8.autocast(enabled=False):
        same(layer.apply(variables, X), expected["off"])


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(jax.vmap(f, (None, 0)))], ids=["jit", "vmap"])
def test_a_jitted_function_is_traced_again(wrap, variables, expected):
    traces = []

    def apply(variables, x):
        traces.append(1)
        return LAYER.apply(variables, x)

    jitted = wrap(apply)
    x = X if wrap is jax.jit else X[None]
    for _ in range(2):
        for context, name in (
            (fp8.autocast(recipe=MX), "MX"),
            (fp8.autocast(recipe=CURRENT), "current"),
            (fp8.autocast(enabled=False), "off"),
            (fp8.autocast(), "delayed"),
            # An equal recipe is the same recipe.
            (fp8.autocast(recipe=fp8.MXFP8BlockScaling()), "MX"),
        ):
            with context:
                same(jitted(variables, x).reshape(8, 16), expected[name])
    assert len(traces) == 4


@pytest.mark.long
def test_the_backward_pass_has_the_precision_of_the_forward_pass(variables):
    params = {"params": variables["params"]}
    g = np.ones((8, 16), np.float32)

    def vjp_of(layer, wrapped=lambda f: f):
        # Outside of the context, and compiled there.
        vjp = jax.vjp(jax.jit(wrapped(lambda v, x: layer.apply(v, x))), params, X)[1]
        return partial(jax.jit(lambda vjp, g: vjp(g)), vjp)

    wanted = jax.tree.leaves(vjp_of(layer_with(MX))(g))
    plain = jax.tree.leaves(vjp_of(PLAIN)(g))
    for wrapped in (lambda f: f, jax.checkpoint):
        with fp8.autocast(recipe=MX):
            vjp = vjp_of(LAYER, wrapped)
        for actual, expected in zip(jax.tree.leaves(vjp(g)), wanted):
            same(actual, expected)
        with fp8.autocast(enabled=False):
            for actual, expected in zip(jax.tree.leaves(vjp(g)), wanted):
                same(actual, expected)
            vjp = vjp_of(LAYER, wrapped)
        with fp8.autocast(recipe=MX):
            for actual, expected in zip(jax.tree.leaves(vjp(g)), plain):
                np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_off_touches_no_state(variables):
    state = {OWG: jax.tree.map(lambda leaf: leaf + 0.25, variables[OWG])}

    @jax.jit
    def grads(v):
        return fp8.grad(lambda v: jnp.sum(LAYER.apply(v, X)))(v)

    with fp8.autocast(enabled=False):
        # No variable is declared, none is needed, and what is there is kept.
        assert list(jax.eval_shape(LAYER.init, jax.random.key(0), X)) == ["params"]
        jax.eval_shape(LAYER.apply, {"params": variables["params"]}, X)
        new = grads({**variables, **state})
    jax.tree.map(np.testing.assert_array_equal, new[OWG], state[OWG])
    assert (grads({**variables, **state})[OWG]["Fp8DotGeneralOp_0"]["input_amax_history"][0]) != 0.25


def test_a_recipe_without_state_leaves_state_alone(variables):
    with fp8.autocast(recipe=MX):
        new = jax.jit(fp8.grad(lambda v: jnp.sum(LAYER.apply(v, X))))(variables)
    jax.tree.map(np.testing.assert_array_equal, new[OWG], variables[OWG])


def test_state_that_is_missing_under_another_recipe():
    with fp8.autocast(recipe=MX):
        variables = variables_of(LAYER, X)
        assert fp8.add_fp8_state(variables, LAYER, X) is variables
    with pytest.raises(fp8.MissingStateError, match="Recipes without delayed scaling.*need no state"):
        LAYER.apply(variables, X)
    LAYER.apply(fp8.add_fp8_state(variables, LAYER, X), X)
    with pytest.raises(ValueError, match="has no FP8 layer"):
        fp8.add_fp8_state(variables, PLAIN, X)


def test_einsum_and_the_other_ops(variables):
    x, w = jnp.asarray(X), variables["params"]["kernel"]
    with fp8.autocast(recipe=MX):
        wanted = LAYER.apply(variables, X)
        same(fp8.Fp8Einsum().apply({}, "ab,bc->ac", x, w), wanted)
        same(fp8.NANOOFp8DotGeneralOp().apply({}, x, w, (((1,), (0,)), ((), ()))), wanted)
    with fp8.autocast(enabled=False):
        same(fp8.Fp8Einsum().apply({}, "ab,bc->ac", x, w), PLAIN.apply(variables, X))


@pytest.mark.parametrize("bad", ["MXFP8", fp8.MXFP8BlockScaling, 3])
def test_a_wrong_recipe(bad):
    with pytest.raises(TypeError, match="recipe must be an instance of a recipe class"):
        fp8.autocast(recipe=bad)
    with pytest.raises(TypeError, match="recipe must be an instance of a recipe class"):
        fp8.Fp8DotGeneralOp(recipe=bad)


def test_a_recipe_in_the_place_of_enabled():
    with pytest.raises(TypeError, match=r"got MXFP8BlockScaling.*Name the recipe: autocast\(recipe="):
        fp8.autocast(MX)


JITTED = jax.jit(LAYER.apply)
RECIPES = {"MX": MX, "current": CURRENT}


@pytest.fixture
def in_force(variables, expected):
    """Returns a function that calls the jitted function and says which recipe it ran under."""
    names = {result.tobytes(): name for name, result in expected.items()}
    return lambda: names[np.asarray(JITTED(variables, X)).tobytes()]


def in_a_thread(function):
    """Returns what the function returns in a new thread, or raises its error."""
    with futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def meanwhile(first, second):
    """Runs two tasks. ``second`` is called while the first task is under MX, which then calls ``first``."""

    async def run_first(started, finished):
        with fp8.autocast(recipe=MX):
            started.set()
            await finished.wait()
            return first()

    async def run_second(started, finished):
        await started.wait()
        try:
            return second()
        finally:
            finished.set()

    async def main():
        events = asyncio.Event(), asyncio.Event()
        tasks = [
            asyncio.create_task(run(*events), name=name)
            for run, name in ((run_first, "first"), (run_second, "second"))
        ]
        return await asyncio.gather(*tasks)

    return asyncio.run(main())


def test_a_task_that_runs_meanwhile_computes_with_that_recipe(in_force):
    for _ in range(2):  # compiling, then compiled
        assert meanwhile(in_force, in_force) == ["MX", "MX"]
        assert in_force() == "delayed"


def test_a_task_may_not_enter_while_another_is_inside(in_force):
    def enter():
        message = (
            r"The asyncio task 'second' entered autocast while the task 'first' .*Leave autocast before"
        )
        with pytest.raises(RuntimeError, match=message), fp8.autocast(recipe=CURRENT):
            pass
        return in_force()

    assert meanwhile(in_force, enter) == ["MX", "MX"]
    assert in_force() == "delayed"


def test_tasks_that_enter_one_after_the_other(in_force):
    """Under the recipe of the code that runs the event loop, which is no task."""

    async def run(name):
        before = in_force()
        with fp8.autocast(recipe=RECIPES[name]), fp8.autocast(enabled=False):
            assert in_force() == "off"
        with fp8.autocast(recipe=RECIPES[name]):
            now = in_force()
        await asyncio.sleep(0)
        return before, now, in_force()

    async def main():
        return await asyncio.gather(run("current"), run("MX"))

    with fp8.autocast(recipe=MX):
        assert asyncio.run(main()) == [("MX", name, "MX") for name in ("current", "MX")]
        assert in_force() == "MX"
    assert in_force() == "delayed"


def under(recipe):
    with fp8.autocast(recipe=recipe):
        while True:
            yield


def test_a_thread_cannot_leave_for_another(in_force):
    def closed_by_another():
        generator = under(MX)
        next(generator)
        message = "left in the thread .*, which had not entered it. The recipe stays set in the thread that"
        with pytest.raises(RuntimeError, match=message):
            in_a_thread(generator.close)
        return in_force()

    assert in_a_thread(closed_by_another) == "MX"
    assert in_force() == "delayed"


def test_an_asynchronous_generator_that_nobody_closes(in_force):
    """The event loop closes it, in a task of its own."""

    async def steps():
        with fp8.autocast(recipe=MX):
            while True:
                yield in_force()

    async def main():
        async for name in steps():
            assert name == in_force() == "MX"
            break
        gc.collect()
        await asyncio.sleep(0.01)
        assert in_force() == "delayed"

    asyncio.run(main())


def test_a_thread_has_its_own(in_force):
    with fp8.autocast(recipe=MX):
        assert in_a_thread(in_force) == "delayed"
        assert asyncio.run(asyncio.to_thread(in_force)) == "delayed"

        def enters():
            with fp8.autocast(recipe=CURRENT):
                return in_force(), in_a_thread(in_force)

        assert in_a_thread(enters) == ("current", "delayed")
        assert in_force() == "MX"


def test_what_it_does_not_decorate():
    async def coroutine():
        pass

    async def generator():
        yield

    for function in (coroutine, generator, under):
        with pytest.raises(TypeError, match=r"got <function .*Write the with statement in it"):
            fp8.autocast()(function)


OWN, DEFAULT = fp8.Float8BlockScaling(), fp8.DelayedScaling()
AMBIENT = [MX.gemms, CURRENT.gemms, None, DEFAULT]


def number_in_use(x):
    """Adds the index of the recipe in ``AMBIENT``."""
    return x + AMBIENT.index(recipe_in_use(None, DEFAULT))


def test_a_recipe_entered_in_a_function_that_is_being_compiled():
    """In a new thread, whose key is another one after the first function than before it."""

    @jax.jit
    def numbers(x):
        with fp8.autocast(recipe=MX):
            inside = number_in_use(x)
        return inside, number_in_use(x)

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
    function, x = jax.jit(number_in_use), np.int32(0)
    calls = []

    def profiled():
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code) if event == "call" else None)
        result = function(x)
        sys.setprofile(None)
        return result

    for _ in range(2):
        for context in (fp8.autocast(recipe=fp8.MXFP8BlockScaling()), fp8.autocast(False), fp8.autocast()):
            with context:
                assert function(x) == profiled()
        assert function(x) == profiled()
    assert calls == []


@pytest.mark.parametrize("seed", range(4))
def test_contexts_that_are_left_in_any_order(seed):
    """A function always runs as compiled for the innermost context that is open."""
    contexts = [fp8.autocast(recipe=MX), fp8.autocast(recipe=CURRENT), fp8.autocast(False), fp8.autocast()]
    choose = random.Random(seed)
    functions = [jax.jit(number_in_use), jax.jit(lambda x: jax.jit(number_in_use)(x)), number_in_use]
    opened = []
    for _ in range(60):
        if choose.random() < 0.5 or not opened:
            opened.append(choose.randrange(4))
            contexts[opened[-1]].__enter__()
        else:
            left = choose.choice(opened)
            contexts[left].__exit__(None, None, None)
            del opened[len(opened) - 1 - opened[::-1].index(left)]
        innermost = opened[-1] if opened else 3
        assert recipe_in_use(OWN, DEFAULT) is (None if innermost == 2 else OWN)
        assert choose.choice(functions)(np.int32(0)) == innermost
    for left in opened:
        contexts[left].__exit__(None, None, None)
    assert number_in_use(0) == 3
    with pytest.raises(RuntimeError, match="which had not entered it"):
        contexts[0].__exit__(None, None, None)


def test_recipes_that_nothing_uses_any_more_are_forgotten():
    for length in range(1, 50):
        with fp8.autocast(recipe=fp8.DelayedScaling(amax_history_len=length)):
            pass
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one).__name__ == "_Ambient"]
    assert len(kept) < 49

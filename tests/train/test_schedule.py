"""Schedules: phases by step, beside ``autocast`` by hand; state over phases; the fallback; errors."""

import dataclasses
import re
from functools import partial

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._core.autocast import recipe_in_use
from tests.cases import OWG, normal, variables_of

DELAYED = fp8.DelayedScaling(amax_history_len=4)
CURRENT = fp8.Float8CurrentScaling()
FORWARD = fp8.CustomRecipe(forward=DELAYED.gemms.forward)
PHASES = (
    fp8.Phase(name="begin", until=2, recipe=DELAYED),
    fp8.Phase(name="wide", until=3, enabled=False),
    fp8.Phase(name="current", until=4, recipe=CURRENT),
    fp8.Phase(name="end", recipe=DELAYED),
)
SCHEDULE = fp8.Schedule(phases=PHASES)
NUM_STEPS = 6
BY_HAND = [*2 * [{"recipe": DELAYED}], {"enabled": False}, {"recipe": CURRENT}, *2 * [{"recipe": DELAYED}]]
X = normal(0, NUM_STEPS, 8, 16, dtype=jnp.bfloat16)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def dense(**fields):
    return nn.Dense(16, dtype=jnp.bfloat16, use_bias=False, **fields)


MODEL = dense(dot_general_cls=fp8.Fp8DotGeneralOp)


def loss_of(apply, variables, x):
    return jnp.mean(jnp.square(apply(variables, x).astype(jnp.float32)))


@partial(jax.jit, donate_argnums=0)
def train_step(state, x):
    loss, grads = fp8.value_and_grad(partial(loss_of, state.apply_fn))(state.params, x)
    return state.apply_gradients(grads=grads), loss


@pytest.fixture(scope="module")
def first():
    with SCHEDULE.init():
        variables = MODEL.init(jax.random.key(1), X[0])
    state = fp8.TrainState.create(apply_fn=MODEL.apply, params=variables, tx=optax.sgd(0.1))
    return state.replace(step=jnp.int32(0))


def run(state, contexts, xs):
    """Returns the states and losses of all steps; it donates a copy of the first state."""
    state, found = jax.tree.map(jnp.copy, state), []
    for context, x in zip(contexts, xs, strict=True):
        with context:
            state, loss = train_step(state, x)
        found.append((jax.tree.map(jnp.copy, state), loss))
    return found


@pytest.fixture(scope="module")
def scheduled(first):
    before = train_step._cache_size()
    found = run(first, map(SCHEDULE.at, range(NUM_STEPS)), X)
    assert train_step._cache_size() - before == 3  # delayed, which two phases share, wide and current
    return found


def test_a_schedule_is_autocast_by_hand(first, scheduled):
    assert_same_bits(scheduled, run(first, [fp8.autocast(**phase) for phase in BY_HAND], X))


def test_a_phase_without_fp8_is_the_wide_model(scheduled):
    before, after = scheduled[1][0], scheduled[2][0]
    state = fp8.TrainState.create(
        apply_fn=dense().apply, params={"params": before.params["params"]}, tx=optax.sgd(0.1)
    )
    (wide, loss), *_ = run(state, [SCHEDULE.at(0)], X[2:3])
    assert_same_bits((wide.params["params"], loss), (after.params["params"], scheduled[2][1]))


def test_state_passes_through_phases_that_do_not_use_it(first, scheduled):
    states = [first.params[OWG], *(state.params[OWG] for state, _ in scheduled)]
    assert len({jax.tree.structure(state) for state in states}) == 1
    assert_same_bits(states[2], states[4])
    old, new = (state["Fp8DotGeneralOp_0"]["input_amax_history"] for state in states[4:6])
    expected = np.roll(old, -1)
    expected[0] = jnp.max(jnp.abs(X[4]))
    np.testing.assert_array_equal(new, expected)


def test_a_run_resumes_in_its_phase(first, scheduled):
    saved = flax.serialization.to_bytes(scheduled[2][0])
    state = flax.serialization.from_bytes(first, saved)
    resumed = run(state, [SCHEDULE.at(state.step + i) for i in range(3)], X[3:])
    assert_same_bits(resumed, scheduled[3:])


def test_accumulated_gradients_keep_the_state_that_a_phase_does_not_use(first, scheduled):
    state = scheduled[1][0]
    accumulated = fp8.accumulate_gradients(partial(loss_of, MODEL.apply))
    with SCHEDULE.at(2):
        _, grads = jax.jit(accumulated)(state.params, X[2].reshape(2, 4, 16))
    assert_same_bits(grads[OWG], state.params[OWG])


def test_nnx_phases_share_one_model():
    traced, states = [], []

    @nnx.jit
    def step(model, optimizer, x):
        traced.append(x.shape)
        loss, grads = fp8nnx.value_and_grad(lambda model: jnp.mean(jnp.square(model(x))))(model)
        optimizer.update(model, grads)
        return loss

    with SCHEDULE.init():
        op = fp8nnx.Fp8DotGeneralOp()
    model = nnx.Linear(16, 8, use_bias=False, dot_general=op, rngs=nnx.Rngs(0))
    optimizer = fp8nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for i, x in enumerate(X[1:].astype(jnp.float32), 1):
        if i != 3:  # the phase with current scaling, which Linen's test has
            kernel = model.kernel.get_value()
            with SCHEDULE.at(i):
                loss = step(model, optimizer, x)
            is_wide = np.isclose(loss, np.mean(np.square(np.asarray(x) @ np.asarray(kernel))), rtol=1e-6)
            assert is_wide == (i == 2)
            states.append(jax.tree.map(jnp.copy, nnx.state(model)))
    assert len(traced) == 2
    history = [state["dot_general"]["kernel_amax_history"].get_value() for state in states]
    assert_same_bits(history[0], history[1])
    assert [int((h > 0).sum()) for h in history] == [1, 1, 2, 3]


def in_use(recipes, context):
    """Returns the recipes that ops with these recipes use in a context."""
    with context:
        return [recipe_in_use(recipe, DELAYED) for recipe in recipes]


def test_layers_follow_the_schedule_unless_a_rule_gave_them_another_recipe():
    other = fp8.MXFP8BlockScaling()
    own = [None, DELAYED, CURRENT, DELAYED.gemms, other]
    assert in_use(own, SCHEDULE.at(0)) == 4 * [DELAYED.gemms] + [other]
    assert in_use(own, SCHEDULE.at(2)) == 5 * [None]
    assert in_use(own, SCHEDULE.at(3)) == 4 * [CURRENT.gemms] + [other]
    off = fp8.Schedule(phases=(fp8.Phase(name="fp8", until=1), fp8.Phase(name="bf16", enabled=False)))
    assert in_use(own, off.at(0)) == in_use(own, fp8.autocast())
    assert in_use(own, off.at(1)) == 5 * [None]
    assert in_use(own, fp8.autocast(recipe=CURRENT)) == [CURRENT.gemms, *own[1:]]


def test_phases_of_a_converted_model_and_their_reports():
    layers = [nn.Dense(640), nn.Dense(640), nn.Dense(640)]
    model = fp8.quantize_model(
        nn.Sequential(layers), DELAYED, exclude="layers_0", rules=[("layers_1", fp8.MXFP8BlockScaling())]
    )
    x = jax.ShapeDtypeStruct((4096, 640), jnp.float32)
    reports = []
    for step in (0, 2, 3):
        with SCHEDULE.at(step):
            reports.append(fp8.report(model, x))
    assert [report.phase for report in reports] == ["begin", "wide", "current"]
    assert [[row.converted for row in report.rows] for report in reports] == [
        [False, True, True],
        [False, False, False],
        [False, True, True],
    ]
    assert "Phase of the schedule: wide." in str(reports[1])
    assert reports[1].rows[2].reason.startswith("FP8 is off")
    assert fp8.report(model, x).phase is None


def state_made_in(context, model=MODEL):
    with context:
        return jax.eval_shape(model.init, jax.random.key(0), X[0]).get(OWG, {})


@pytest.mark.parametrize(
    ("recipes", "leaves"),
    [
        ((None, DELAYED), 6),
        ((CURRENT, DELAYED), 6),
        ((FORWARD, CURRENT), 4),
        ((CURRENT, None), 0),
        ((None,), 0),
    ],
)
def test_init_makes_the_state_of_all_phases(recipes, leaves):
    phases = [
        fp8.Phase(name=str(i), until=i + 1, recipe=recipe, enabled=recipe is not None)
        for i, recipe in enumerate(recipes)
    ]
    phases[-1] = fp8.Phase(name="last", recipe=recipes[-1], enabled=recipes[-1] is not None)
    schedule = fp8.Schedule(phases=tuple(phases))
    state = state_made_in(schedule.init())
    assert len(jax.tree.leaves(state)) == (leaves if any(recipes) else 6)
    if leaves == 6:
        assert state == state_made_in(fp8.autocast(recipe=DELAYED))


FALLBACK = fp8.Schedule(phases=PHASES, fallback=fp8.Fallback(above=10, hold=2))


def names(schedule, off_until):
    return [schedule.phase(step, off_until=off_until).name for step in range(NUM_STEPS)]


def test_fp8_is_off_while_a_statistic_is_above_the_bound():
    plain = ["begin", "begin", "wide", "current", "end", "end"]
    assert names(FALLBACK, 0) == names(SCHEDULE, 0) == plain
    assert FALLBACK.next_off_until(2, 10.0, 1) == 1
    off_until = FALLBACK.next_off_until(2, jnp.float32(10.5), 0)
    assert off_until == 5
    assert names(FALLBACK, jnp.int32(off_until)) == 2 * ["fallback"] + ["wide"] + 2 * ["fallback"] + ["end"]
    for value in (float("nan"), float("inf")):
        assert FALLBACK.next_off_until(0, value, 4) == 4
        assert FALLBACK.next_off_until(9, value, 4) == 12
    assert in_use([DELAYED], FALLBACK.at(4, off_until=5)) == [None]
    of_numpy = dataclasses.replace(FALLBACK, fallback=fp8.Fallback(above=np.float32(10), hold=np.int32(2)))
    assert of_numpy.next_off_until(2, jnp.float32(10.5), 0) == off_until


def test_short_form():
    end = fp8.schedule(CURRENT, until=5)
    found = fp8.schedule(DELAYED, until=2, then=end)
    assert end.phases == (
        fp8.Phase(name="before step 5", until=5, recipe=CURRENT),
        fp8.Phase(name="from step 5", enabled=False),
    )
    assert found.phases == (fp8.Phase(name="before step 2", until=2, recipe=DELAYED), *end.phases)
    assert [found.phase(step).recipe for step in (1, 2, 4, 5)] == [DELAYED, CURRENT, CURRENT, None]
    assert fp8.schedule(DELAYED, until=2, then=CURRENT).phase(2).recipe == CURRENT
    assert fp8.schedule(None, until=2).phase(1).enabled
    with pytest.raises(ValueError, match="until must increase"):
        fp8.schedule(DELAYED, until=5, then=end)
    with pytest.raises(TypeError, match="then must be a recipe"):
        fp8.schedule(DELAYED, until=5, then="bf16")  # type: ignore


def test_what_needs_fp8_says_that_it_is_off():
    model, x = dense(dot_general_cls=fp8.Fp8DotGeneralOp), X[0]
    variables = variables_of(model, x)
    schedule, off = fp8.schedule(DELAYED, until=2), "FP8 is off here, by the phase 'from step 2'"
    with schedule.at(2), pytest.raises(ValueError, match=off):
        fp8.calibrate(model.apply, variables, [x])
    with (
        fp8.autocast(enabled=False),
        pytest.raises(ValueError, match=r"off here, by autocast\(enabled=False"),
    ):
        fp8.freeze(model, variables, x)
    layer = nnx.Linear(16, 16, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
    with schedule.at(2), pytest.raises(ValueError, match=off):
        fp8nnx.freeze(layer, x.astype(jnp.float32))


def test_calibrate_says_that_the_recipe_has_no_state():
    model, x = dense(dot_general_cls=fp8.Fp8DotGeneralOp), X[0]
    schedule = fp8.schedule(DELAYED, until=2, then=CURRENT)
    with schedule.init():
        variables = variables_of(model, x)
        fp8.calibrate(model.apply, variables, [x])
    advice = r"no scaling state here, by the phase 'from step 2': call this in init\(\) of the schedule"
    with schedule.at(2), pytest.raises(ValueError, match=advice):
        fp8.calibrate(model.apply, variables, [x])
    with (
        fp8.autocast(recipe=CURRENT),
        pytest.raises(ValueError, match=r"by autocast\(recipe=…\): call this outside of it"),
    ):
        fp8.calibrate(model.apply, variables, [x])


def test_a_train_state_is_not_variables():
    model, x = dense(dot_general_cls=fp8.Fp8DotGeneralOp), X[0]
    variables = variables_of(model, x)
    state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))
    for call in (
        lambda: fp8.freeze(model, state, x),
        lambda: fp8.calibrate(model.apply, state, [x]),
        lambda: fp8.add_fp8_state(state, model, x),
        lambda: fp8.load_into(state, {}),
        lambda: fp8.weights_for_serving(model, state, x),
    ):
        with pytest.raises(TypeError, match=r"got TrainState\. Pass state\.params"):
            call()
    with pytest.raises(TypeError, match=r"must be an int; .* of type TrainState"):
        SCHEDULE.at(state)


def test_an_audit_names_the_phase():
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    with SCHEDULE.at(2):
        report = fp8.audit(jnp.dot, x, x, target="local")
        with fp8.autocast():
            assert fp8.audit(jnp.dot, x, x, target="local").phase is None
    assert report.phase == "wide"
    assert "Phase of the schedule: wide." in str(report)


def phases(*untils, **last):
    others = [fp8.Phase(name=str(i), until=until) for i, until in enumerate(untils)]
    return {"phases": (*others, fp8.Phase(name="last", **last))}


ERRORS = {
    "empty name": (ValueError, lambda: fp8.Phase(name=""), "name of a Phase must not be empty"),
    "no name": (TypeError, lambda: fp8.Phase(name=3), "must be a str; got 3"),
    "until 0": (ValueError, lambda: fp8.Phase(name="a", until=0), "'a' must be 1 or more; got 0"),
    "until float": (TypeError, lambda: fp8.Phase(name="a", until=1e3), "'a' must be an int; got 1000.0"),
    "no recipe": (TypeError, lambda: fp8.Phase(name="a", recipe="fp8"), "fp8"),
    "enabled": (TypeError, lambda: fp8.Phase(name="a", enabled=None), "enabled of the phase 'a'"),
    "recipe, and off": (
        ValueError,
        lambda: fp8.Phase(name="a", recipe=CURRENT, enabled=False),
        "Leave out",
    ),
    "no phase": (ValueError, lambda: fp8.Schedule(phases=()), "got no phase"),
    "one phase": (TypeError, lambda: fp8.Schedule(phases=PHASES[0]), "must be a tuple of fp8flax.Phase"),
    "not phases": (TypeError, lambda: fp8.Schedule(phases=(CURRENT,)), "must be a tuple of fp8flax.Phase"),
    "equal names": (
        ValueError,
        lambda: fp8.Schedule(phases=(PHASES[0], fp8.Phase(name="begin", recipe=DELAYED))),
        "name of its own",
    ),
    "last until": (ValueError, lambda: fp8.Schedule(phases=PHASES[:1]), "must have until=None"),
    "no until": (ValueError, lambda: fp8.Schedule(**phases(3, None)), "'1' is followed by another"),
    "unordered": (ValueError, lambda: fp8.Schedule(**phases(3, 3)), "begins at step 3 and has until=3"),
    "some recipes": (
        ValueError,
        lambda: fp8.Schedule(**phases(3, recipe=CURRENT)),
        "['0'] have FP8 but no",
    ),
    "lengths": (
        ValueError,
        lambda: fp8.Schedule(phases=(PHASES[0], fp8.Phase(name="b", recipe=fp8.DelayedScaling()))),
        "same amax_history_len; got 4 and 1024 for the input",
    ),
    "no fallback": (TypeError, lambda: fp8.Schedule(phases=PHASES, fallback=10.0), "must be an fp8flax.Fa"),
    "its name": (
        ValueError,
        lambda: fp8.Schedule(phases=(fp8.Phase(name="fallback"),), fallback=FALLBACK.fallback),
        "No phase may be named 'fallback'",
    ),
    "bound": (ValueError, lambda: fp8.Fallback(above=float("nan"), hold=1), "must be finite; got nan"),
    "bound text": (TypeError, lambda: fp8.Fallback(above="10", hold=1), "must be a float; got '10'"),
    "hold": (ValueError, lambda: fp8.Fallback(above=10.0, hold=0), "must be 1 or more; got 0"),
    "step": (ValueError, lambda: SCHEDULE.at(-1), "step must be 0 or more; got -1"),
    "step float": (TypeError, lambda: SCHEDULE.at(2.0), "step must be an int; got 2.0"),
    "step bool": (TypeError, lambda: SCHEDULE.at(True), "step must be an int"),
    "traced": (TypeError, lambda: jax.jit(SCHEDULE.phase)(3), "outside of the jitted function"),
    "off_until": (ValueError, lambda: SCHEDULE.at(1, off_until=3), "needs a schedule with a fallback"),
    "off_until < 0": (ValueError, lambda: FALLBACK.at(1, off_until=-3), "off_until must be 0 or more"),
    "statistic": (ValueError, lambda: SCHEDULE.next_off_until(1, 3.0), "set Schedule(fallback=…)"),
    "statistic text": (TypeError, lambda: FALLBACK.next_off_until(1, "high"), "a number or a scalar array"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    kind, call, text = ERRORS[name]
    with pytest.raises(kind, match=re.escape(text)):
        call()

"""Gradients that merge by max, and the train state, agree with one call on the concatenated data."""

from functools import partial

import flax.core
import flax.linen as nn
import flax.serialization
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import io_callback

import fp8flax as fp8
from tests.cases import OWG, assert_trees_equal, mesh, variables_of
from tests.models import in_scan
from tests.train.net import MODEL, VARIABLES, Net, Op, X, gradient, mse, op_of, trained

assert_trees_close = partial(
    assert_trees_equal, compare=partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
)


def amax_of(variables):
    """Returns the newest amax of the input."""
    return op_of(variables)["input_amax_history"][0]


class TestStateAsNumbers:
    """Inside of the differentiated function the state stands for its next value."""

    @pytest.mark.parametrize(
        "loss",
        [
            lambda v: jnp.sum(op_of(v)["kernel_scale"] ** 2),
            lambda v: jnp.sum(op_of(v)["kernel_scale"] > 0),
            lambda v: op_of(v)["kernel_scale"].max(),
            lambda v: float(op_of(v)["kernel_scale"][0]),
            lambda v: jnp.sum(op_of(v)["kernel_scale"].astype(jnp.float32)),
            lambda v: jnp.vdot(op_of(v)["kernel_scale"], jnp.ones(1)),
            optax.tree.norm,
            lambda v: mse(jax.tree.map(lambda x: x.astype(jnp.float32), v), X),
        ],
        ids=["power", "comparison", "method", "float", "cast", "product", "norm of all", "cast of all"],
    )
    def test_arithmetic_is_refused(self, loss):
        with pytest.raises(TypeError, match=r"scaling state.*variables\['params'\].*fp32_max_grad"):
            jax.jit(fp8.grad(loss))(VARIABLES)
        with pytest.raises(TypeError, match="scaling state"):
            fp8.accumulate_gradients(lambda v, x: loss(v))(VARIABLES, X)

    def test_a_penalty_of_the_parameters(self):
        grads = fp8.grad(lambda v: optax.tree.norm(v["params"]))(VARIABLES)
        assert_trees_equal(grads[OWG], VARIABLES[OWG])

    def test_a_history_that_is_cast_has_its_values(self):
        variables = trained()
        history = lambda v: op_of(v)["input_amax_history"]  # noqa: E731
        value, grads = fp8.value_and_grad(lambda v: jnp.sum(history(v).astype(jnp.float32)))(variables)
        np.testing.assert_allclose(value, jnp.sum(history(variables)), rtol=1e-6)
        assert_trees_equal(grads[OWG], variables[OWG])


class TestSignature:
    """The signatures of ``jax.grad`` and ``jax.value_and_grad``."""

    def test_without_state_it_is_jax(self):
        def f(a, b, c=2.0):
            return a["w"] ** 2 * b * c

        args = ({"w": 3.0}, 5.0)
        for argnums in (0, (0, 1), -1, [0], np.int64(1)):
            found, expected = (g(f, argnums) for g in (fp8.value_and_grad, jax.value_and_grad))
            assert_trees_equal(jax.jit(found)(*args, c=4.0), jax.jit(expected)(*args, c=4.0))
        assert_trees_equal(fp8.grad(f)(*args), jax.grad(f)(*args))
        for argnums, wrong in ((2, args), (0, (3, 5.0))):
            with pytest.raises(TypeError, match="argnums|allow_int"):
                fp8.grad(f, argnums)(*wrong)

    def test_has_aux(self):
        def f(variables, x):
            out, updates = MODEL.apply(variables, x, mutable=True)
            return jnp.mean(out**2), {"out": out, "state": updates[OWG]}

        (value, aux), grads = jax.jit(fp8.value_and_grad(f, has_aux=True))(VARIABLES, X)
        grads_again, aux_again = jax.jit(fp8.grad(f, has_aux=True))(VARIABLES, X)
        np.testing.assert_allclose(value, jnp.mean(aux["out"] ** 2), rtol=1e-6)
        assert_trees_equal(grads, grads_again)
        assert_trees_equal(aux, aux_again)
        # State that leaves through aux is float32 again.
        assert_trees_equal(aux["state"], VARIABLES[OWG])

    def test_holomorphic_and_allow_int_are_passed_on(self):
        assert fp8.grad(lambda z: z**2, holomorphic=True)(1 + 1j) == 2 + 2j
        assert fp8.grad(lambda i: 1.0, allow_int=True)(3).dtype == jax.dtypes.float0
        # Integers beside the state need no allow_int.
        with_step = {**VARIABLES, "counter": {"step": jnp.int32(3)}}
        grads = fp8.grad(lambda v: mse({k: v[k] for k in VARIABLES}, X))(with_step)
        assert_trees_equal({k: grads[k] for k in VARIABLES}, fp8.grad(mse)(VARIABLES, X))

    @pytest.mark.long
    def test_stacked_layers_with_jit_switched_off(self):
        stacked = in_scan(remat=True)(Op)
        variables = variables_of(stacked, X)

        def step(variables):
            return fp8.value_and_grad(lambda v: jnp.sum(stacked.apply(v, X) ** 2))(variables)

        with jax.disable_jit():
            found = step(variables)
        assert_trees_close(found, jax.jit(step)(variables))

    @pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
    def test_the_collection_as_an_argument_of_its_own(self, split):
        def twice(params, state):
            variables = {"params": params, **(state if split else {OWG: state})}
            return mse(variables, X) + mse(variables, 2 * X)

        state = {OWG: VARIABLES[OWG]} if split else VARIABLES[OWG]
        _, (_, new) = fp8.value_and_grad(twice, (0, 1))(VARIABLES["params"], state)
        assert amax_of(new if split else {OWG: new}) == 2 * np.max(np.abs(X))

    def test_a_parameter_with_a_name_of_the_state_is_a_parameter(self):
        def f(variables):
            return jnp.sum(jnp.exp(variables["params"]["input_scale"]) * variables["other"]["kernel_scale"])

        variables = {"params": {"input_scale": jnp.ones((2,))}, "other": {"kernel_scale": jnp.ones((2,))}}
        assert_trees_equal(fp8.grad(f)(variables), jax.grad(f)(variables))


@pytest.mark.newest
class TestMergeByMax:
    """The state is that of one call on all the data; tests/linen/test_transformations.py has more ways."""

    def test_a_gradient_inside_of_the_loss(self):
        """As in first-order MAML: the next state is that of the outer gradient."""

        def loss(v):
            inner = fp8.grad(mse)({**v, "params": VARIABLES["params"]}, 3 * X)["params"]
            return mse({**v, "params": jax.tree.map(jnp.subtract, v["params"], inner)}, X)

        state = jax.jit(fp8.grad(loss))(VARIABLES)
        assert amax_of(state) == np.max(np.abs(X))

    def test_stacked_layers_that_read_their_states_by_hand(self):
        """A layer of a user reads the state without an op of this package, and not all of it."""

        class ByHand(nn.Module):
            @nn.compact
            def __call__(self, x, _=None):
                state = {
                    f"{role}_{name}": self.variable(OWG, f"{role}_{name}", init, (n,)).value
                    for role in ("input", "output_grad")
                    for name, n, init in (("scale", 1, jnp.ones), ("amax_history", 4, jnp.zeros))
                }
                args = state["input_scale"], state["input_amax_history"]
                return 2 * jnp.sin(fp8.in_qdq(jnp.float32, jnp.float8_e4m3fn, x, *args)), None

        stacked = nn.scan(ByHand, length=3, variable_axes={OWG: 0})()
        old = variables_of(stacked, X, None)
        new = jax.jit(fp8.grad(lambda v: jnp.mean(stacked.apply(v, X, None)[0] ** 2)))(old)[OWG]
        amaxes = new["input_amax_history"][:, 0]
        np.testing.assert_allclose(amaxes[:2], [jnp.abs(X).max(), 2 * jnp.abs(jnp.sin(X)).max()], rtol=0.1)
        assert amaxes[2] > 0
        assert_trees_equal(new["output_grad_scale"], old[OWG]["output_grad_scale"])


accumulated = jax.jit(fp8.accumulate_gradients(mse))


@pytest.mark.newest
class TestAccumulateGradients:
    """Microbatches, one at a time, as in tests/linen/test_transformations.py."""

    def microbatches(self):
        return jnp.stack([X, 3 * X, -2 * X])

    def test_aux_keys_and_dtypes(self):
        def loss(variables, batch):
            noise = jax.random.normal(batch["key"], X.shape)
            return mse(variables, (batch["x"] + noise)), {"noise": noise}

        narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), VARIABLES["params"])
        variables = {"params": narrow, OWG: VARIABLES[OWG]}
        with jax.numpy_dtype_promotion("standard"):
            batches = {"x": self.microbatches(), "key": jax.random.split(jax.random.key(0), 3)}
            (value, aux), grads = fp8.accumulate_gradients(loss, has_aux=True)(variables, batches)
        assert value.shape == ()
        assert aux["noise"].shape == (3, *X.shape)
        assert {leaf.dtype for leaf in jax.tree.leaves(grads["params"])} == {jnp.dtype(jnp.bfloat16)}
        assert {leaf.dtype for leaf in jax.tree.leaves(grads[OWG])} == {jnp.dtype(jnp.float32)}

    def test_a_tuple_of_arguments_and_integers(self):
        """The state may be an argument of its own; integers get no gradient."""

        def loss(args, x):
            params, state, _ = args
            return mse({"params": params, **state}, x)

        args = (VARIABLES["params"], {OWG: VARIABLES[OWG]}, jnp.int32(3))
        params, state, step = fp8.accumulate_gradients(loss)(args, self.microbatches())[1]
        assert step == 0
        assert_trees_equal({"params": params, **state}, accumulated(VARIABLES, self.microbatches())[1])

    def test_random_keys_and_integers_of_another_argument(self):
        """Keys have no gradient. JAX refuses an integer unless it is beside the state."""

        def loss(variables, x, factor=1.0):
            noise = jax.random.normal(variables["key"], X.shape)
            return factor * mse({name: variables[name] for name in VARIABLES}, x + noise)

        variables = {**VARIABLES, "key": jax.random.key(0)}
        _, grads = fp8.accumulate_gradients(loss)(variables, X[None])
        assert grads.pop("key").dtype == jax.dtypes.float0
        expected = jax.jit(fp8.grad(loss))(variables, X)
        assert_trees_close(grads, {name: expected[name] for name in VARIABLES})
        for wrong in (3, jnp.int32(3)):
            with pytest.raises(TypeError, match="allow_int"):
                fp8.value_and_grad(loss, argnums=(0, 2))(variables, X, wrong)

    @pytest.mark.parametrize("callback", [jax.debug.callback, lambda f, x: io_callback(f, None, x)])
    def test_side_effects_happen_once_in_each_microbatch(self, callback):
        seen = []

        def loss(variables, x):
            callback(seen.append, lax.stop_gradient(variables["a"]))
            return jnp.sum(variables["a"] * x)

        fp8.accumulate_gradients(loss)({"a": jnp.float32(2)}, jnp.ones((3, 4)))
        jax.effects_barrier()
        assert seen == [2, 2, 2]

    @pytest.mark.parametrize("batches", [{"a": X, "b": X[:2]}, X[:0], jnp.float32(1), {}, [X, X[:2]]])
    def test_wrong_microbatches_are_refused(self, batches):
        with pytest.raises(ValueError, match="first dimension"):
            fp8.accumulate_gradients(lambda v, b: 0.0)(VARIABLES, batches)

    def test_sums_in_float32(self):
        """A sum in bfloat16 of 512 equal parts would stop at 256 of them."""

        def loss(variables, x):
            return x * variables["params"]["w"]

        variables = {"params": {"w": jnp.ones((), jnp.bfloat16)}}
        grads = fp8.accumulate_gradients(loss)(variables, jnp.ones((512,), jnp.bfloat16))[1]
        assert grads["params"]["w"] == 1

    @pytest.mark.usefixtures("stacking")
    def test_a_layer_that_only_one_microbatch_uses(self):
        def loss(variables, batch):
            x, flag = batch
            return lax.cond(flag, lambda: mse(variables, x), lambda: mse(variables, x, use_second=False))

        variables, batches = trained(), self.microbatches()
        accumulate = jax.jit(fp8.accumulate_gradients(loss))
        grads = accumulate(variables, (batches, jnp.array([False, True, False])))[1]
        alone = gradient(variables, batches[1])
        histories = (op_of(v, "second")["input_amax_history"] for v in (grads, alone))
        assert_trees_equal(*histories)
        none = accumulate(variables, (batches, jnp.zeros((3,), bool)))[1]
        assert_trees_equal(none[OWG]["second"], variables[OWG]["second"])

    @pytest.mark.usefixtures("promotion_of_users")
    def test_multi_steps_keeps_every_microbatch(self):
        """With Optax's MultiSteps each microbatch is a step of the state, and no amax is lost."""
        tx = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=3)
        state = fp8.TrainState.create(apply_fn=MODEL.apply, params=VARIABLES, tx=tx)
        amax = np.max(np.abs(X))
        apply_gradients = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
        for x in self.microbatches():
            assert_trees_equal(state.params["params"], VARIABLES["params"])
            state = apply_gradients(state, gradient(state.params, x))
        history = op_of(state.params)["input_amax_history"]
        np.testing.assert_allclose(history, [2 * amax, 0, amax, 3 * amax], rtol=1e-6)
        assert not np.array_equal(
            state.params["params"]["first"]["kernel"], VARIABLES["params"]["first"]["kernel"]
        )


def test_debug_nans_and_infs():
    """Nothing is NaN or Inf on the way, in a state with amaxes."""
    with jax.debug_nans(True), jax.debug_infs(True):
        variables = fp8.calibrate(mse, VARIABLES, [X], backward=True)
        fp8.freeze(MODEL, variables, X)  # looks at the state
        fp8.check_state(variables)
    with jax.debug_nans(True):
        grads = fp8.grad(mse)(variables, X)
    assert np.isfinite(grads["params"]["first"]["kernel"]).all()


class TestNoUpdate:
    """State that got no gradient, or saw a NaN or an Inf, is kept."""

    @pytest.mark.newest
    @pytest.mark.parametrize("gradient", [fp8.grad, jax.grad], ids=["fp8.grad", "jax.grad"])
    def test_an_unused_layer_and_a_bad_batch(self, gradient):
        state = fp8.TrainState.create(
            apply_fn=MODEL.apply, params=trained(), tx=optax.apply_if_finite(optax.sgd(0.1), 10)
        )

        @partial(jax.jit, static_argnums=2)
        def step(state, x, use_second):
            def loss(v):
                return jnp.mean(state.apply_fn(v, x, use_second=use_second) ** 2)

            return state.apply_gradients(grads=gradient(loss)(state.params))

        unused = step(state, X, False).params
        assert_trees_equal(unused[OWG]["second"], state.params[OWG]["second"])
        assert amax_of(unused) == np.max(np.abs(X))
        for bad in (np.nan, -np.inf):
            after = step(state, X.at[1, 2].set(bad), True)
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.params))
            old, new = (op_of(s.params)["input_amax_history"] for s in (state, after))
            np.testing.assert_array_equal(new, old)
            # The next step is like any other.
            assert amax_of(step(after, X, True).params) == np.max(np.abs(X))


@pytest.mark.usefixtures("promotion_of_users")
class TestTrainState:
    def loss(self, state, x):
        return lambda v: jnp.mean((state.apply_fn(v, x) - 1.0) ** 2)

    def test_optimizers_see_params_alone(self):
        tx = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
        state = fp8.TrainState.create(apply_fn=MODEL.apply, params=VARIABLES, tx=tx)
        # By hand: optax on params alone, the collection overwritten.
        variables, opt_state = VARIABLES, tx.init(VARIABLES["params"])
        assert_trees_equal(state.opt_state, opt_state)

        @partial(jax.jit, donate_argnums=0)
        def step(state, x):
            return state.apply_gradients(grads=fp8.grad(self.loss(state, x))(state.params))

        @jax.jit
        def step_by_hand(variables, opt_state, x):
            grads = fp8.grad(self.loss(state, x))(variables)
            updates, opt_state = tx.update(grads["params"], opt_state, variables["params"])
            params = optax.apply_updates(variables["params"], updates)
            return {"params": params, OWG: grads[OWG]}, opt_state

        state = jax.tree.map(jnp.array, state)
        for i in range(4):
            variables, opt_state = step_by_hand(variables, opt_state, X * (1 + i))
            state = step(state, X * (1 + i))
        assert state.step == 4
        assert_trees_equal(
            state.params[OWG], variables[OWG], partial(np.testing.assert_allclose, rtol=1e-4)
        )
        assert_trees_equal(
            state.params["params"], variables["params"], partial(np.testing.assert_allclose, atol=1e-4)
        )

    @pytest.mark.parametrize("freeze", [lambda t: t, flax.core.freeze], ids=["dict", "FrozenDict"])
    def test_batch_stats_survive(self, freeze):
        model = Net(batch_norm=True)
        variables = freeze(variables_of(model, X))
        state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(0.1))

        @jax.jit
        def step(state):
            def loss(v):
                out, updates = state.apply_fn(v, X, train=True, mutable=["batch_stats"])
                return jnp.mean(out**2), updates

            grads, updates = jax.grad(loss, has_aux=True)(state.params)
            kept = state.apply_gradients(grads=grads)
            return kept, kept.replace(params={**kept.params, **updates}), updates

        kept, new, updates = step(state)
        assert type(kept.params) is type(variables)
        assert set(new.params) == {"params", OWG, "batch_stats"}
        assert_trees_equal(new.params["batch_stats"], updates["batch_stats"])
        # Without the replacement they stay as they were.
        assert_trees_equal(kept.params["batch_stats"], variables["batch_stats"])

    @pytest.mark.parametrize("bare", [False, True], ids=["variables", "params"])
    def test_without_fp8_it_is_the_flax_train_state(self, bare):
        model = Net(None)
        variables = variables_of(model, X)
        params = variables["params"] if bare else variables

        @jax.jit
        def step(state):
            grads = jax.grad(lambda p: jnp.mean(state.apply_fn({"params": p} if bare else p, X) ** 2))(
                state.params
            )
            return state.apply_gradients(grads=grads)

        states = [
            cls.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))
            for cls in (fp8.TrainState, flax.training.train_state.TrainState)
        ]
        for _ in range(2):
            states = [step(state) for state in states]
        assert_trees_equal(states[0].params, states[1].params)
        assert states[0].step == 2

    def test_a_checkpoint_of_the_flax_train_state_loads(self):
        theirs = flax.training.train_state.TrainState.create(
            apply_fn=MODEL.apply, params=trained(), tx=optax.adamw(1e-2)
        )
        fresh = fp8.TrainState.create(apply_fn=MODEL.apply, params=VARIABLES, tx=optax.adamw(1e-2))
        restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(theirs))
        assert_trees_equal(restored.params, theirs.params)

    def test_wrong_gradients_are_refused(self):
        state = fp8.TrainState.create(apply_fn=MODEL.apply, params=VARIABLES, tx=optax.sgd(0.1))
        grads = fp8.grad(self.loss(state, X))(state.params)
        narrow = jax.tree.map(lambda s: s.astype(jnp.bfloat16), grads[OWG])
        for wrong, error, match in (
            ({"params": grads["params"]}, ValueError, f"has no '{OWG}'"),
            (grads["params"], ValueError, "has no 'params'"),
            ({**grads, OWG: {"first": grads[OWG]["first"]}}, ValueError, "structure"),
            ({**grads, OWG: narrow}, TypeError, "first/Fp8DotGeneralOp_0/input_scale must be float32"),
        ):
            with pytest.raises(error, match=match):
                state.apply_gradients(grads=wrong)
        held = state.apply_gradients(grads={**grads, OWG: state.params[OWG]})
        assert_trees_equal(held.params[OWG], VARIABLES[OWG])

    def test_wrong_params_are_refused(self):
        create = partial(fp8.TrainState.create, apply_fn=MODEL.apply, tx=optax.sgd(0.1))
        for nested in (
            {"generator": VARIABLES, "discriminator": VARIABLES},
            {"params": VARIABLES},
            VARIABLES[OWG],
        ):
            with pytest.raises(ValueError, match="optimizer would see"):
                create(params=nested)


def multiplied(tree, factor):
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def train_state(variables):
    return fp8.TrainState.create(apply_fn=MODEL.apply, params=variables, tx=optax.sgd(0.1))


def apply_to_state(variables, grads):
    """Returns the scaling state after ``apply_gradients``."""
    return train_state(variables).apply_gradients(grads=grads).params[OWG]


apply_jitted = jax.jit(apply_to_state)


class TestGradientsThatWereChanged:
    """Each tensor whose new state no step can make gets a scale of NaN under jit; the others do not."""

    @pytest.mark.parametrize("steps", [0, 2])
    def test_a_history_that_was_kept(self, steps):
        variables = trained(steps)
        for grads in (
            gradient(variables, X, use_second=False),
            gradient(variables, X.at[0, 0].set(jnp.nan)),
        ):
            assert_trees_equal(apply_jitted(variables, grads), grads[OWG])

    @pytest.mark.usefixtures("stacking")
    def test_only_the_tensor_that_was_touched(self):
        variables = trained(2)
        grads = gradient(variables, X)
        op_of(grads)["kernel_amax_history"] *= 0.3
        kept = apply_jitted(variables, grads)
        op_of(grads)["kernel_scale"] = jnp.full((1,), jnp.nan)
        op_of(grads)["kernel_amax_history"] = op_of(variables)["kernel_amax_history"]
        assert_trees_equal(kept, grads[OWG])
        assert jnp.isnan(mse({**variables, OWG: kept}, X))
        # The NaN stays: no later step hides it.
        assert jnp.isnan(op_of(gradient({**variables, OWG: kept}, X))["kernel_scale"])

    def test_stacked_layers_are_judged_one_by_one(self):
        variables = trained(2)
        grads = gradient(variables, X)

        def stack(*trees):
            return jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), *trees)

        def wrong(path, old):
            is_scale = path[-1].key.endswith("_scale")
            return jnp.full_like(old, jnp.nan) if is_scale else old

        olds = {"params": variables["params"], OWG: stack(variables[OWG], variables[OWG])}
        news = stack(grads[OWG], multiplied(grads[OWG], 0.3))
        kept = apply_jitted(olds, {"params": grads["params"], OWG: news})
        assert_trees_equal(kept, stack(grads[OWG], jax.tree.map_with_path(wrong, variables[OWG])))

    def test_the_maximum_over_devices_one_of_which_kept_its_history(self):
        variables, xs = trained(6), jnp.stack([X, X.at[0, 0].set(jnp.nan), 3 * X])

        def of_device(x):
            return fp8.pmean_gradients(gradient(variables, x), "data")

        reduced = jax.jit(jax.vmap(of_device, axis_name="data"))(xs)
        kept = jax.jit(jax.vmap(partial(apply_to_state, variables)))(reduced)
        assert_trees_equal(kept, reduced[OWG])
        jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf[0], leaf[1]), kept)
        one = jax.tree.map(lambda leaf: leaf[0], reduced)
        assert_trees_equal(apply_to_state(variables, one), one[OWG])

    @pytest.mark.parametrize(
        ("options", "steps"),
        [
            ({"amax_history_len": 1}, 0),
            ({"amax_history_len": 3, "amax_compute_algo": "most_recent", "margin": 2}, 3),
            ({"amax_history_len": 1, "use_power_2_scales": True}, 3),
        ],
        ids=["new", "most_recent", "power_2"],
    )
    def test_the_scale_shows_a_factor(self, options, steps):
        """A history of one entry can be any; its scale must follow from the old history."""
        model = Net(partial(Op, recipe=fp8.DelayedScaling(**options)))
        gradient = jax.jit(fp8.grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)))
        variables = variables_of(model, X)
        for i in range(steps):
            variables = {**variables, OWG: gradient(variables, (i + 1) * X)[OWG]}
        grads = gradient(variables, X)
        assert_trees_equal(apply_jitted(variables, grads), grads[OWG])
        wrong = apply_jitted(variables, multiplied(grads, 0.3))
        assert jnp.isnan(op_of({OWG: wrong})["input_scale"])

    def test_in_shard_map_and_scan(self):
        """The check finds nothing wrong with the states of a loop over sharded data."""
        variables = trained(2)

        def grads_of(v, x):
            return fp8.grad(lambda v: lax.pmean(mse(v, x), "data"))(v)

        def step(v, x):
            def body(v, _):
                return {**v, OWG: apply_to_state(v, multiplied(grads_of(v, x), 1.0))}, None

            return lax.scan(body, v, None, length=2)[0]

        specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P()}
        sharded = partial(jax.shard_map, mesh=mesh(data=2), **specs)
        xs = jnp.concatenate([X, 2 * X])
        jitted, expected = jax.jit(sharded(grads_of)), variables
        for _ in range(2):
            expected = {**expected, OWG: jax.device_get(jitted(expected, xs))[OWG]}
        assert_trees_equal(jax.jit(sharded(step))(variables, xs)[OWG], expected[OWG])


IN_ONE_PROGRAM = {
    "of an older state": lambda grad, v, x: grad(VARIABLES, x),
    "two steps on": lambda grad, v, x: grad({**v, OWG: grad(v, 5 * x)[OWG]}, x),
    "of another tensor": lambda grad, v, x: exchanged(grad(v, x)),
    "a product": lambda grad, v, x: multiplied(grad(v, x), 0.5),
    "clipped": lambda grad, v, x: jax.tree.map(lambda g: jnp.clip(g, -1e6, 1e6), grad(v, x)),
    "a mean": lambda grad, v, x: jax.tree.map(lambda a, b: (a + b) / 2, grad(v, x), grad(v, 3 * x)),
}


def exchanged(grads):
    """Returns gradients in which the input and the kernel of a layer have each other's state."""
    changed = jax.tree.map(lambda x: x, grads)
    op = op_of(changed)
    for name in ("scale", "amax_history"):
        op[f"input_{name}"], op[f"kernel_{name}"] = op[f"kernel_{name}"], op[f"input_{name}"]
    return changed


@pytest.mark.parametrize("grad", [fp8.grad(mse), gradient], ids=["grad", "jit"])
@pytest.mark.parametrize("change", IN_ONE_PROGRAM.values(), ids=IN_ONE_PROGRAM)
def test_what_is_not_the_next_state_in_one_program(change, grad):
    after = jax.jit(lambda v, x: apply_to_state(v, change(grad, v, x)))(trained(2), X)
    assert jnp.isnan(op_of({OWG: after})["input_scale"])


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_mean_over_devices_in_one_program(check_vma):
    """Its values are those of a state that a step could make."""

    def step(v, x):
        grads = fp8.grad(mse)(lax.pcast(v, "data", to="varying"), x)
        return apply_to_state(v, lax.pmean(grads, "data"))

    split = partial(jax.shard_map, mesh=mesh(data=2), in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    after = jax.jit(split(step, check_vma=check_vma))(trained(2), jnp.concatenate([X, 2 * X]))
    assert jnp.isnan(op_of({OWG: after})["input_scale"])


@pytest.mark.parametrize("grad", [fp8.grad(mse), gradient], ids=["grad", "jit"])
def test_the_next_state_in_one_program(grad):
    after = jax.jit(lambda v, x: apply_to_state(v, grad(v, x)))(trained(2), X)
    assert_trees_equal(after, gradient(trained(2), X)[OWG])


on_two_devices = partial(
    jax.shard_map, mesh=mesh(data=2), in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=False
)


@pytest.mark.parametrize(
    ("grad", "wrap"),
    [
        (fp8.grad(mse), jax.jit),
        (gradient, jax.jit),
        (jax.grad(lambda v, x: jnp.mean(train_state(v).apply_fn(v, x) ** 2)), jax.jit),
        (lambda v, x: fp8.accumulate_gradients(mse)(v, x[None])[1], jax.jit),
        (lambda v, x: fp8.DynamicScale().value_and_grad(mse)(v, x)[-1], jax.jit),
        (lambda v, x: fp8.pmean_gradients(fp8.grad(mse)(v, x), "data"), on_two_devices),
    ],
    ids=["grad", "jit", "jax.grad", "accumulate", "DynamicScale", "pmean_gradients"],
)
@pytest.mark.usefixtures("stacking")
def test_the_check_of_a_state_that_the_program_shows_costs_nothing(grad, wrap):
    expected = num_instructions(wrap(lambda v, x: grad(v, x)[OWG]))
    assert num_instructions(wrap(lambda v, x: apply_to_state(v, grad(v, x)))) == expected


def num_instructions(step):
    return jax.jit(step).lower(trained(2), X).compile().as_text().count(" = ")


def test_the_check_of_another_state_costs_instructions():
    state, checked = (
        num_instructions(step)
        for step in (
            lambda v, x: gradient(v, x)[OWG],
            lambda v, x: apply_to_state(v, multiplied(gradient(v, x), 0.5)),
        )
    )
    assert checked > 1.2 * state


@pytest.mark.usefixtures("stacking")
def test_a_value_that_depends_on_no_state_leaves_all_as_it_is():
    def value_and_state(v):
        value, grads = fp8.value_and_grad(lambda v: jnp.sum(v["params"]["first"]["bias"]))(v)
        return value, grads[OWG]

    value, state = jax.jit(value_and_state)(VARIABLES)
    assert value == jnp.sum(VARIABLES["params"]["first"]["bias"])
    jax.tree.map(np.testing.assert_array_equal, state, VARIABLES[OWG])

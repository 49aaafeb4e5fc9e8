"""The code of docs/migrating.md runs, and differs from the other libraries as the page says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from tests import ROOT
from tests.cases import OWG
from tests.pages import examples_of, run


@functools.cache
def page():
    """Returns the namespace after the code blocks of the page, which run once."""
    return run(examples_of((ROOT / "docs" / "migrating.md").read_text()), "docs/migrating.md")


@pytest.mark.long
class TestPage:
    def test_flax(self):
        """A step that resumes from Flax's checkpoint takes Flax's next step, to five digits."""
        after = page()
        with jax.numpy_dtype_promotion("standard"):
            step = after["make_step"](jax.value_and_grad)
            theirs, loss = step(after["flax_state"])
        np.testing.assert_allclose(after["loss"], loss, rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
            after["state"].params,
            theirs.params,
        )
        fp8.check_state(after["state"].params, before=after["flax_state"].params)

    def test_transformer_engine(self):
        """The next scale equals the one that Transformer Engine stores, by its documentation."""
        history, scale = np.zeros(4, np.float32), np.ones(1, np.float32)
        for amax in (5.0, 2.0, 3.0, 1.0, 4.0):
            history[0] = amax
            scale = np.array([448 / history.max()], np.float32)  # of the next step
            history = np.roll(history, -1)
            history[0] = 0
        metas = {f"{t}_scale": scale for t in ("x", "kernel", "grad")}
        metas |= {f"{t}_amax_history": jnp.asarray(history) for t in ("x", "kernel", "grad")}
        state = page()["state_of_transformer_engine"](metas)
        np.testing.assert_array_equal(state["input_amax_history"], [4, 0, 3, 1])
        op = fp8.Fp8DotGeneralOp(recipe=fp8.DelayedScaling(amax_history_len=4))
        x, kernel = np.ones((1, 16), np.float32), np.ones((16, 16), np.float32)

        def loss(variables):
            return jnp.sum(op.apply(variables, x, kernel, (((1,), (0,)), ((), ()))))

        state = fp8.grad(loss)({OWG: state})[OWG]
        np.testing.assert_allclose(state["input_scale"], 1 / scale, rtol=1e-6)
        np.testing.assert_array_equal(state["input_amax_history"], [1, 3, 1, 4])

    def test_qwix(self):
        after = page()
        np.testing.assert_array_equal(after["output"], after["served"])

    def test_keras(self):
        """The function makes variables that ``add_fp8_state`` accepts, with the values of the layer."""
        weights = {"kernel": np.ones((32, 64), np.float32), "bias": np.zeros(64, np.float32)}
        for i, role in enumerate(("inputs", "kernel", "outputs_grad"), 1):
            weights[f"{role}_scale"] = np.float32(i)
            weights[f"{role}_amax_history"] = np.full(1024, i, np.float32)
        variables = page()["variables_of_keras"](weights)
        model8 = fp8.quantize_model(page()["nn"].Dense(64), include=".*")
        added = fp8.add_fp8_state(variables, model8, page()["x"])
        state = added[OWG]["Fp8DotGeneralOp_0"]
        assert [state[f"{role}_scale"][0] for role in ("input", "kernel", "output_grad")] == [1, 2, 3]

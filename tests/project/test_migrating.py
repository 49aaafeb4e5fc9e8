"""The code on the pages about migration runs, before and after, and differs as the pages say."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from tests import ROOT

OWG = fp8.OVERWRITE_WITH_GRADIENT
PAGES = {path.stem.removeprefix("migrating_"): path for path in (ROOT / "docs").glob("migrating_*.md")}
# Blocks that need packages which the tests do not have are marked ``py``, and others ``python``.
BEFORE, AFTER = "py", "python"


def blocks_of(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page].read_text(), re.DOTALL | re.MULTILINE)


@functools.cache
def run(page, language):
    """Returns the namespace after the code blocks of a page; each page runs once."""
    namespace = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks_of(page, language):
            exec(compile(block, f"{page}, {language}", "exec"), namespace)
    return namespace


def sqnr(x, y):
    return 10 * np.log10(np.sum(np.square(x)) / np.sum(np.square(x - y)))


def check_flax(after):
    np.testing.assert_allclose(after["losses_before"], after["losses_after"], rtol=1e-5)
    assert after["losses_after"][-1] < after["losses_after"][0]
    fp8.check_state(after["resumed"].params, before=after["state_before"].params)


def check_transformer_engine(after):
    """The next scale equals the one that Transformer Engine stores, by its documentation."""
    assert np.isfinite(after["loss"])
    carried = after["carried"][OWG]["Fp8DotGeneralOp_0"]
    np.testing.assert_array_equal(carried["input_amax_history"][:2], [3, 0])
    np.testing.assert_allclose(carried["input_scale"], 3 / 448)
    history, scale = np.zeros(4, np.float32), np.ones(1, np.float32)
    for amax in (5.0, 2.0, 3.0, 1.0, 4.0):
        history[0] = amax
        scale = np.array([448 / history.max()], np.float32)  # of the next step
        history = np.roll(history, -1)
        history[0] = 0
    metas = {f"{t}_scale": scale for t in ("x", "kernel", "grad")}
    metas |= {f"{t}_amax_history": jnp.asarray(history) for t in ("x", "kernel", "grad")}
    state = after["state_of_transformer_engine"](metas)
    np.testing.assert_array_equal(state["input_amax_history"], [4, 0, 3, 1])
    op = fp8.Fp8DotGeneralOp(recipe=fp8.DelayedScaling(amax_history_len=4))
    x, kernel = np.ones((1, 16), np.float32), np.ones((16, 16), np.float32)

    def loss(variables):
        return jnp.sum(op.apply(variables, x, kernel, (((1,), (0,)), ((), ()))))

    state = fp8.grad(loss)({OWG: state})[OWG]
    np.testing.assert_allclose(state["input_scale"], 1 / scale, rtol=1e-6)
    np.testing.assert_array_equal(state["input_amax_history"], [1, 3, 1, 4])


def check_qwix(after):
    np.testing.assert_array_equal(after["output_after"], after["served_after"])
    state = after["with_state"][OWG]["layers_0"]["Fp8DotGeneralOp_0"]
    np.testing.assert_array_equal(state["input_amax_history"][0], np.abs(after["x"]).max())


def check_keras(after):
    assert after["losses_after"][-1] < after["losses_after"][0]


CHECKS = {
    "flax": check_flax,
    "transformer_engine": check_transformer_engine,
    "qwix": check_qwix,
    "keras": check_keras,
}


@pytest.mark.long
@pytest.mark.parametrize("page", CHECKS)
def test_after(page):
    CHECKS[page](run(page, AFTER))


@pytest.mark.long
def test_before_with_qwix():
    pytest.importorskip("qwix", reason="Qwix is not among the dependencies of the tests")
    before, after = run("qwix", BEFORE), run("qwix", AFTER)
    for name in ("output", "served"):
        assert sqnr(before[f"{name}_before"], after[f"{name}_after"]) > 100
    trees = (
        jax.tree.leaves(left[f"grads_{when}"]) for left, when in ((before, "before"), (after, "after"))
    )
    assert all(sqnr(theirs, ours) > 20 for theirs, ours in zip(*trees))


@pytest.mark.long
def test_before_with_keras(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("keras", reason="Keras is not among the dependencies of the tests")
    before, after = run("keras", BEFORE), run("keras", AFTER)
    variables = {**after["variables"], "params": {"kernel": before["kernel_before"]}}
    state, losses = after["train"](variables)
    np.testing.assert_allclose(losses[0], before["losses_before"][0], rtol=1e-6)
    np.testing.assert_allclose(losses, before["losses_before"], rtol=0.02)
    read = after["variables_of_keras"](before["keras_weights"])
    carried = fp8.add_fp8_state(read, after["model8"], after["x"])
    theirs, ours = (tree[OWG]["Fp8DotGeneralOp_0"] for tree in (carried, state.params))
    np.testing.assert_array_equal(theirs["input_amax_history"], ours["input_amax_history"])
    np.testing.assert_allclose(theirs["kernel_amax_history"], ours["kernel_amax_history"], rtol=0.01)

"""The op of docs/extending.md: trained, converted, reported, audited and frozen, in Linen and in NNX."""

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax import extend
from fp8flax._core.plans import row as table
from tests import ROOT

PAGE = ROOT / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
MOST_LINES = 60

# Bits are compared between programs, which must be compiled with the same options.
pytestmark = pytest.mark.optimized

X = jax.random.normal(jax.random.key(0), (4, 16, 64))


@pytest.fixture(scope="module")
def page():
    """Runs the code of the page, and takes the row out of the table afterwards."""
    before, names = dict(table._rows), {"__name__": "page"}
    exec("\n".join(BLOCKS), names)
    yield names
    table._rows.clear()
    table._rows.update(before)


@pytest.fixture
def linen(page):
    """A converted Linen model, and its variables with a bias that is not zero."""
    model = fp8.quantize_model(page["Experts"](), include="")
    variables = model.init(jax.random.key(1), X)
    bias = jax.random.normal(jax.random.key(2), variables["params"]["bias"].shape)
    return model, {**variables, "params": {**variables["params"], "bias": bias}}


@pytest.fixture
def in_nnx(page, linen):
    """A converted NNX model with the same parameters."""
    params = linen[1]["params"]

    class Experts(nnx.Module):
        def __init__(self):
            self.kernel, self.bias = (nnx.Param(params[name]) for name in ("kernel", "bias"))
            self.batched_dense = page["batched_dense"]

        def __call__(self, x):
            return self.batched_dense(x, self.kernel.get_value(), self.bias.get_value())

    return fp8nnx.quantize_model(Experts(), include="")


def test_the_page_needs_few_lines():
    code = [line for block in BLOCKS[:3] for line in block.splitlines() if line.strip()]
    assert 30 < len(code) <= MOST_LINES


def reference(params, scale=None):
    """The op in NumPy: quantized to e4m3 with one scale for each tensor, multiplied in float64."""
    x, kernel, bias = (np.asarray(a, np.float64) for a in (X, params["kernel"], params["bias"]))
    top = float(jnp.finfo(jnp.float8_e4m3fn).max)

    def rounded(a):
        step = np.float32(np.abs(a).max() / top if scale is None else scale)
        codes = np.clip(a.astype(np.float32) / step, -top, top).astype(jnp.float8_e4m3fn)
        return codes.astype(np.float64) * step

    return np.einsum("brd,bdc->brc", rounded(x), rounded(kernel)) + bias[:, None]


def test_the_first_call_has_scales_of_one(linen, in_nnx):
    model, variables = linen
    expected = reference(variables["params"], scale=1.0)
    np.testing.assert_allclose(model.apply(variables, X), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(in_nnx(X), expected, rtol=1e-5, atol=1e-5)


def test_calls_by_hand(page, linen):
    op, params = (
        extend.linen_op(page["BATCHED_DENSE"])(recipe=fp8.Float8CurrentScaling()),
        linen[1]["params"],
    )
    out = op.apply({}, X, params["kernel"], params["bias"])
    np.testing.assert_allclose(out, reference(params), rtol=1e-5, atol=1e-5)
    other = extend.nnx_op(page["BATCHED_DENSE"])(recipe=fp8.Float8CurrentScaling())
    np.testing.assert_array_equal(other(X, params["kernel"], params["bias"]), out)
    qdq = extend.nnx_op(page["BATCHED_DENSE"])(recipe=fp8.Float8CurrentScaling(), form="qdq")
    np.testing.assert_allclose(qdq(X, params["kernel"], params["bias"]), out, rtol=1e-5, atol=1e-5)


def loss_of(out):
    return jnp.mean((out - 1) ** 2)


@pytest.mark.long
def test_training_is_the_same_in_linen_and_nnx(linen, in_nnx):
    model, variables = linen
    state = fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=optax.sgd(1.0))
    optimizer = fp8nnx.Optimizer(in_nnx, optax.sgd(1.0), wrt=nnx.Param)
    losses = []
    for _ in range(3):
        loss, grads = fp8.value_and_grad(lambda v: loss_of(model.apply(v, X)))(state.params)
        state = state.apply_gradients(grads=grads)
        loss_nnx, grads = fp8nnx.value_and_grad(lambda m: loss_of(m(X)))(in_nnx)
        optimizer.update(in_nnx, grads)
        losses.append((float(loss), float(loss_nnx)))
    assert [a for a, _ in losses] == [b for _, b in losses]
    assert losses[2][0] < losses[0][0]
    ((name, fp8_state),) = state.params["_overwrite_with_gradient"].items()
    assert name.startswith("Fp8BatchedDenseOp_")  # and not the op of the dot_general inside
    assert type(in_nnx.batched_dense).__name__ == "Fp8BatchedDenseOp"
    assert float(fp8_state["input_amax_history"].max()) == float(jnp.abs(X).max())
    assert float(fp8_state["output_grad_amax_history"].max()) > 0
    np.testing.assert_array_equal(in_nnx.kernel.get_value(), state.params["params"]["kernel"])
    np.testing.assert_array_equal(in_nnx.batched_dense.kernel_scale.get_value(), fp8_state["kernel_scale"])


def test_an_nnx_op_with_a_stacked_state_needs_a_class(page):
    row = dataclasses.replace(
        page["BATCHED_DENSE"], name="Stacked", primitive=None, nnx_field="stacked", stacked=("kernel",)
    )
    extend.register(row)

    class Experts(nnx.Module):
        def __init__(self):
            self.kernel, self.stacked = nnx.Param(jnp.ones((4, 64, 32))), row.plain

    with pytest.raises(ValueError, match=r"Define a subclass of fp8flax\.nnx\.Fp8RaggedDotOp"):
        fp8nnx.quantize_model(Experts(), include="")
    stacked = type("Stacked", (fp8nnx.Fp8RaggedDotOp,), {"row": row})
    assert extend.nnx_op(row) is stacked
    assert fp8nnx.quantize_model(Experts(), include="").stacked.kernel_scale.shape == (4, 1)


def test_reports(linen, in_nnx):
    for (row,) in (fp8.report(linen[0], X).rows, fp8nnx.report(in_nnx, X).rows):
        assert (row.batch, row.m, row.k, row.n, row.count, row.converted) == (4, 16, 64, 32, 1, True)


def test_a_model_that_is_not_converted_computes_as_before(page):
    model = page["Experts"]()
    variables = model.init(jax.random.key(1), X)
    kept = fp8.quantize_model(nn.Sequential([model, nn.Dense(32)]), include="layers_1")
    found = {row.path: row.converted for row in fp8.report(kept, X).rows}
    assert found == {"layers_0": False, "layers_1": True}
    np.testing.assert_array_equal(
        model.apply(variables, X),
        page["batched_dense"](X, *(variables["params"][n] for n in ("kernel", "bias"))),
    )


@pytest.mark.parametrize("weight_only", [False, pytest.param(True, marks=pytest.mark.long)])
def test_freezing_keeps_every_bit(linen, in_nnx, weight_only):
    model, variables = linen
    variables = fp8.calibrate(model.apply, variables, [X])
    served, stored = fp8.freeze(model, variables, X, weight_only=weight_only)
    assert stored["params"]["kernel"].dtype == jnp.float8_e4m3fn
    out = served.apply(stored, X)
    fp8nnx.calibrate(lambda m, x: m(x), in_nnx, [X])
    frozen = fp8nnx.freeze(in_nnx, X, weight_only=weight_only)
    assert frozen.kernel.get_value().dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(frozen(X), out)
    if not weight_only:
        np.testing.assert_array_equal(out, model.apply(variables, X))
        np.testing.assert_array_equal(frozen(X), in_nnx(X))


def test_the_audit_finds_the_gemms(linen, gpu):
    model, variables = linen
    step = jax.jit(fp8.value_and_grad(lambda v: loss_of(model.apply(v, X))))
    report = fp8.audit(step, variables, target="h200")
    assert {gemm.role for gemm in report.gemms if gemm.is_fp8} == {"forward", "wgrad"}


def test_a_row_may_be_registered_again(page):
    again = dataclasses.replace(page["BATCHED_DENSE"])
    extend.register(again)
    assert [row for row in table.rows() if row.primitive == "batched_dense"] == [again]
    extend.register(page["BATCHED_DENSE"])


@pytest.mark.parametrize("name", ["Fp8DotGeneralOp", "Other"])
def test_a_name_or_primitive_of_another_row_is_refused(page, name):
    row = dataclasses.replace(page["BATCHED_DENSE"], name=name, primitive="dot_general")
    before = table.rows()
    with pytest.raises(ValueError, match="the row 'Fp8DotGeneralOp' already"):
        extend.register(row)
    assert table.rows() == before

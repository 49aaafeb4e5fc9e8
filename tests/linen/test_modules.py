"""The Linen ops agree with NumPy over several steps, and with Flax's op after some; their arguments."""

import warnings
from functools import partial

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops as flax_ops
from jax import lax

import fp8flax as fp8
from tests import reference
from tests.cases import NO_BATCH, OWG, data, make_step, name_of, normal, variables_of

HYBRID, HYBRID_FNUZ = fp8.Format.HYBRID, fp8.Format.HYBRID_FNUZ
OVER_STEPS = [
    # test_defects tests the formats E5M2 and E4M3_FNUZ
    *(("direct", {}, each, jnp.float32) for each in (HYBRID, fp8.Format.E5M2_FNUZ)),
    ("direct", {}, HYBRID, jnp.bfloat16),
    ("direct", {"margin": 2}, HYBRID, jnp.float32),
    ("direct", {"algorithm": "most_recent"}, HYBRID_FNUZ, jnp.float32),
    ("qdq", {}, HYBRID, jnp.bfloat16),
]


@pytest.mark.optimized
@pytest.mark.parametrize(("form", "options", "fp8_format", "dtype"), OVER_STEPS, ids=name_of)
def test_agrees_with_numpy_over_steps(form, options, fp8_format, dtype):
    recipe = fp8.DelayedScaling(
        fp8_format=fp8_format,
        amax_history_len=3,
        margin=options.get("margin", 0),
        amax_compute_algo=options.get("algorithm", "max"),
    )
    op, dims = fp8.Fp8DotGeneralOp(recipe=recipe, form=form), (((1,), (0,)), NO_BATCH)
    expected = reference.DenseStep(
        3,
        *(dtype.name for dtype in fp8_format.value),
        round_operands=form == "qdq",
        **options,
    )
    variables = variables_of(op, jnp.ones((5, 7), dtype), jnp.ones((7, 3), dtype), dims)
    step = make_step(op, dims)
    # Half a unit in the last place of the result, and of the operands where they are rounded too; among
    # float16's subnormals, where these gradients lie, that unit no longer shrinks with the value.
    tolerance = {jnp.float32: 1e-6, jnp.bfloat16: 2**-8, jnp.float16: 2**-11}[dtype]
    tolerance *= 1 if form == "direct" else 2
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    for i in range(4):
        lhs, rhs, g = data(i, (5, 7), (7, 3), dims, dtype)
        (variables, dx, dw), y = step(variables, lhs, rhs, g)
        want = expected(np.asarray(lhs), np.asarray(rhs), np.asarray(g.astype(dtype)))
        for actual, wanted in zip((y, dx, dw), want):
            error = np.linalg.norm(np.asarray(actual, np.float64) - wanted)
            assert error <= tolerance * np.linalg.norm(wanted) + smallest / 2 * wanted.size**0.5
        for role in expected.scale:
            state = variables[OWG]
            np.testing.assert_array_equal(state[f"{role}_scale"], expected.scale[role])
            np.testing.assert_array_equal(state[f"{role}_amax_history"], expected.history[role])


def test_nanoo_uses_fnuz():
    x, w, dims = jnp.full((2, 3), 300.0), jnp.ones((3, 4)), (((1,), (0,)), NO_BATCH)
    for op, largest in ((fp8.NANOOFp8DotGeneralOp(), 240.0), (fp8.Fp8DotGeneralOp(), 288.0)):
        out = op.apply(op.init(jax.random.key(0), x, w, dims), x, w, dims)
        np.testing.assert_array_equal(out, np.full((2, 4), 3 * largest))


@pytest.fixture(scope="module")
def three_steps_of_flax():
    """Returns a gradient function, variables after three steps of Flax's op, and gradients of a fourth."""
    x = normal(0, 8, 6) * 20
    theirs = nn.Dense(4, dot_general_cls=partial(flax_ops.Fp8DotGeneralOp, amax_history_length=4))

    def gradients_of(model):
        gradients = jax.jit(jax.grad(lambda v, x: jnp.mean(model.apply(v, x) ** 2)))
        return lambda variables, i: gradients(variables, x * (i + 1))

    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore", DeprecationWarning)
        variables = jax.jit(theirs.init)(jax.random.key(1), x)
        gradients = gradients_of(theirs)
        for i in range(3):
            grads = gradients(variables, i)
            params = jax.tree.map(lambda p, g: p - 1e-3 * g, variables["params"], grads["params"])
            variables = {"params": params, OWG: grads[OWG]}
        return gradients_of, variables, gradients(variables, 3)


@pytest.mark.parametrize("form", ["direct", "qdq"])
def test_a_checkpoint_of_flax_continues(form, three_steps_of_flax):
    """After three steps with Flax's op, a step with our op equals a step with Flax's op."""
    gradients_of, variables, expected = three_steps_of_flax
    recipe = fp8.DelayedScaling(amax_history_len=4)
    ours = nn.Dense(4, dot_general_cls=partial(fp8.Fp8DotGeneralOp, recipe=recipe, form=form))
    template = variables_of(ours, jnp.ones((8, 6)))
    variables = flax.serialization.from_bytes(template, flax.serialization.to_bytes(variables))
    actual = gradients_of(ours)(variables, 3)
    if form == "qdq":  # the form of that op: bit for bit
        jax.tree.map(np.testing.assert_array_equal, actual[OWG], expected[OWG])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), actual, expected)


class TestArguments:
    dims = (((1,), (0,)), NO_BATCH)
    x, w = jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)

    def apply(self, *args, **kwargs):
        op = fp8.Fp8DotGeneralOp()
        return op.init_with_output(jax.random.key(0), *args, **kwargs)[0]

    @pytest.mark.parametrize("dtype", [None, jnp.float32])
    def test_preferred_element_type_keeps_the_gradients_dtypes(self, dtype):
        op = fp8.Fp8DotGeneralOp()
        variables = variables_of(op, self.x, self.w, self.dims)

        def loss(x, w, variables):
            out = op.apply(
                variables, lhs=x, rhs=w, dimension_numbers=self.dims, preferred_element_type=dtype
            )
            return jnp.sum(out).astype(jnp.float32), out

        grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(self.x, self.w, variables)
        assert out.dtype == (dtype or jnp.bfloat16)
        assert [g.dtype for g in grads[:2]] == [jnp.bfloat16, jnp.bfloat16]

    def test_a_wrong_preferred_element_type_is_refused(self):
        with pytest.raises(TypeError, match="preferred_element_type"):
            self.apply(self.x, self.w, self.dims, preferred_element_type=jnp.int32)

    @pytest.mark.parametrize(
        ("precision", "forward", "backward"),
        [
            (None, "DEFAULT", "HIGHEST"),
            (lax.Precision.HIGH, "HIGH", "HIGH"),
            ("highest", "HIGHEST", "HIGHEST"),
        ],
    )
    def test_precision_reaches_the_three_gemms(self, precision, forward, backward):
        op = fp8.Fp8DotGeneralOp(form="qdq")  # of the direct form: see test_dot_general
        variables = variables_of(op, self.x, self.w, self.dims)

        def loss(x, w, variables):
            return jnp.sum(op.apply(variables, x, w, self.dims, precision))

        jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(self.x, self.w, variables))
        found = [line.split("precision=")[1] for line in jaxpr.splitlines() if "precision=" in line]
        names = [("HIGHEST" if "HIGHEST" in f else "HIGH" if "HIGH" in f else "DEFAULT") for f in found]
        assert sorted(names) == sorted([forward, backward, backward])

    @pytest.mark.parametrize(("side", "dtype"), [("lhs", jnp.int32), ("rhs", jnp.float8_e4m3fn)])
    def test_other_operands_are_refused(self, side, dtype):
        operands = {"lhs": self.x, "rhs": self.w}
        operands[side] = operands[side].astype(dtype)
        with pytest.raises(TypeError, match=f"{side} .*16 bits or more"):
            self.apply(**operands, dimension_numbers=self.dims)

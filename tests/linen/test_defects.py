"""Defects of ``flax.linen.fp8_ops`` (0.12.8) that this package must not have, by their numbers.

Each test names what happens there. Rows 1 to 3 are in ``test_transformations``, 6 in ``test_flax_names``,
9 and 10 in ``test_train``, 11 in ``test_calibrate``, 14 and 15 in ``test_modules``, 17 in
``test_gpu_program``, and 18 in ``test_dot_general``.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from tests.cases import normal, variables_of

OWG = fp8.OVERWRITE_WITH_GRADIENT
Op = partial(fp8.Fp8DotGeneralOp, recipe=fp8.DelayedScaling(amax_history_len=4))
LAYER = nn.Dense(6, dot_general_cls=Op)
X = normal(0, 4, 6)
VARIABLES = variables_of(LAYER, X)
AMAX = float(np.max(np.abs(X)))
NO_BATCH = ((), ())


def op_state(tree):
    return tree[OWG]["Fp8DotGeneralOp_0"]


def apply_sum(v, x):
    return jnp.sum(LAYER.apply(v, x))


def assert_merged(tree, amax):
    np.testing.assert_array_equal(op_state(tree)["input_scale"], [1.0])
    np.testing.assert_allclose(op_state(tree)["input_amax_history"], [amax, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("form", ["direct", "qdq"])
def test_04_vmap_over_examples(form):
    """There: the states add; in the max dtype a TypeError."""
    wrap = jax.jit if form == "qdq" else lambda f: f
    layer = nn.Dense(6, dot_general_cls=partial(Op, form=form))

    def loss(v, factor):
        return jnp.sum(jax.vmap(lambda x: layer.apply(v, factor * x))(X))

    assert_merged(wrap(fp8.grad(loss))(VARIABLES, 2.0), 2 * AMAX)
    per_example = wrap(jax.vmap(fp8.grad(lambda v, x: jnp.sum(layer.apply(v, x))), (None, 0)))(VARIABLES, X)
    assert_merged(jax.tree.map(lambda leaf: leaf[2], per_example), AMAX)


@pytest.mark.parametrize("form", ["direct", "qdq"])
@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_05_shard_map_with_default_checks(inside, form):
    """Flax raises ``ValueError: Custom VJP bwd rule must produce…`` here."""
    layer = nn.Dense(6, dot_general_cls=partial(Op, form=form))
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(v, x):
        return lax.psum(jnp.sum(layer.apply(v, x)), "data")

    sharded = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    step = sharded(fp8.grad(loss)) if inside else fp8.grad(sharded(loss))
    grads = jax.jit(step)(VARIABLES, X)
    assert_merged(grads, AMAX)
    expected = fp8.grad(apply_sum)(VARIABLES, X)["params"]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), grads["params"], expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_07_a_nan_or_inf_batch(bad):
    """There: the amax stays in the history and freezes the scale for as long as it is remembered."""
    variables = VARIABLES
    for x in (X, X.at[0, 0].set(bad), 2 * X, X):
        variables = {**VARIABLES, OWG: fp8.grad(apply_sum)(variables, x)[OWG]}
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(variables))
    state = op_state(variables)
    np.testing.assert_allclose(state["input_amax_history"], [AMAX, 0, AMAX, 2 * AMAX], rtol=1e-6)
    np.testing.assert_allclose(state["input_scale"], [2 * AMAX / 448], rtol=1e-6)


def test_08_a_state_of_zeros_still_recovers():
    """There: scale and history become 0, and the next forward pass is NaN or 0."""
    grads = jax.grad(lambda v: jnp.sum(v["params"]["bias"]))(VARIABLES)
    zeroed = {**VARIABLES, OWG: grads[OWG]}
    np.testing.assert_array_equal(op_state(zeroed)["input_scale"], [0.0])
    np.testing.assert_allclose(LAYER.apply(zeroed, X), LAYER.apply(VARIABLES, X))


def test_12_variables_without_state():
    """There: ScopeCollectionNotFound, naming an internal variable."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(6, dot_general_cls=Op, name="head")(x)

    plain = variables_of(nn.Dense(6), X)
    with pytest.raises(fp8.MissingStateError, match="'head'.*add_fp8_state"):
        Net().apply({"params": {"head": plain["params"]}}, X)
    with pytest.raises(fp8.MissingStateError, match="fp8flax.add_fp8_state"):
        LAYER.apply(plain, X)
    bridged = fp8.add_fp8_state(plain, LAYER, X)
    np.testing.assert_array_equal(LAYER.apply(bridged, X), LAYER.apply(VARIABLES, X))


@pytest.mark.filterwarnings("ignore:The kernel of an FP8 layer is differentiated")
@pytest.mark.parametrize(
    ("fp8_format", "largest", "largest_gradient"),
    [("E5M2", 57344.0, 57344.0), ("HYBRID_FNUZ", 240.0, 57344.0), ("E4M3_FNUZ", 240.0, 240.0)],
)
def test_13_other_formats_are_honoured(fp8_format, largest, largest_gradient):
    """There: e5m2 and fnuz dtypes are ignored by the direct op."""
    op = fp8.Fp8DotGeneralOp(recipe=fp8.DelayedScaling(fp8_format=fp8.Format[fp8_format]))
    x, w, dims = jnp.full((1, 1), 1e6), jnp.ones((1, 1)), (((1,), (0,)), NO_BATCH)
    variables = variables_of(op, x, w, dims)
    out, vjp = jax.vjp(lambda v, w: op.apply(v, x, w, dims), variables, w)
    assert out[0, 0] == largest
    assert vjp(jnp.full((1, 1), 1e6))[1][0, 0] == largest * largest_gradient


def test_16_a_cast_of_all_variables():
    """There: the histories stay bfloat16, in silence."""
    narrow = jax.tree.map(lambda v: v.astype(jnp.bfloat16), VARIABLES)
    for use in (
        lambda: LAYER.apply(narrow, X.astype(jnp.bfloat16)),
        lambda: fp8.grad(apply_sum)(narrow, X),
        lambda: fp8.TrainState.create(apply_fn=LAYER.apply, params=narrow, tx=optax.sgd(0.1)),
    ):
        with pytest.raises(TypeError, match="must be float32; got bfloat16"):
            use()

"""``quantize_model`` of NNX gives ops to layers by rules, and reports them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import normal
from tests.nnx import layout
from tests.nnx.layout import to_linen

OWG = "_overwrite_with_gradient"
PRODUCT = "a product of two activations (products=True converts them)"
CURRENT, SHORT = fp8.Float8CurrentScaling(), fp8.DelayedScaling(amax_history_len=4)


class Block(nnx.Module):
    """A model with every kind of layer; one layer is called twice."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 32, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 32, decode=False, rngs=rngs)
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.with_up = nnx.List([self.up])
        self.einsum = nnx.Einsum("btm,mo->bto", (64, 32), (32,), rngs=rngs)
        self.cell = nnx.OptimizedLSTMCell(32, 32, rngs=rngs)
        self.logits = nnx.Linear(32, 48, rngs=rngs)
        self.router = nnx.Linear(32, 48, rngs=rngs)
        self.tiny = nnx.Linear(32, 4, rngs=rngs)
        mask = jnp.ones((2, 2, 4, 32))
        self.patches = nnx.Conv(4, 32, (2, 2), (2, 2), padding="VALID", mask=mask, rngs=rngs)
        self.conv = nnx.Conv(32, 32, (3, 3), rngs=rngs)
        self.w = nnx.Param(jnp.ones((32, 32)))

    def __call__(self, tokens):
        x = self.einsum(nnx.gelu(self.up(self.attention(self.embed(tokens)))))
        return self.logits(x) + self.tiny(x).sum() + self.up(x @ self.w[...]).sum()


@pytest.fixture(scope="module")
def block():
    return nnx.eval_shape(lambda: Block(nnx.Rngs(0)))


def ops_of(model):
    """Returns the ops by the paths of their layers."""
    return {path.rpartition("/")[0]: op for path, op in layout.ops_of(model).items()}


CELL = {f"cell/{name}" for name in ("dense_i", "dense_h")}
ATTENTION = {f"attention/{name}" for name in ("query", "key", "value", "out")}


def test_layers_and_defaults(block):
    everything = fp8nnx.quantize_model(block, include=".*")
    found = ops_of(everything)
    others = {"up", "einsum", "logits", "router", "tiny", "patches", "conv"}
    assert set(found) == ATTENTION | CELL | others
    assert len({id(op) for op in found.values()}) == len(found)
    assert everything.with_up[0] is everything.up
    assert not ops_of(block)
    assert type(found["einsum"]) is fp8nnx.Fp8Einsum
    large = nnx.eval_shape(
        lambda: nnx.Dict(
            {
                name: nnx.Linear(1024, 1024, rngs=nnx.Rngs(0))
                for name in ("up", "lm_head", "head", "classifier_1", "router", "headless")
            }
            | {
                "patches": nnx.Conv(64, 1024, (4, 4), (4, 4), padding="VALID", rngs=nnx.Rngs(0)),
                "conv": nnx.Conv(64, 1024, (3, 3), rngs=nnx.Rngs(0)),
                "causal": nnx.Conv(1024, 1024, 1, padding="CAUSAL", rngs=nnx.Rngs(0)),
                "grouped": nnx.Conv(1024, 1024, 1, feature_group_count=2, rngs=nnx.Rngs(0)),
            }
        )
    )
    assert set(ops_of(fp8nnx.quantize_model(large))) == {"up", "headless", "patches", "causal"}


def test_nothing_is_converted():
    """The error says why, as that of ``init`` of a Linen model. Axes of batches are no part of K and N."""
    general = nnx.LinearGeneral(16, 4, batch_axis={0: 2}, rngs=nnx.Rngs(0))
    einsum = nnx.Einsum("btm,bmo->bto", (2, 16, 4), rngs=nnx.Rngs(0))
    expected = r"None of the model's 2 .* einsum: K=16, N=4:.* general: K=16, N=4:.* include=r'\.\*'"
    with pytest.raises(ValueError, match=expected):
        fp8nnx.quantize_model(nnx.Dict(general=general, einsum=einsum))


def test_rules(block):
    model8 = fp8nnx.quantize_model(
        block,
        SHORT,
        exclude="attention/key",
        include=["attention", "cell"],
        rules=[
            ("attention/out", CURRENT),
            ("dense_h/kernel", "leave"),
            lambda path, layer, shapes: CURRENT if shapes == ((32,), (32, 64)) and path == "up" else None,
        ],
        form="qdq",
    )
    found = ops_of(model8)
    assert set(found) == ATTENTION - {"attention/key"} | {"cell/dense_i", "up"}
    assert found["attention/out"].recipe == found["up"].recipe == CURRENT
    assert found["attention/query"].recipe == SHORT
    assert {op.form for op in found.values()} == {"qdq"}
    assert OWG in to_linen(found["attention/query"])
    assert OWG not in to_linen(found["attention/out"])


def test_rules_and_models_that_are_wrong(block):
    with pytest.raises(ValueError, match="'encoder'.*attention/key"):
        fp8nnx.quantize_model(block, include=["up", "encoder"])
    allowed = fp8nnx.quantize_model(block, include=["up", "encoder"], allow_unmatched=True)
    assert set(ops_of(allowed)) == {"up"}
    with pytest.raises(TypeError, match="Pass an instance"):
        fp8nnx.quantize_model(Block)
    with pytest.raises(ValueError, match="converted already"):
        fp8nnx.quantize_model(fp8nnx.quantize_model(block, include="up"), include="up")
    layer, x = nnx.Linear(32, 32, rngs=nnx.Rngs(0)), jnp.ones((2, 32))
    part = fp8nnx.quantize_model(layer, recipe=CURRENT, include=".*")
    with pytest.raises(ValueError, match="'layers/1/dot_general' comes from"):
        fp8nnx.quantize_model(nnx.Sequential(layer, part), include="layers/0")
    with pytest.raises(ValueError, match="'layers/1/dot_general' comes from quantize_model or freeze"):
        fp8nnx.quantize_model(nnx.Sequential(layer, fp8nnx.freeze(part, x)), x)


def test_layers_with_functions_of_their_own_are_left():
    rngs = nnx.Rngs(0)

    def own(*args, **kwargs):
        return jax.lax.dot_general(*args, **kwargs)

    layers = {
        "own": nnx.Linear(32, 32, dot_general=own, rngs=rngs),
        "cls": nnx.LinearGeneral(32, 32, dot_general_cls=lambda: own, rngs=rngs),
        "op": nnx.Linear(32, 32, dot_general=fp8nnx.Fp8DotGeneralOp(recipe=CURRENT), rngs=rngs),
        "integers": nnx.Linear(32, 32, dtype=jnp.int8, rngs=rngs),
    }
    keys = jax.random.split(jax.random.key(0), 2)
    layers["stacked"] = nnx.vmap(
        lambda key: nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(key)), out_axes=2
    )(keys)
    model8 = fp8nnx.quantize_model(nnx.Dict(layers), SHORT, exclude="op")
    assert set(ops_of(model8)) == {"op"}
    assert model8["op"].dot_general.recipe == CURRENT
    del layers["op"]
    reasons = "cls: it has an op of its own.*own: it has an op of its own.*along another axis"
    with pytest.raises(ValueError, match=reasons):
        fp8nnx.quantize_model(nnx.Dict(layers), rules=[(".*", SHORT)])


@pytest.mark.long
def test_ops_by_hand_keep_recipe_and_state_unless_a_rule_names_them():
    def op():
        return fp8nnx.Fp8DotGeneralOp(recipe=SHORT)

    rngs, shared = nnx.Rngs(0), op()
    hand = nnx.Linear(576, 576, dot_general=op(), rngs=rngs)
    hand.dot_general.input_scale.set_value(jnp.full((1,), 8.0))
    plain = nnx.Linear(576, 576, rngs=rngs)
    attention = nnx.MultiHeadAttention(2, 576, qkv_dot_general=shared, decode=False, rngs=rngs)
    model = nnx.Sequential(hand, plain, attention)
    model8 = fp8nnx.quantize_model(model, CURRENT)
    kept, fresh, attention8 = model8.layers
    assert kept.dot_general.recipe == SHORT
    assert kept.dot_general.input_scale.get_value() == 8
    assert fresh.dot_general.recipe == attention8.out.dot_general.recipe == CURRENT
    assert attention8.query.dot_general is attention8.value.dot_general
    assert attention8.query.dot_general._scope == "layers/2/key"  # the first of them
    assert hand.dot_general._scope == ""
    report = fp8nnx.report(model8, jax.ShapeDtypeStruct((8, 576), jnp.float32))
    assert [row.reason for row in report.rows] == [
        *("an op of its own", "by default"),
        *(["an op of its own"] * 3 + [PRODUCT] * 2 + ["by default"]),
    ]
    replaced = fp8nnx.quantize_model(model, rules=[("layers/0", CURRENT)])
    assert replaced.layers[0].dot_general.recipe == CURRENT
    assert replaced.layers[2].query.dot_general.recipe == SHORT


def test_the_model_stays_as_it_is_and_arrays_are_shared():
    model = nnx.Linear(32, 16, rngs=nnx.Rngs(0))
    model8 = fp8nnx.quantize_model(model, include=".*")
    assert model8.kernel.get_value() is model.kernel.get_value()
    by_hand = nnx.Linear(32, 16, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
    x = normal(0, 4, 32)
    np.testing.assert_array_equal(model8(x), by_hand(x))
    assert not np.array_equal(model8(x), model(x))
    model8.kernel.set_value(jnp.zeros((32, 16)))
    assert model(x).any()
    with fp8.autocast(recipe=CURRENT):
        assert OWG not in to_linen(fp8nnx.quantize_model(model, include=".*"))
    graphdef, _ = nnx.split(model8)
    assert hash(graphdef) == hash(nnx.graphdef(fp8nnx.quantize_model(model, include=".*")))


def test_report(block):
    model8 = fp8nnx.quantize_model(block, include=["up", "einsum"], rules=[("attention/out", CURRENT)])
    report = fp8nnx.report(model8, jax.ShapeDtypeStruct((8, 10), jnp.int32))
    rows = {row.path: row for row in report.rows}
    # What is not called is not there.
    assert set(rows) == ATTENTION | {"attention", "", "up", "einsum", "logits", "tiny"}
    assert rows["attention"].reason == PRODUCT
    assert rows[""].kernel == "w"
    up = rows["up"]
    assert (up.batch, up.m, up.k, up.n, up.count) == (1, 80, 32, 64, 2)
    assert (rows["einsum"].k, rows["einsum"].n) == (64, 32)
    assert (rows["attention/out"].k, rows["attention/out"].n) == (32, 32)
    assert up.reason == "by include 'up'"
    assert rows["attention/out"].reason == "by the rule 'attention/out'"
    assert rows["logits"].reason == "not included"
    assert {row.path for row in report.converted} == {"up", "einsum", "attention/out"}
    assert "3 of 11 contractions are converted" in str(report)
    images = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float32)
    patches = fp8nnx.quantize_model(block.patches, include=".*")
    (row,) = fp8nnx.report(patches, images).rows
    assert (row.m, row.k, row.n, row.kernel) == (2 * 4 * 4, 2 * 2 * 4, 32, "kernel")
    with pytest.raises(TypeError, match="come from fp8flax.quantize_model"):
        fp8nnx.report(block)


@pytest.mark.long
def test_audit_names_layers(gpu):
    """NNX gives no names to operations in programs; ops of ``quantize_model`` do."""
    model = nnx.Sequential(
        nnx.Linear(32, 64, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(64, 32, rngs=nnx.Rngs(0))
    )
    model8 = fp8nnx.quantize_model(model, CURRENT, include=".*", exclude="layers/2")
    graphdef, state = nnx.split(model8)
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)

    def step(state, x):
        return fp8nnx.grad(lambda model: jnp.sum(model(x) ** 2))(nnx.merge(graphdef, state))

    report = fp8.audit(step, state, x, target="h200")
    in_fp8 = {(gemm.path, gemm.role) for gemm in report.gemms if gemm.is_fp8}
    assert in_fp8 == {("layers/0", "forward"), ("layers/0", "wgrad")}
    graphdef, state = nnx.split(fp8nnx.freeze(model8, x))
    rows = jax.ShapeDtypeStruct((512, 32), jnp.float32)  # few would be XLA's own kernel's
    report = fp8.audit(lambda state, x: nnx.merge(graphdef, state)(x), state, rows, target="h200")
    assert [gemm.path for gemm in report.gemms if gemm.is_fp8] == ["layers/0"]

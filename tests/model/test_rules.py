"""Rules decide which contractions run in FP8: their order, the defaults, and the report."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.op import GemmSizes
from fp8flax._model.param_origin import Source
from fp8flax._model.rules import BREAK_EVEN, Rules, Site
from tests.models import in_scan

CURRENT, MX = fp8.Float8CurrentScaling(), fp8.MXFP8BlockScaling()


def site(path="mlp/up", k=4096, n=4096, *, module=None, kernel="kernel", **changes):
    options = {
        "path": tuple(path.split("/")),
        "module": module or nn.Dense(n),
        "sources": (Source((*path.split("/"), kernel), (k, n)),) if kernel else (),
        "op": DotGeneral,
        "shapes": ((8, k), (k, n)),
        "dtypes": (jnp.dtype("bfloat16"), jnp.dtype("float32")),
        "sizes": GemmSizes(1, 8, k, n),
        "is_matmul": True,
    }
    return Site(**{**options, **changes})


class TestOrder:
    def test_the_first_that_speaks_decides(self):
        rules = Rules(
            exclude="attention/out",
            rules=[("attention", MX), ("up$", "leave"), (".*/down", CURRENT)],
            include=("up", "down", "head"),
        )
        said = {
            path: rules.decide(site(path))
            for path in ("attention/out", "attention/key", "mlp/up", "mlp/down", "head", "other")
        }
        assert [d.converts for d in said.values()] == [False, True, False, True, True, False]
        assert [d.recipe for d in said.values()] == [None, MX, None, CURRENT, None, None]
        assert [d.pattern for d in said.values()] == [
            *("exclude 'attention/out'", "the rule 'attention'", "the rule 'up$'", "the rule '.*/down'"),
            *("include 'head'", None),
        ]
        assert [d.reason for d in said.values()] == [
            "left by exclude 'attention/out'",
            "by the rule 'attention'",
            "left by the rule 'up$'",
            "by the rule '.*/down'",
            "by include 'head'",
            "not included",
        ]

    def test_patterns_see_the_parameter_too(self):
        rules = Rules(rules=[("up/kernel$", CURRENT)])
        assert rules.decide(site()).recipe is CURRENT
        assert rules.decide(site(kernel="w")).recipe is None

    def test_a_callable(self):
        asked = []

        def rule(path, module, shapes):
            asked.append((path, type(module), shapes))
            return {"a": CURRENT, "b": "leave"}.get(path)

        rules = Rules(rules=rule, recipe=MX)
        decisions = [rules.decide(site(path)) for path in "abc"]
        assert [d.converts for d in decisions] == [True, False, True]
        assert [d.recipe for d in decisions] == [CURRENT, None, MX]
        assert asked == [(path, nn.Dense, ((8, 4096), (4096, 4096))) for path in "abc"]
        with pytest.raises(ValueError, match="'a', .*'fp8'"):
            Rules(rules=lambda *_: "fp8").decide(site("a"))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"include": "("}, "include"),
            ({"exclude": ["ok", 3]}, "exclude"),
            ({"exclude": None}, "exclude"),
            ({"rules": [("[", "leave")]}, "rules"),
            ({"rules": ["Dense"]}, "rules"),
            ({"rules": [("Dense", "skip")]}, "'Dense' .*'skip'"),
            ({"form": "fake"}, "form"),
            ({"products": "yes"}, "products"),
        ],
    )
    def test_errors(self, options, message):
        with pytest.raises((ValueError, TypeError), match=message):
            fp8.quantize_model(nn.Dense(4), **options)

    def test_compiled_patterns(self):
        """Their flags count, as in ``(?i)``."""
        first, second = re.compile("LAYERS_0", re.IGNORECASE), re.compile("_2$")
        for options in ({"include": first, "exclude": second}, {"include": [first], "exclude": (second,)}):
            model = fp8.quantize_model(nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(4)]), **options)
            rows = fp8.report(model, jnp.ones((2, 4))).rows
            assert [(row.path, row.converted) for row in rows] == [("layers_0", True), ("layers_2", False)]


class TestDefaults:
    def test_the_last_layer(self):
        ends = ("lm_head", "model/lm_head", "logits", "decoder/logits_dense", "classifier", "head")
        for path in (*ends, "predictions/decoder", "qa_logits", "LMHead_0", "unembed"):
            assert Rules().decide(site(path)).reason == "the logits, by the layer's name"
            assert Rules(include=path).decide(site(path)).converts

    def test_other_names(self):
        for path in ("heads/up", "attention_head_0", "multi_head/query", "predictions/transform"):
            assert Rules().decide(site(path)).converts, path

    def test_sizes(self):
        """FP8 can gain if 1/(1/M + 1/K + 1/N) is above the limit for some M."""
        for k, n in [(562, 562), (281, 10**6), (16, 10**6), (300, 4096), (4096, 4096)]:
            decision = Rules().decide(site(k=k, n=n))
            assert decision.converts == (1 / (1 / k + 1 / n) >= BREAK_EVEN), (k, n)
        assert "K=15, N=4096: a size below 16" in Rules().decide(site(k=15)).reason
        assert "too small to gain, 1/(1/K + 1/N) = 256 < 281" in Rules().decide(site(k=512, n=512)).reason

    def test_what_else_is_left(self):
        reasons = {
            "an embedding": site(module=nn.Embed(8, 4096)),
            "a convolution that is not a matmul": site(op=Conv, is_matmul=False),
            "a product of two activations": site(kernel=None),
            "a product of two parameters": site(kernel=None, impossible="a product of two parameters"),
            "operands of int8": site(dtypes=(jnp.dtype("int8"), jnp.dtype("float32"))),
            "told the sharding": site(impossible="told the sharding of its result"),
        }
        for reason, one in reasons.items():
            decision = Rules().decide(one)
            assert not decision.converts
            assert reason in decision.reason
        # A contraction that would only be slow is converted on demand. An impossible one is not.
        converts = [Rules(include=".*").decide(one).converts for one in reasons.values()]
        assert converts == [True, True, False, False, False, False]
        assert Rules(products=True).decide(reasons["a product of two activations"]).converts


class Model(nn.Module):
    """Two layers that gain, a logits layer, a small one, a product, and a loop that is not Linen's."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(1024, name="up")(x)
        x = nn.Dense(512, name="down")(nn.relu(x))
        x = x + (x @ x.T) @ nn.Dense(512, name="value")(x)
        w = self.param("w", nn.initializers.lecun_normal(), (512, 512))
        x = jax.lax.scan(lambda c, _: (c @ w, None), x, length=2)[0]
        return nn.Dense(512, name="lm_head")(x)


ARRAY = jnp.asarray(np.random.default_rng(0).standard_normal((8, 8)), jnp.float32)


def products(x, w, v):
    """Products of all kinds."""
    of = ARRAY, 2 * jnp.eye(8).T, nn.relu(w), w * ARRAY + v, nn.relu(v.T)
    return sum(x @ each for each in of) + x @ (x.T @ x) @ w


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        v = self.variable("fixed", "v", jnp.ones, (8, 8)).value
        return products(x, self.param("w", nn.initializers.lecun_normal(), (8, 8)), v)


class Fixed(nnx.Variable):
    pass


class NNX(nnx.Module):
    def __init__(self):
        self.w, self.v = nnx.Param(ARRAY + 1), Fixed(ARRAY + 2)

    def __call__(self, x):
        return products(x, self.w[...], self.v[...])


class TestReport:
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)

    def test_what_a_product_multiplies_with(self):
        x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
        for model, inputs, kind in (Linen(), (), "collection 'fixed'"), (NNX(), (x,), "type Fixed"):
            rows = fp8.report(fp8.quantize_model(model, *inputs, include=".*"), x).rows
            assert [row.reason.removeprefix("a product ").partition(" (")[0] for row in rows] == [
                *["with a constant"] * 2,
                *["with a kernel that is computed from w"] * 2,
                f"with v, a variable of the {kind}",
                *["of two activations"] * 2,
                "by include '.*'",
            ]
            everything = fp8.quantize_model(model, *inputs, include=".*", products=True)
            assert fp8.report(everything, x).fp8_share == 1

    def test_rows(self):
        model8 = fp8.quantize_model(Model(), rules=[("value", "leave")])
        result = fp8.report(model8, self.x)
        rows = [(r.path, r.kernel, r.m, r.k, r.n, r.converted) for r in result.rows]
        assert rows == [
            ("up", "up/kernel", 64, 1024, 1024, True),
            ("down", "down/kernel", 64, 1024, 512, True),
            ("", None, 64, 512, 64, False),
            ("value", "value/kernel", 64, 512, 512, False),
            ("", None, 64, 64, 512, False),
            ("", None, 64, 512, 512, False),
            ("lm_head", "lm_head/kernel", 64, 512, 512, False),
        ]
        reasons = [r.reason for r in result.rows]
        assert reasons[:2] == ["by default"] * 2
        assert reasons[3] == "left by the rule 'value'"
        assert reasons[2] == reasons[4] == "a product of two activations (products=True converts them)"
        assert result.rows[0].flops == 2 * 64 * 1024 * 1024
        assert (result.rows[5].count, "inside of scan" in reasons[5]) == (2, True)
        total = 2 * 64 * (1024 * 1024 + 1024 * 512 + 4 * 512 * 512 + 2 * 64 * 512)
        assert result.fp8_share == pytest.approx(2 * 64 * (1024 * 1024 + 1024 * 512) / total)
        text = str(result)
        assert "2 of 7 contractions are converted" in text
        assert all(r.reason in text for r in result.rows)

    def test_loops_count(self):
        model8 = fp8.quantize_model(in_scan()(), include=".*")
        (row,) = fp8.report(model8, np.ones((4, 8), np.float32)).rows
        assert (row.path, row.count, row.flops) == ("layers/Dense_0", 3, 3 * 2 * 4 * 8 * 8)

    def test_a_batch_of_vmap_counts(self):
        """A vmap over examples adds rows to a matmul; one over experts adds matmuls."""

        class PerExample(nn.Module):
            @nn.compact
            def __call__(self, x):
                dense = nn.Dense(8)
                y = dense(x[:1])
                return (
                    nn.vmap(lambda m, x: m(x), variable_axes={"params": None}, split_rngs={})(dense, x) + y
                )

        class Experts(nn.Module):
            @nn.compact
            def __call__(self, x):
                axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
                return nn.vmap(nn.Dense, **axes)(5)(x)

        model8 = fp8.quantize_model(PerExample(), include=".*")
        rows = fp8.report(model8, np.ones((16, 4), np.float32)).rows
        assert [(r.batch, r.m, r.k, r.n, r.count) for r in rows] == [(1, 1, 4, 8, 1), (1, 16, 4, 8, 1)]
        model8 = fp8.quantize_model(Experts(), include=".*")
        (row,) = fp8.report(model8, np.ones((3, 16, 4), np.float32)).rows
        assert (row.batch, row.m, row.k, row.n, row.count) == (3, 16, 4, 5, 1)

    def test_errors(self):
        with pytest.raises(TypeError, match="not from freeze"):
            fp8.report(nn.Dense(4), self.x)
        for name, value in {"rngs": {}, "mutable": True}.items():
            with pytest.raises(TypeError, match=f"got {name}=.* by position"):
                fp8.report(fp8.quantize_model(nn.Dense(4)), self.x, **{name: value})
        model8 = fp8.quantize_model(Model(), include=["up", "absent"])
        with pytest.raises(ValueError, match="'absent'"):
            fp8.report(model8, self.x)
        # If nothing is converted, the report still gives the reasons.
        result = fp8.report(fp8.quantize_model(nn.Dense(4)), self.x)
        assert not result.converted

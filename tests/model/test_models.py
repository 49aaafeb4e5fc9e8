"""``quantize_model`` of an unchanged model gives what the same model with ops set by hand does."""

import gc
import sys
import threading
import weakref
from concurrent import futures

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp8flax as fp8
from fp8flax._model.module_call import watch
from tests.cases import OWG, assert_same, cells, flat, normal, variables_of
from tests.models import ALL, MODELS, Attention, Layers, Own


def steps(models, variables, x):
    """Returns for each model all gradients and the output of a second step, which uses the new state."""

    @jax.jit  # one program, so that equal models are compiled once
    def step(each):
        def loss(variables, model):
            out = model.apply(variables, x)
            return jnp.sum(jnp.sin(out) ** 2), out

        return [jax.grad(loss, has_aux=True)(v, model) for v, model in zip(each, models)]

    return step([{**variables, OWG: grads.get(OWG, {})} for grads, _ in step([variables] * len(models))])


@pytest.mark.long
@pytest.mark.parametrize("name", cells(MODELS, repeated=["scan, tied", "attention"]))
def test_equals_ops_by_hand(name):
    plain, by_hand, op = MODELS[name]
    x = normal(0, 2, 4, 8)
    model8 = fp8.quantize_model(plain(), **ALL)
    models = model8, by_hand(op), plain()
    variables, expected, of_plain = jax.jit(lambda key: [model.init(key, x) for model in models])(
        jax.random.key(1)
    )
    assert_same(variables, expected)
    assert_same({"params": variables["params"]}, of_plain)
    (grads, out), (expected_grads, expected_out) = steps(models[:2], variables, x)
    np.testing.assert_array_equal(out, expected_out)
    assert_same(grads, expected_grads)
    state = flat(grads[OWG])
    assert state
    is_used = [
        (leaf > 0).any() and (leaf != 1).any() for path, leaf in state.items() if "other" not in path
    ]
    assert all(is_used)


def over_examples(loss, variables, x):
    return jnp.mean(jax.vmap(lambda one: loss(variables, one[None]))(x))


def on_devices(loss, variables, x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    local = lambda variables, x: lax.pmean(loss(variables, x), "data")  # noqa: E731
    return jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())(variables, x)


@pytest.mark.parametrize("around", [over_examples, on_devices])
def test_under_a_transformation(around):
    """Loss, gradients and state equal those with ops set by hand, to the last bit."""
    x = normal(0, 2, 4, 8)
    models = fp8.quantize_model(Own(), **ALL), Own(fp8.Fp8DotGeneralOp)
    variables = variables_of(models[1], x)

    @jax.jit
    def step(v):
        losses = [lambda v, x, m=m: jnp.sum(jnp.sin(m.apply(v, x)) ** 2) for m in models]
        return [fp8.value_and_grad(lambda v, f=f: around(f, v, x))(v) for f in losses]

    actual, expected = step(variables)
    assert actual[0] == expected[0]
    assert_same(actual[1], expected[1])


@pytest.mark.long
def test_a_recurrent_cell():
    model, x = nn.RNN(nn.OptimizedLSTMCell(6)), normal(0, 2, 5, 4)
    model8 = fp8.quantize_model(model, fp8.Float8CurrentScaling(), **ALL)
    variables = model.init(jax.random.key(1), x)
    assert_same(model8.init(jax.random.key(1), x), variables)
    wide, narrow = model.apply(variables, x), jax.jit(model8.apply)(variables, x)
    assert 0 < np.linalg.norm(wide - narrow) / np.linalg.norm(wide) < 0.1
    # Linen computes the four gates in one matmul of the input and one of the carry.
    state = flat(variables_of(fp8.quantize_model(model, **ALL), x)[OWG])
    assert len(state) == 2 * 6
    assert {leaf.shape for leaf in state.values()} == {(1,), (1024,)}


class Everything(nn.Module):
    """A model with ``setup``, several methods, statistics, dropout, sown values and a nested layer."""

    def setup(self):
        self.encoder = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False), nn.relu])
        self.decoder = nn.Dense(4)
        self.dropout = nn.Dropout(0.5)
        self.scale = self.param("scale", nn.initializers.ones, ())

    def encode(self, x):
        return self.encoder(x) * self.scale

    def decode(self, z, *, train=False):
        self.sow("intermediates", "z", z)
        return self.decoder(self.dropout(z, deterministic=not train))

    def __call__(self, x, train=False):
        return self.decode(self.encode(x), train=train)


class TestLikeTheModel:
    """The converted model can be used like the model."""

    model = Everything()
    x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)

    @pytest.fixture
    def model8(self):
        return fp8.quantize_model(self.model, **ALL)

    @pytest.fixture
    def variables(self, model8):
        return model8.init(jax.random.key(0), self.x)

    def test_variables(self, variables):
        assert_same({**variables, OWG: {}}, {**self.model.init(jax.random.key(0), self.x), OWG: {}})
        assert {path.rpartition("/")[0] for path in flat(variables[OWG])} == {
            "encoder/layers_0/Fp8DotGeneralOp_0",
            "decoder/Fp8DotGeneralOp_0",
        }

    def test_mutable_collections(self, model8, variables):
        options = {"mutable": ["batch_stats", "intermediates"], "capture_intermediates": True}
        out, changed = model8.apply(variables, self.x, **options)
        without = {k: v for k, v in variables.items() if k != OWG}
        plain, expected = self.model.apply(without, self.x, **options)
        assert jax.tree.structure(changed) == jax.tree.structure(expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.3), changed, expected)
        np.testing.assert_allclose(out, plain, atol=0.3)
        assert not np.array_equal(out, plain)


class OneElement(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.tanh(nn.Dense(8)(nn.Embed(10, 8)(tokens)))
        return nn.Dense(8, name="last")(x @ self.param("w", nn.initializers.lecun_normal(), (8, 1)))


def test_inputs_of_one_element_are_inputs():
    """One token of one sequence has one element, and still is no constant of the model."""
    model8 = fp8.quantize_model(OneElement(), **ALL)
    one, many = (variables_of(model8, jnp.zeros(shape, jnp.int32)) for shape in ((1, 1), (2, 3)))
    assert_same(one, many)
    assert set(one[OWG]) == {"Dense_0", "Fp8DotGeneralOp_w", "last"}


def test_variables_of_numpy():
    """Variables are NumPy arrays, as ``flax.serialization`` restores them, in a call without jit."""
    x = normal(0, 4, 8)
    model8 = fp8.quantize_model(Own(), **ALL)
    variables = variables_of(model8, x)
    expected = model8.apply(variables, x)
    assert (expected != Own().apply({"params": variables["params"]}, x)).any()
    np.testing.assert_array_equal(model8.apply(jax.tree.map(np.asarray, variables), x), expected)


class AppliedApart(nn.Module):
    """Logits as in Hugging Face's models: a layer is applied with the embedding as its kernel."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(12, 8)
        x = nn.Dense(8)(embed(tokens))
        kernel = embed.variables["params"]["embedding"].T
        return nn.Dense(12, use_bias=False, parent=None).apply({"params": {"kernel": kernel}}, x)


def test_a_module_with_variables_of_its_own():
    tokens = np.arange(4)
    model8 = fp8.quantize_model(AppliedApart(), **ALL)
    variables = variables_of(model8, tokens)
    assert set(variables[OWG]) == {"Dense_0"}
    _, left = fp8.report(model8, tokens).rows
    assert "applied to variables of its own" in left.reason


def test_products():
    """Attention's own two products are converted on demand; their ops are numbered."""
    x = normal(0, 2, 4, 8)
    left = fp8.report(fp8.quantize_model(Attention(), **ALL), x)
    assert {(r.batch, r.m, r.k, r.n) for r in left.rows if not r.converted} == {(4, 4, 4, 4)}
    model8 = fp8.quantize_model(Attention(), products=True, **ALL)
    variables = variables_of(model8, x)
    ops = {path.rpartition("/")[0].rpartition("/")[2] for path in flat(variables[OWG])}
    assert ops == {"Fp8DotGeneralOp_0", "Fp8DotGeneralOp_product_0", "Fp8DotGeneralOp_product_1"}
    out = jax.jit(model8.apply)(variables, x)
    wide = jax.jit(Attention().apply)({"params": variables["params"]}, x)
    assert 0 < np.linalg.norm(out - wide) / np.linalg.norm(wide) < 0.1
    of_input = jax.grad(lambda x: jnp.sum(model8.apply(variables, x)))
    jax.eval_shape(of_input, x)  # trains nothing: no warning


class Cached(nnx.Module):
    """A model whose first input may be None, with inputs by keyword, two of them named as options."""

    def __init__(self):
        self.w, self.v = (nnx.Param(jnp.asarray(normal(i, 8, 8))) for i in range(2))

    def __call__(self, tokens, x=None, form="whole", *, cache, rngs=None):
        y = jnp.einsum("bi,io->bo", x if tokens is None else tokens, self.w[...]) + cache["keys"]
        return y if form == "whole" else jnp.einsum("bi,io->bo", y, self.v[...])


def test_inputs_of_an_nnx_model():
    x, cache = normal(0, 4, 8), {"keys": normal(1, 4, 8)}
    for inputs, keywords, share in (
        ((None, x), {}, 0.5),
        ((fp8.Float8CurrentScaling(), None, x), {}, 0.5),
        ((), {"tokens": x}, 0.5),
        ((x, None, "part"), {"form": "qdq"}, 1),
    ):
        model8 = fp8.quantize_model(Cached(), *inputs, **keywords, cache=cache, **ALL)
        assert model8.fp8_w.form == keywords.get("form", "direct")
        assert fp8.report(model8, x, form="part", cache=cache).fp8_share == share


class Sampled(nnx.Linear):
    """Bonsai's vision transformer takes its random keys by keyword only."""

    def __call__(self, x, *, rngs):
        return super().__call__(x)


def test_inputs_that_may_be_options():
    x, cache = normal(0, 4, 8), {"keys": normal(1, 4, 8)}
    for keywords, match in (
        ({"form": "qdq"}, "form= is an option .* by position"),
        ({"rngs": nnx.Rngs(0)}, "rngs= is an option .*fp8=0"),
        ({"cash": x}, "unexpected keyword argument 'cash'"),
    ):
        with pytest.raises(TypeError, match=match):
            fp8.quantize_model(Cached(), x, cache=cache, **keywords)
    with pytest.raises(TypeError, match="rngs= is an option .* by keyword only"):
        fp8.quantize_model(Sampled(4, 8, rngs=nnx.Rngs(0)), x, rngs=None)
    random = {"recipe": fp8.NVFP4BlockScaling(), "rngs": nnx.Rngs(fp8=0)}
    assert fp8.quantize_model(Cached(), x, cache=cache, **random, **ALL).fp8_w.rngs is not None


def watched(cls):
    model = cls()
    watch(model)
    return model


@pytest.mark.parametrize("base", [nn.Module, nnx.Module], ids=["Linen", "NNX"])
def test_threads_that_convert_equal_models_make_one_class(base):
    convert = watched if base is nnx.Module else lambda cls: fp8.quantize_model(cls(), **ALL)
    count, interval = 16, sys.getswitchinterval()
    barrier = threading.Barrier(count)
    sys.setswitchinterval(1e-6)
    try:
        with futures.ThreadPoolExecutor(count) as pool:
            for cls in (type("Model", (base,), {"__call__": lambda self, x: x}) for _ in range(10)):
                run = [pool.submit(lambda cls=cls: (barrier.wait(), convert(cls))[1]) for _ in range(count)]
                assert len({type(each.result()) for each in run}) == 1
    finally:
        sys.setswitchinterval(interval)


class TestErrors:
    x = np.ones((4, 8), np.float32)

    def test_what_is_no_model(self):
        with pytest.raises(TypeError, match="Pass an instance"):
            fp8.quantize_model(nn.Dense)
        with pytest.raises(TypeError, match="got dict"):
            fp8.quantize_model({})

        class Pretrained:
            module = nn.Dense(4)

        with pytest.raises(TypeError, match="Pass its .module"):
            fp8.quantize_model(Pretrained())
        with pytest.raises(TypeError, match="recipe"):
            fp8.quantize_model(nn.Dense(4), "delayed")
        for inputs, keywords, got in ((self.x,), {}, "1"), ((), {"y": 1}, ".*'y'"):
            with pytest.raises(TypeError, match=f"takes no inputs .* got {got}"):
                fp8.quantize_model(nn.Dense(4), *inputs, **keywords)

    def test_a_bound_or_converted_model(self):
        variables = variables_of(nn.Dense(4), self.x)
        with pytest.raises(ValueError, match="bound Dense"):
            fp8.quantize_model(nn.Dense(4).bind(variables))
        with pytest.raises(ValueError, match="Dense is converted already"):
            fp8.quantize_model(fp8.quantize_model(nn.Dense(4), **ALL))

    def test_a_pattern_that_matches_nothing(self):
        unmatched = {"exclude": "Dens_1", "rules": [("Dens_2", "leave")], "include": ["Dens_3", ".*"]}
        with pytest.raises(ValueError, match="Dens_1.*Dens_2.*Dens_3.*DenseGeneral_0, Dense_0"):
            fp8.quantize_model(Layers(), **unmatched).init(jax.random.key(0), self.x)
        lenient = fp8.quantize_model(Layers(), **unmatched, allow_unmatched=True)
        assert OWG in lenient.init(jax.random.key(0), self.x)

    def test_nothing_is_converted(self):
        model8 = fp8.quantize_model(Layers())
        with pytest.raises(ValueError, match="a size below 16"):
            model8.init(jax.random.key(0), self.x)
        with pytest.raises(ValueError, match="no contraction"):
            fp8.quantize_model(nn.LayerNorm()).init(jax.random.key(0), self.x)

    def test_state_is_missing(self):
        model8 = fp8.quantize_model(nn.Dense(4), **ALL)
        variables = nn.Dense(4).init(jax.random.key(0), self.x)
        with pytest.raises(fp8.MissingStateError, match="add_fp8_state"):
            model8.apply(variables, self.x)
        added = fp8.add_fp8_state(variables, model8, self.x)
        assert_same(added, model8.init(jax.random.key(0), self.x))


@pytest.mark.usefixtures("small_heap")
def test_nothing_of_a_model_is_kept():
    """Classes and objects of the rules do not outlive the models; equal arguments give equal models."""

    def use():
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(8)(x)

        held, x = jnp.ones((100,)), normal(0, 4, 8)

        def rule(path, module, shapes):
            return None if held.size else "leave"

        model8, again = (fp8.quantize_model(Model(), rules=[rule], **ALL) for _ in range(2))
        assert model8 == again
        variables = fp8.calibrate(model8.apply, variables_of(model8, x), [x])
        serve, served = fp8.freeze(model8, variables, x)
        assert serve == fp8.freeze(model8, variables, x)[0]
        for model, values in ((model8, variables), (serve, served)):
            model.apply(values, x)
        return [weakref.ref(one) for one in (Model, type(model8), type(serve), held)]

    refs = use()
    for _ in range(3):
        gc.collect()
    assert [ref() for ref in refs] == [None] * 4

"""Converted models support what users do with models: methods, decorators, structs, maps, pickles."""

import copy
import dataclasses
import functools
import pickle
import warnings
from typing import Any, NamedTuple

import cloudpickle
import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
from tests.cases import OWG, assert_same, flat, normal, variables_of
from tests.core.ops.test_dot_general import algorithms, lowered_for_cuda
from tests.models import ALL, in_scan

KEY = jax.random.key(0)
X = normal(1, 4, 8)
plain = fp8.remove_fp8_state


def ops(variables):
    """Returns the paths of the ops that have state."""
    return {path.rpartition("/")[0] for path in flat(variables.get(OWG, {}))}


def assert_in_fp8(model, model8, variables, x=X):
    """Asserts that a converted model computes what the model does, with the errors of FP8."""
    out, wide = model8.apply(variables, x), model.apply(plain(variables), x)
    assert 0 < np.linalg.norm(out - wide) / np.linalg.norm(wide) < 0.12


def assert_frozen_equal(model8, variables, x=X):
    variables = fp8.calibrate(model8.apply, variables, [x])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="These kernels of FP8 ops stay wide")
        serve, served = fp8.freeze(model8, variables, x)
    np.testing.assert_array_equal(serve.apply(served, x), model8.apply(variables, x))
    return serve, served


class Coder(nn.Module):
    """A model with several methods, and perhaps a submodule that is passed to it."""

    head: nn.Module | None = None

    def setup(self):
        self.encoder = nn.Dense(8)
        self.decoder = nn.Dense(8)

    def encode(self, x, scale=1.0):
        return self.encoder(x) * scale

    @nn.nowrap
    def unwrapped(self, x):
        return self.encoder(x)

    def __call__(self, x):
        x = self.decoder(self.encode(x))
        return x if self.head is None else self.head(x)


MODEL = Coder()
MODEL8 = fp8.quantize_model(MODEL, **ALL)
METHODS = {
    "bound": MODEL8.encode,
    "unbound": type(MODEL8).encode,
    "function": lambda m, x: m.encode(x),
    "of a submodule": lambda m, x: m.encoder(x),
    "bound, of the model": MODEL.encode,
    "unbound, of the model": Coder.encode,
    "partial": functools.partial(Coder.encode, scale=1.0),
    "unwrapped": "unwrapped",
}


def test_methods():
    variables = MODEL8.init(KEY, X)
    expected = MODEL8.apply(variables, X, method="encode")
    assert (expected != MODEL.apply(plain(variables), X, method="encode")).any()
    for method in METHODS.values():
        np.testing.assert_array_equal(MODEL8.apply(variables, X, method=method), expected)
        out, made = MODEL8.init_with_output(KEY, X, method=method)
        np.testing.assert_array_equal(out, expected)
        assert ops(made) == {"encoder/Fp8DotGeneralOp_0"}
    with pytest.warns(UserWarning, match="decoder"):
        _, encoder = fp8.freeze(MODEL8, variables, methods={"encode": (X,)}, weight_only=True)
    assert encoder["params"]["encoder"]["kernel"].itemsize == 1
    of_submodule = fp8.report(fp8.quantize_model(Coder(nn.Dense(8)), **ALL), X, method="head")
    assert [row.path for row in of_submodule.converted] == ["head"]
    assert len(fp8.report(MODEL8, X, method=MODEL8.encode).rows) == 1
    serve, served = fp8.freeze(MODEL8, fp8.calibrate(MODEL8.apply, variables, [X]), X)
    first = serve.apply(served, X, method=serve.encode)
    np.testing.assert_array_equal(serve.apply(served, X, method=MODEL.encode), first)
    np.testing.assert_allclose(first, expected, atol=0.2)

    everything = lambda module, _: not isinstance(module, fp8.Fp8DotGeneralOp)  # noqa: E731
    for method in ("__call__", Coder.encode):
        options = {"method": method, "capture_intermediates": everything}
        _, captured = MODEL8.apply(variables, X, **options)
        _, expected = MODEL.apply(plain(variables), X, **options)
        assert jax.tree.structure(captured) == jax.tree.structure(expected)


class Contractions(nn.Module):
    einsum: Any = jnp.einsum

    @nn.compact
    def __call__(self, x):
        w, v = (self.param(name, nn.initializers.lecun_normal(), (8, 16, 32)) for name in "wv")
        y = jnp.einsum("oij,bij->bo", x, w, precision=("highest", "default"))
        return y + self.einsum("oij,bij->bo", x, v)


def test_switched_off_is_bit_equal():
    """Also a contraction that an op would compute with other operands or in another order."""
    model, x = Contractions(), normal(3, 24, 16, 32)
    model8 = fp8.quantize_model(Contractions(fp8.Fp8Einsum(parent=None)), **ALL)
    variables = variables_of(model8, x)
    assert (model8.apply(variables, x) != model.apply(plain(variables), x)).any()
    with fp8.autocast(enabled=False):
        for run in (lambda f: f, jax.jit):
            out = run(model8.apply)(variables, x)
            np.testing.assert_array_equal(out, run(model.apply)(plain(variables), x))
        assert OWG not in model8.init(KEY, x)


@pytest.mark.parametrize("ambient", ["BF16_BF16_F32", "highest"])
@pytest.mark.parametrize(("precision", "expected"), [(None, "fast"), ("highest", "exact")])
def test_only_the_precision_of_the_layer_counts(ambient, precision, expected):
    """The recipe sets the accumulation, and not ``jax.default_matmul_precision``."""
    x = normal(0, 32, 32)
    model8 = fp8.quantize_model(nn.Dense(32, precision=precision), **ALL)
    variables = model8.init(KEY, x)
    with jax.default_matmul_precision(ambient):
        assert algorithms(lowered_for_cuda(model8.apply, variables, x)) == [
            (expected, "f8E4M3FN", "f8E4M3FN")
        ]


class Looped(nn.Module):
    """A model whose main method is a loop."""

    @functools.partial(nn.scan, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(8)(x)), None


TRANSFORMED = {
    "nn.jit": (nn.jit(Coder)(), (X,), {"encoder": (1,), "decoder": (1,)}),
    "a method": (Looped(), (X, None), {"Dense_0": (2, 1)}),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transformed_class_as_the_model(name):
    model, args, shapes = TRANSFORMED[name]
    model8 = fp8.quantize_model(model, **ALL)
    variables = model8.init(KEY, *args)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4), plain(variables), model.init(KEY, *args)
    )
    state = flat(variables[OWG])
    for path, shape in shapes.items():
        assert state[f"{path}/Fp8DotGeneralOp_0/input_scale".lstrip("/")].shape == shape
    out, wide = (
        jax.tree.leaves(m.apply(v, *args))[0] for m, v in ((model8, variables), (model, plain(variables)))
    )
    assert 0 < np.linalg.norm(out - wide) < 1


class Configured(nn.Module):
    """Has attributes that are no fields, as models of Diffusers and what loads a model set them."""

    features: int

    def __post_init__(self):
        object.__setattr__(self, "config", {"features": self.features})
        super().__post_init__()

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.config["features"])(x)


def test_attributes_that_are_no_fields():
    model = Configured(8)
    object.__setattr__(model, "revision", "main")
    model8 = fp8.quantize_model(model, **ALL)
    variables = variables_of(model8, X)
    assert_in_fp8(model, model8, variables)
    for one in (model8, pickle.loads(pickle.dumps(model8)), copy.deepcopy(model8)):
        assert (one.config, one.revision) == ({"features": 8}, "main")
    assert dataclasses.replace(model8, features=4).config == {"features": 4}


class Pair(NamedTuple):
    first: Any
    second: Any


class Tuples(nn.Module):
    @nn.compact
    def __call__(self, x):
        def kernel(key):
            return nn.initializers.lecun_normal()(key, (8, 8))

        a, b = self.param("tuple", lambda key: (kernel(key), jnp.zeros((1, 8))))
        pair = self.param("pair", lambda key: Pair(jnp.ones(()), [kernel(key) - 0.1]))
        return (x @ a + b) @ pair.second[0] * pair.first


@pytest.mark.long
def test_parameters_in_tuples():
    model, model8 = Tuples(), fp8.quantize_model(Tuples(), **ALL)
    variables = model8.init(KEY, X)
    assert ops(variables) == {f"Fp8DotGeneralOp_{name}" for name in ("tuple-0", "pair-second-0")}
    assert_in_fp8(model, model8, variables)
    variables["params"]["pair"].second[0] = variables["params"]["tuple"][0]  # one array at two paths
    variables = fp8.calibrate(model8.apply, variables, [100 * X])
    np.testing.assert_allclose(model8.apply(variables, X), jax.jit(model8.apply)(variables, X), rtol=1e-5)
    assert {row.kernel for row in fp8.report(model8, X).rows} == {"tuple/0", "pair/second/0"}
    _, served = assert_frozen_equal(model8, variables)
    assert isinstance(served["params"]["pair"], Pair)
    dtypes = [x.dtype.name for x in jax.tree.leaves(served["params"]["pair"])]
    assert dtypes == ["float32", "float8_e4m3fn"]


def transposed(variables):
    return jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2) if x.shape[-2:] == (8, 8) else x, variables)


def mapped(cls=None):
    """Returns a model with a layer whose parameters are mapped."""

    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.map_variables(nn.Dense, "params", transposed, transposed, init=True)
            return layer(8, dot_general_cls=cls, name="layer")(x)

    return Mapped()


def in_a_loop(cls=None):
    """Returns a model whose parameters are mapped in a loop."""

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(nn.Dense(8, dot_general_cls=cls)(x)), None

    class Loop(nn.Module):
        @nn.compact
        def __call__(self, x):
            options = {"trans_in_fn": transposed, "trans_out_fn": transposed, "init": True, "mutable": True}
            axes = {"variable_axes": {"params": 0, OWG: 0}, "split_rngs": {"params": True}, "length": 2}
            loop = nn.scan(nn.map_variables(Layer, "params", **options), **axes)
            return loop(name="layer")(x, None)[0]

    return Loop()


class Normalized(nn.Module):
    cls: Any = None
    names: frozenset = frozenset({"kernel"})

    @nn.compact
    def __call__(self, x):
        layer = nn.Dense(8, dot_general_cls=self.cls, name="layer")
        return nn.WeightNorm(layer, variable_filter=self.names)(x)


MAPS = {"transposed": mapped, "in a loop": in_a_loop, "WeightNorm": Normalized}


@pytest.mark.long
@pytest.mark.parametrize("name", MAPS)
def test_mapped_variables(name):
    model, by_hand = MAPS[name](), MAPS[name](fp8.Fp8DotGeneralOp)
    model8 = fp8.quantize_model(model, include="layer", allow_unmatched=True)
    variables = model8.init(KEY, X)
    assert_frozen_equal(model8, variables)
    assert len(fp8.report(model8, X).converted) >= 1
    if name == "in a loop":  # which compiles anew at each call
        return
    assert_same(plain(variables), model.init(KEY, X))
    assert_in_fp8(model, model8, variables)
    if name == "WeightNorm":
        with pytest.raises(ValueError, match="quantize_model"):
            by_hand.init(KEY, X)
        by_hand = Normalized(fp8.Fp8DotGeneralOp, frozenset({"layer/kernel"}))
        assert_frozen_equal(by_hand, variables)
    assert_same(variables, by_hand.init(KEY, X))
    np.testing.assert_array_equal(model8.apply(variables, X), by_hand.apply(variables, X))
    grads = [fp8.grad(lambda v, m=m: jnp.sum(m.apply(v, X) ** 2))(variables) for m in (model8, by_hand)]
    assert_same(*grads)
    assert min(float(leaf.max()) for leaf in jax.tree.leaves(grads[0][OWG])) > 0


def test_a_map_of_all_parameters_does_not_change_the_state():
    def positive(variables):
        return jax.tree.map(lambda x: jax.nn.relu(x) + 0.1, variables)

    model8 = fp8.quantize_model(nn.map_variables(nn.Dense, "params", positive, init=True)(8), **ALL)
    variables = fp8.calibrate(model8.apply, model8.init(KEY, X), [X])
    by_hand = nn.Dense(8, dot_general_cls=fp8.Fp8DotGeneralOp)
    expected = by_hand.apply({**variables, "params": positive(variables["params"])}, X)
    np.testing.assert_array_equal(model8.apply(variables, X), expected)
    assert_frozen_equal(model8, variables)


def test_a_map_around_a_loop_that_drops_the_state():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(8)(x), None

    def known(variables):
        if "Dense_0" not in variables.get("params", {}):
            return variables
        layer = variables["params"]["Dense_0"]
        return {"params": {"Dense_0": {name: layer[name] for name in ("kernel", "bias")}}}

    class Mapped(nn.Module):
        @nn.compact
        def __call__(self, x):
            loop = nn.scan(Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return nn.map_variables(loop, "params", known, known, init=True)(name="loop")(x, None)[0]

    with pytest.raises(ValueError, match="'loop/Dense_0'"):
        fp8.quantize_model(Mapped(), **ALL).init(KEY, X)


class RematOfParams(nn.Module):
    """Takes only the parameters along, so the state comes from the trace around it."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(nn.Dense, variables=["params"])(8)(nn.remat(in_scan(tied=True))()(x))


@pytest.mark.usefixtures("small_heap")
def test_state_that_layers_of_a_loop_share():
    model, model8 = RematOfParams(), fp8.quantize_model(RematOfParams(), **ALL)
    with jax.checking_leaks():
        variables = variables_of(model8, X)
        grads = jax.jit(fp8.grad(lambda v: jnp.sum(model8.apply(v, X))))(variables)
    assert {leaf.ndim for leaf in jax.tree.leaves(variables[OWG])} == {1}
    assert min(float(leaf.max()) for leaf in jax.tree.leaves(grads[OWG])) > 0
    assert_in_fp8(model, model8, variables)


def test_a_failed_call_leaves_no_trace():
    class Fails(nn.Module):
        @nn.compact
        def __call__(self, x):
            nn.Dense(8)(x)
            raise ArithmeticError

    before = dict(vars(nn.module)), dict(vars(nn.Dense)), dict(vars(flax.core.lift))
    with pytest.raises(ArithmeticError):
        fp8.quantize_model(Fails(), **ALL).init(KEY, X)
    assert (dict(vars(nn.module)), dict(vars(nn.Dense)), dict(vars(flax.core.lift))) == before
    jax.eval_shape(lambda x: x @ x.T, X)  # no trace of ours is in front


@pytest.mark.long
def test_copies_and_pickles():
    rules = [("encoder", fp8.Float8CurrentScaling(granularity="axiswise"))]
    model8 = fp8.quantize_model(Coder(), fp8.DelayedScaling(amax_history_len=4), rules=rules, **ALL)
    variables = fp8.calibrate(model8.apply, variables_of(model8, X), [X])
    frozen = fp8.freeze(model8, variables, X)
    for model, values in ((model8, variables), frozen):
        for again in (
            *(way.loads(way.dumps(model)) for way in (pickle, cloudpickle)),
            *(copy.copy(model), copy.deepcopy(model), dataclasses.replace(model), model.clone(parent=None)),
        ):
            assert type(again) is type(model)
            assert again == model
            assert hash(again) == hash(model)
        again = pickle.loads(pickle.dumps(model))
        np.testing.assert_array_equal(again.apply(values, X), model.apply(values, X))
    assert fp8.freeze(copy.deepcopy(model8), variables, X)[0] == frozen[0]


class TestBinding:
    def test_bind_and_share_scope(self):
        class Sharing(nn.Module):
            def setup(self):
                self.inner = nn.Dense(8)
                nn.share_scope(self, self.inner)

            def __call__(self, x):
                return self.inner(x)

        model8 = fp8.quantize_model(Sharing(), **ALL)
        variables = variables_of(model8, X)
        assert ops(variables) == {"Fp8DotGeneralOp_kernel"}
        assert_in_fp8(Sharing(), model8, variables)
        unbound, same = model8.bind(variables).unbind()
        assert unbound == model8
        assert_same(same, variables)
        assert_frozen_equal(model8, variables)

    @pytest.mark.long
    def test_converted_models_inside_of_models(self):
        first = fp8.quantize_model(nn.Dense(8), **ALL)
        model = nn.Sequential([first, nn.relu, fp8.quantize_model(Coder(), include="decoder")])
        paths = {"layers_0/Fp8DotGeneralOp_0", "layers_2/decoder/Fp8DotGeneralOp_0"}
        assert ops(model.init(KEY, X)) == paths
        # In one that is converted too, the rules of the inner one hold for its layers.
        outer = fp8.quantize_model(nn.Sequential([*model.layers, nn.Dense(8)]), include="layers_3")
        variables = variables_of(outer, X)
        assert ops(variables) == {*paths, "layers_3/Fp8DotGeneralOp_0"}
        reasons = {row.path: row.reason for row in fp8.report(outer, X).rows}
        assert reasons == {
            "layers_0": "by include '.*'",
            "layers_2/encoder": "not included",
            "layers_2/decoder": "by include 'decoder'",
            "layers_3": "by include 'layers_3'",
        }
        assert_frozen_equal(outer, variables)
        # A frozen model in the place of one of them needs its own variables.
        variables = fp8.calibrate(outer.apply, variables, [X])
        serve, served = fp8.freeze(first, {name: x["layers_0"] for name, x in variables.items()}, X)
        mixed = fp8.quantize_model(nn.Sequential([serve, *outer.layers[1:]]), include="layers_3")
        with pytest.raises(TypeError, match="must stay in FP8"):
            mixed.apply(variables, X)
        with_served = {**variables, "params": {**variables["params"], "layers_0": served["params"]}}
        np.testing.assert_array_equal(mixed.apply(with_served, X), outer.apply(variables, X))

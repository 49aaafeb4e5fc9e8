"""An op of a converted model keeps its identity, whatever else a method computes."""

import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import OWG, normal, variables_of
from tests.models import ALL

pytestmark = pytest.mark.newest

init = nn.initializers.lecun_normal()


def names(variables):
    return sorted(variables[OWG])


def close(actual, expected, tolerance=0.1):
    error = np.linalg.norm(np.asarray(actual - expected)) / np.linalg.norm(np.asarray(expected))
    assert error < tolerance, error


class EncoderDecoder(nn.Module):
    """Raw kernels in several methods, and a cached pass that computes fewer of them."""

    def setup(self):
        self.wk, self.wv, self.wq = (self.param(name, init, (8, 8)) for name in ("k", "v", "q"))

    def encode(self, x):
        return 1e3 * (x @ self.wk), x @ self.wv

    def decode(self, x, keys, values):
        return nn.softmax((x @ self.wq) @ keys.T) @ values

    def __call__(self, x, cached=None):
        keys, values = self.encode(x) if cached is None else cached
        return self.decode(x, keys, values)


class BesideGiven(nn.Module):
    """An FP8 op set by hand, beside a raw product with the large parameter ``kernel``."""

    @nn.compact
    def __call__(self, x):
        w = self.param("w", init, (8, 8))
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        kernel = self.param("kernel", init, (8, 8))
        return fp8.Fp8DotGeneralOp()(x, w, dims) @ (1e5 * kernel)


def test_methods_and_a_cached_pass():
    model, x = EncoderDecoder(), normal(0, 4, 8)
    model8 = fp8.quantize_model(model, **ALL)
    variables = fp8.calibrate(model8.apply, variables_of(model8, x), [x])
    assert names(variables) == ["Fp8DotGeneralOp_k", "Fp8DotGeneralOp_q", "Fp8DotGeneralOp_v"]
    whole = model8.apply(variables, x)
    close(whole, model.apply({"params": variables["params"]}, x), 0.2)
    cached = model8.apply(variables, x, method="encode")
    np.testing.assert_array_equal(model8.apply(variables, x, cached), whole)
    np.testing.assert_array_equal(model8.apply(variables, x, *cached, method="decode"), whole)


def test_beside_an_op_that_was_given():
    x = normal(0, 4, 8)
    model8 = fp8.quantize_model(BesideGiven(), **ALL)
    variables = fp8.calibrate(model8.apply, variables_of(model8, x), [x])
    assert names(variables) == ["Fp8DotGeneralOp_0", "Fp8DotGeneralOp_kernel"]
    params = variables["params"]
    close(model8.apply(variables, x), x @ params["w"] @ (1e5 * params["kernel"]))


def test_two_given_ops_with_operands_of_one_shape_have_a_row_each():
    class Given(nn.Module):
        @nn.compact
        def __call__(self, x):
            w, dims = self.param("w", init, (32, 32)), (((1,), (0,)), ((), ()))
            return fp8.Fp8DotGeneralOp()(
                fp8.Fp8DotGeneralOp(recipe=fp8.NVFP4BlockScaling())(x, w, dims), w, dims
            )

    rows = fp8.report(fp8.quantize_model(Given(), **ALL, allow_unmatched=True), normal(0, 4, 32)).rows
    assert [(row.kernel, row.count, row.is_fp4) for row in rows] == [("w", 1, True), ("w", 1, False)]


def test_one_kernel_used_twice_has_one_state():
    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", init, (8, 8))
            return (x @ w) + jnp.einsum("bi,io->bo", 3 * x, w)

    x = normal(0, 4, 8)
    model8 = fp8.quantize_model(Twice(), **ALL)
    variables = variables_of(model8, x)
    grads = fp8.grad(lambda v: jnp.sum(model8.apply(v, x)))(variables)
    history = grads[OWG]["Fp8DotGeneralOp_w"]["input_amax_history"]
    assert history[0] == jnp.max(jnp.abs(3 * x))


PARTS = {
    "w": lambda x, w: x @ w,
    "w-T": lambda x, w: x @ w.T,
    "w-axis0-0-4": lambda x, w: x[:, :4] @ w[:4],
    "w-axis0-0-8-2": lambda x, w: x[:, :4] @ w[::2],
    "w-axis1-0-4": lambda x, w: x @ (2 * w[:, :4]),
    "w-axis1-4-8": lambda x, w: x @ jnp.split(w, 2, axis=1)[1],
    "w-axis1-0-4-T": lambda x, w: x[:, :4] @ w[:, :4].T,
    "w-8x2x4-axis1-1": lambda x, w: x @ w.reshape(8, 2, 4)[:, 1],
    "w-T-8x2x4-axis1-1": lambda x, w: x @ w.T.reshape(8, 2, 4)[:, 1],
    "w-axis1-0-2-w-axis1-6-8": lambda x, w: x @ jnp.concatenate([w[:, :2], w[:, 6:]], 1),
}


@jax.custom_jvp
def identity(w):
    return w


identity.defjvps(lambda tangent, out, w: tangent)
CHANGES = {
    "as it is": lambda w: w,
    "read by a function with its own derivative": lambda w: (identity(w), w)[1],
    "scaled": lambda w: 0.5 * w,
    "centered": lambda w: w - w.mean(0, keepdims=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_parts_that_differ_have_states_that_differ(change):
    """Also if the kernel is computed from the parameter and numbers, as standardized weights are."""

    class Parts(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = change(self.param("w", init, (8, 8)))
            return sum(jnp.sum(multiply(x, w)) for multiply in PARTS.values())

    variables = fp8.quantize_model(Parts(), **ALL).init(jax.random.key(0), normal(0, 4, 8))
    assert {name.removeprefix("Fp8DotGeneralOp_") for name in names(variables)} == set(PARTS)


PARAMS = dict.fromkeys(("a-b-c", "a/b-c", "w", "w-T", "w-axis1-0-4", "T", "product_0"), 0)
PARAMS |= {"a": {"b-c": 0}, "a-b": {"c": 0}}
NAMED = {
    "a-b~-c": lambda p: p["a"]["b-c"],
    "a~-b-c": lambda p: p["a-b"]["c"],
    "a~-b~-c": lambda p: p["a-b-c"],
    "a~.b~-c": lambda p: p["a/b-c"],
    "w": lambda p: p["w"],
    "w-T": lambda p: p["w"].T,
    "w~-T": lambda p: p["w-T"],
    "w-axis1-0-4": lambda p: p["w"][:, :4],
    "w~-axis1~-0~-4": lambda p: p["w-axis1-0-4"],
    "w-~T": lambda p: jnp.concatenate([p["w"], p["T"]], 1),
    "~product_0": lambda p: p["product_0"],
}


class Named(nn.Module):
    """Products with kernels whose names have the characters that separate the parts of an op's name."""

    @nn.compact
    def __call__(self, x):
        of = {name: jax.tree.map(lambda _: jnp.ones((8, 8)), tree) for name, tree in PARAMS.items()}
        params = {name: self.param(name, lambda key, tree=tree: tree) for name, tree in of.items()}
        return [x @ kernel(params) for kernel in NAMED.values()]


def test_no_two_kernels_have_one_name():
    model8, x = fp8.quantize_model(Named(), **ALL, products=True), normal(0, 4, 8)
    variables = variables_of(model8, x)
    assert names(variables) == sorted(f"Fp8DotGeneralOp_{name}" for name in NAMED)
    grads = fp8.grad(lambda v: sum(map(jnp.sum, model8.apply(v, x))))(variables)
    for name, kernel in NAMED.items():
        history = grads[OWG][f"Fp8DotGeneralOp_{name}"]["kernel_amax_history"]
        assert history[0] == np.max(np.abs(kernel(variables["params"]))), name
    assert len(fp8.report(model8, x).rows) == len(NAMED)


class Outer(nn.Module):
    """A layer with a kernel of its own and one of its parent; both are ``w`` in their modules."""

    @nn.compact
    def __call__(self, x):
        class Inner(nn.Module):
            @nn.compact
            def __call__(self, x, outer):
                return x @ outer @ self.param("w", init, (8, 8))

        return Inner(name="inner")(x, self.param("w", init, (8, 8)))


def test_a_kernel_of_another_module_with_the_same_name():
    with pytest.raises(ValueError, match="'inner' multiplies by 'w' and by 'inner/w'.*exclude='.inner/w.'"):
        fp8.quantize_model(Outer(), **ALL).init(jax.random.key(0), normal(0, 4, 8))
    model8 = fp8.quantize_model(Outer(), **ALL, exclude="^inner/w$")
    assert list(variables_of(model8, normal(0, 4, 8))[OWG]["inner"]) == ["Fp8DotGeneralOp_w"]


class SameAttributes(nnx.Module):
    """Kernels whose ops would have one name after each ``-`` has become an ``_``."""

    def __init__(self):
        self.a, self.b, self.a_b, b_c, c = (
            nnx.Param(jnp.full((8, 8), n)) for n in (2.0, 3.0, 4.0, 5.0, 6.0)
        )
        self.m, self.m_b = nnx.Dict(b_c=b_c), nnx.Dict(c=c)

    def __call__(self, x):
        joined = jnp.concatenate([self.a, self.b], 1)
        return sum(jnp.sum(x @ w) for w in (joined, self.a_b, self.m.b_c, self.m_b.c))


def test_no_two_kernels_have_one_attribute():
    x = normal(0, 4, 8)
    model8 = fp8.quantize_model(SameAttributes(), x, **ALL)
    grads = fp8nnx.grad(lambda m: m(x))(nnx.merge(*nnx.split(model8)))
    ops = {name: grads[name]["kernel_amax_history"][...][0] for name in grads if name.startswith("fp8")}
    assert ops == {"fp8_a_b": 4, "fp8_a-b": 3, "fp8_m-b_c": 5, "fp8_m_b-c": 6}
    rows = fp8.report(model8, x).rows
    assert sorted(row.kernel for row in rows if row.converted) == ["a", "a_b", "m/b_c", "m_b/c"]


SAME_CHECKSUM = "fc_kbiezyelt", "fc_haiunkvaq"


class Two(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name in SAME_CHECKSUM:
            x = nn.Dense(8, name=name)(x)
        return x


class TwoInNNX(nnx.Module):
    def __init__(self):
        for name in SAME_CHECKSUM:
            setattr(self, name, nnx.Linear(8, 8, rngs=nnx.Rngs(0)))

    def __call__(self, x):
        for name in SAME_CHECKSUM:
            x = getattr(self, name)(x)
        return x


def test_layers_whose_names_have_one_checksum():
    assert len({zlib.crc32(name.encode()) for name in SAME_CHECKSUM}) == 1
    for model in Two(), TwoInNNX():
        rows = fp8.report(fp8.quantize_model(model, **ALL), normal(0, 4, 8)).rows
        assert [(row.path, row.count) for row in rows] == [(name, 1) for name in SAME_CHECKSUM]


class SignGrad(nn.Module):
    @nn.compact
    def __call__(self, x):
        def fwd(module, x):
            return nn.vjp(f, module, x)

        def bwd(vjp_fn, g):
            params_t, *inputs_t = vjp_fn(g)
            return (jax.tree.map(jnp.sign, params_t), *inputs_t)

        def f(module, x):
            return module(x)

        x = nn.Dense(8, name="first")(x)
        return nn.custom_vjp(f, fwd, bwd)(nn.Dense(8, name="second"), x)


def test_in_nn_custom_vjp():
    """An op in ``nn.custom_vjp`` is refused; left wide, the layer has the derivative of the model."""
    model, x = SignGrad(), normal(0, 4, 8)
    with pytest.raises(ValueError, match="'second' .*custom_vjp.*exclude='second'"):
        fp8.quantize_model(model, **ALL).init(jax.random.key(0), x)
    model8 = fp8.quantize_model(model, **ALL, exclude="second")
    variables = variables_of(model8, x)
    assert names(variables) == ["first"]
    grads = jax.jit(fp8.grad(lambda v: jnp.sum(model8.apply(v, x))))(variables)
    assert set(np.unique(grads["params"]["second"]["kernel"])) <= {-1.0, 0.0, 1.0}
    assert grads[OWG]["first"]["Fp8DotGeneralOp_0"]["input_amax_history"][0] == jnp.max(jnp.abs(x))


class LooksAtItself(nn.Module):
    """A penalty on its parameters, and a gradient step of its own on some of them."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(8, name="one")(x)
        w = self.param("w", init, (8, 8))
        y = y @ w
        if self.is_initializing():
            return y, 0.0
        params = self.variables["params"]
        penalty = sum(jnp.sum(p**2) for p in jax.tree.leaves(params))
        one = nn.Dense(8, parent=None)
        loss = lambda p: jnp.mean(one.apply({"params": p}, x) ** 2)  # noqa: E731
        stepped = jax.tree.map(lambda p, g: p - g, params["one"], jax.grad(loss)(params["one"]))
        return y + one.apply({"params": stepped}, x), penalty


def test_a_model_sees_its_own_parameters():
    model, x = LooksAtItself(), normal(0, 4, 8)
    model8 = fp8.quantize_model(model, **ALL)
    variables = fp8.calibrate(model8.apply, variables_of(model8, x), [x])
    (y, penalty), (expected, of_all) = (
        model8.apply(variables, x),
        model.apply({"params": variables["params"]}, x),
    )
    np.testing.assert_allclose(penalty, of_all, rtol=1e-6)
    close(y, expected)


def test_a_kernel_that_starts_constant_and_is_cast():
    """Zero-initialized projections in bfloat16, as in diffusion models and adapters, get their state."""
    layer = nn.Dense(8, kernel_init=nn.initializers.zeros, dtype=jnp.bfloat16)
    model8 = fp8.quantize_model(nn.Sequential([layer]), **ALL)
    x = normal(0, 4, 8)
    variables = model8.init(jax.random.key(0), x)
    assert "Fp8DotGeneralOp_0" in variables[OWG]["layers_0"]
    assert model8.apply(variables, x).dtype == jnp.bfloat16

"""An op of a converted model keeps its identity, whatever else a method computes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8flax as fp8
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

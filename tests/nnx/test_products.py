"""``quantize_model`` of NNX with inputs finds the contractions that modules write out."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import normal
from tests.nnx.layout import ops_of

OWG = fp8nnx.OverwriteWithGradient
X = normal(0, 4, 8)


def param(*shape, seed=1):
    return nnx.Param(0.3 * normal(seed, *shape))


class Own(nnx.Module):
    """Products with a kernel that is whole, transposed, sliced, scaled, on the left, or of a submodule."""

    def __init__(self):
        self.w, self.tied, self.qkv = param(8, 8), param(8, 8), param(8, 16)
        self.left, self.scaled = param(8, 8), param(8, 8)
        self.layer = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.embed = nnx.Embed(12, 8, rngs=nnx.Rngs(0))
        self.lora = nnx.LoRA(8, 2, 8, rngs=nnx.Rngs(0), b_initializer=nnx.initializers.normal())

    def __call__(self, x):
        x = self.layer(x @ self.w) @ self.tied.T
        x = jnp.einsum("bi,io->bo", x, self.qkv[:, :8]) + x @ self.qkv[:, 8:]
        x = (self.left @ x.T).T @ (0.5 * self.scaled)
        x = x + self.lora(x)
        return self.embed.attend(x)


NAMES = {
    *("fp8_w", "fp8_tied-T", "fp8_qkv-axis1-0-8", "fp8_qkv-axis1-8-16", "fp8_left-T", "fp8_scaled"),
    *("layer/dot_general", "embed/fp8_embedding-T", "lora/fp8_lora_a", "lora/fp8_lora_b"),
}


def histories(model):
    return {"/".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(model, OWG))}


def assert_in_fp8(model8, model, *inputs):
    out, wide = model8(*inputs), model(*inputs)
    assert 0 < np.linalg.norm(out - wide) / np.linalg.norm(wide) < 0.2


@pytest.fixture(scope="module")
def model8():
    return fp8.quantize_model(Own(), X, include=".*")


class TestOwn:
    def test_ops_and_values(self, model8):
        assert set(ops_of(model8)) == NAMES
        assert_in_fp8(model8, Own(), X)
        np.testing.assert_array_equal(nnx.jit(lambda m, x: m(x))(model8, X), jax.jit(model8)(X))
        restored = nnx.merge(nnx.graphdef(model8), jax.tree.map(np.asarray, nnx.state(model8)))
        np.testing.assert_array_equal(restored(X), model8(X))

    @pytest.mark.long
    def test_gradients_and_states(self, model8):
        grads = nnx.jit(fp8nnx.grad(lambda m: jnp.sum(m(X) ** 2)))(model8)
        found = {path: x for path, x in histories(grads).items() if path.endswith("amax_history")}
        assert len(found) == 3 * len(NAMES)
        assert all(np.max(np.asarray(x[...])) > 0 for x in found.values())

    def test_report(self, model8):
        report = fp8.report(model8, X)
        assert {row.kernel for row in report.rows} == {
            *("w", "tied", "qkv", "left", "scaled", "layer/kernel", "embed/embedding"),
            *("lora/lora_a", "lora/lora_b"),
        }
        assert report.fp8_share == 1
        (left,) = (row for row in report.rows if row.kernel == "left")
        assert (left.m, left.k, left.n) == (4, 8, 8)

    def test_copies_and_pickles(self, model8):
        expected = model8(X)
        for again in (pickle.loads(pickle.dumps(model8)), copy.deepcopy(model8), nnx.clone(model8)):
            assert isinstance(again, Own)
            np.testing.assert_array_equal(again(X), expected)
        graphdef = nnx.graphdef(fp8.quantize_model(Own(), X, include=".*"))
        assert hash(nnx.graphdef(model8)) == hash(graphdef)


def test_what_is_left_is_in_the_report():
    model8 = fp8.quantize_model(Own(), X, include="layer")
    assert set(ops_of(model8)) == {"layer/dot_general"}
    assert type(model8) is Own
    report = fp8.report(model8, X)
    assert len(report.rows) == 10
    assert {row.reason for row in report.rows if not row.converted} == {"not included"}
    without_inputs = fp8.report(fp8.quantize_model(Own(), include=".*"), X)
    assert [row.kernel for row in without_inputs.converted] == ["layer/kernel"]
    assert all("inputs" in row.reason for row in without_inputs.rows if not row.converted)
    with pytest.raises(ValueError, match="'absent'.*embed, layer, lora"):
        fp8.quantize_model(Own(), X, include="absent")


class Block(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(0.3 * jax.random.normal(rngs.params(), (8, 8)))
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.layer(x @ self.w))


class Stack(nnx.Module):
    def __init__(self, how):
        self.how = how
        self.blocks = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))

    def __call__(self, x):
        if self.how == "vmap":
            return nnx.vmap(lambda block, x: block(x), in_axes=(0, None))(self.blocks, x).sum(0)
        step = nnx.remat(lambda x, block: block(x))
        return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


@pytest.mark.parametrize("how", ["remat in scan", pytest.param("vmap", marks=pytest.mark.long)])
def test_stacked_modules(how):
    model = Stack(how)
    model8 = fp8.quantize_model(model, X, include=".*")
    assert {op.input_scale.shape for op in ops_of(model8).values()} == {(3, 1)}
    assert_in_fp8(model8, model, X)
    grads = nnx.jit(fp8nnx.grad(lambda m: jnp.sum(m(X) ** 2)))(model8)
    assert all(np.asarray(x[...]).max() > 0 for path, x in histories(grads).items() if "history" in path)
    report = fp8.report(model8, X)
    assert report.fp8_share == 1
    assert sum(row.flops for row in report.rows) == 3 * 2 * (2 * 4 * 8 * 8)
    assert how == "vmap" or {row.count for row in report.rows} == {3}
    random = fp8.quantize_model(model, fp8.NVFP4BlockScaling(), X, include=".*", rngs=nnx.Rngs(0))
    assert {op.rngs.key.shape for op in ops_of(random).values()} == {(3,)}


class Experts(nnx.Module):
    """One parameter in a ragged dot, in an einsum, and in places that are not looked into."""

    def __init__(self):
        self.w = param(2, 8, 8)

    def __call__(self, x):
        x = jax.lax.ragged_dot(x, self.w[...], jnp.array([1, 3]))
        x = jnp.einsum("bi,eio->bo", x, self.w[...])
        x, _ = jax.lax.scan(lambda x, _: (x @ self.w[0], None), x, length=2)
        return jax.checkpoint(lambda x: x @ self.w[1])(x)


def test_experts_and_places_that_are_not_looked_into():
    model8 = fp8.quantize_model(Experts(), X, include=".*")
    assert set(ops_of(model8)) == {"fp8_ragged_dot_w", "fp8_w"}
    assert model8.fp8_ragged_dot_w.kernel_scale.shape == (2, 1)
    assert_in_fp8(model8, Experts(), X)
    report = fp8.report(model8, X)
    assert [row.kernel for row in report.rows] == ["w", "w"]
    assert len(report.unseen) == 2


def test_products_of_activations():
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    x = X[None]
    report = fp8.report(fp8.quantize_model(attention, x, include=".*"), x)
    assert [row.converted for row in report.rows].count(False) == 2
    both = fp8.quantize_model(attention, x, include=".*", products=True)
    assert fp8.report(both, x).fp8_share == 1
    assert_in_fp8(both, attention, x)
    jax.grad(lambda x: jnp.sum(both(x)))(x)  # trains nothing: no warning


class OwnDerivative(nnx.Module):
    def __init__(self):
        self.block = Block(nnx.Rngs(0))

    def __call__(self, x):
        f = nnx.custom_vjp(lambda block, x: block(x))
        f.defvjp(lambda block, x: (f(block, x), x), lambda x, g: (None, g))
        return f(self.block, x)


def test_in_nnx_custom_vjp():
    """An op there could not update its state; it is refused as in Linen."""
    for include, path in (("block/w", "block"), ("block/layer", "block/layer")):
        with pytest.raises(ValueError, match=f"'{path}' .*custom_vjp.*exclude="):
            fp8.quantize_model(OwnDerivative(), X, include=include)


def test_a_failed_call_leaves_no_trace():
    class Fails(Own):
        def __call__(self, x):
            super().__call__(x)
            raise ArithmeticError

    model = Fails()
    before = jax.make_jaxpr(jnp.tanh)(X)
    with pytest.raises(ArithmeticError):
        fp8.quantize_model(model, X, include=".*")
    assert type(model) is Fails
    assert str(jax.make_jaxpr(jnp.tanh)(X)) == str(before)
    assert jax.eval_shape(lambda x: x @ x.T, X).shape == (4, 4)


def test_nothing_to_convert():
    for inputs in ((), (X,)):
        with pytest.raises(ValueError, match="no contraction"):
            fp8.quantize_model(nnx.LayerNorm(8, rngs=nnx.Rngs(0)), *inputs)

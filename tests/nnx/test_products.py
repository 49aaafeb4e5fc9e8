"""``quantize_model`` of NNX with inputs finds the contractions that modules write out."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests.cases import mesh, normal
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
    """One parameter in a ragged dot, an einsum, ``jax.checkpoint``, and a loop that is not looked into."""

    def __init__(self):
        self.w = param(2, 8, 8)

    def __call__(self, x):
        x = jax.lax.ragged_dot(x, self.w[...], jnp.array([1, 3]))
        x = jnp.einsum("bi,eio->bo", x, self.w[...])
        x, _ = jax.lax.scan(lambda x, _: (x @ self.w[0], None), x, length=2)
        return jax.checkpoint(lambda x: x @ self.w[1])(x)


def test_experts_and_places_that_are_not_looked_into():
    model8 = fp8.quantize_model(Experts(), X, include=".*")
    assert set(ops_of(model8)) == {"fp8-ragged_dot-w", "fp8_w", "fp8_w-axis0-1"}
    assert ops_of(model8)["fp8-ragged_dot-w"].kernel_scale.shape == (2, 1)
    assert_in_fp8(model8, Experts(), X)
    report = fp8.report(model8, X)
    assert [(row.kernel, row.count) for row in report.rows] == [("w", 1), ("w", 1), (None, 2), ("w", 1)]
    assert "inside of scan" in report.rows[2].reason
    flops = [row.flops for row in report.rows]
    assert report.fp8_share == (sum(flops) - flops[2]) / sum(flops)


def test_products_of_activations():
    attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    x = X[None]
    report = fp8.report(fp8.quantize_model(attention, x, include=".*"), x)
    assert [row.converted for row in report.rows].count(False) == 2
    both = fp8.quantize_model(attention, x, include=".*", products=True)
    assert fp8.report(both, x).fp8_share == 1
    assert_in_fp8(both, attention, x)
    jax.eval_shape(jax.grad(lambda x: jnp.sum(both(x))), x)  # trains nothing: no warning


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


class Written(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel[...]


class Summed(nnx.Linear):
    def __call__(self, x):
        return jnp.einsum("io,bi->bo", self.kernel[...], x)


class Inherited(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x)


class Parent(nnx.Module):
    """Multiplies by the kernel of a layer that it does not call; another method calls another layer."""

    def __init__(self):
        self.layer, self.other = (nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(2))

    def __call__(self, x):
        return x @ self.layer.kernel[...]

    def decode(self, x):
        return self.other(x)


class TestOnlyWhatRuns:
    """The op of a layer counts as one only if the layer calls it."""

    @pytest.mark.parametrize("cls", [Written, Summed, Inherited])
    def test_classes_of_layers(self, cls):
        by_hand = nnx.Linear(8, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        model8 = fp8.quantize_model(cls(8, 8, rngs=nnx.Rngs(0)), X, include=".*")
        assert len(ops_of(model8)) == 1
        np.testing.assert_array_equal(model8(X), by_hand(X))
        assert fp8.report(model8, X).fp8_share == 1
        pair = nnx.List([cls(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0))])
        model8 = fp8.quantize_model(nnx.Sequential(*pair), include=".*")
        assert set(ops_of(model8)) == {"layers/1/dot_general"}
        wide, converted = fp8.report(model8, X).rows
        assert ("inputs" in wide.reason, converted.converted) == (True, True)

    def test_a_parent_that_multiplies(self):
        model = Parent()
        model8 = fp8.quantize_model(model, X, include=".*")
        assert set(ops_of(model8)) == {"fp8_layer-kernel", "other/dot_general"}
        assert_in_fp8(model8, model, X)
        row, not_run = fp8.report(model8, X).rows
        assert (row.kernel, row.converted) == ("layer/kernel", True)
        assert (not_run.path, not_run.converted, not_run.count, not_run.flops) == ("other", False, 0, 0)
        assert not_run.reason == "its op did not run in this call"
        without = fp8.report(fp8.quantize_model(model, include=".*"), X)
        assert [row.path for row in without.rows if row.reason == not_run.reason] == ["layer", "other"]
        assert without.fp8_share == 0

    def test_ops_by_hand(self):
        class ByHand(nnx.Module):
            def __init__(self):
                self.op, self.w = fp8nnx.Fp8DotGeneralOp(), param(8, 8)
                self.layer = Written(8, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))

            def __call__(self, x):
                return self.layer(self.op(x, self.w[...], (((1,), (0,)), ((), ()))))

        rows = fp8.report(fp8.quantize_model(ByHand(), X, include="absent", allow_unmatched=True), X).rows
        assert [(row.path, row.converted, row.count) for row in rows] == [
            *(("", True, 1), ("layer", False, 1), ("layer", False, 0))
        ]

    def test_two_ops_by_hand_in_one_module(self):
        """Each has a row, also if their operands have the same shapes."""

        class Two(nnx.Module):
            def __init__(self):
                self.first, self.second, self.w = (
                    fp8nnx.Fp8DotGeneralOp(),
                    fp8nnx.Fp8DotGeneralOp(),
                    param(8, 8),
                )

            def __call__(self, x):
                dims = ((1,), (0,)), ((), ())
                return self.second(self.first(x, self.w[...], dims), self.w[...], dims)

        rows = fp8.report(fp8.quantize_model(Two(), X, include="absent", allow_unmatched=True), X).rows
        assert [(row.path, row.converted, row.count) for row in rows] == [("", True, 1)] * 2


class Child(nnx.Module):
    def __init__(self):
        self.w = param(8, 8)

    def kernel(self):
        return self.w.T

    def __call__(self, x):
        return x @ x.T @ x @ self.w


def test_the_contractions_are_those_that_were_decided():
    """A child that stays wide takes no op of its parent, which multiplies by what the child returns."""

    class Family(nnx.Module):
        def __init__(self):
            self.child, self.child_w = Child(), param(8, 8, seed=2)

        def __call__(self, x):
            x = self.child(x) @ self.child_w @ self.child.kernel()
            return x @ x.T @ x

    model, x = Family(), jnp.asarray(X)
    model8 = fp8.quantize_model(model, x, products=True, include="^$|child_w|child/w", exclude="^child$")
    assert set(ops_of(model8)) == {f"fp8_{x}" for x in ("child_w", "child-w-T", "product_0", "product_1")}
    np.testing.assert_array_equal(model8.child(x), model.child(x))
    grads = fp8nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model8)
    assert all(np.asarray(g[...]).max() > 0 for path, g in histories(grads).items() if "history" in path)


class Decorated(nnx.Module):
    def __init__(self, how):
        self.first, self.w, self.layer = param(8, 8), param(8, 8), nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.how = how

    def plain(self, x):
        return self.layer(jnp.tanh(x @ self.w))

    remat, nnx_jit, jax_jit = nnx.remat(plain), nnx.jit(plain), jax.jit(plain)
    scan = nnx.scan(plain, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=2)

    def __call__(self, x):
        return getattr(self, self.how)(x @ self.first) @ self.w


@pytest.mark.parametrize("how", ["remat", "nnx_jit", "jax_jit"])
def test_decorated_methods(how):
    expected, model8 = (fp8.quantize_model(Decorated(name), X, include=".*") for name in ("plain", how))
    assert set(ops_of(model8)) == set(ops_of(expected)) == {"fp8_first", "fp8_w", "layer/dot_general"}

    def step(model):
        return fp8nnx.value_and_grad(lambda m: jnp.sum(m(X) ** 2))(model)

    (loss, grads), (right, right_grads) = nnx.jit(step)(model8), nnx.jit(step)(expected)
    np.testing.assert_allclose(loss, right, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, right_grads)
    assert fp8.report(model8, X).fp8_share == 1


def test_random_rounding_in_a_remat_of_a_method():
    """NNX draws no random numbers in another trace than that of the model."""
    options = {"include": ".*", "rngs": nnx.Rngs(0)}
    model8 = fp8.quantize_model(Decorated("remat"), fp8.NVFP4BlockScaling(), X, **options)
    grad = nnx.jit(nnx.grad(lambda m: jnp.sum(m(X) ** 2)))
    first, second = (grad(model8).w[...] for _ in range(2))
    assert np.isfinite(first).all()
    assert (first != second).any()


def test_a_scan_of_a_method_counts():
    report = fp8.report(fp8.quantize_model(Decorated("scan"), X, include=".*"), X)
    assert [(row.kernel, row.count, row.converted) for row in report.rows] == [
        *(("first", 1, True), (None, 2, False), ("layer/kernel", 2, True), ("w", 1, True))
    ]
    assert report.fp8_share == 4 / 6


class Contractions(nnx.Module):
    """Contractions that an op would compute with other operands, axes or precisions."""

    def __init__(self):
        self.w, self.experts = param(8, 16, 32), param(3, 24, 32)
        self.layer = nnx.Einsum("oij,bij->bo", (8, 16, 32), rngs=nnx.Rngs(0))
        self.conv = nnx.Conv(24, 24, (1,), rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = jnp.einsum("oij,bij->bo", x, self.w[...], precision=("highest", "default"))
        y = self.conv(self.layer(x) + y)
        return jax.lax.ragged_dot(
            y @ self.experts[1] @ self.experts[1].T, self.experts[...], jnp.array([2, 3, 2])
        )


def test_switched_off_is_bit_equal():
    model, x = Contractions(), normal(3, 24, 16, 32)
    model8 = fp8.quantize_model(model, x, include=".*")
    run = nnx.jit(lambda m, x: m(x))
    assert (model8(x) != model(x)).any()
    with fp8.autocast(enabled=False):
        np.testing.assert_array_equal(model8(x), model(x))
        np.testing.assert_array_equal(run(model8, x), run(model, x))
        assert not fp8.report(model8, x).converted


def test_products_with_the_sharding_of_their_results():
    """The op shards its result as the model says; kernels on the left stay wide, with a reason."""

    class Sharded(nnx.Module):
        def __init__(self):
            self.w, self.left = param(16, 8), param(4, 4)

        def __call__(self, x):
            y = jnp.matmul(x, self.w[...], out_sharding=P(None, "model"))
            return jnp.matmul(self.left[...], y, out_sharding=P(None, "model"))

    x = normal(0, 4, 16)
    with jax.set_mesh(mesh(AxisType.Explicit, model=2)):
        model = fp8.quantize_model(Sharded(), x, recipe=fp8.Float8CurrentScaling(), include=".*")
        out, frozen = model(x), fp8.freeze(model, x)
        assert jax.typeof(out).sharding.spec == P(None, "model")
        np.testing.assert_array_equal(frozen(x), out)
        of_w, of_left = fp8.report(model, x).rows
    assert (of_w.converted, of_left.converted) == (True, False)
    assert "on the left" in of_left.reason
    assert set(ops_of(model)) == {"fp8_w"}
    here = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())(
        x, model.w[...], (((1,), (0,)), ((), ()))
    )
    np.testing.assert_allclose(out, model.left[...] @ here, rtol=1e-5, atol=1e-5)


class Named(nnx.Module):
    """Writes out a product with ``w``, and has an attribute that the op of the product would overwrite."""

    def __init__(self):
        self.w, self.fp8_w = (nnx.Param(normal(i, 8, 8)) for i in range(2))

    def __call__(self, x):
        return x @ self.w


def test_an_attribute_with_the_name_of_an_op():
    with pytest.raises(ValueError, match="has an attribute 'fp8_w'.*another name"):
        fp8.quantize_model(Named(), normal(2, 4, 8), include=".*")


class Online(nnx.Module):
    """A network and its target, whose call writes out a product, too."""

    def __init__(self):
        self.network, self.target, self.w = Named(), Named(), nnx.Param(normal(3, 8, 8))
        del self.network.fp8_w, self.target.fp8_w

    def __call__(self, x):
        return self.network(x), self.target(x), x @ self.w


def test_two_parameters_that_hold_one_array():
    """``nnx.update`` puts the arrays of one network into another. Each product has its op, also eagerly."""
    x = normal(3, 4, 8)
    model8 = fp8.quantize_model(Online(), x, recipe=fp8.Float8CurrentScaling(), include=".*")
    nnx.update(model8.target, nnx.state(model8.network, nnx.Param))
    for first, second, _ in (model8(x), nnx.jit(lambda model, x: model(x))(model8, x)):
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(first, x @ model8.network.w.get_value())

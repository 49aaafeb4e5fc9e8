"""A kind of quantizer of one's own: one class, outside of the package, in every contraction."""

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import fp8flax as fp8
from fp8flax._core.formats import fp8_max
from fp8flax._core.gemm import cuda
from fp8flax._core.gemm.gpus import compile_target

WIDTH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowBlocks(fp8.Quantizer):
    """1×64 blocks along the contraction, with scales in E5M2, rounded up."""

    dtype: Any = jnp.float8_e4m3fn
    scale_dtype: ClassVar[Any] = jnp.float8_e5m2

    def quantize(self, x, view, delayed_scale=None):
        blocks = self._blocks(view.to_matrix(x).astype(jnp.float32))
        amax = jnp.max(jnp.abs(blocks), axis=3)
        # The next E5M2 above the scale: 2 bits of mantissa, so at most a quarter more.
        scale = (jnp.maximum(amax, 2.0**-8) / fp8_max(self.dtype) * 1.25).astype(self.scale_dtype)
        codes = fp8.quantize(blocks, self.dtype, scale.astype(jnp.float32)[..., None])
        return fp8.QTensor(codes, scale, self)

    def dequantize(self, q, view, dtype):
        blocks = q.codes.astype(jnp.float32) * q.scale.astype(jnp.float32)[..., None]
        _, rows, columns = view.matrix_shape
        matrix = blocks.reshape(*blocks.shape[:2], -1)[:, :rows, :columns]
        return view.from_matrix(matrix).astype(dtype)

    def pack(self, q, view):
        _, rows, columns = view.matrix_shape
        matrix = q.codes.reshape(*q.codes.shape[:2], -1)[:, :rows, :columns]
        return dataclasses.replace(q, codes=view.from_matrix(matrix))

    def unpack(self, q, view):
        return dataclasses.replace(q, codes=self._blocks(view.to_matrix(q.codes)))

    @staticmethod
    def _blocks(matrix):
        batch, rows, columns = matrix.shape
        padded = jnp.pad(matrix, ((0, 0), (0, 0), (0, -columns % WIDTH)))
        return padded.reshape(batch, rows, -1, WIDTH)


def reference(x, axis):
    """Quantizes an array along an axis and dequantizes it, in NumPy, by the description above."""
    rows = np.moveaxis(np.asarray(x, np.float32), axis, -1)
    padded = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % WIDTH)])
    blocks = padded.reshape(*rows.shape[:-1], -1, WIDTH)
    amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), np.float32(2.0**-8))
    scale = (amax / np.float32(448) * np.float32(1.25)).astype(jnp.float8_e5m2).astype(np.float32)
    left = np.clip(blocks / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(np.float32) * scale
    return np.moveaxis(left.reshape(padded.shape)[..., : rows.shape[-1]], -1, axis)


OWN = fp8.GemmRecipe(lhs=RowBlocks(), rhs=RowBlocks())
RECIPE = fp8.CustomRecipe(forward=OWN, dgrad=OWN, wgrad=OWN)
RNG = np.random.default_rng(0)
X, W, G = (RNG.normal(size=shape).astype(np.float32) for shape in ((48, 80), (80, 32), (48, 32)))


def test_all_three_products_have_its_values():
    op = fp8.Fp8DotGeneralOp(recipe=RECIPE)
    out, vjp = jax.vjp(lambda x, w: op.apply({}, x, w, (((1,), (0,)), ((), ()))), X, W)
    dx, dw = vjp(jnp.asarray(G))
    np.testing.assert_allclose(out, reference(X, 1) @ reference(W, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, reference(G, 1) @ reference(W, 1).T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, reference(X, 0).T @ reference(G, 0), rtol=1e-5, atol=1e-5)


def test_experts_have_its_values():
    kernels, sizes = np.stack([W, 2 * W[::-1]]), np.array([20, 28])
    out = fp8.Fp8RaggedDotOp(recipe=RECIPE).apply({}, X, kernels, sizes)
    x, w = reference(X, 1), [reference(kernel, 0) for kernel in kernels]
    np.testing.assert_allclose(out, np.concatenate([x[:20] @ w[0], x[20:] @ w[1]]), rtol=1e-5, atol=1e-5)


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernels = self.param("kernels", nn.initializers.lecun_normal(), (2, x.shape[-1], 8))
        return fp8.Fp8RaggedDotOp(recipe=RECIPE)(x, kernels, jnp.array([20, 28]))


def conv(**options):
    return nn.Conv(
        8, conv_general_dilated_cls=lambda: fp8.Fp8ConvGeneralDilatedOp(recipe=RECIPE), **options
    )


LAYERS = {
    "Dense": nn.Dense(8, dot_general_cls=lambda: fp8.Fp8DotGeneralOp(recipe=RECIPE)),
    "Conv": nn.Sequential([lambda x: x.reshape(-1, 8, 10, 1), conv(kernel_size=(4, 5), strides=(4, 5))]),
    "ragged dot": Experts(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_it_trains(name):
    layer = LAYERS[name]
    state = fp8.TrainState.create(
        apply_fn=layer.apply, params=layer.init(jax.random.key(0), X), tx=optax.sgd(0.2)
    )

    @jax.jit
    def step(state):
        def loss(variables):
            return jnp.mean((layer.apply(variables, X) - 0.5) ** 2)

        value, grads = fp8.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    losses = []
    for _ in range(20):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def test_a_convolution_of_overlapping_windows_says_what_it_takes():
    with pytest.raises(ValueError, match="takes one scale per tensor"):
        conv(kernel_size=(3, 3)).init(jax.random.key(0), jnp.ones((1, 8, 8, 4)))


def test_it_is_kept_under_remat():
    layer = nn.remat(nn.Dense, policy=jax.checkpoint_policies.save_only_these_names(*fp8.RESIDUAL_NAMES))(
        8, dot_general_cls=lambda: fp8.Fp8DotGeneralOp(recipe=RECIPE)
    )
    plain = LAYERS["Dense"]
    variables = plain.init(jax.random.key(0), X)

    def gradient(layer):
        return jax.jit(jax.grad(lambda v: jnp.sum(jnp.sin(layer.apply(v, X)))))(variables)

    jax.tree.map(np.testing.assert_array_equal, gradient(layer), gradient(plain))


def test_it_is_frozen():
    layer = LAYERS["Dense"]
    variables = layer.init(jax.random.key(0), X)
    served, served_variables = fp8.freeze(layer, variables, X)
    assert served_variables["params"]["kernel"].dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(served.apply(served_variables, X), layer.apply(variables, X))


class TestErrors:
    def test_state_is_that_of_delayed_scaling_alone(self):
        with pytest.raises(TypeError, match="Own cannot have scaling state"):

            class Own(fp8.DelayedQuantizer):
                pass

    def test_what_could_be_changed(self):
        class Mutable(fp8.Quantizer):
            dtype = jnp.float8_e4m3fn

        gemm = fp8.GemmRecipe(lhs=Mutable(), rhs=Mutable())
        with pytest.raises(TypeError, match=r"a quantizer must be frozen.*is not a dataclass"):
            fp8.Fp8DotGeneralOp(recipe=fp8.CustomRecipe(forward=gemm))

    def test_what_has_no_hash(self):
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class WithList(RowBlocks):
            widths: list = dataclasses.field(default_factory=list)

        gemm = fp8.GemmRecipe(lhs=WithList(), rhs=WithList())
        with pytest.raises(
            TypeError, match="a quantizer must be frozen.*has a field widths that cannot be"
        ):
            fp8.Fp8DotGeneralOp(recipe=fp8.CustomRecipe(forward=gemm))

    @pytest.mark.parametrize("name", ["codes", "scale"])
    def test_dtypes_that_it_did_not_say(self, name):
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Wrong(RowBlocks):
            def quantize(self, x, view, delayed_scale=None):
                q = super().quantize(x, view)
                return dataclasses.replace(q, **{name: getattr(q, name).astype(jnp.bfloat16)})

        gemm = fp8.GemmRecipe(lhs=Wrong(), rhs=Wrong())
        op = fp8.Fp8DotGeneralOp(recipe=fp8.CustomRecipe(forward=gemm))
        with pytest.raises(TypeError, match="must return codes in its dtype and scales in its scale_dtype"):
            op.apply({}, X, W, (((1,), (0,)), ((), ())))

    def test_a_kernel_that_is_not_packed(self):
        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Unpacked(RowBlocks):
            def pack(self, q, view):
                return q

        gemm = fp8.GemmRecipe(lhs=Unpacked(), rhs=Unpacked())
        layer = nn.Dense(
            8, dot_general_cls=lambda: fp8.Fp8DotGeneralOp(recipe=fp8.CustomRecipe(forward=gemm))
        )
        with pytest.raises(ValueError, match="Define pack and unpack"):
            fp8.freeze(layer, layer.init(jax.random.key(0), X), X)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NarrowScale(fp8.Quantizer):
    """One scale per tensor, in a dtype that does not hold the product of two."""

    dtype: Any = jnp.float8_e4m3fn
    scale_dtype: ClassVar[Any] = jnp.float16
    scales_along_contraction: ClassVar[bool] = False

    def quantize(self, x, view, delayed_scale=None):
        scale = (jnp.max(jnp.abs(x)) / 448).astype(self.scale_dtype)
        return fp8.QTensor(fp8.quantize(x, self.dtype, scale.astype(jnp.float32)), scale, self)


@pytest.mark.parametrize("capability", [None, 9.0])
def test_scales_are_multiplied_in_float32(capability, monkeypatch):
    """Also as the lowering for GPUs does it."""
    if capability is not None:
        monkeypatch.setattr(lax, "platform_dependent", lambda *args, cuda, default: cuda(*args))
        monkeypatch.setattr(cuda, "dot", lambda _, x, w, precision, t: x.astype(t) @ w.astype(t))
    gemm = fp8.GemmRecipe(lhs=NarrowScale(), rhs=NarrowScale())
    op = fp8.Fp8DotGeneralOp(recipe=fp8.CustomRecipe(forward=gemm))
    with compile_target(capability):
        out = op.apply({}, 0.02 * X, 0.02 * W, (((1,), (0,)), ((), ())))
    np.testing.assert_allclose(out, 0.0004 * X @ W, atol=1e-3)
    assert np.max(np.abs(out)) > 5e-3

"""NNX models written as other code bases write them, at small sizes, each named after its model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.cases import normal

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 8)), jnp.int32)
IMAGES, TEXT = normal(0, 2, 8, 8, 3), normal(1, 2, 8, 16)
linear = functools.partial(nnx.Linear, use_bias=False, rngs=nnx.Rngs(0))


def param(*shape):
    return nnx.Param(normal(sum(shape), *shape) / shape[-2] ** 0.5)


class Einsum(nnx.Module):
    """Tunix's: a method in a decorator."""

    def __init__(self, equation, shape, rngs=None):
        self.equation, self.w = equation, param(*shape)

    @jax.named_scope("einsum")
    def __call__(self, x):
        return jnp.einsum(self.equation, x, jnp.astype(self.w[...], x.dtype))


class Cache(nnx.Module):
    """Bonsai's: a module among the inputs, which the model changes."""

    def __init__(self):
        self.k, self.v = (nnx.Cache(jnp.zeros((2, 8, 1, 8))) for _ in range(2))

    def put(self, k, v):
        self.k.set_value(self.k[...] + k)
        self.v.set_value(self.v[...] + v)
        return self.k[...], self.v[...]


class Attention(nnx.Module):
    def __init__(self, einsum):
        self.q = einsum("BTD,DNH->BTNH", (16, 2, 8), rngs=nnx.Rngs(0))
        self.k, self.v = (einsum("BSD,DKH->BSKH", (16, 1, 8), rngs=nnx.Rngs(i)) for i in (1, 2))
        self.o = einsum("BTNH,NHD->BTD", (2, 8, 16), rngs=nnx.Rngs(3))

    def __call__(self, x, cache):
        q, k, v = self.q(x)[:, :, None], self.k(x), self.v(x)
        if cache is not None:
            k, v = cache.put(k, v)
        weights = jnp.where(jnp.tri(8, dtype=bool), jnp.einsum("BTKGH,BSKH->BKGTS", q, k), -1e9)
        return self.o(jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(weights), v)[:, :, 0])


class Gated(nnx.Module):
    def __init__(self):
        self.gate, self.up, self.down = linear(16, 32), linear(16, 32), linear(32, 16)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """Tunix's, without a mesh: a product for each index into a parameter."""

    def __init__(self):
        self.router, self.up, self.down = linear(16, 2), param(2, 16, 32), param(2, 32, 16)

    def __call__(self, x):
        up = [jnp.einsum("BTD,DF->BTF", x, self.up[i]) for i in range(2)]
        outs = [jnp.einsum("BTF,FD->BTD", nnx.silu(h), self.down[i]) for i, h in enumerate(up)]
        return jnp.sum(jax.nn.softmax(self.router(x))[..., None, :] * jnp.stack(outs, -1), -1)


class Decoder(nnx.Module):
    def __init__(self, einsum, mlp, remat):
        self.norm, self.attention = nnx.RMSNorm(16, rngs=nnx.Rngs(0)), Attention(einsum)
        self.mlp, self.remat = mlp(), remat

    def block(self, x, cache):
        x = x + self.attention(self.norm(x), cache)
        return x + self.mlp(x)

    def __call__(self, x, cache):
        if not self.remat:
            return self.block(x, cache)
        graphdef, state = nnx.split(self)
        return jax.checkpoint(lambda state, x: nnx.merge(graphdef, state).block(x, None))(state, x)


class LanguageModel(nnx.Module):
    def __init__(self, einsum=Einsum, mlp=Gated, remat=False):
        self.embedding, self.layers = param(32, 16), nnx.List([Decoder(einsum, mlp, remat)])

    def __call__(self, tokens, *, cache=None):
        x = self.embedding[(tokens,)]
        for layer in self.layers:
            x = layer(x, cache)
        return jnp.tanh(jnp.dot(x, self.embedding[...].T) / 30) * 30


class Mamba2(nnx.Module):
    def __init__(self):
        self.embed, self.a = nnx.Embed(32, 16, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(2))
        self.into, self.out = linear(16, 48), linear(16, 16)
        self.conv = nnx.Conv(32, 32, (4,), padding="CAUSAL", feature_group_count=32, rngs=nnx.Rngs(0))

    def __call__(self, tokens):
        z, x = jnp.split(self.into(self.embed(tokens)), [16], -1)
        x, b, c = (y.reshape(2, 8, 2, -1) for y in jnp.split(self.conv(x), [16, 24], -1))
        decay = jnp.exp(-jnp.tri(8)[None] * self.a[:, None, None])
        y = jnp.einsum("blhn,bshn,hls,bshp->blhp", b, c, decay, x).reshape(2, 8, 16)
        return self.out(y * nnx.silu(z)) @ self.embed.embedding[:].T


class DenseNet(nnx.Module):
    """Bonsai's, with the dropout and the functions in fields of Flax's MNIST example."""

    def __init__(self):
        self.conv1, self.conv3 = (nnx.Conv(3, 16, (n, n), rngs=nnx.Rngs(n)) for n in (1, 3))
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=nnx.Rngs(0)), nnx.Dropout(0.02, rngs=nnx.Rngs(0))
        self.pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.patches, self.head = nnx.Conv(32, 32, (2, 2), (2, 2), rngs=nnx.Rngs(0)), linear(128, 10)

    def __call__(self, x):
        x = jnp.concatenate([self.norm(self.conv1(x)), self.dropout(self.conv3(x))], -1)
        return self.head(self.patches(self.pool(x)).reshape(2, -1))


class Towers(nnx.Module):
    """CLIP's loss of two towers, one with an RNN, and the logits of Flax's attention with its embedding."""

    def __init__(self):
        self.embed, self.scale = nnx.Embed(32, 16, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones(()))
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0))
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(16, 16, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))

    def __call__(self, tokens, x):
        text, image = self.attention(self.embed(tokens))[:, -1], self.rnn(x)[:, -1]
        return jnp.exp(self.scale[...]) * self.embed.attend(text @ image.T @ image)


# A model, its inputs, its keyword inputs, and how many of its contractions run in FP8.
MODELS = {
    "Tunix Llama 3, remat": lambda: (LanguageModel(remat=True), (TOKENS,), {}, 8),
    "Tunix Qwen3-MoE": lambda: (LanguageModel(mlp=Experts), (TOKENS,), {}, 10),
    "Tunix Gemma 3": lambda: (LanguageModel(), (TOKENS,), {"cache": None}, 8),
    "Bonsai Qwen3": lambda: (LanguageModel(nnx.Einsum), (TOKENS,), {"cache": Cache()}, 8),
    "Bonsai Mamba 2": lambda: (Mamba2(), (TOKENS,), {}, 5),
    "Bonsai DenseNet": lambda: (DenseNet(), (IMAGES,), {}, 4),
    "JIMM CLIP": lambda: (Towers(), (TOKENS, TEXT), {}, 7),
}

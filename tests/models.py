"""Models to convert, each also with ops that are set by hand; and a small language model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fp8flax as fp8
from tests.cases import OWG, variables_of

ALL = {"include": ".*"}


class Einsum(nn.Module):
    """A layer like ``nn.Einsum`` that calls ``Fp8Einsum``, named as in a converted model.

    ``cls`` is ``Fp8DotGeneralOp``, alone or with options, which the einsum then has; None for no FP8.
    """

    shape: tuple[int, ...]
    einsum_str: str
    cls: object = None
    use_bias: bool = False
    dtype: object = None

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), self.shape)
        bias = self.param("bias", nn.initializers.zeros, self.shape[-1:]) if self.use_bias else None
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias, dtype=self.dtype)
        einsum = jnp.einsum
        if self.cls is not None:
            einsum = fp8.Fp8Einsum(**getattr(self.cls, "keywords", {}), name="Fp8DotGeneralOp_0")
        y = einsum(self.einsum_str, x, kernel)
        return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


class Layers(nn.Module):
    """Linen's own layers; each takes its op by another argument."""

    cls: type | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dot_general_cls=self.cls)(x)
        x = nn.DenseGeneral((2, 8), dot_general_cls=self.cls)(x)
        return Einsum((2, 8, 6), "...hd,hdo->...o", self.cls, use_bias=True)(x)


class LinensEinsum(nn.Module):
    """The same model with Linen's Einsum."""

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 8))(nn.Dense(8)(x))
        return nn.Einsum((2, 8, 6), "...hd,hdo->...o")(x)


class Attention(nn.Module):
    cls: type | None = None

    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(
            2, qkv_dot_general_cls=self.cls, out_dot_general_cls=self.cls
        )(x)


class Patches(nn.Module):
    cls: type | None = None

    @nn.compact
    def __call__(self, x):
        options = {"conv_general_dilated_cls": self.cls} if self.cls else {}
        return nn.Conv(8, (2, 2), strides=(2, 2), **options)(x[..., None])


class Own(nn.Module):
    """A layer of a user: with operators, einsum or lax; the kernel is cast, transposed, or on the left."""

    cls: type | None = None

    @nn.compact
    def __call__(self, x):
        weights = [
            self.param(name, nn.initializers.lecun_normal(), (8, 8), jnp.float32) for name in "abcde"
        ]
        a, b, c, d, e = (w.astype(x.dtype) for w in weights)
        if self.cls is None:
            x = x @ a
            x = jnp.einsum("...i,oi->...o", x, b)
            x = lax.dot_general(x, c, (((x.ndim - 1,), (0,)), ((), ())))
            x = jnp.dot(x, d.T)
            return jnp.swapaxes(jnp.einsum("oi,...ti->...ot", e, x), -1, -2)
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        x = self.op("a")(x, a, dims)
        x = self.op("b-T")(x, b, (((x.ndim - 1,), (1,)), ((), ())))
        x = self.op("c")(x, c, dims)
        x = self.op("d-T")(x, d.T, dims)
        return self.op("e-T")(x, e, (((x.ndim - 1,), (1,)), ((), ())))

    def op(self, name):
        """An op that is named after its kernel, as in a converted layer."""
        return self.cls(name=f"{self.cls.__name__}_{name}")


class Body(nn.Module):
    cls: type | None = None

    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(x.shape[-1], dot_general_cls=self.cls)(x)), None


def in_scan(tied=False, remat=False):
    class Scanned(nn.Module):
        cls: type | None = None

        @nn.compact
        def __call__(self, x):
            state = {OWG: nn.broadcast if tied else 0} if self.cls else {}
            shared = nn.broadcast if tied else 0
            body = nn.remat(Body, prevent_cse=False) if remat else Body
            if tied:
                axes = {"variable_broadcast": ["params", *state], "split_rngs": {"params": False}}
            else:
                axes = {"variable_axes": {"params": shared, **state}, "split_rngs": {"params": True}}
            return nn.scan(body, length=3, **axes)(self.cls, name="layers")(x, None)[0]

    return Scanned


class Experts(nn.Module):
    """Three experts as one layer under nn.vmap."""

    cls: type | None = None

    @nn.compact
    def __call__(self, x):
        state = {OWG: 0} if self.cls else {}
        many = nn.vmap(
            nn.Dense, variable_axes={"params": 0, **state}, split_rngs={"params": True}, in_axes=None,
            axis_size=3,
        )  # fmt: skip
        return many(5, dot_general_cls=self.cls)(x)


class Lifted(nn.Module):
    """Layers inside nn.jit, and in one branch of nn.cond."""

    cls: type | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.jit(nn.Dense)(8, dot_general_cls=self.cls, name="first")(x)
        one, other = (nn.Dense(8, dot_general_cls=self.cls, name=name) for name in ("one", "other"))
        if self.is_initializing():
            return one(x) + other(x)
        return nn.cond(jnp.mean(x) > -100, lambda _, x: one(x), lambda _, x: other(x), self, x)


# name: (model, with ops by hand, what it is converted from)
MODELS = {
    "layers": (LinensEinsum, Layers, fp8.Fp8DotGeneralOp),
    "attention": (Attention, Attention, fp8.Fp8DotGeneralOp),
    "patches": (Patches, Patches, fp8.Fp8ConvGeneralDilatedOp),
    "own": (Own, Own, fp8.Fp8DotGeneralOp),
    "scan": (in_scan(),) * 2 + (fp8.Fp8DotGeneralOp,),
    "scan, tied": (in_scan(tied=True),) * 2 + (fp8.Fp8DotGeneralOp,),
    "remat in scan": (in_scan(remat=True),) * 2 + (fp8.Fp8DotGeneralOp,),
    "vmap": (Experts, Experts, fp8.Fp8DotGeneralOp),
    "jit and cond": (Lifted, Lifted, fp8.Fp8DotGeneralOp),
}


class Block(nn.Module):
    decode: bool = False

    @nn.compact
    def __call__(self, x, mask=None):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, decode=self.decode, name="attention")(h, mask=mask)
        h = nn.gelu(nn.Dense(4 * x.shape[-1], name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1], name="down")(h)


class LanguageModel(nn.Module):
    width: int = 32
    layers: int = 2
    vocabulary: int = 16
    decode: bool = False
    tied: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width)
        x = embed(tokens)
        mask = None if self.decode else nn.make_causal_mask(tokens)
        for i in range(self.layers):
            x = Block(self.decode, name=f"block_{i}")(x, mask)
        x = nn.LayerNorm()(x)
        return embed.attend(x) if self.tied else nn.Dense(self.vocabulary, name="lm_head")(x)


TOKENS = np.random.default_rng(0).integers(0, 16, (2, 8)).astype(np.int32)


def trained(model, *inputs, recipe=None, **options):
    """Returns a converted model with state that has seen data: amaxes from 2 to 3. Compiles nothing."""
    model8 = fp8.quantize_model(model, recipe, **{**ALL, "allow_unmatched": True, **options})
    variables = variables_of(model8, *inputs)
    rng = np.random.default_rng(2)

    def seen(path, leaf):
        if not path[-1].key.endswith("amax_history"):
            return leaf
        return leaf.at[..., 0].set(rng.uniform(2, 3, leaf.shape[:-1]).astype(leaf.dtype))

    if OWG in variables:
        variables = {**variables, OWG: jax.tree_util.tree_map_with_path(seen, variables[OWG])}
    return model8, variables

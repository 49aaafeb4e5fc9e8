"""The models of the demo in Flax Linen: a language model on bytes, and a classifier of film reviews.

``quantize_model`` converts both to FP8. Activations are bfloat16, parameters float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

VOCABULARY = 256


class Block(nn.Module):
    """Block of a Transformer: pre-norm self-attention and a GELU MLP."""

    width: int
    num_heads: int
    dot_general_cls: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps activations of shape ``(batch, length, width)`` to the same shape."""
        dense = partial(nn.Dense, dtype=self.dtype, dot_general_cls=self.dot_general_cls)
        h = nn.RMSNorm(dtype=self.dtype, name="attn_norm")(x)
        op = self.dot_general_cls
        attention = partial(nn.MultiHeadDotProductAttention, dtype=self.dtype, force_fp32_for_softmax=True)
        attention = partial(attention, qkv_dot_general_cls=op, out_dot_general_cls=op)
        x = x + attention(self.num_heads, name="attn")(h, mask=mask)
        h = nn.RMSNorm(dtype=self.dtype, name="mlp_norm")(x)
        h = nn.gelu(dense(4 * self.width, name="up")(h))
        return x + dense(self.width, name="down")(h)


class ByteTransformer(nn.Module):
    """Predicts the next byte at every position."""

    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    max_length: int = 128
    dot_general_cls: Any = None
    """The matmul of the linear layers, such as ``fp8flax.Fp8DotGeneralOp``; None is ``lax.dot_general``."""
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes of shape ``(batch, length)`` to float32 logits ``(batch, length, 256)``."""
        x = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, name="embed")(tokens)
        init = nn.initializers.normal(0.02)
        positions = self.param("positions", init, (self.max_length, self.width), jnp.float32)
        x = x + positions[None, : tokens.shape[1]].astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        block = partial(Block, self.width, self.num_heads, self.dot_general_cls, self.dtype)
        for i in range(self.num_layers):
            x = block(name=f"block_{i}")(x, mask)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        dense = partial(nn.Dense, dtype=self.dtype, dot_general_cls=self.dot_general_cls)
        return dense(VOCABULARY, name="logits")(x).astype(jnp.float32)


class ReviewDecoder(nn.Module):
    """Block of causal self-attention and a ReLU MLP, each with dropout, a residual sum and post-norm."""

    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations of shape ``(batch, length, width)`` to the same shape."""
        init, deterministic = nn.initializers.glorot_uniform(), not self.has_rng("dropout")
        dense = partial(nn.Dense, x.shape[-1], dtype=jnp.bfloat16, kernel_init=init)
        norm = partial(nn.LayerNorm, epsilon=1e-5, dtype=jnp.bfloat16)
        dropout = partial(nn.Dropout, self.dropout, deterministic=deterministic)
        attention = partial(
            nn.MultiHeadDotProductAttention, dtype=jnp.bfloat16, force_fp32_for_softmax=True
        )
        attention = partial(attention, kernel_init=init, dropout_rate=self.dropout, broadcast_dropout=False)
        h = attention(num_heads=2, deterministic=deterministic, name="attention")(
            x, mask=nn.make_causal_mask(x[..., 0])
        )
        x = norm()(x + dropout()(h))
        h = dense(name="down")(nn.relu(dense(name="up")(x)))
        return norm()(x + dropout()(h))


class ReviewClassifier(nn.Module):
    """Classifies reviews as positive or negative: one decoder, the mean over all positions, and an MLP.

    The model and its sizes are those of Keras's float8 example. Padding takes part in the attention and in
    the mean, as in that example. Dropout is applied if ``apply`` gets a key for it.
    """

    vocabulary: int = 20_000
    length: int = 200
    width: int = 32
    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens of shape ``(batch, length)`` to float32 logits ``(batch, 1)`` of being positive."""
        init = nn.initializers.normal(0.03)
        dense = partial(nn.Dense, dtype=jnp.bfloat16, kernel_init=nn.initializers.glorot_uniform())
        dropout = partial(nn.Dropout, self.dropout, deterministic=not self.has_rng("dropout"))
        x = nn.Embed(self.vocabulary, self.width, jnp.bfloat16, embedding_init=init, name="tokens")(tokens)
        positions = self.param("positions", init, (self.length, self.width), jnp.float32)
        x = dropout()(x + positions[None, : tokens.shape[1]].astype(x.dtype))
        x = ReviewDecoder(self.dropout, name="decoder")(x)
        x = dropout()(jnp.mean(x, axis=1))
        x = dropout()(nn.relu(dense(self.width, name="hidden")(x)))
        return dense(1, name="positive")(x).astype(jnp.float32)

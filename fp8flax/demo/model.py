"""A small decoder-only Transformer on bytes, whose linear layers take their matmul as an argument."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

VOCABULARY = 256


class Block(nn.Module):
    """Pre-norm self-attention and a GELU MLP."""

    width: int
    num_heads: int
    dot_general_cls: Any
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps activations of shape ``(batch, length, width)`` to the same shape."""
        h = nn.RMSNorm(dtype=self.dtype, name="attn_norm")(x)
        x = x + nn.MultiHeadDotProductAttention(
            self.num_heads,
            dtype=self.dtype,
            force_fp32_for_softmax=True,
            qkv_dot_general_cls=self.dot_general_cls,
            out_dot_general_cls=self.dot_general_cls,
            name="attn",
        )(h, mask=mask)
        h = nn.RMSNorm(dtype=self.dtype, name="mlp_norm")(x)
        h = nn.Dense(4 * self.width, dtype=self.dtype, dot_general_cls=self.dot_general_cls, name="up")(h)
        h = nn.gelu(h)
        h = nn.Dense(self.width, dtype=self.dtype, dot_general_cls=self.dot_general_cls, name="down")(h)
        return x + h


class ByteTransformer(nn.Module):
    """Predicts the next byte at every position.

    Attributes:
        width: size of the activations.
        num_layers: number of blocks.
        num_heads: attention heads per block.
        max_length: longest sequence.
        dot_general_cls: the matmul of every linear layer, such as ``fp8flax.Fp8DotGeneralOp``; None for
            ``lax.dot_general``.
        dtype: dtype of the activations; parameters are float32.
    """

    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    max_length: int = 128
    dot_general_cls: Any = None
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes of shape ``(batch, length)`` to float32 logits ``(batch, length, 256)``."""
        x = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, name="embed")(tokens)
        positions = self.param(
            "positions", nn.initializers.normal(0.02), (self.max_length, self.width), jnp.float32
        )
        x = x + positions[None, : tokens.shape[1]].astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        for i in range(self.num_layers):
            x = Block(self.width, self.num_heads, self.dot_general_cls, self.dtype, name=f"block_{i}")(
                x, mask
            )
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        logits = nn.Dense(
            VOCABULARY, dtype=self.dtype, dot_general_cls=self.dot_general_cls, name="logits"
        )(x)
        return logits.astype(jnp.float32)

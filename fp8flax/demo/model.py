"""The model of the demo in Flax Linen: a Transformer that predicts bytes or classifies texts.

``quantize_model`` converts it to FP8. Activations are bfloat16, parameters float32.
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
    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
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
    """Predicts the next byte at every position, or the class of a text of bytes or words."""

    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    max_length: int = 128
    dot_general_cls: Any = None
    """The matmul of the linear layers, such as ``fp8flax.Fp8DotGeneralOp``; None is ``lax.dot_general``."""
    dtype: Any = jnp.bfloat16
    vocabulary: int = VOCABULARY
    num_classes: int | None = None
    """The number of classes of a text; None predicts the next byte."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens of shape ``(batch, length)`` to float32 logits.

        The logits are ``(batch, length, 256)`` for the next byte, or ``(batch, num_classes)``.
        """
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, name="embed")(tokens)
        init = nn.initializers.normal(0.02)
        positions = self.param("positions", init, (self.max_length, self.width), jnp.float32)
        x = x + positions[None, : tokens.shape[1]].astype(self.dtype)
        mask = nn.make_causal_mask(tokens) if self.num_classes is None else None
        block = partial(Block, self.width, self.num_heads, self.dot_general_cls, self.dtype)
        for i in range(self.num_layers):
            x = block(name=f"block_{i}")(x, mask)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        dense = partial(nn.Dense, dtype=self.dtype, dot_general_cls=self.dot_general_cls)
        if self.num_classes is None:
            return dense(self.vocabulary, name="logits")(x).astype(jnp.float32)
        return dense(self.num_classes, name="classes")(jnp.mean(x, axis=1)).astype(jnp.float32)

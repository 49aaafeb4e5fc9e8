"""The model of the demo in Flax Linen: a Transformer that predicts bytes.

``quantize_model`` converts it to FP8. Activations are bfloat16, parameters float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

VOCABULARY = 256
Op: TypeAlias = Callable[[], nn.Module] | None
"""The matmul of the linear layers, such as ``fp8flax.Fp8DotGeneralOp``; None is ``lax.dot_general``."""


class Block(nn.Module):
    """Block of a Transformer: pre-norm self-attention and a GELU MLP."""

    width: int
    num_heads: int
    dot_general_cls: Op
    dtype: DTypeLike

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
    dot_general_cls: Op = None
    dtype: DTypeLike = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens of shape ``(batch, length)`` to float32 logits, ``(batch, length, 256)``."""
        x = nn.Embed(VOCABULARY, self.width, dtype=self.dtype, name="embed")(tokens)
        init = nn.initializers.normal(0.02)
        positions = self.param("positions", init, (self.max_length, self.width), jnp.float32)
        x = x + positions[None, : tokens.shape[1]].astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        block = partial(Block, self.width, self.num_heads, self.dot_general_cls, self.dtype)
        for i in range(self.num_layers):
            x = block(name=f"block_{i}")(x, mask)
        x = nn.RMSNorm(dtype=self.dtype, name="norm")(x)
        logits = nn.Dense(VOCABULARY, dtype=self.dtype, dot_general_cls=self.dot_general_cls, name="logits")
        return logits(x).astype(jnp.float32)

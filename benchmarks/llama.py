"""A training step of a Llama-like language model of Linen layers."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import fp8flax as fp8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of a model, whose embedding is also that of the logits."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def kernels(self) -> tuple[tuple[int, int], ...]:
        """The matmuls of one block: (inputs, outputs) of query, key, value, out, gate, up, down."""
        kv = self.width // self.heads * self.kv_heads
        attention = ((self.width, self.width), (self.width, kv), (self.width, kv), (self.width, self.width))
        return (*attention, *((self.width, self.hidden),) * 2, (self.hidden, self.width))

    @property
    def parameters(self) -> int:
        """Counts the weights of the matmuls and of the embedding."""
        return self.layers * sum(k * n for k, n in self.kernels) + self.vocabulary * self.width

    def flops(self, tokens: int) -> int:
        """Returns the operations of a training step's matmuls, attention's own products left out."""
        return 6 * tokens * self.parameters


BF16 = {"dtype": jnp.bfloat16}


class Part(nn.Module):
    """The options of the model and of its parts."""

    config: Config
    op: Any = None
    """The ``dot_general_cls`` of the layers in the blocks; the logits stay in bfloat16."""
    implementation: str = "xla"
    """The attention of ``jax.nn.dot_product_attention``."""

    @property
    def options(self) -> tuple[Any, ...]:
        """Hands all of it on to a part."""
        return self.config, self.op, self.implementation


class Attention(Part):
    """Causal attention with rotary positions and grouped keys and values."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``(batch, length, width)`` to the same."""
        batch, length, width = x.shape
        size = width // self.config.heads
        dense: Any = partial(nn.Dense, use_bias=False, dot_general_cls=self.op, **BF16)
        features = {"query": width, **dict.fromkeys(("key", "value"), self.config.kv_heads * size)}
        q, k, v = (dense(n, name=name)(x).reshape(batch, length, -1, size) for name, n in features.items())
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=self.implementation)
        # XLA's own attention would keep the weights of all layers for the backward pass.
        attend = attend if self.implementation == "cudnn" else jax.checkpoint(attend)
        out = attend(rotated(q), rotated(k), v)
        return dense(width, name="out")(out.reshape(batch, length, width))


def rotated(x: jax.Array) -> jax.Array:
    """Applies rotary positions to ``(batch, length, heads, size)``."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = jnp.arange(x.shape[1], dtype=jnp.float32)
    angles = (positions[:, None] * frequencies[None, :])[None, :, None, :]
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    a, b = (part.astype(jnp.float32) for part in (x[..., :half], x[..., half:]))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Block(Part):
    """Attention and a gated feed-forward layer, each after a norm and around a residual."""

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        """Maps ``(batch, length, width)`` to the same, in the form that ``nn.scan`` takes."""
        dense: Any = partial(nn.Dense, use_bias=False, dot_general_cls=self.op, **BF16)
        attention = Attention(*self.options, name="attention")
        x += attention(nn.RMSNorm(name="attention_norm", **BF16)(x))
        h = nn.RMSNorm(name="norm", **BF16)(x)
        h = nn.silu(dense(self.config.hidden, name="gate")(h)) * dense(self.config.hidden, name="up")(h)
        return x + dense(self.config.width, name="down")(h), None


class Llama(Part):
    """The model."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens ``(batch, length)`` to logits in bfloat16."""
        embed = nn.Embed(self.config.vocabulary, self.config.width, name="embed", **BF16)
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0, fp8.OVERWRITE_WITH_GRADIENT: 0},
            split_rngs={"params": True},
            length=self.config.layers,
        )
        x, _ = blocks(*self.options, name="blocks")(embed(tokens), None)
        return embed.attend(nn.RMSNorm(name="norm", **BF16)(x))


OPTIMIZER = optax.adamw(1e-4)


def initial_state(model: Llama, key: jax.Array) -> fp8.TrainState:
    """Returns a train state with AdamW."""
    # Whatever computes attention has no parameters, and need not know such short sequences.
    variables = model.clone(implementation="xla").init(key, jnp.zeros((1, 16), jnp.int32))
    return fp8.TrainState.create(apply_fn=model.apply, params=variables, tx=OPTIMIZER)


def train_step(state: fp8.TrainState, tokens: jax.Array) -> tuple[fp8.TrainState, jax.Array]:
    """Returns the state after one step of predicting each token's successor, and the loss before it."""

    def loss_of(variables: Any) -> jax.Array:
        logits = state.apply_fn(variables, tokens).astype(jnp.float32)
        labels = jnp.roll(tokens, -1, axis=1)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))

    loss, grads = fp8.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss

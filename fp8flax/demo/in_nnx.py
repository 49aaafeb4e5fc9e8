"""The demo in Flax NNX: the model of ``model.py``, and a training step, with the names of the Linen one."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax.demo import training
from fp8flax.demo.model import VOCABULARY
from fp8flax.demo.training import RECIPES, WIDE, Settings, loss_of


def _attention(query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, **_: Any) -> jax.Array:
    """Attention as Linen computes it; NNX's has no softmax in float32."""
    return nn.dot_product_attention(query, key, value, mask=mask, force_fp32_for_softmax=True)


def _promote_input(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """Leaves the scale of a norm in float32, as Linen does."""
    del inexact
    x, scale = args
    return x.astype(dtype), scale


class Block(nnx.Module):
    """Pre-norm self-attention and a GELU MLP."""

    def __init__(self, width: int, num_heads: int, dtype: Any, rngs: nnx.Rngs):
        norm = partial(nnx.RMSNorm, width, dtype=dtype, promote_dtype=_promote_input, rngs=rngs)
        self.attn_norm = norm()
        self.attn = nnx.MultiHeadAttention(
            num_heads, width, dtype=dtype, attention_fn=_attention, decode=False, rngs=rngs
        )
        self.mlp_norm = norm()
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps activations of shape ``(batch, length, width)`` to the same shape."""
        x = x + self.attn(self.attn_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class ByteTransformer(nnx.Module):
    """Predicts the next byte at every position; see ``model.ByteTransformer``."""

    def __init__(
        self,
        width: int,
        num_layers: int,
        max_length: int,
        num_heads: int = 4,
        dtype: Any = jnp.bfloat16,
        *,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        self.embed = nnx.Embed(VOCABULARY, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (max_length, width), jnp.float32)
        )
        self.block = nnx.List([Block(width, num_heads, dtype, rngs) for _ in range(num_layers)])
        self.norm = nnx.RMSNorm(width, dtype=dtype, promote_dtype=_promote_input, rngs=rngs)
        self.logits = nnx.Linear(width, VOCABULARY, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes of shape ``(batch, length)`` to float32 logits ``(batch, length, 256)``."""
        x = self.embed(tokens) + self.positions[None, : tokens.shape[1]].astype(self.dtype)
        mask = nn.make_causal_mask(tokens)
        for block in self.block:
            x = block(x, mask)
        return self.logits(self.norm(x)).astype(jnp.float32)


class State(flax.struct.PyTreeNode):
    """A model and its optimizer, as a tree of arrays."""

    graphdef: Any = flax.struct.field(pytree_node=False)
    arrays: Any

    @classmethod
    def of(cls, model: nnx.Module, optimizer: nnx.Optimizer) -> State:
        """Splits the two."""
        return cls(*nnx.split((model, optimizer)))

    def merged(self) -> Any:
        """Returns the model and the optimizer, of variables of their own."""
        return nnx.merge(self.graphdef, self.arrays)


@functools.cache
def make_model(precision: str, settings: Settings) -> Any:
    """Returns the model without arrays; with ``precision="fp8"`` in FP8, as the Linen model."""

    def make() -> Any:
        model = ByteTransformer(settings.width, settings.num_layers, settings.length, rngs=nnx.Rngs(0))
        if precision != "fp8":
            return model
        return fp8nnx.quantize_model(model, RECIPES[settings.recipe], include=".*", exclude=WIDE)

    return nnx.eval_shape(make)


def make_state(precision: str, seed: int, settings: Settings) -> State:
    """Returns the state at step 0, with the variables of the Linen model."""
    model = nnx.clone(make_model(precision, settings))
    fp8nnx.update_from_linen(model, training.make_state(precision, seed, settings).params)
    return State.of(model, fp8nnx.Optimizer(model, training.make_optimizer(settings)))


def variables(state: State) -> Any:
    """Returns the variables of the model, as the Linen one has them."""
    return fp8nnx.to_linen(state.merged()[0])


def _loss(model: Any, windows: jax.Array) -> jax.Array:
    return loss_of(model(windows[:, :-1]), windows[:, 1:])


@partial(jax.jit, donate_argnums=0)
def train_step(state: State, windows: jax.Array) -> tuple[State, jax.Array, jax.Array]:
    """Takes one step on windows ``(batch, length + 1)``; returns ``(state, loss, scaling)``."""
    model, optimizer = state.merged()
    loss, grads = fp8nnx.value_and_grad(_loss)(model, windows)
    optimizer.update(model, grads)
    state = State.of(model, optimizer)
    return state, loss, training.scaling_of(variables(state))


@jax.jit
def evaluate(state: State, windows: jax.Array) -> jax.Array:
    """Returns the loss on windows ``(batch, length + 1)``, with the scales of a step."""
    loss, _ = fp8nnx.value_and_grad(_loss)(state.merged()[0], windows)  # XLA drops the gradients
    return loss


@jax.jit
def measure(state: State, windows: jax.Array) -> Any:
    """Returns statistics of each FP8 tensor of a step on windows ``(batch, length + 1)``."""
    graphdef, arrays = nnx.split(state.merged()[0])
    return fp8.statistics(lambda arrays: _loss(nnx.merge(graphdef, arrays), windows))(arrays)


NNX = training.Api(make_state, train_step, evaluate, measure, variables)

"""A Transformer in NNX has the losses of the same Transformer in Linen, bit for bit."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax.demo import model as linen
from tests.nnx.layout import to_linen, update_from_linen

WIDTH, LENGTH, BYTES = 16, 16, linen.VOCABULARY
WINDOWS = np.random.default_rng(0).integers(0, BYTES, size=(4, 2, LENGTH + 1))
RULES = {"include": ".*", "exclude": r"block[_/]0/attn"}


def attention(query, key, value, *, mask, **_):
    """Attention as Linen computes it; that of NNX has no softmax in float32."""
    return nn.dot_product_attention(query, key, value, mask=mask, force_fp32_for_softmax=True)


def promote_input(args, /, *, dtype, **_):
    """Leaves the scale of a norm in float32, as Linen does."""
    return args[0].astype(dtype), args[1]


class Block(nnx.Module):
    def __init__(self, norm, linear, rngs):
        self.attn_norm, self.mlp_norm = norm(), norm()
        self.attn = nnx.MultiHeadAttention(
            4, WIDTH, dtype=jnp.bfloat16, attention_fn=attention, decode=False, rngs=rngs
        )
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def __call__(self, x, mask):
        x = x + self.attn(self.attn_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class ByteTransformer(nnx.Module):
    """The Linen model of the demo."""

    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}
        norm = partial(nnx.RMSNorm, WIDTH, promote_dtype=promote_input, **options)
        linear = partial(nnx.Linear, **options)
        self.embed = nnx.Embed(BYTES, WIDTH, **options)
        self.positions = nnx.Param(jnp.zeros((LENGTH, WIDTH)))
        self.block = nnx.List([Block(norm, linear, rngs)])
        self.norm, self.logits = norm(), linear(WIDTH, BYTES)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[None].astype(jnp.bfloat16)
        for block in self.block:
            x = block(x, nn.make_causal_mask(tokens))
        return self.logits(self.norm(x)).astype(jnp.float32)


def loss_of(apply, windows):
    losses = optax.softmax_cross_entropy_with_integer_labels(apply(windows[:, :-1]), windows[:, 1:])
    return jnp.mean(losses)


@pytest.fixture
def _promotion_of_flax():
    """Norms and Optax mix dtypes in their own arithmetic."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.long
@pytest.mark.usefixtures("_promotion_of_flax")
def test_losses_and_state_are_those_of_the_linen_model():
    plain = linen.ByteTransformer(width=WIDTH, num_layers=1, max_length=LENGTH)
    linen_model = fp8.quantize_model(plain, **RULES)
    variables = jax.jit(plain.init)(jax.random.key(0), WINDOWS[0, :, :-1])
    variables = fp8.add_fp8_state(variables, linen_model, WINDOWS[0, :, :-1])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    state = fp8.TrainState.create(apply_fn=linen_model.apply, params=variables, tx=tx)
    model = fp8nnx.quantize_model(ByteTransformer(nnx.Rngs(0)), **RULES)
    update_from_linen(model, variables)
    optimizer = fp8nnx.Optimizer(model, tx)

    @jax.jit
    def linen_step(state, windows):
        loss, grads = fp8.value_and_grad(lambda v: loss_of(partial(state.apply_fn, v), windows))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    @nnx.jit
    def step(model, optimizer, windows):
        loss, grads = fp8nnx.value_and_grad(loss_of)(model, windows)
        optimizer.update(model, grads)
        return loss

    for windows in WINDOWS:
        state, expected = linen_step(state, windows)
        assert step(model, optimizer, windows) == expected
    state8 = state.params[fp8.OVERWRITE_WITH_GRADIENT]
    assert {*state8["block_0"]} == {"up", "down"}
    jax.tree.map(np.testing.assert_array_equal, to_linen(model), state.params)

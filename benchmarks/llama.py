"""The training step that ``recipes`` predicts and ``gpu`` times: the matmuls of two of a Llama's layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen import fp8_ops
from flax.training.train_state import TrainState as FlaxTrainState

import fp8flax as fp8
from benchmarks import accuracy
from benchmarks.dense import with_qwix

ROWS, FEED_FORWARD = 8192, 3.5
"""The rows of the input, and the width of the feed-forward part over the width of the model."""
RECIPES = {
    name: accuracy.RECIPES[name]
    for name in ("delayed", "current", "axiswise", "block128", "mxfp8", "nvfp4")
}
OTHERS = ("flax-direct", "flax-qdq", "qwix")


class Layer(nn.Module):
    """The matmuls of a Llama's layer, with an elementwise product in the place of attention."""

    op: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations of shape ``(rows, width)`` to the same shape."""
        dense = partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=self.op)
        norm, width = partial(nn.RMSNorm, dtype=jnp.bfloat16), x.shape[-1]
        h = norm()(x)
        query, key, value = (dense(width, name=name)(h) for name in ("query", "key", "value"))
        x = x + dense(width, name="out")(nn.tanh(query) * key + value)
        h = norm()(x)
        gate, up = (dense(int(FEED_FORWARD * width), name=name)(h) for name in ("gate", "up"))
        return x + dense(width, name="down")(nn.silu(gate) * up)


class Scanned(nn.Module):
    """A stack of layers under ``nn.scan``, whose backward pass may compute the forward pass again."""

    op: Any
    num_layers: int
    has_remat: bool
    policy: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations of shape ``(rows, width)`` to the same shape."""
        layer = nn.remat(Layer, policy=self.policy, prevent_cse=False) if self.has_remat else Layer
        scan: Any = partial(nn.scan, length=self.num_layers, split_rngs={"params": True, "fp8": True})
        axes = {"params": 0, fp8.OVERWRITE_WITH_GRADIENT: 0}
        run = scan(lambda layer, x, _: (layer(x), None), axes)
        return run(layer(self.op), x, None)[0]


def training_step(
    how: str, width: int, rows: int = ROWS, **scanned: Any
) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a training step, the function that makes its first state, and its input.

    The step computes in bfloat16 with float32 weights; its loss is a mean of squares; AdamW updates.

    Args:
        how: ``"bf16"``, a name of ``RECIPES`` or one of ``OTHERS``.
        width: of the model.
        rows: of the input.
        **scanned: fields of ``Scanned``, to run layers under ``nn.scan``; without them there are two.

    Returns:
        ``step(state, x)``, which returns the next state; ``initial()``, which returns the first state; and
        the shape and dtype of ``x``.
    """
    ops: dict[str, Any] = {
        "flax-direct": fp8_ops.Fp8DirectDotGeneralOp,
        "flax-qdq": fp8_ops.Fp8DotGeneralOp,
    }
    ops |= {name: partial(fp8.Fp8DotGeneralOp, recipe=recipe) for name, recipe in RECIPES.items()}
    is_ours = how in RECIPES
    two = nn.Sequential([Layer(ops.get(how)), Layer(ops.get(how))])
    model: nn.Module = Scanned(ops.get(how), **scanned) if scanned else two
    if how == "qwix":
        model = with_qwix(model, tensorwise=True)
    kind = fp8.TrainState if is_ours else FlaxTrainState
    differentiate: Callable[..., Any] = (fp8 if is_ours else jax).grad
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)

    def initial() -> Any:
        variables = model.init(jax.random.key(0), jnp.zeros((16, width), x.dtype))
        return kind.create(apply_fn=model.apply, params=dict(variables), tx=optax.adamw(1e-4))

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: jax.Array) -> Any:
        def loss(variables: Any) -> jax.Array:
            rngs = {"fp8": jax.random.fold_in(jax.random.key(0), state.step)}
            return jnp.mean(jnp.square(state.apply_fn(variables, x, rngs=rngs).astype(jnp.float32)))

        return state.apply_gradients(grads=differentiate(loss)(state.params))

    return step, initial, x

"""A mixture-of-experts layer, whose ragged matmul is an argument."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


class MoE(nn.Module):
    """A feed-forward layer that sends each token to a few of its experts.

    ``out[t] = sum_e gate[t, e] * down[e](gelu(up[e](x[t])))``, where ``e`` runs over the ``top_k`` experts
    with the largest router probabilities; the gates are these probabilities, made to sum to one. No token
    is dropped. (There is no auxiliary loss: in a large model something must keep the experts busy alike.)

    The tokens are sorted by expert, so that each of the two products is one ragged matmul. The router runs
    in float32.

    Attributes:
        num_experts: how many experts there are.
        hidden: width of each expert's hidden layer.
        top_k: experts per token.
        ragged_dot_cls: a callable that makes the ragged matmul, such as ``fp8flax.Fp8RaggedDotOp``; None
            for ``lax.ragged_dot``.
        dtype: dtype of the activations; parameters are float32.

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> from fp8flax.demo.moe import MoE
        >>> layer = MoE(num_experts=4, hidden=32, ragged_dot_cls=fp8.Fp8RaggedDotOp)
        >>> variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((2, 5, 16)))
        >>> variables["_overwrite_with_gradient"]["Fp8RaggedDotOp_0"]["kernel_scale"].shape
        (4, 1)

    Source: Shazeer et al., 2017, arXiv:1701.06538; Gale et al., 2022, arXiv:2211.15841, for the sorting.
    """

    num_experts: int
    hidden: int
    top_k: int = 2
    ragged_dot_cls: Any = None
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps activations of shape ``(..., width)`` to the same shape."""
        width = x.shape[-1]
        tokens = jnp.asarray(x).reshape(-1, width)
        router = nn.Dense(self.num_experts, use_bias=False, dtype=jnp.float32, name="router")
        probabilities, experts = lax.top_k(nn.softmax(router(tokens)), self.top_k)
        gates = probabilities / jnp.sum(probabilities, axis=1, keepdims=True)

        # Row i is a copy of token row_token[i] for one of its experts; the rows are sorted by expert.
        order = jnp.argsort(experts.reshape(-1))
        row_token = order // self.top_k
        group_sizes = jnp.bincount(experts.reshape(-1), length=self.num_experts)

        init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        up = self.param("up", init, (self.num_experts, width, self.hidden), jnp.float32)
        down = self.param("down", init, (self.num_experts, self.hidden, width), jnp.float32)
        rows = tokens.astype(self.dtype)[row_token]
        rows = nn.gelu(self._ragged_dot()(rows, up.astype(self.dtype), group_sizes))
        rows = self._ragged_dot()(rows, down.astype(self.dtype), group_sizes)

        weighted = rows * gates.reshape(-1)[order].astype(self.dtype)[:, None]
        out = jnp.zeros(tokens.shape, self.dtype).at[row_token].add(weighted)
        return out.reshape(x.shape)

    def _ragged_dot(self) -> Any:
        """Returns a ragged matmul with a state of its own."""
        return lax.ragged_dot if self.ragged_dot_cls is None else self.ragged_dot_cls()

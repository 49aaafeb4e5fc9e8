"""A mixture-of-experts layer in NNX; see ``_linen/moe.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype

from fp8flax._core.blocks import ROUTER, experts_init, mixture
from fp8flax._core.options import check_int
from fp8flax._core.plans.mlp import check_block
from fp8flax._core.quantize import as_float_array
from fp8flax._core.recipes import Recipe
from fp8flax._core.shared_text import with_shared_text
from fp8flax.nnx.ops import Fp8RaggedDotOp

if TYPE_CHECKING:
    from jaxtyping import Float


class RouterLoss(nnx.Variable[Any]):
    """Variable with a loss of the router of ``MoE``, that of its last call; a float32 scalar.

    Example:
        >>> from flax import nnx
        >>> import jax, jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = fp8nnx.MoE(16, num_experts=4, hidden_features=32, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 5, 16))
        >>> def loss(layer, x):
        ...     out = layer(x)
        ...     return jnp.mean(out**2) + 0.01 * sum(jax.tree.leaves(nnx.state(layer, fp8nnx.RouterLoss)))
        >>> value, grads = fp8nnx.value_and_grad(loss)(layer, x)
    """


class Experts(nnx.Module):
    """One kernel for each expert."""

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        features: int,
        *,
        dtype: Any,
        param_dtype: Any,
        kernel_init: Callable[..., Any],
        recipe: Recipe | None,
        rngs: nnx.Rngs,
    ):
        shape = num_experts, in_features, features
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.ragged_dot = Fp8RaggedDotOp(num_experts, recipe=recipe)
        self.dtype = dtype

    def __call__(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        """Maps rows that are sorted by expert, ``(rows, in)``, to ``(rows, out)``."""
        rows, kernel = promote_dtype(rows, self.kernel.get_value(), dtype=self.dtype)
        return self.ragged_dot(rows, kernel, sizes)


@with_shared_text
class MoE(nnx.Module):
    """Feed-forward layer that sends each token to a few of its experts, which multiply in FP8.

    This is ``fp8flax.MoE`` in NNX, with the same computation, parameters and state. The two losses of the
    router are variables of the type ``RouterLoss``: ``load_balancing`` and ``router_z``. Each call
    overwrites them, so read them after the call, in the function that is differentiated.

    Args:
        in_features: number of features of the input.
        {moe_fields}
        rngs: random number generators for the parameters.

    Raises:
        MissingStateError: the layer was made under a recipe without the state that it needs now.
        TypeError: the input is not bfloat16, float16, float32 or float64, or an argument has the wrong
            type.
        ValueError: an argument has a value that is not allowed.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = fp8nnx.MoE(16, num_experts=4, hidden_features=32, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 16))).shape
        (2, 5, 16)
        >>> layer.load_balancing.get_value().shape
        ()

    Source: as for ``fp8flax.MoE``.
    """

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        hidden_features: int,
        features: int | None = None,
        *,
        top_k: int = 2,
        activation: str = "gelu",
        gated: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Callable[..., Any] = experts_init,
        recipe: Recipe | None = None,
        rngs: nnx.Rngs,
    ):
        sizes = {"in_features": in_features, "hidden_features": hidden_features, "features": features}
        check_block(activation, gated, num_experts=num_experts, **sizes)
        check_int("top_k", top_k, 1, num_experts, "A token goes to an expert once.")
        features = in_features if features is None else features
        self.num_experts, self.top_k, self.activation, self.gated = num_experts, top_k, activation, gated
        self.router = nnx.Linear(in_features, num_experts, **ROUTER, param_dtype=param_dtype, rngs=rngs)
        experts = partial(
            Experts,
            num_experts,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            recipe=recipe,
            rngs=rngs,
        )
        if gated:
            self.gate = experts(in_features, hidden_features)
        self.up = experts(in_features, hidden_features)
        self.down = experts(hidden_features, features)
        self.load_balancing, self.router_z = (RouterLoss(jnp.zeros((), jnp.float32)) for _ in range(2))

    def __call__(self, x: Float[jax.Array, "*batch inputs"]) -> Float[jax.Array, "*batch features"]:
        """Applies the layer to the last dimension of the input; see the class."""
        return mixture(
            as_float_array(x, "x"),
            self.router,
            [self.gate, self.up] if self.gated else [self.up],
            self.down,
            num_experts=self.num_experts,
            top_k=self.top_k,
            activation=self.activation,
            record=lambda name, loss: getattr(self, name).set_value(loss),
        )

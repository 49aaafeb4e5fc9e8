"""A mixture-of-experts layer, whose experts' matmuls run in FP8."""

# ``_host/shared_text.py`` fills in the words in braces of the docstrings.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from fp8flax._core.blocks import ROUTER, check_mixture, experts_init, layer_sizes, mixture
from fp8flax._core.quantize import as_float_array
from fp8flax._core.recipes import Recipe, check_recipe
from fp8flax._linen.ops import Fp8RaggedDotOp

if TYPE_CHECKING:
    from jaxtyping import Float

LOSSES = "losses"


class _Experts(nn.Module):
    """Multiplies each row by the kernel of its expert."""

    features: int
    dtype: Any
    param_dtype: Any
    kernel_init: Callable[..., Any]
    recipe: Recipe | None

    @nn.compact
    def __call__(self, rows: jax.Array, sizes: jax.Array) -> jax.Array:
        shape = len(sizes), rows.shape[-1], self.features
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        rows, kernel = promote_dtype(rows, kernel, dtype=self.dtype)
        return Fp8RaggedDotOp(recipe=self.recipe, name=f"{Fp8RaggedDotOp.__name__}_0")(rows, kernel, sizes)


class MoE(nn.Module):
    """Feed-forward layer that sends each token to a few of its experts, which multiply in FP8.

    {computation}

    If the collection ``"losses"`` is mutable, the layer writes the losses there. A module that is called
    twice adds up the values of both calls.

    Attributes:
        {fields}

    Raises:
        {errors}

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer, x = fp8.MoE(num_experts=4, hidden_features=32), jnp.ones((2, 5, 16))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> variables["_overwrite_with_gradient"]["up"]["Fp8RaggedDotOp_0"]["kernel_scale"].shape
        (4, 1)
        >>> out, aux = layer.apply(variables, x, mutable="losses")
        >>> sorted(aux["losses"])
        ['load_balancing', 'router_z']

    {source}
    """

    num_experts: int
    hidden_features: int
    features: int | None = None
    top_k: int = 2
    activation: str = "gelu"
    gated: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = experts_init
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"hidden_features": self.hidden_features, "features": self.features}
        check_mixture(self.activation, self.gated, self.top_k, self.num_experts, **sizes)
        if self.recipe is not None:
            check_recipe(self.recipe)

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*batch inputs"]) -> Float[jax.Array, "*batch features"]:
        """Applies the layer to the last dimension of the input; see the class."""
        x = as_float_array(x, "x")
        sizes = layer_sizes(x.shape[-1], self.hidden_features, self.features, self.gated)
        return mixture(
            x,
            nn.Dense(self.num_experts, **ROUTER, param_dtype=self.param_dtype, name="router"),
            [self._experts(name, features) for name, (_, features) in sizes.items()],
            top_k=self.top_k,
            activation=self.activation,
            record=None if self.is_initializing() else self._sow,
        )

    def _sow(self, name: str, loss: jax.Array) -> None:
        self.sow(LOSSES, name, loss, jnp.add, lambda: jnp.float32(0))

    def _experts(self, name: str, features: int) -> _Experts:
        return _Experts(
            features, self.dtype, self.param_dtype, self.kernel_init, recipe=self.recipe, name=name
        )

"""The feed-forward block of a Transformer, whose activations are cast to FP8 as they are computed."""

# ``_host/shared_text.py`` fills in the words in braces of the docstrings.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.blocks import DenseParts, layer_names, layer_sizes, mlp_as_one_op, mlp_by_layers
from fp8flax._core.options import check_bool
from fp8flax._core.plans.contraction import States
from fp8flax._core.plans.mlp import check_block, runs_as_one
from fp8flax._core.quantize import as_float_array
from fp8flax._core.recipes import Recipe, check_recipe
from fp8flax._linen.conversion import conversion
from fp8flax._linen.ops import Fp8DotGeneralOp

if TYPE_CHECKING:
    from jaxtyping import Float


class _StateOfOp(Fp8DotGeneralOp):
    """Op that returns its scaling state instead of multiplying."""

    @nn.compact
    def __call__(self, recipe: Recipe) -> States:  # type: ignore[override]
        return self._states(recipe)


class _PartsOfDense(nn.Dense):
    """Dense layer that returns its parameters and its scaling state instead of computing."""

    @nn.compact
    def __call__(self, inputs: int, recipe: Recipe) -> DenseParts:  # type: ignore[override]
        kernel = self.param("kernel", self.kernel_init, (inputs, self.features), self.param_dtype)
        bias = None
        if self.use_bias:
            bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype)
        return DenseParts(kernel, bias, _StateOfOp(name=f"{Fp8DotGeneralOp.__name__}_0")(recipe))


class MLP(nn.Module):
    """Feed-forward block of two or three dense layers, whose hidden activations exist in FP8 only.

    The block has the parameters and the scaling state of two ``nn.Dense``, or three if it is gated, with
    ``dot_general_cls=Fp8DotGeneralOp``. It also computes their values, up to rounding::

        up, gate, down = (nn.Dense(n, use_bias=False) for n in (hidden, hidden, features))
        down(activation(gate(x)) * up(x))  # gated=True
        down(activation(up(x)))  # gated=False

    {computation}

    Attributes:
        {fields}
        names: names of the layers in the variables, in the order ``("gate", "up", "down")``, without the
            first if the block is not gated. None takes these names. Give the names of the block that this
            one replaces, such as ``("wi_0", "wi_1", "wo")`` of T5, to load its checkpoints.

    Raises:
        {errors}

    Example:
        >>> import jax, jax.numpy as jnp, fp8flax as fp8
        >>> block, x = fp8.MLP(64, activation="silu", gated=True), jnp.ones((2, 16))
        >>> variables = block.init(jax.random.key(0), x)
        >>> jax.tree.map(jnp.shape, variables["params"]["gate"])
        {'kernel': (16, 64)}
        >>> block.apply(variables, x).shape
        (2, 16)

    {source}
    """

    hidden_features: int
    features: int | None = None
    activation: str = "gelu"
    gated: bool = False
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Callable[..., Any] = nn.linear.default_kernel_init
    bias_init: Callable[..., Any] = nn.initializers.zeros
    recipe: Recipe | None = None
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"hidden_features": self.hidden_features, "features": self.features}
        check_block(self.activation, self.gated, **sizes)
        check_bool("use_bias", self.use_bias)
        if self.recipe is not None:
            check_recipe(self.recipe)
        if self.names is not None:
            expected = layer_names(self.gated)
            names: Any = self.names
            are_strings = not isinstance(names, str) and all(isinstance(name, str) for name in names)
            if not (are_strings and len(names) == len({*names}) == len(expected)):
                raise ValueError(
                    f"names must be {len(expected)} different strings, of the layers {expected}; got "
                    f"{self.names!r}."
                )

    @nn.compact
    def __call__(self, x: Float[jax.Array, "*batch inputs"]) -> Float[jax.Array, "*batch features"]:
        """Applies the block to the last dimension of the input; see the class."""
        x = as_float_array(x, "x")
        sizes = layer_sizes(x.shape[-1], self.hidden_features, self.features, self.gated)
        names = self.names or tuple(sizes)
        layers = list(zip(names, sizes.values(), strict=True))
        recipe = recipe_in_use(self.recipe, Fp8DotGeneralOp.default_recipe)
        if recipe is None or not self._is_one(recipe, x):
            return mlp_by_layers(
                x, [self._layer(nn.Dense, name, n) for name, (_, n) in layers], self.activation
            )
        parts = [self._layer(_PartsOfDense, name, n)(inputs, recipe) for name, (inputs, n) in layers]
        return mlp_as_one_op(
            x, parts, recipe, self.activation, names, partial(promote_dtype, dtype=self.dtype)
        )

    def _is_one(self, recipe: Recipe, x: jax.Array) -> bool:
        """Returns whether all layers can be computed as one function."""
        return (
            runs_as_one(recipe.gemms, x, self.dtype or self.param_dtype)
            and not self.is_initializing()
            and conversion().on_op is None
        )

    def _layer(self, kind: type[nn.Dense], name: str, features: int) -> Any:
        return kind(
            features,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general_cls=partial(Fp8DotGeneralOp, recipe=self.recipe),
            name=name,
        )

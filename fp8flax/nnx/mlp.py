"""The feed-forward block of a Transformer in NNX; see ``_linen/mlp.py``."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype

from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.blocks import DenseParts, as_one, in_turn
from fp8flax._core.options import check_bool
from fp8flax._core.plans.mlp import check_block, runs_as_one
from fp8flax._core.quantize import as_float_array
from fp8flax._core.recipes import DelayedScaling, Recipe
from fp8flax._core.shared_text import with_shared_text
from fp8flax.nnx.ops import Fp8DotGeneralOp

if TYPE_CHECKING:
    from jaxtyping import Float


def _is_plain(layer: Any) -> bool:
    """Returns whether a layer has the class and options that ``MLP`` gives; dtype and op may differ."""
    options = inspect.signature(nnx.Linear.__init__).parameters
    names = {"precision", "promote_dtype", "preferred_element_type"} & options.keys()
    return type(layer) is nnx.Linear and all(
        getattr(layer, name) is options[name].default for name in names
    )


@with_shared_text
class MLP(nnx.Module):
    """Feed-forward block of two or three dense layers, whose activations are cast to FP8 at once.

    This is ``fp8flax.MLP`` in NNX. It has two ``nnx.Linear``, ``up`` and ``down``, and ``gate`` if it is
    gated, with one ``Fp8DotGeneralOp`` each. Up to rounding it computes ``down(activation(gate(x)) *
    up(x))`` or ``down(activation(up(x)))``. The output of the activation, and the gradient of its input,
    exist in FP8 only; see ``fp8flax.MLP``.

    The block computes its layers one after the other in the cases where ``fp8flax.MLP`` does so, in models
    that ``freeze`` returned, and if a layer was replaced or given another op, recipe or option.

    Args:
        in_features: number of features of the input.
        {mlp_fields}
        rngs: random number generators for the parameters.

    Raises:
        MissingStateError: the layer was made under a recipe without the state that it needs now.
        TypeError: the input is not bfloat16, float16, float32 or float64, or an argument has the wrong
            type.
        ValueError: an argument has a value that is not allowed, or the state does not fit the recipe.

    Example:
        >>> from flax import nnx
    from flax.linen.dtypes import promote_dtype
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> block = fp8nnx.MLP(16, 64, activation="silu", gated=True, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 16))).shape
        (2, 16)

    Source: as for ``fp8flax.MLP``.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        features: int | None = None,
        *,
        activation: str = "gelu",
        gated: bool = False,
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.nn.linear.default_kernel_init,
        bias_init: Any = nnx.initializers.zeros,
        recipe: Recipe | None = None,
        rngs: nnx.Rngs,
    ):
        given = {"in_features": in_features, "hidden_features": hidden_features, "features": features}
        check_block(activation, gated, **given)
        features = in_features if features is None else features
        check_bool("use_bias", use_bias)
        self.activation, self.gated, self.dtype = activation, gated, dtype
        linear = partial(
            nnx.Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
        )
        for name, sizes in (
            ("gate", (in_features, hidden_features)),
            ("up", (in_features, hidden_features)),
            ("down", (hidden_features, features)),
        ):
            if gated or name != "gate":
                setattr(self, name, linear(*sizes, dot_general=Fp8DotGeneralOp(recipe=recipe)))

    def __call__(self, x: Float[jax.Array, "*batch inputs"]) -> Float[jax.Array, "*batch features"]:
        """Applies the block to the last dimension of the input; see the class."""
        x = as_float_array(x, "x")
        names = ("gate", "up", "down")[not self.gated :]
        layers = [getattr(self, name) for name in names]
        recipe = self._recipe_of_all(layers, x)
        if recipe is None:
            return in_turn(x, layers, self.activation)
        parts = [
            DenseParts(
                layer.kernel.get_value(),
                None if layer.bias is None else layer.bias.get_value(),
                layer.dot_general._states(recipe),
            )
            for layer in layers
        ]
        scopes = [layer.dot_general._scope or name for name, layer in zip(names, layers)]
        return as_one(x, parts, recipe, self.activation, scopes, partial(promote_dtype, dtype=self.dtype))

    def _recipe_of_all(self, layers: list[Any], x: jax.Array) -> Recipe | None:
        """Returns the recipe of the layers; None if they cannot be computed as one function."""
        ops: list[Any] = [getattr(layer, "dot_general", None) for layer in layers]
        if not all(
            _is_plain(layer)
            and layer.dtype == self.dtype
            and type(op) is Fp8DotGeneralOp
            and op.form == "direct"
            for layer, op in zip(layers, ops)
        ):
            return None
        param_dtype = layers[-1].param_dtype
        recipe, *others = {recipe_in_use(op.recipe, DelayedScaling()) for op in ops}
        if others or recipe is None or not runs_as_one(recipe.gemms, x, self.dtype or param_dtype):
            return None
        return recipe

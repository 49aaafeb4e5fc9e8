"""The blocks ``MLP`` and ``MoE`` in NNX; see ``_core/blocks.py``."""

# ``_host/shared_text.py`` fills in the words in braces of the docstrings.

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.dtypes import promote_dtype

from fp8flax._core.blocks import (
    ROUTER,
    DenseParts,
    check_mixture,
    experts_init,
    layer_names,
    layer_sizes,
    mixture,
    mlp_as_one_op,
    mlp_by_layers,
)
from fp8flax._core.options import check_bool
from fp8flax._core.plans.mlp import check_block, runs_as_one
from fp8flax._core.quantize import as_float_array
from fp8flax._core.recipes import Recipe
from fp8flax.nnx.ops import Fp8DotGeneralOp, Fp8RaggedDotOp, checked
from fp8flax.nnx.variables import RouterLoss

if TYPE_CHECKING:
    from jaxtyping import Float


def _is_plain(layer: Any) -> bool:
    """Returns whether a layer has the class and options that ``MLP`` gives; dtype and op may differ."""
    options = inspect.signature(nnx.Linear.__init__).parameters
    names = {"precision", "promote_dtype", "preferred_element_type"} & options.keys()
    return type(layer) is nnx.Linear and all(
        getattr(layer, name) is options[name].default for name in names
    )


class MLP(nnx.Module):
    """Feed-forward block of two or three dense layers, whose hidden activations exist in FP8 only.

    The block has two ``nnx.Linear``, ``up`` and ``down``, and ``gate`` if it is gated, with one
    ``Fp8DotGeneralOp`` each. Up to rounding it computes ``down(activation(gate(x)) * up(x))`` or
    ``down(activation(up(x)))``.

    {computation}

    Args:
        in_features: number of features of the input.
        {fields}
        rngs: random number generators for the parameters.

    Raises:
        {errors}

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> block = fp8nnx.MLP(16, 64, activation="silu", gated=True, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((2, 16))).shape
        (2, 16)

    {source}
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
        for name, sizes in layer_sizes(in_features, hidden_features, features, gated).items():
            setattr(self, name, linear(*sizes, dot_general=Fp8DotGeneralOp(recipe=recipe)))

    def __call__(self, x: Float[jax.Array, "*batch inputs"]) -> Float[jax.Array, "*batch features"]:
        """Applies the block to the last dimension of the input; see the class."""
        x = as_float_array(x, "x")
        names = layer_names(self.gated)
        layers = [getattr(self, name) for name in names]
        recipe = self._recipe_of_all(layers, x)
        if recipe is None:
            return mlp_by_layers(x, layers, self.activation)
        parts = [
            DenseParts(
                layer.kernel.get_value(),
                None if layer.bias is None else layer.bias.get_value(),
                layer.dot_general._states(recipe),
            )
            for layer in layers
        ]
        scopes = [layer.dot_general._scope or name for name, layer in zip(names, layers)]
        out = mlp_as_one_op(
            x, parts, recipe, self.activation, scopes, partial(promote_dtype, dtype=self.dtype)
        )
        first = parts[0]
        assert first.states.kernel is not None
        return checked(out, first.kernel, first.states.kernel.scale)

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
        have_bias = {layer.bias is not None for layer in layers[:-1]}
        recipe, *others = {op._recipe_in_use() for op in ops}
        if len(have_bias) > 1 or others or recipe is None:
            return None
        dtypes = [self.dtype or layer.param_dtype for layer in layers]
        return recipe if all(runs_as_one(recipe.gemms, x, dtype) for dtype in dtypes) else None


class Experts(nnx.Module):
    """The kernels of all experts for one layer, and the op that multiplies by them."""

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


class MoE(nnx.Module):
    """Feed-forward layer that sends each token to a few of its experts, which multiply in FP8.

    {computation}

    The losses are variables of the type ``RouterLoss``. Each call overwrites them, so read them after the
    call, in the function that is differentiated.

    Args:
        in_features: number of features of the input.
        {fields}
        rngs: random number generators for the parameters.

    Raises:
        {errors}

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = fp8nnx.MoE(16, num_experts=4, hidden_features=32, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 16))).shape
        (2, 5, 16)
        >>> layer.load_balancing.get_value().shape
        ()

    {source}
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
        given = {"in_features": in_features, "hidden_features": hidden_features, "features": features}
        check_mixture(activation, gated, top_k, num_experts, **given)
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
        for name, sizes in layer_sizes(in_features, hidden_features, features, gated).items():
            setattr(self, name, experts(*sizes))
        # ``mixture`` records the losses under these names.
        self.load_balancing, self.router_z = (RouterLoss(jnp.zeros((), jnp.float32)) for _ in range(2))

    def __call__(self, x: Float[jax.Array, "*batch inputs"]) -> Float[jax.Array, "*batch features"]:
        """Applies the layer to the last dimension of the input; see the class."""
        return mixture(
            as_float_array(x, "x"),
            self.router,
            [getattr(self, name) for name in layer_names(self.gated)],
            top_k=self.top_k,
            activation=self.activation,
            record=lambda name, loss: getattr(self, name).set_value(loss),
        )

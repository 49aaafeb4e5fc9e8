"""``freeze``: an NNX model for serving, with kernels in FP8 and scales that no longer change."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.dot_general import DimensionNumbers, frozen_dot_general, quantize_kernel
from fp8flax._core.einsum import einsum_with
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.qtensor import QTensor
from fp8flax._core.recipes import CustomRecipe, DelayedScaling
from fp8flax._linen.op import with_sharding
from fp8flax._serve.kernels import WEIGHT_ONLY
from fp8flax._serve.scales import fixed_scales
from fp8flax._serve.serving import constant
from fp8flax._train.bridge import split_arrays
from fp8flax.nnx.models import Layer, layers_of
from fp8flax.nnx.ops import Fp8Einsum, Fp8Op
from fp8flax.nnx.variables import state_of


class Frozen(nnx.Variable[Any]):
    """A kernel in FP8, or a scale, of a frozen model: a variable that nothing trains.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax as fp8, fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
        >>> layer = nnx.Linear(4, 8, dot_general=op, rngs=nnx.Rngs(0))
        >>> sorted(nnx.state(fp8nnx.freeze(layer, jnp.ones((2, 4))), fp8nnx.Frozen))
        ['dot_general', 'kernel']

    Source: none.
    """


class _FrozenOp(nnx.Module):
    """A matmul with a kernel that is stored in FP8, and scales that stay."""

    kernel_scale: Frozen
    input_scale: Frozen

    def __init__(self, recipe: CustomRecipe, form: str, scope: str, scales: dict[str, jax.Array]):
        self.recipe, self.form, self.scope = recipe, form, scope
        for role, scale in scales.items():
            setattr(self, f"{role}_scale", Frozen(scale))

    def dot_general(
        self,
        lhs: jax.Array,
        codes: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> jax.Array:
        if recipe_in_use(self.recipe, DelayedScaling()) is None:
            raise ValueError(
                "fp8flax.autocast(enabled=False) cannot turn FP8 off in a frozen model, whose kernels are "
                "stored in FP8. Call it outside of that context, or call the model that was frozen."
            )
        scale = constant(self.kernel_scale.get_value())
        kernel = QTensor(
            constant(codes), scale.reshape(()) if scale.shape == (1,) else scale, self.recipe.forward.rhs
        )
        quantizer = self.recipe.forward.lhs
        is_fixed = quantizer is not None and quantizer.needs_state
        with jax.named_scope(self.scope) if self.scope else contextlib.nullcontext():
            return frozen_dot_general(
                lhs,
                jnp.zeros(codes.shape, lhs.dtype),  # of which nothing is read
                dimension_numbers,
                precision,
                preferred_element_type,
                kernel=kernel,
                input_scale=constant(self.input_scale.get_value()) if is_fixed else None,
                recipe=self.recipe,
                form=self.form,
            )

    def __call__(self, *args: Any, out_sharding: Any = None, **kwargs: Any) -> jax.Array:
        return with_sharding(self.dot_general(*args, **kwargs), out_sharding)


class _FrozenEinsum(_FrozenOp):
    def __call__(self, *args: Any, out_sharding: Any = None, **kwargs: Any) -> jax.Array:
        return with_sharding(einsum_with(self.dot_general, *args, **kwargs), out_sharding)


@dataclasses.dataclass(frozen=True)
class _PromotesAllBut:
    """Promotes what a layer computes with, and leaves codes of a kernel as they are."""

    promote: Callable[..., Any]
    kernel_dtype: Any

    def __call__(self, args: Any, /, **kwargs: Any) -> Any:
        inputs, codes, *rest = args
        inputs, _, *rest = self.promote((inputs, jnp.zeros((), self.kernel_dtype), *rest), **kwargs)
        return inputs, codes, *rest


def freeze(model: nnx.Module, *args: Any, weight_only: bool = False, **kwargs: Any) -> Any:
    """Returns a copy of a model for serving: kernels in FP8, scales that no longer change.

    Each op computes, bit for bit, what it computes in ``model``. (So do the models, where XLA compiles what
    lies between the ops alike.) Delayed scales become those that the next step would use; recipes without
    state go on to scale inputs as they come. Kernels stand where they were, as codes in variables of a type
    of their own, with their scales in the op of the layer; wide parameters are ``nnx.Param`` as before.
    ``nnx.jit``, ``nnx.split`` and checkpoints take the copy as any model. It can be differentiated with
    respect to inputs and wide parameters; with respect to codes and scales it raises ``TypeError``.

    Args:
        model: one whose layers have ops, by hand or by ``quantize_model``, trained or calibrated.
        *args: inputs, to trace the model with; in the place of arrays ``jax.ShapeDtypeStruct`` will do.
        weight_only: store kernels in FP8 with a scale for each output feature, multiply in the inputs'
            dtype.
        **kwargs: keyword inputs.

    Returns:
        A model of the same type; the one given stays as it is.

    Raises:
        ValueError: no layer with an op of a matmul runs with these inputs.

    Warns:
        UserWarning: kernels of FP8 ops stay wide: of convolutions, of ops that no layer of NNX has, of
            layers that did not run, of recipes that keep them wide; or delayed scales have seen no data.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 4))
        >>> fp8nnx.calibrate(lambda layer, x: layer(x), layer, [x])
        >>> frozen = fp8nnx.freeze(layer, x)
        >>> frozen.kernel.get_value().dtype.name, bool((frozen(x) == layer(x)).all())
        ('float8_e4m3fn', True)

    Source: as of ``fp8flax.freeze``.
    """
    copy: Any = nnx.clone(model)
    layers = {
        layer.site.path: layer for layer in layers_of(copy) if layer.op is not None and layer.takes_codes
    }
    seen = _operands(model, set(layers), args, kwargs)
    fresh: list[str] = []
    frozen = 0
    for path, (lhs, dims) in seen.items():
        frozen += _freeze(layers[path], path, lhs, dims, weight_only, fresh)
    if not frozen:
        raise ValueError(
            "No layer with an FP8 matmul ran with these inputs, so there is nothing to freeze. Convert the "
            "model by fp8flax.nnx.quantize_model(model, include=…), or give its layers ops."
        )
    if hasattr(copy, "fp8_rules"):
        del copy.fp8_rules
    wide = ["/".join(map(str, p)) for p, node in nnx.iter_graph(copy) if isinstance(node, Fp8Op)]
    if wide:
        warnings.warn(
            f"The kernels of these FP8 ops stay wide: {', '.join(sorted(wide))}. They are no matmuls, no "
            "layers of NNX, did not run, or their recipe says so.",
            stacklevel=2,
        )
    if fresh:
        warnings.warn(
            f"These scales are frozen as they are, though they have seen no data: {', '.join(fresh)}. "
            "fp8flax.nnx.calibrate takes them from sample batches.",
            stacklevel=2,
        )
    return copy


def _operands(model: nnx.Module, paths: set[str], args: Any, kwargs: Any) -> dict[str, tuple[Any, Any]]:
    """Returns what layers multiply by their kernels, and the dimension numbers, by the layers' paths."""
    copy = nnx.clone(model)
    seen: dict[str, tuple[Any, Any]] = {}

    def looking(path: str, is_einsum: bool) -> Any:
        def look(lhs: jax.Array, rhs: jax.Array, dims: Any, *rest: Any, **kwargs: Any) -> jax.Array:
            seen[path] = jax.ShapeDtypeStruct(lhs.shape, lhs.dtype), dims
            return lax.dot_general(lhs, rhs, dims, *rest, **kwargs)

        def look_at_einsum(*args: Any, out_sharding: Any = None, **kwargs: Any) -> jax.Array:
            del out_sharding
            return einsum_with(look, *args, **kwargs)

        return look_at_einsum if is_einsum else look

    for layer in layers_of(copy):
        if layer.site.path in paths:
            function = looking(layer.site.path, layer.kind.op is Fp8Einsum)
            setattr(layer.module, layer.kind.op.field, nnx.static(function))
    graphdef, state = nnx.split(copy)
    arrays, fill = split_arrays(args, kwargs)

    def call(state: Any, arrays: Any) -> None:
        args, kwargs = fill(arrays)
        nnx.merge(graphdef, state)(*args, **kwargs)

    jax.eval_shape(call, state, arrays)
    return seen


def _freeze(
    layer: Layer, path: str, lhs: Any, dims: DimensionNumbers, weight_only: bool, fresh: list[str]
) -> bool:
    """Freezes a layer, or returns that it cannot be."""
    op = layer.op
    assert op is not None
    recipe = recipe_in_use(op.recipe, op.default_recipe())
    if recipe is None or recipe.gemms.forward.rhs is None:
        return False
    gemms = WEIGHT_ONLY if weight_only else recipe.gemms
    scales = {}
    if not weight_only:
        state = {path: state_of(op)[OVERWRITE_WITH_GRADIENT]}
        scales = fixed_scales((path,), gemms, state, fresh)
    variable = layer.module.kernel
    wide = variable.get_value()

    def store(kernel: jax.Array, scale: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        stored = quantize_kernel(lhs, kernel.astype(lhs.dtype), dims, gemms, scale)
        return stored.codes, stored.scale.reshape((1,)) if stored.scale.ndim == 0 else stored.scale

    each: Any = store
    for _ in layer.stacked:
        each = jax.vmap(each)
    codes, scales["kernel"] = jax.jit(each)(wide, scales.get("kernel"))
    kind = _FrozenEinsum if layer.kind.op is Fp8Einsum else _FrozenOp
    setattr(layer.module, layer.kind.op.field, nnx.data(kind(gemms, op.form, path, scales)))
    layer.module.kernel = Frozen(codes)
    promote = layer.module.promote_dtype
    layer.module.promote_dtype = nnx.static(_PromotesAllBut(promote, wide.dtype))
    return True

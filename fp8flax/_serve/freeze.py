"""``freeze``: turns a trained Linen model into one for serving, with FP8 kernels and fixed scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, state_leaf_names
from fp8flax._core.options import check_bool, check_params, check_variables, wrong_model
from fp8flax._core.recipes import CustomRecipe
from fp8flax._model.converted_call import Call, Seen, seen_of
from fp8flax._model.rules import Rules
from fp8flax._model.wrapped_module import convert, converted_class, trace_apply
from fp8flax._serve import trees
from fp8flax._serve.hidden_state import ServedOp
from fp8flax._serve.kernels import layout, left_wide, params_of, stored
from fp8flax._serve.serving import Serving
from fp8flax._serve.stored_op import FROZEN, WEIGHT_ONLY, check_can_freeze, fixed_scales, warn_of


def freeze(
    model: nn.Module,
    variables: Mapping[str, Any],
    *args: Any,
    weight_only: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Returns a model and its variables for serving: kernels in FP8, scales that no longer change.

    Each op computes, bit for bit, what it computes in ``model``. The models agree bit for bit if XLA
    compiles the code between the ops in the same way; under ``jax.jit`` it may fuse it differently and
    round differently in the last bit. Delayed scales become those that the next step would use. Recipes
    without state continue to scale inputs from the current data. There is no scaling state left that a call
    must mutate.

    The serving model can be differentiated with respect to its inputs and its wide parameters, in forward
    and reverse mode, any number of times (forces, guidance, saliency). Its derivative is that of a model
    with the dequantized kernels, and quantizing an input passes the derivative on unchanged. Tangents and
    cotangents stay wide. Differentiation with respect to FP8 kernels and to scales raises ``TypeError``.

    The serving model's ``init`` returns a fresh KV cache, which decoding loops read as ``init(rng,
    tokens)["cache"]``. The parameters that it returns are random, in the shapes and dtypes of those
    returned here. Call it under ``jax.eval_shape`` for a target to restore a checkpoint into.

    Kernels are stored at their old place, under their names, in FP8. Their scales are next to them, under
    the name of the op: ``params/Dense_0/kernel`` and ``params/Dense_0/Fp8DotGeneralOp_0/kernel_scale`` (and
    ``input_scale``, if it is fixed). Any checkpoint library can save these variables.

    These parameters stay wide, and their ops quantize them at each call:

    * a parameter that is also used for something else, such as an embedding that is tied to the logits
    * a parameter that is used by several ops, or after arithmetic
    * a parameter that is split into several kernels, and parameters that are joined to one kernel
    * kernels of convolutions and ragged dots, if their scales are not delayed

    Args:
        model: the model that ``quantize_model`` returned, or a model whose layers were given FP8 ops.
        variables: all collections of the model, with trained or calibrated state. You can leave out the
            inputs if ``model`` comes from ``quantize_model`` and was called before, for instance by
            ``init``.
        *args: inputs to trace the model with; ``jax.ShapeDtypeStruct`` may take the place of arrays.
        weight_only: whether to store kernels in FP8 with a scale for each output feature, and to multiply
            in the inputs' dtype.
        **kwargs: keyword inputs of the model.

    Returns:
        The serving model, called like ``model``; and its variables. The other collections are unchanged.

    Raises:
        MissingStateError: an op's scaling state is missing from ``variables``.
        ValueError: ``model`` is frozen, or has no FP8 op, or inputs are needed; a parameter is missing;
            layers share parameters but no state; or FP8 is switched off here.
        TypeError: ``model`` is not a Linen module, or ``weight_only`` is not a bool.

    Warns:
        UserWarning: kernels of FP8 ops stay wide, with the reason for each; or delayed scales have seen no
            data.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model8, x = fp8.quantize_model(nn.Dense(8), include=""), jnp.ones((2, 4))
        >>> variables = fp8.calibrate(model8.apply, model8.init(jax.random.key(0), x), [x])
        >>> serve_model, serve_variables = fp8.freeze(model8, variables)
        >>> serve_variables["params"]["kernel"].dtype.name
        'float8_e4m3fn'
        >>> bool((serve_model.apply(serve_variables, x) == model8.apply(variables, x)).all())
        True

    Source: for the names of the scales, the FP8 checkpoints of inference servers; see ``save_safetensors``.
    """
    if not isinstance(model, nn.Module):
        raise wrong_model(model, "be a flax.linen.Module", "flax.linen", "freeze")
    check_bool("weight_only", weight_only)
    if getattr(model, "_fp8_serving", None) is not None:
        raise ValueError(FROZEN)
    check_can_freeze()
    check_variables(variables)
    check_params(variables)
    base: Any = model
    if not hasattr(model, "_fp8_rules"):
        # The ops of this model were given by hand. The class records them, and converts nothing.
        base = convert(model, converted_class(type(model), Rules(include=(), allow_unmatched=True), Call))
    boxed = flax.core.unfreeze(dict(variables))
    variables = nn.meta.unbox(boxed)
    seen = _record_of(base, variables, args, kwargs)
    params, state = variables.get(PARAMS, {}), variables.get(OVERWRITE_WITH_GRADIENT, {})
    recipes = {path: WEIGHT_ONLY if weight_only else found.gemms for path, found in seen.ops.items()}
    wide, given = left_wide(seen, recipes), trees.leaves(params)
    fresh: list[str] = []
    served: list[ServedOp] = []
    for path, found in seen.ops.items():
        recipe = recipes[path]
        kernel = None if path in wide or found.kernel is None else found.kernel.sources[0].path
        parameter: Any = None if kernel is None else trees.get(given, kernel)
        delayed = fixed_scales(path, recipe, state, fresh)
        codes, scales = stored(path, found, recipe, parameter, delayed)
        for role, scale in scales.items():
            params = trees.replaced(params, (*path, state_leaf_names(role)[0]), scale)
        fixed = tuple((state_leaf_names(role)[0], x.shape, x.dtype) for role, x in scales.items())
        if kernel is None or codes is None:
            recipe = CustomRecipe() if recipe is WEIGHT_ONLY else recipe
            served.append(ServedOp(path, recipe, None, fixed))
            continue
        params = trees.replaced(params, kernel, _placed_like(parameter, codes))
        # The dtype of the variable, which may have been cast since the model was recorded.
        dtype = np.dtype(jax.dtypes.canonicalize_dtype(parameter.dtype))
        served.append(ServedOp(path, recipe, (kernel, dtype), fixed, layout(found)))
    named = [(param, why) for path, why in wide.items() if why for param in params_of(seen.ops[path])]
    reasons = {"/".join(param): why for param, why in named}
    warn_of(reasons, fresh, "fp8flax.calibrate(model.apply, variables, batches)")
    others = {name: value for name, value in variables.items() if name != OVERWRITE_WITH_GRADIENT}
    cls = converted_class(base._fp8_base, base._fp8_rules, Serving(tuple(served)))
    boxes = {name: boxed[name] for name in others}
    return convert(model, cls), trees.reboxed({**others, PARAMS: params}, boxes)


def _record_of(base: Any, variables: Mapping[str, Any], args: Any, kwargs: Any) -> Seen:
    """Returns the record of a model's FP8 ops; if there are inputs, traces the model with them before.

    Raises:
        ValueError: no FP8 op was recorded.
    """
    if args or kwargs:
        trace_apply(base, jax.eval_shape(lambda v: v, variables), args, kwargs)
    seen = seen_of(base)
    if not seen.ops:
        raise ValueError(
            f"No FP8 op of {type(base).__name__} ran"
            + (
                " with these inputs. Convert it by fp8flax.quantize_model(model, include=…), or give its "
                "layers FP8 ops; fp8flax.report(model, *inputs) says what is converted."
                if args or kwargs
                else " in this process. Pass inputs to trace the model with: freeze(model, variables, x). "
                "If it was not converted, call fp8flax.quantize_model(model)."
            )
        )
    return seen


def _placed_like(wide: Any, codes: jax.Array) -> jax.Array:
    """Returns codes, with the sharding of their parameter if it is on several devices."""
    is_here = isinstance(wide, jax.Array) and not isinstance(wide, jax.core.Tracer)
    if is_here and len(wide.sharding.device_set) > 1:
        return jax.device_put(codes, wide.sharding)
    return codes

"""``freeze``: turns a trained model of Linen or NNX into one for serving."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn

from fp8flax._core.options import check_bool, check_params, check_variables, wrong_model
from fp8flax._core.types import PyTree
from fp8flax._model.quantize_model import is_nnx
from fp8flax._serve import linen
from fp8flax._serve.reading import Calls
from fp8flax._serve.stored_op import Arrays, ServedOp


def freeze(
    model: Any,
    *args: Any,
    weight_only: bool = False,
    methods: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Returns a model, and for Linen its variables, for serving: kernels in FP8, scales that do not change.

    Each op computes, bit for bit, what it computes in ``model``. (An op that casts to FP8 and back computes
    what its direct counterpart does. Under ``jax.jit``, XLA may fuse the code between the ops differently.
    NNX layers that share a kernel get the largest of its delayed scales.) Delayed scales become those that
    the next step would use. Recipes without state continue to scale inputs
    from current data.

    A kernel is stored in FP8, at its old place, if it is one whole parameter that a matmul multiplies by,
    at most cast, reshaped or transposed, and nothing else reads it. Kernels that divide a parameter along
    one axis, such as ``w[i]`` for each ``i`` or the parts of ``jnp.split``, are stored too, each with
    scales of its own. (Layers of NNX that share a kernel, and multiply by it in one way, share its codes.)
    All other kernels stay wide, and their ops quantize them at each call: slices that overlap, leave a part
    out or follow a reshape, an embedding that is tied to the logits, kernels of convolutions, NVFP4 kernels
    whose matmul does not sum over a multiple of 16 values, and stacked kernels in Linen whose shape
    does not show the axis of the stack, such as ``(8, 8, 4)``. An op that did not run in the traced calls
    computes as in training. Code that was not traced, and reads a stored kernel in another way, raises
    ``ValueError``.

    The scales are beside the kernel, in ``params/Dense_0/Fp8DotGeneralOp_0/kernel_scale`` (and
    ``input_scale``, if it is fixed; in NVFP4 ``kernel_scale`` has a scale for 16 values of each output
    feature, and ``kernel_tensor_scale`` multiplies them). Experts and stacked layers have scales of their
    own, along the first axes; in NNX, kernels must be stacked along these, too. There, kernels in FP8 and
    scales have the type ``fp8flax.nnx.Frozen``. Any checkpoint library can save them. For a target to
    restore into, call ``freeze`` under ``jax.eval_shape`` or ``nnx.eval_shape``: a frozen Linen model has
    no ``init``.

    The frozen model has derivatives of any order with respect to its inputs and its wide parameters, as a
    model with the dequantized kernels; FP8 ops of wide kernels have those of training. Differentiation with
    respect to FP8 kernels and to scales raises ``TypeError``.

    Args:
        model: the model that ``quantize_model`` returned, or a model whose layers were given FP8 ops.
        *args: for a Linen model, first all its collections, with trained or calibrated state. Then inputs
            to trace a call of the model with, arrays or ``jax.ShapeDtypeStruct``.
        weight_only: whether to store kernels in FP8 with a scale for each output feature, and to multiply
            in the inputs' dtype.
        methods: inputs of other methods that will be called, by the names of the methods: a tuple of
            positional inputs, or a mapping of keyword inputs. ``{"decode": (z,)}`` traces
            ``model.decode(z)``. ``__call__`` may be among them, and is not traced if it has no inputs.
        **kwargs: keyword inputs of the model.

    Returns:
        For Linen, the frozen model, called like ``model``, and its variables: of the scaling state only
        that of ops with wide kernels; other collections than this and ``params`` are unchanged. For NNX, a
        frozen copy of the model.

    Raises:
        MissingStateError: an op's scaling state is missing from the variables.
        ValueError: ``model`` is frozen, no FP8 op ran, or FP8 is switched off here.
        TypeError: ``model`` is not a module of Flax; the variables of a Linen model are not a mapping;
            there are no inputs; ``methods`` is not a mapping of tuples and mappings; ``method`` is given;
            or ``weight_only`` is not a bool.

    Warns:
        UserWarning: kernels of FP8 ops stay wide, or ops did not run, with the reason for each; or delayed
            scales have seen no data.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model8, x = fp8.quantize_model(nn.Dense(8), include=""), jnp.ones((2, 4))
        >>> variables = fp8.calibrate(model8.apply, model8.init(jax.random.key(0), x), [x])
        >>> serve_model, serve_variables = fp8.freeze(model8, variables, x)
        >>> serve_variables["params"]["kernel"].dtype.name
        'float8_e4m3fn'
        >>> bool((serve_model.apply(serve_variables, x) == model8.apply(variables, x)).all())
        True

    For NNX, see ``fp8flax.nnx.Frozen``.

    Source: torchao, ``Float8StaticActivationFloat8WeightConfig`` and ``Float8WeightOnlyConfig``.
    """
    check_bool("weight_only", weight_only)
    serving = _of_framework(model)
    if serving.is_frozen(model):
        raise ValueError(
            "model must be a model in training; it is frozen already. Pass the original model, or write "
            "the frozen one with save_safetensors."
        )
    if is_nnx(model):
        return serving.freeze(model, _calls(model, args, kwargs, methods), weight_only)
    variables, *inputs = args or (kwargs.pop("variables", None),)
    check_variables(variables)
    check_params(variables)
    return serving.freeze(model, variables, _calls(model, inputs, kwargs, methods), weight_only)


def described(model: Any, variables: PyTree) -> tuple[Sequence[ServedOp], Arrays]:
    """Returns the ops of a frozen model, and its arrays by their paths, which begin with the collection.

    Scaling state and NNX's random number generators are left out.
    """
    serving = _of_framework(model)
    if not serving.is_frozen(model):
        raise wrong_model(model, "come from fp8flax.freeze")
    ops, arrays = serving.described(model, variables)
    return ops, arrays


def _of_framework(model: Any) -> Any:
    """Returns the file that freezes models of this framework, and describes frozen ones."""
    if is_nnx(model):
        from fp8flax._serve import nnx

        return nnx
    if not isinstance(model, nn.Module):
        raise wrong_model(model, "be a flax.nnx.Module or a flax.linen.Module")
    return linen


def _calls(model: Any, inputs: Sequence[Any], keywords: Mapping[str, Any], methods: Any) -> Calls:
    """Returns the calls to trace; raises ``TypeError`` if there are none, or an argument has no meaning."""
    if "method" in keywords and "method" not in inspect.signature(type(model).__call__).parameters:
        raise TypeError(
            f"freeze has no argument method; got {keywords['method']!r}. Give the inputs of each method by "
            "its name: methods={'decode': (z,)}."
        )
    calls: Calls = {"__call__": (tuple(inputs), dict(keywords))} if inputs or keywords else {}
    if not isinstance(methods or {}, Mapping):
        raise TypeError(f"methods must map names of methods to their inputs; got {type(methods).__name__}.")
    for name, given in (methods or {}).items():
        if not isinstance(given, tuple | list | Mapping):
            raise TypeError(
                "methods must have a tuple of positional inputs, or a mapping of keyword inputs, for each "
                f"method; got {type(given).__name__} for {name!r}. Write methods={{{name!r}: (x,)}}."
            )
        if name in calls:
            raise TypeError("The inputs of __call__ are given twice: by themselves, and in methods.")
        calls[name] = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    if not calls:
        raise TypeError(
            "freeze needs inputs to trace the model with, arrays or jax.ShapeDtypeStruct; got none. Pass "
            "them: freeze(model, variables, x), or freeze(model, x) in NNX. Inputs of other methods than "
            "__call__ go into methods={'decode': (z,)}; methods={'__call__': ()} is a call without inputs."
        )
    return calls

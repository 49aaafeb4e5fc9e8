"""``freeze``: turns a trained model of Linen or NNX into one for serving."""

from __future__ import annotations

import importlib
from typing import Any

import flax.linen as nn

from fp8flax._core.options import check_bool, wrong_model
from fp8flax._model.quantize_model import is_nnx
from fp8flax._serve import linen


def freeze(model: Any, *args: Any, weight_only: bool = False, **kwargs: Any) -> Any:
    """Returns a model, and for Linen its variables, for serving: kernels in FP8, scales that do not change.

    Each op computes, bit for bit, what it computes in ``model``; with ``form="qdq"``, what its direct form
    computes. (Under ``jax.jit``, XLA may fuse the code between the ops differently.) Delayed scales become
    those that the next step would use. Recipes without state continue to scale inputs from current data.

    A kernel is stored in FP8, at its old place, if it is one whole parameter that a matmul multiplies by,
    at most cast, reshaped or transposed, and nothing else reads it. In NNX the matmul must be that of a
    layer of Flax. All other kernels stay wide, and their ops quantize them at each call: parts of
    parameters, an embedding that is tied to the logits, kernels of convolutions and ragged dots, NVFP4
    kernels whose matmul does not sum over a multiple of 16 values, and stacked kernels in Linen whose shape
    does not show the axis of the stack, such as ``(8, 8, 4)``. A method of a Linen model that was not
    traced, and reads a stored kernel in another way, reads Inf.

    The scales are beside the kernel, in ``params/Dense_0/Fp8DotGeneralOp_0/kernel_scale`` (and
    ``input_scale``, if it is fixed; in NVFP4 ``kernel_scale`` has a scale for 16 values of each output
    feature, and ``kernel_tensor_scale`` multiplies them). In NNX, kernels in FP8 and scales have the type
    ``fp8flax.nnx.Frozen``. Any checkpoint library can save them. For a target to restore into, call
    ``freeze`` under ``jax.eval_shape`` or ``nnx.eval_shape``: a frozen Linen model has no ``init``.

    The frozen model has derivatives of any order with respect to its inputs and its wide parameters, as a
    model with the dequantized kernels; FP8 ops of wide kernels have those of training. Differentiation with
    respect to FP8 kernels and to scales raises ``TypeError``.

    Args:
        model: the model that ``quantize_model`` returned, or a model whose layers were given FP8 ops.
        *args: for a Linen model, first all its collections, with trained or calibrated state. Then inputs
            to trace the model with, arrays or ``jax.ShapeDtypeStruct``. Without inputs, a Linen model that
            comes from ``quantize_model`` is traced with the shapes of the last ``apply`` of each method.
        weight_only: whether to store kernels in FP8 with a scale for each output feature, and to multiply
            in the inputs' dtype.
        **kwargs: keyword inputs of the model.

    Returns:
        For Linen, the frozen model, called like ``model``, and its variables: of the scaling state only
        that of ops with wide kernels; other collections than this and ``params`` are unchanged. For NNX, a
        frozen copy of the model.

    Raises:
        MissingStateError: an op's scaling state is missing from the variables.
        ValueError: ``model`` is frozen, no FP8 op ran, or FP8 is switched off here.
        TypeError: ``model`` is not a module of Flax; the variables of a Linen model are not a mapping; or
            ``weight_only`` is not a bool.

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

    For NNX, see ``fp8flax.nnx.Frozen``.

    Source: torchao, ``Float8StaticActivationFloat8WeightConfig`` and ``Float8WeightOnlyConfig``.
    """
    front = front_of(model)
    check_bool("weight_only", weight_only)
    if front.is_frozen(model):
        raise ValueError(
            "model must be a model in training; it is frozen already. Pass the original model, or write "
            "the frozen one with save_safetensors."
        )
    return front.freeze(model, args, kwargs, weight_only)


def front_of(model: Any) -> Any:
    """Returns our module for the API of a model: ``linen``, or ``fp8flax.nnx.freezing``."""
    if isinstance(model, nn.Module):
        return linen
    if not is_nnx(model):
        raise wrong_model(model, "be a flax.nnx.Module or a flax.linen.Module")
    return importlib.import_module("fp8flax.nnx.freezing")

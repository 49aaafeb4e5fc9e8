"""Inserts text that several docstrings have in common, such as the arguments of Linen ops and NNX ops."""

from __future__ import annotations

import re
import textwrap
from typing import Any, TypeVar

T = TypeVar("T")

_TEXTS = {
    # Ops.
    "recipe": """\
recipe: how tensors are scaled. None takes the recipe of ``fp8flax.autocast``, or
    ``DelayedScaling()`` outside of it.""",
    "op_options": """\
recipe: how tensors are scaled. None takes the recipe of ``fp8flax.autocast``, or
    ``DelayedScaling()`` outside of it.
form: ``"direct"`` multiplies FP8 operands, on the FP8 units of GPUs that have them. ``"qdq"`` casts
    to FP8 and back around a matmul in the operands' dtype; it serves as a reference and is never
    faster.""",
    "wrong_operand": """\
TypeError: an operand is not bfloat16, float16, float32 or float64, or the state is not float32.""",
    # Blocks of layers.
    "mlp_fields": """\
hidden_features: number of features of ``up`` and ``gate``.
features: number of features of ``down``; None for that of the input.
activation: ``"gelu"`` (the tanh approximation, as Flax's ``gelu``), ``"gelu_exact"``, ``"relu"`` or
    ``"silu"``.
gated: whether the activation is applied to ``gate`` and multiplies ``up``. Both layers then take
    the input with one scale, that of ``gate``.
use_bias: whether the layers have biases.
dtype: dtype of the computation; None for that of input and parameters.
param_dtype: dtype of the parameters.
kernel_init: initializer of the kernels.
bias_init: initializer of the biases.
recipe: how tensors are scaled. None takes the recipe of ``fp8flax.autocast``, or
    ``DelayedScaling()`` outside of it.""",
    "moe_fields": """\
num_experts: number of experts.
hidden_features: number of features of each expert's hidden layer.
features: number of features of the result; None for that of the input.
top_k: number of experts per token.
activation: ``"gelu"`` (the tanh approximation, as Flax's ``gelu``), ``"gelu_exact"``, ``"relu"`` or
    ``"silu"``.
gated: whether the activation is applied to a third layer, ``gate``, and multiplies ``up``.
dtype: dtype of the experts' computation and the result; None for that of input and parameters.
param_dtype: dtype of the parameters.
kernel_init: initializer of the experts' kernels, ``(num_experts, in, out)``.
recipe: how tensors are scaled. None takes the recipe of ``fp8flax.autocast``, or
    ``DelayedScaling()`` outside of it.""",
}


def with_shared_text(documented: T) -> T:
    """Replaces each line ``{name}`` in the docstring of a class or function by the text of this name.

    Other lines in braces stay. The docstring of a user's own op may have some.
    """

    def text(found: re.Match[str]) -> str:
        name = found["name"]
        return textwrap.indent(_TEXTS[name], found["indent"]) if name in _TEXTS else found[0]

    target: Any = documented
    if target.__doc__:  # not with python -OO
        target.__doc__ = re.sub(r"^(?P<indent> *)\{(?P<name>\w+)\}$", text, target.__doc__, flags=re.M)
    return documented

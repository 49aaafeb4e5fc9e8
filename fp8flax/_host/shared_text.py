"""Inserts text that several docstrings have in common, such as the arguments of Linen ops and NNX ops.

Such a text stands in a docstring as a line with its name, for instance ``{recipe}``. ``publish`` inserts
the texts, so ``help`` shows them, and so does the site of the documentation.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

_OPERAND = "an operand is not bfloat16, float16, float32 or float64, or the state is not float32"
_RECIPE = """\
recipe: how tensors are scaled. None takes the recipe of ``fp8flax.autocast``, or
    ``DelayedScaling()`` outside of it."""
_ACTIVATION = """\
activation: ``"gelu"`` (the tanh approximation, as Flax's ``gelu``), ``"gelu_exact"``, ``"relu"`` or
    ``"silu"``."""
_GRADIENT_ARGS = """\
has_aux: whether the function returns auxiliary data.
holomorphic: passed to JAX.
allow_int: passed to JAX."""
_GRADIENT_ERRORS = "TypeError: (when called) scaling state is not float32."

# Keys are ``name`` or ``Class.name``; see ``with_shared_text``.
_TEXTS = {
    # Ops.
    "recipe": _RECIPE,
    "options": f"""\
{_RECIPE}
form: ``"direct"`` multiplies FP8 operands, on the FP8 units of GPUs that have them. ``"qdq"`` casts
    to FP8 and back around a matmul in the operands' dtype; it serves as a reference and is never
    faster.""",
    "Fp8DotGeneralOp.errors": f"""\
TypeError: {_OPERAND}.
ValueError: the history in the state has another length than the recipe says.""",
    "Fp8Einsum.errors": f"""\
TypeError: {_OPERAND}.
    Also if ``eqn`` is not a string.
ValueError: the equation does not fit the operands, or the state does not fit the recipe.""",
    "Fp8Einsum.source": "Source: ``flax.linen.fp8_ops.Fp8Einsum``.",
    "Fp8ConvGeneralDilatedOp.errors": f"""\
TypeError: {_OPERAND}.
ValueError: the recipe scales along the contraction and the convolution is not a matmul, or the
    state does not fit the recipe.""",
    "Fp8ConvGeneralDilatedOp.source": (
        "Source: ``lax.conv_general_dilated``; recipes of Micikevicius et al., 2022, arXiv:2209.05433."
    ),
    "Fp8RaggedDotOp.errors": f"""\
TypeError: {_OPERAND}.
ValueError: the shapes do not fit, or the state does not fit the recipe or the number of experts.""",
    "Fp8RaggedDotOp.source": (
        "Source: ``jax.lax.ragged_dot``; the state of ``flax.linen.fp8_ops``, per expert."
    ),
    # Blocks of layers.
    "MLP.fields": f"""\
hidden_features: number of features of ``up`` and ``gate``.
features: number of features of ``down``; None for as many as the input has.
{_ACTIVATION}
gated: whether the activation is applied to ``gate`` and multiplies ``up``. Both layers then take
    the input with one scale, that of ``gate``.
use_bias: whether the layers have biases.
dtype: dtype of the computation; None for the dtype that input and parameters promote to.
param_dtype: dtype of the parameters.
kernel_init: initializer of the kernels.
bias_init: initializer of the biases.
{_RECIPE}""",
    "MoE.fields": f"""\
num_experts: number of experts.
hidden_features: number of features of each expert's hidden layer.
features: number of features of the result; None for as many as the input has.
top_k: number of experts per token.
{_ACTIVATION}
gated: whether the activation is applied to a third layer, ``gate``, and multiplies ``up``.
dtype: dtype of the experts' computation and the result; None for the dtype that input and
    parameters promote to.
param_dtype: dtype of the parameters.
kernel_init: initializer of the experts' kernels, ``(num_experts, in, out)``.
{_RECIPE}""",
    # Training.
    "value_and_grad.args": _GRADIENT_ARGS,
    "value_and_grad.errors": _GRADIENT_ERRORS,
    "grad.args": _GRADIENT_ARGS,
    "grad.errors": _GRADIENT_ERRORS,
    "accumulate_gradients.errors": """\
TypeError: (when called) scaling state is not float32.
ValueError: (when called) there is no microbatch, or the first dimensions differ.""",
    "accumulate_gradients.also": """\
(``optax.MultiSteps`` accumulates over steps instead, each with its own scaling state.)""",
    "calibrate.args": """\
batches: a few samples, similar to those that the model will see.
backward: whether the function is a loss (a scalar), whose gradients fill the state of output
    gradients too. Otherwise that state stays unchanged.
has_aux: whether the loss comes in a pair ``(loss, aux)``.""",
    "check_state.errors": """\
TypeError: the values are traced.
ValueError: the state is wrong; the message lists five leaves at most, and says what to do.""",
    # Whole models.
    "quantize_model.rules": """\
Rules are tried in this order, and the first that matches decides: ``exclude``, ``rules``, ``include``,
the defaults. The defaults leave out

* embeddings
* layers named like the last one (``lm_head``, ``logits``, ``classifier``, …), or ``router``
* convolutions that are not matmuls, because XLA has no FP8 with gradients for them
* kernels with K or N below 16
* kernels too small for FP8 to gain on an H200 with any batch (``1/(1/K + 1/N) < 281``)""",
    "quantize_model.recipe": """\
recipe: how tensors are scaled, unless a rule says otherwise. None takes the recipe of
    ``fp8flax.autocast``, or ``DelayedScaling()`` outside of it.""",
    "report.args": """\
model: the model that ``quantize_model`` returned.
*args: inputs of the model; ``jax.ShapeDtypeStruct`` may take the place of arrays.
target: the GPU of the prediction, as for ``audit``: ``"h100"``, ``"h200"``, ``"b200"``, …
**kwargs: keyword inputs of the model.""",
    "weights_for_serving.args": """\
weight_only: whether each output feature has a scale, as in ``freeze``.
**kwargs: keyword inputs of the model.""",
    "weights_for_serving.warns": """\
UserWarning: at the first call, if kernels of FP8 ops stay wide; see ``freeze``. Scales that have
    seen no data cause no warning.""",
    "freeze.args": """\
*args: inputs to trace the model with; ``jax.ShapeDtypeStruct`` may take the place of arrays.
weight_only: whether to store kernels in FP8 with a scale for each output feature, and to multiply
    in the inputs' dtype.
**kwargs: keyword inputs of the model.""",
}


def with_shared_text(docstring: str, name: str) -> str:
    """Returns the docstring of a class or function with a text in the place of each line ``{key}``.

    The text is that of ``{name}.{key}``, or of ``{key}``. Lines in braces without a text stay.
    """

    def text(found: re.Match[str]) -> str:
        of_this = _TEXTS.get(f"{name}.{found['key']}", _TEXTS.get(found["key"]))
        return found[0] if of_this is None else textwrap.indent(of_this, found["indent"])

    return re.sub(r"^(?P<indent> *)\{(?P<key>\w+)\}$", text, docstring, flags=re.M)


def insert_shared_text(documented: Any) -> None:
    """Inserts the shared text into the docstring of a class or function; other objects stay unchanged."""
    docstring = getattr(documented, "__doc__", None)
    if docstring and hasattr(documented, "__name__"):  # no docstring with python -OO
        changed = with_shared_text(docstring, documented.__name__)
        if changed != docstring:
            documented.__doc__ = changed

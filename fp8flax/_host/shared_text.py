"""Inserts text that several docstrings have in common, such as the arguments of Linen ops and NNX ops.

Such a text stands in a docstring as a line with its name, for instance ``{recipe}``. ``publish`` inserts
the texts, so ``help`` shows them, and so does the site of the documentation.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

_OP_ERRORS = """\
MissingStateError: the recipe in use needs scaling state that is missing. A Linen layer was applied
    to variables without it, or an NNX op was made under a recipe without state.
TypeError: an operand is not bfloat16, float16, float32 or float64, or the state is not float32."""
_RECIPE = """\
recipe: how tensors are scaled. None takes the recipe of ``fp8flax.autocast``, or
    ``DelayedScaling()`` outside of it."""
_FORM = """\
form: ``"direct"`` multiplies FP8 operands, on the FP8 units of GPUs that have them. ``"qdq"`` casts
    to FP8 and back around a matmul in the operands' dtype; it serves as a reference and is never
    faster."""
_GRADIENT_ARGS = """\
has_aux: whether the function returns auxiliary data.
holomorphic: passed to JAX.
allow_int: passed to JAX."""
_GRADIENT_STATE = """\
The gradient of the scaling state is its next value: the state of one call on all the data. This holds
however often a layer ran (shared weights, a scan over microbatches, ``jax.vmap`` over examples,
``jax.shard_map`` over devices). A layer that got no gradient keeps its state. A tensor that held a NaN
or an Inf leaves no trace in its history."""
_GRADIENT_ERRORS = "TypeError: (when called) scaling state is not float32."

# Keys are ``name`` or ``Class.name``; see ``with_shared_text``.
_TEXTS = {
    # Ops.
    "recipe": _RECIPE,
    "options": f"""\
{_RECIPE}
{_FORM}""",
    "Fp8DotGeneralOp.state": """\
Delayed scaling is the default. Its state is float32 variables: ``{input,kernel,output_grad}_scale`` of
shape ``(1,)`` and ``{…}_amax_history`` of shape ``(amax_history_len,)``. The gradient of each variable
is its next value: the scale that this step used, and the history with this step's amax at index 0. The
next step computes its scale from that history. Other recipes have no state. Under
``autocast(enabled=False)`` the op is ``lax.dot_general``.""",
    "Fp8DotGeneralOp.errors": f"""\
{_OP_ERRORS}
ValueError: the history in the state has another length than the recipe says.""",
    "Fp8Einsum.operands": """\
The first operand is the input and the second is the kernel, in any order of the result's indices.""",
    "Fp8Einsum.errors": f"""\
{_OP_ERRORS}
    Also if ``eqn`` is not a string, or an operand is not an array.
ValueError: the equation does not fit the operands, or the state does not fit the recipe.""",
    "Fp8Einsum.source": "Source: ``flax.linen.fp8_ops.Fp8Einsum``.",
    "Fp8ConvGeneralDilatedOp.computation": """\
Some convolutions are matmuls: their windows do not overlap, they have no groups, and their input is not
dilated. Examples are 1×1 kernels and the patch embedding of a vision transformer. The op computes them
as ``Fp8DotGeneralOp`` does, under every recipe.

In all other convolutions the input, the kernel and the output gradient are cast to FP8 and back. They
are convolved in the dtype of the operands, on every device, because XLA has no gradients of
convolutions in FP8. The tensors kept for the backward pass take the memory of FP8; the speed is that of
the operands' dtype. Such a convolution needs one scale per tensor (``DelayedScaling``,
``Float8CurrentScaling``), because scales that change within a window cannot be applied to the result.

The scaling state is that of ``Fp8DotGeneralOp``. Under ``autocast(enabled=False)`` the op is
``lax.conv_general_dilated``.""",
    "Fp8ConvGeneralDilatedOp.options": f"""\
{_RECIPE}
form: ``"direct"`` keeps FP8 operands for the backward pass, and multiplies them if the convolution
    is a matmul. ``"qdq"`` casts to FP8 and back around JAX's own convolution.""",
    "Fp8ConvGeneralDilatedOp.errors": f"""\
{_OP_ERRORS}
ValueError: the recipe scales along the contraction and the convolution is not a matmul, or the
    state does not fit the recipe.""",
    "Fp8ConvGeneralDilatedOp.source": (
        "Source: ``lax.conv_general_dilated``; recipes of Micikevicius et al., 2022, arXiv:2209.05433."
    ),
    "Fp8RaggedDotOp.computation": """\
``out[m] = lhs[m] . rhs[e]``, where ``e`` is the expert of row ``m``: the first ``group_sizes[0]`` rows
belong to expert 0, and so on. Rows beyond ``sum(group_sizes)`` give zeros and have no effect on any
scale, whatever they hold.

The scaling state is that of ``Fp8DotGeneralOp``, except that each expert's kernel has its own scale and
amax history. ``kernel_scale`` has shape ``(experts, 1)`` and ``kernel_amax_history`` has shape
``(experts, amax_history_len)``. The input and the output gradient have one scale each. Under
``autocast(enabled=False)`` the op is ``lax.ragged_dot``.""",
    "Fp8RaggedDotOp.options": f"""\
{_RECIPE} Values with scales per block are multiplied in a wide dtype,
    except 128-blocks on Hopper.
{_FORM}""",
    "Fp8RaggedDotOp.errors": f"""\
{_OP_ERRORS}
ValueError: the shapes do not fit, or the state does not fit the recipe or the number of experts.""",
    "Fp8RaggedDotOp.source": (
        "Source: ``jax.lax.ragged_dot``; the state of ``flax.linen.fp8_ops``, per expert."
    ),
    # Training.
    "value_and_grad.state": _GRADIENT_STATE,
    "value_and_grad.args": _GRADIENT_ARGS,
    "value_and_grad.errors": _GRADIENT_ERRORS,
    "grad.args": _GRADIENT_ARGS,
    "grad.errors": _GRADIENT_ERRORS,
    "accumulate_gradients.computation": """\
Every microbatch is cast with the same scales, and the scaling state is that of one call on all of them.
The gradients of parameters are averaged in float32. If the loss is a mean over examples and all
microbatches have one size, gradients and state are those of one large batch.

Kernels are quantized once for all microbatches. Their codes stay in memory for this time: one byte per
element, or two for block scales that differ between the forward and the backward pass. Call the
function under ``jax.jit`` or ``nnx.jit``; otherwise each call compiles again.""",
    "accumulate_gradients.result": """\
The number of microbatches is the first dimension of each leaf of ``microbatches``, as in
``jax.lax.scan``; ``jax.random.split`` makes a key for each. The function returns ``(value,
gradients)``, or with ``has_aux`` ``((value, aux), gradients)``: the mean value, the gradients as in
``value_and_grad``, and ``aux`` of each microbatch, stacked.""",
    "accumulate_gradients.errors": """\
TypeError: (when called) scaling state is not float32; or the function cannot take a list that was
    passed as microbatches.
ValueError: (when called) there is no microbatch, or the first dimensions differ.""",
    "accumulate_gradients.also": """\
(``optax.MultiSteps`` accumulates over steps instead, each with its own scaling state.)""",
    "calibrate.computation": """\
It runs the function on each batch and records the largest magnitudes. Every FP8 op runs in its
operands' own dtype, so that saturation in an early layer does not mislead a later one. The result is
the state of one step on all batches, with the scales that the next step uses.

Without ``backward=True`` the state of inputs and kernels is filled; the state of output gradients needs
a loss and ``backward=True``.""",
    "calibrate.function": """\
It is compiled. Without ``backward`` it may return any arrays, and every layer must affect a
float that it returns, because reverse mode records the magnitudes. If it has no reverse mode,
because a layer runs in a ``lax.while_loop`` or in ``jax.jvp``, callbacks to the host record
them.""",
    "calibrate.args": """\
batches: a few samples, similar to those that the model will see.
backward: whether the function is a loss (a scalar), whose gradients fill the state of output
    gradients too. Otherwise that state stays unchanged.
has_aux: whether the loss comes in a pair ``(loss, aux)``.""",
    "calibrate.errors": """\
TypeError: scaling state is not float32; the function is a model; it takes the parts of a batch as
    separate arguments, or returns no loss although ``backward`` is True; or ``batches`` is one
    batch.
ValueError: there is no scaling state; there is no batch; a batch produced a NaN or an Inf in a
    tensor of a layer; or the function reaches no FP8 op.""",
    "calibrate.warns": "UserWarning: some op did not run; its state stays unchanged.",
    "check_state.errors": """\
TypeError: the values are traced, or scaling state is not float32.
ValueError: the state is wrong, or was donated; the message lists five tensors at most, and says what
    to do.""",
    # Whole models.
    "report.result": "A ``ModelReport``; print it, or look at its ``rows``.",
    "quantize_model.rules": """\
Rules are tried in this order, and the first that matches decides: ``exclude``, ``rules``, ``include``,
the defaults. The defaults leave out

* embeddings
* layers named like the last one (``lm_head``, ``logits``, ``classifier``, …), or ``router``
* convolutions that are not matmuls, because XLA has no FP8 with gradients for them
* kernels with K or N below 16
* kernels too small for FP8 to gain on an H200 with any batch (``1/(1/K + 1/N) < 281``)""",
    "quantize_model.args": """\
recipe: how tensors are scaled, unless a rule says otherwise. None takes the recipe of
    ``fp8flax.autocast``, or ``DelayedScaling()`` outside of it.
include: a regular expression or several. Only contractions that match are converted, even those
    that the defaults leave out.
exclude: a regular expression or several; contractions that match are not converted.
rules: a sequence of pairs and callables. A pair has a regular expression and a recipe or
    ``"leave"``. A callable ``(path, module, shapes)`` returns a recipe, ``"leave"``, or None to let
    the next rule decide. It gets the module's path, the module, and the shapes of input and kernel.
    In NNX the first shape has only the dimensions that the kernel contracts.
allow_unmatched: whether to allow a pattern that decides nothing, because no contraction matches it
    or an earlier rule matches first. By default such a pattern is an error.
form: form of the ops: ``"direct"``, or ``"qdq"``, which with delayed scaling can be differentiated
    twice and is never faster; see ``Fp8DotGeneralOp``.""",
    "report.args": """\
model: the model that ``quantize_model`` returned.
*args: inputs of the model; ``jax.ShapeDtypeStruct`` may take the place of arrays.
target: the GPU of the prediction, as for ``audit``: ``"h100"``, ``"h200"``, ``"b200"``, …
**kwargs: keyword inputs of the model.""",
    "save_safetensors.args": """\
rename: other names for the tensors: regular expressions and their replacements, each substituted
    wherever it is found in a name, in their order; or a function of one name that returns another.
    A name without a match stays unchanged. A wide ``<layer>.kernel`` that is renamed to
    ``<layer>.weight`` is transposed to ``(out, in)``, as PyTorch has it. ``load_safetensors`` finds
    the variables by the names that they have in the model.
    A replacement with ``{0}`` makes a tensor for each entry of the first dimension, and puts its
    number there; ``{1}`` is for the second dimension. A dict as replacement splits the output
    features of a layer: ``{"qkv": {"q": 512, "k": 128, "v": 128}}``. A tuple of patterns joins
    them: ``{("q", "k", "v"): "qkv"}``. ``load_into`` reads such a file, with the same ``rename``.
config: contents of a ``config.json`` in the folder of ``path``, which describes the architecture,
    as ``to_dict()`` of a transformers config returns it. ``quantization_config`` is added to it.
    None writes no such file.""",
    "save_safetensors.errors": """\
ImportError: the library ``safetensors`` is not installed.
OSError: a file cannot be written, for instance because the disk is full.
TypeError: ``model`` does not come from ``freeze``; ``rename`` is neither a mapping as above nor a
    function that returns strings; or ``config`` is not a mapping that JSON can hold.
ValueError: two variables would have one name; a variable is not an array of a dtype that files
    hold; a pattern matches nothing; a name would be empty, or give the tensors of one layer
    different prefixes.
    Also if ``rename`` would cut a block of scales, or join layers that have one scale each.
    Also if a wide kernel that becomes a weight does not have two dimensions. Also if ``config`` is
    given, and no ``quantization_config`` describes the model, or ``config`` has its own.""",
    "load_safetensors.errors": """\
OSError: there is no such file, or it cannot be read.
ValueError: the file was not written by ``save_safetensors``, or by another version of it; the file
    is damaged, for instance a bit of a tensor is flipped; or it has a 64-bit array, which JAX would
    narrow. For the latter, enable ``jax_enable_x64``, or convert the array before it is saved. The
    error names the file. (Version 2, which can be read too, had no checksums of the tensors
    themselves.)""",
    "weights_for_serving.computation": """\
The tensors are those of the file that ``save_safetensors`` writes after ``freeze``, bit for bit. One
compiled program makes them on the devices. It is compiled at the first call. Later calls with the same
model, options and shapes use it again. Use this function where an inference engine samples from a model
between the steps of its training, as in reinforcement learning.

XLA derives the sharding of the results from the sharding of the variables. If the variables are on a
mesh with explicit axes, the results are on the same mesh with automatic axes.""",
    "weights_for_serving.args": """\
*args: inputs to trace the model with, as in ``freeze``. Their values are not used.
rename: names of the server for those of the model, as in ``save_safetensors``. A function must be
    the same object at each call; another one compiles a new program.
weight_only: whether each output feature has a scale, as in ``freeze``.
**kwargs: keyword inputs of the model.""",
    "weights_for_serving.warns": """\
UserWarning: at the first call, if kernels of FP8 ops stay wide; see ``freeze``. Scales that have
    seen no data cause no warning.""",
    "weights_for_serving.result": "Codes, scales and wide tensors by their names, as in the file.",
    "freeze.computation": """\
Each op computes, bit for bit, what it computes in ``model``. The models agree bit for bit if XLA
compiles the code between the ops in the same way; under ``jax.jit`` it may fuse it differently and
round differently in the last bit. Delayed scales become those that the next step would use. Recipes
without state continue to scale inputs from the current data.""",
    "freeze.warns": """\
UserWarning: kernels of FP8 ops stay wide, with the reason for each; or delayed scales have seen no
    data.""",
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

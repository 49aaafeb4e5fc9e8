"""FP8 for Flax NNX: what is public, in reading order.

A second front of the package: recipes, ``autocast`` and ``audit`` are those of ``fp8flax``.
"""

# Ops, to be given to layers, and their state.
from fp8flax.nnx.ops import Fp8ConvGeneralDilatedOp, Fp8DotGeneralOp, Fp8Einsum, Fp8RaggedDotOp
from fp8flax.nnx.ops import OverwriteWithGradient

# Training.
from fp8flax.nnx.training import Optimizer, accumulate_gradients, grad, overwrite_state, value_and_grad
from fp8flax._train.check import check_state

# Whole models.
from fp8flax._model.quantize_model import quantize_model
from fp8flax._model.report import report

# Serving, and what comes before.
from fp8flax._train.calibrate import calibrate
from fp8flax.nnx.freezing import Frozen
from fp8flax._serve.freeze import freeze
from fp8flax._serve.export import save_safetensors, weights_for_serving

__all__ = [
    "Fp8ConvGeneralDilatedOp",
    "Fp8DotGeneralOp",
    "Fp8Einsum",
    "Fp8RaggedDotOp",
    "Frozen",
    "Optimizer",
    "OverwriteWithGradient",
    "accumulate_gradients",
    "calibrate",
    "check_state",
    "freeze",
    "grad",
    "overwrite_state",
    "quantize_model",
    "report",
    "save_safetensors",
    "value_and_grad",
    "weights_for_serving",
]

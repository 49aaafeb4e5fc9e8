"""FP8 training and inference for Flax Linen and NNX: the public names, in reading order.

A file imports only from its own folder and from the folders before it: ``_compat`` (private parts of
JAX), ``_core`` (pure functions of arrays), ``_linen``, ``_train``, ``_audit``, ``_model``,
``_serve``, ``nnx`` and ``demo``.
"""

# Ops that layers take.
from fp8flax._linen.ops import Fp8ConvGeneralDilatedOp, Fp8DotGeneralOp, Fp8RaggedDotOp

# Recipes: how tensors are scaled.
from fp8flax._core.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from fp8flax._core.autocast import autocast
from fp8flax._core.formats import Format

# Parts of custom recipes.
from fp8flax._core.recipes import CustomRecipe, GemmRecipe, Recipe
from fp8flax._core.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, NVFP4Quantizer
from fp8flax._core.qtensor import QTensor

# Training.
from fp8flax._train.gradients import accumulate_gradients, grad, pmean_gradients, value_and_grad
from fp8flax._train.train_state import DynamicScale, TrainState
from fp8flax._core.names import RESIDUAL_NAMES

# Statistics of a run: how its scales affect its tensors.
from fp8flax._train.statistics import plot_statistics, statistics

# The scaling state in a tree of variables.
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.ops.op import MissingStateError
from fp8flax._train.bridge import add_fp8_state, remove_fp8_state
from fp8flax._train.calibrate import calibrate
from fp8flax._train.check import check_state

# Whole models.
from fp8flax._model.quantize_model import quantize_model
from fp8flax._model.report import ModelReport, report

# Serving.
from fp8flax._serve.freeze import freeze
from fp8flax._serve.checkpoints import read_checkpoint
from fp8flax._serve.load_into import load_into
from fp8flax._serve.export import save_safetensors
from fp8flax._serve.export import weights_for_serving

# Audits: which GEMMs of a compiled program run in FP8.
from fp8flax._audit import AuditReport, AuditedGemm, assert_fp8, audit, compile_only_devices
from fp8flax._core.gemm.gpus import Fp8EmulationWarning

# Arithmetic.
from fp8flax._core.quantize import cast_to_representable, dequantize, quantize, quantize_dequantize

# Other names that code written for flax.linen.fp8_ops imports from there.
from fp8flax._core.ops.dot_general import dot_general_with_precision
from fp8flax._compat.max_dtype import fp32_max_grad
from fp8flax._core.qdq import in_q, in_qdq, out_dq, out_qdq
from fp8flax._core.quantize import qdq
from fp8flax._core.scaling import compute_amax_history, compute_scale
from fp8flax._linen.ops import Fp8DirectDotGeneralOp, Fp8DotGeneral, Fp8Einsum, NANOOFp8DotGeneralOp

__version__ = "0.1.0"

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "RESIDUAL_NAMES",
    "AuditReport",
    "AuditedGemm",
    "BlockQuantizer",
    "CurrentQuantizer",
    "CustomRecipe",
    "DelayedQuantizer",
    "DelayedScaling",
    "DynamicScale",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Fp8ConvGeneralDilatedOp",
    "Fp8DirectDotGeneralOp",
    "Fp8DotGeneral",
    "Fp8DotGeneralOp",
    "Fp8Einsum",
    "Fp8EmulationWarning",
    "Fp8RaggedDotOp",
    "GemmRecipe",
    "MXFP8BlockScaling",
    "MissingStateError",
    "ModelReport",
    "NANOOFp8DotGeneralOp",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "QTensor",
    "Recipe",
    "TrainState",
    "accumulate_gradients",
    "add_fp8_state",
    "assert_fp8",
    "audit",
    "autocast",
    "calibrate",
    "cast_to_representable",
    "check_state",
    "compile_only_devices",
    "compute_amax_history",
    "compute_scale",
    "dequantize",
    "dot_general_with_precision",
    "fp32_max_grad",
    "freeze",
    "grad",
    "in_q",
    "in_qdq",
    "load_into",
    "out_dq",
    "out_qdq",
    "plot_statistics",
    "pmean_gradients",
    "qdq",
    "quantize",
    "quantize_dequantize",
    "quantize_model",
    "read_checkpoint",
    "remove_fp8_state",
    "report",
    "save_safetensors",
    "statistics",
    "value_and_grad",
    "weights_for_serving",
]

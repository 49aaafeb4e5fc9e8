"""FP8 training and inference for Flax Linen."""

from fp8flax._host import interrupt as _interrupt  # noqa: F401 (first: the rest takes time, and needs JAX's internals)
from fp8flax._host import versions as _versions

# isort: split
from fp8flax._core.autocast import autocast
from fp8flax._core.device import Fp8EmulationWarning
from fp8flax._core.dot_general import dot_general_with_precision
from fp8flax._core.formats import (
    Format,
    Fp8Limits,
    float8_e4m3fn,
    float8_e4m3fnuz,
    float8_e5m2,
    float8_e5m2fnuz,
    float8_e8m0fnu,
    fp8_limits,
    fp8_max,
)
from fp8flax._core.max_dtype import fp32_max_grad
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, RESIDUAL_NAMES
from fp8flax._core.qdq import in_q, in_qdq, out_dq, out_qdq
from fp8flax._core.quantize import cast_to_representable, dequantize, qdq, quantize, quantize_dequantize
from fp8flax._core.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer
from fp8flax._core.recipes import (
    Accumulation,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    GemmRecipe,
    MXFP8BlockScaling,
    Recipe,
    torchao_recipe,
)
from fp8flax._core.scaling import compute_amax_history, compute_scale
from fp8flax._linen.op import MissingStateError
from fp8flax._linen.ops import (
    Einsum,
    Fp8ConvGeneralDilatedOp,
    Fp8DirectDotGeneralOp,
    Fp8DotGeneral,
    Fp8DotGeneralOp,
    Fp8Einsum,
    Fp8RaggedDotOp,
    NANOOFp8DotGeneralOp,
)
from fp8flax._model.quantize_model import quantize_model
from fp8flax._model.report import ModelReport, report
from fp8flax._serve.freeze import freeze
from fp8flax._serve.safetensors import load_safetensors, save_safetensors
from fp8flax._train.bridge import add_fp8_state, remove_fp8_state
from fp8flax._train.calibrate import calibrate
from fp8flax._train.check import check_state
from fp8flax._train.gradients import accumulate_gradients, grad, pmean_gradients, value_and_grad
from fp8flax._train.train_state import DynamicScale, TrainState
from fp8flax.audit import AuditReport, assert_fp8, audit

__version__ = "0.1.0"

__all__ = [
    "OVERWRITE_WITH_GRADIENT",
    "RESIDUAL_NAMES",
    "Accumulation",
    "AuditReport",
    "BlockQuantizer",
    "CurrentQuantizer",
    "CustomRecipe",
    "DelayedQuantizer",
    "DelayedScaling",
    "DynamicScale",
    "Einsum",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "Fp8ConvGeneralDilatedOp",
    "Fp8DirectDotGeneralOp",
    "Fp8DotGeneral",
    "Fp8DotGeneralOp",
    "Fp8Einsum",
    "Fp8EmulationWarning",
    "Fp8Limits",
    "Fp8RaggedDotOp",
    "GemmRecipe",
    "MXFP8BlockScaling",
    "MissingStateError",
    "ModelReport",
    "NANOOFp8DotGeneralOp",
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
    "compute_amax_history",
    "compute_scale",
    "dequantize",
    "dot_general_with_precision",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "fp8_limits",
    "fp8_max",
    "fp32_max_grad",
    "freeze",
    "grad",
    "in_q",
    "in_qdq",
    "load_safetensors",
    "out_dq",
    "out_qdq",
    "pmean_gradients",
    "qdq",
    "quantize",
    "quantize_dequantize",
    "quantize_model",
    "remove_fp8_state",
    "report",
    "save_safetensors",
    "torchao_recipe",
    "value_and_grad",
]

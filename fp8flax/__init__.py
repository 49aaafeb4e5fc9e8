"""FP8 training and inference for Flax Linen and NNX: the public names, in reading order.

A file imports only from its own folder and from the folders before it: ``_compat`` (private parts of
JAX and Flax), ``_core`` (all that needs no framework), ``_audit``, ``_linen`` and ``_nnx`` (ops as
modules), ``_model``, ``_train``, ``_serve``, ``nnx`` (public names) and ``demo``.
"""

import types

# Ops that layers take.
from fp8flax._linen.ops import Fp8ConvGeneralDilatedOp as Fp8ConvGeneralDilatedOp
from fp8flax._linen.ops import Fp8DotGeneralOp as Fp8DotGeneralOp
from fp8flax._linen.ops import Fp8RaggedDotOp as Fp8RaggedDotOp

# The same for code without Flax: functions, and their state in any tree.
from fp8flax._train.plain import dot_general as dot_general
from fp8flax._train.plain import einsum as einsum
from fp8flax._train.plain import init_state as init_state
from fp8flax._train.plain import merge_state as merge_state
from fp8flax._train.plain import ragged_dot as ragged_dot
from fp8flax._train.plain import split_state as split_state

# Recipes: how tensors are scaled.
from fp8flax._core.recipes import DelayedScaling as DelayedScaling
from fp8flax._core.recipes import Float8BlockScaling as Float8BlockScaling
from fp8flax._core.recipes import Float8CurrentScaling as Float8CurrentScaling
from fp8flax._core.recipes import MXFP8BlockScaling as MXFP8BlockScaling
from fp8flax._core.recipes import NVFP4BlockScaling as NVFP4BlockScaling
from fp8flax._core.autocast import autocast as autocast
from fp8flax._core.formats import Format as Format

# Parts of custom recipes.
from fp8flax._core.recipes import CustomRecipe as CustomRecipe
from fp8flax._core.recipes import GemmRecipe as GemmRecipe
from fp8flax._core.recipes import Recipe as Recipe
from fp8flax._core.quantizers import BlockQuantizer as BlockQuantizer
from fp8flax._core.quantizers import CurrentQuantizer as CurrentQuantizer
from fp8flax._core.quantizers import DelayedQuantizer as DelayedQuantizer
from fp8flax._core.quantizers import NVFP4Quantizer as NVFP4Quantizer
from fp8flax._core.qtensor import QTensor as QTensor

# Training.
from fp8flax._train.gradients import accumulate_gradients as accumulate_gradients
from fp8flax._train.gradients import grad as grad
from fp8flax._train.gradients import pmean_gradients as pmean_gradients
from fp8flax._train.gradients import value_and_grad as value_and_grad
from fp8flax._train.train_state import DynamicScale as DynamicScale
from fp8flax._train.train_state import TrainState as TrainState
from fp8flax._core.names import RESIDUAL_NAMES as RESIDUAL_NAMES

# Statistics of a run: how its scales affect its tensors.
from fp8flax._train.statistics import plot_statistics as plot_statistics
from fp8flax._train.statistics import statistics as statistics

# The scaling state in a tree of variables.
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT
from fp8flax._core.ops.op import MissingStateError as MissingStateError
from fp8flax._train.bridge import add_fp8_state as add_fp8_state
from fp8flax._train.bridge import remove_fp8_state as remove_fp8_state
from fp8flax._train.calibrate import calibrate as calibrate
from fp8flax._train.check import check_state as check_state

# Whole models.
from fp8flax._model.quantize_model import quantize_model as quantize_model
from fp8flax._model.report import ModelReport as ModelReport
from fp8flax._model.quantize_model import report as report

# Serving.
from fp8flax._serve.freeze import freeze as freeze
from fp8flax._serve.checkpoints import read_checkpoint as read_checkpoint
from fp8flax._serve.load_into import load_into as load_into
from fp8flax._serve.export import save_safetensors as save_safetensors
from fp8flax._serve.export import weights_for_serving as weights_for_serving

# Audits: which GEMMs of a compiled program run in FP8.
from fp8flax._audit.report import AuditReport as AuditReport
from fp8flax._audit.gemms import AuditedGemm as AuditedGemm
from fp8flax._audit.auditing import assert_fp8 as assert_fp8
from fp8flax._audit.auditing import audit as audit
from fp8flax._audit.compiling import compile_only_devices as compile_only_devices
from fp8flax._core.gemm.gpus import Fp8EmulationWarning as Fp8EmulationWarning

# Arithmetic.
from fp8flax._core.quantize import cast_to_representable as cast_to_representable
from fp8flax._core.quantize import dequantize as dequantize
from fp8flax._core.quantize import quantize as quantize
from fp8flax._core.quantize import quantize_dequantize as quantize_dequantize

# Other names that code written for flax.linen.fp8_ops imports from there.
from fp8flax._core.flax_names import compute_amax_history as compute_amax_history
from fp8flax._core.flax_names import dot_general_with_precision as dot_general_with_precision
from fp8flax._core.flax_names import in_q as in_q
from fp8flax._core.flax_names import in_qdq as in_qdq
from fp8flax._core.flax_names import out_dq as out_dq
from fp8flax._core.flax_names import out_qdq as out_qdq
from fp8flax._core.flax_names import qdq as qdq
from fp8flax._compat.max_dtype import fp32_max_grad as fp32_max_grad
from fp8flax._core.scaling import compute_scale as compute_scale
from fp8flax._linen.ops import Fp8DirectDotGeneralOp as Fp8DirectDotGeneralOp
from fp8flax._linen.ops import Fp8DotGeneral as Fp8DotGeneral
from fp8flax._linen.ops import NANOOFp8DotGeneralOp as NANOOFp8DotGeneralOp
from fp8flax._linen.ops import Fp8Einsum as Fp8Einsum

__version__ = "0.1.0"


def __getattr__(name: str) -> types.ModuleType:
    """Imports ``fp8flax.nnx`` at its first use: Flax NNX costs users of Linen half a second."""
    if name == "nnx":
        import fp8flax.nnx

        return fp8flax.nnx
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

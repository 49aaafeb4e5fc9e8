"""FP8 for Flax NNX: what is public, in reading order.

A second front of the package: recipes, ``autocast`` and ``audit`` are those of ``fp8flax``.
"""

# Ops, to be given to layers, and their state.
from fp8flax._nnx.ops import Fp8ConvGeneralDilatedOp as Fp8ConvGeneralDilatedOp
from fp8flax._nnx.ops import Fp8DotGeneralOp as Fp8DotGeneralOp
from fp8flax._nnx.ops import Fp8Einsum as Fp8Einsum
from fp8flax._nnx.ops import Fp8RaggedDotOp as Fp8RaggedDotOp
from fp8flax._nnx.ops import OverwriteWithGradient as OverwriteWithGradient

# Training.
from fp8flax._train.nnx import Optimizer as Optimizer
from fp8flax._train.nnx import accumulate_gradients as accumulate_gradients
from fp8flax._train.nnx import grad as grad
from fp8flax._train.nnx import overwrite_state as overwrite_state
from fp8flax._train.nnx import value_and_grad as value_and_grad
from fp8flax._train.check import check_state as check_state

# Whole models.
from fp8flax._model.quantize_model import quantize_model as quantize_model
from fp8flax._model.quantize_model import report as report

# Serving, and what comes before.
from fp8flax._train.calibrate import calibrate as calibrate
from fp8flax._serve.nnx import Frozen as Frozen
from fp8flax._serve.freeze import freeze as freeze
from fp8flax._serve.export import save_safetensors as save_safetensors
from fp8flax._serve.export import weights_for_serving as weights_for_serving

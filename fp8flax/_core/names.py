"""The names that this package writes into programs and variables, and what the audit says of them."""

from __future__ import annotations

FORWARD, DGRAD, WGRAD = "fp8_forward", "fp8_dgrad", "fp8_wgrad"
"""Scopes of the three GEMMs of a contraction."""

BY_OP = "fp8_op"
"""The scope of an FP8 op in a model of ``quantize_model``."""

COUNTED = "fp8_site_"
"""How the scopes begin in which ``report`` counts contractions."""

QDQ = "fp8_qdq"
"""The scope of a GEMM in the quantize-dequantize form, which is left to the compiler."""

BLOCK_GEMM, BLOCK_GEMM_F16 = "fp8_block_gemm", "fp8_block_gemm_f16"
"""Our kernel for block scales: what multiplies in FP8, and what reads FP8 and multiplies in float16."""

BLOCK_GEMM_HOPPER = "fp8_block_gemm_hopper"
"""Our kernel for block scales that multiplies in Hopper's FP8 units."""

GROUPED_GEMM = "fp8_grouped_gemm"
"""Our kernel for the experts of a ragged dot, in Hopper's FP8 units."""

TRANSPOSE_GROUPS = "fp8_transpose_groups"
"""Our kernel that transposes the rows of each expert."""

BLOCK_QUANTIZE = "fp8_block_quantize"
"""Our kernel that casts with a scale per block, in both orientations."""

CAST_TRANSPOSE = "fp8_cast_transpose"
"""Our kernel that casts in both orientations."""

TRANSPOSE = "fp8_transpose"
"""Our kernel that transposes codes."""

NOT_CONVERTED = "fp8_not_converted"
SWITCHED_OFF = "fp8_switched_off"
KEPT_WIDE = "fp8_kept_wide"
CONVOLVED_WIDE = "fp8_convolved_wide"
DEQUANTIZED = "fp8_dequantized"

CHOSEN_WIDE = {
    NOT_CONVERTED: "quantize_model left it, fp8flax.report says why: multiplied in {dtypes}",
    SWITCHED_OFF: "FP8 is off here, by autocast(enabled=False): multiplied in {dtypes}",
    KEPT_WIDE: "the recipe keeps an operand of this GEMM wide: multiplied in {dtypes}",
}
"""Scopes of what was asked not to run in FP8, and the reason; the first in an op name decides."""

WITHOUT_UNITS = {
    CONVOLVED_WIDE: "a convolution that is not a matmul: the same FP8 values, convolved in {dtypes}; "
    "XLA has no FP8 convolution with gradients",
    BLOCK_GEMM_F16: "read as FP8 and multiplied in float16, exactly: our kernel for block scales has no "
    "FP8 here",
    DEQUANTIZED: "nothing here multiplies FP8 with these scales: the same values, multiplied in {dtypes}",
}
"""Scopes of FP8 values that nothing multiplies as FP8, on a device that has FP8 units, and the reason."""

RESIDUAL_NAMES = ("fp8_input", "fp8_kernel", "fp8_scaling")
"""The ``checkpoint_name`` of each tensor that an FP8 matmul keeps for its backward pass.

The names stand for the quantized input, the quantized kernel, and the scales and amaxes. Quantized tensors
are kept as FP8 codes in uint8. The input is kept unquantized if the recipe computes wgrad in high
precision. The result of the forward GEMM is named ``"fp8_output"``. Use the names in policies for
``jax.checkpoint`` and ``nn.remat``::

    policies = jax.checkpoint_policies
    keep_fp8 = policies.save_only_these_names(*fp8.RESIDUAL_NAMES)
    requantize_kernels = policies.save_only_these_names("fp8_input", "fp8_scaling")
    keep_outputs = policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names("fp8_output")
    )

Without a policy, or with one that has none of these names, all of these tensors are computed again from the
inputs of the block. (``dots_saveable`` alone does not see FP8 GEMMs.)
"""

KERNEL_FORWARD_NAME = "fp8_kernel_forward"
"""That of the kernel for its forward GEMM, where those codes are not the ones that are kept.

``accumulate_gradients`` makes them once for all microbatches."""

OUTPUT_NAME = "fp8_output"
"""The ``checkpoint_name`` of the result of the forward GEMM."""

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""The Linen collection whose "gradient" is its next value. Flax uses the same name."""

PARAMS = "params"
"""The Linen collection of what is trained."""

ROLES = ("input", "kernel", "output_grad")
"""The three tensors of a matmul that are quantized, as they appear in the names of the state."""

SCALE, AMAX_HISTORY = "_scale", "_amax_history"
"""How the names of the state end."""


def state_leaf_names(role: str) -> tuple[str, str]:
    """Returns the variable names of a role's scale and amax history."""
    return role + SCALE, role + AMAX_HISTORY

"""The names that this package writes into programs and variables, and how the audit explains them."""

from __future__ import annotations

from fp8flax._core.types import Role

FORWARD, DGRAD, WGRAD = "fp8_forward", "fp8_dgrad", "fp8_wgrad"
"""The scopes (``jax.named_scope``) of the three GEMMs of a contraction."""

BY_OP = "fp8_op"
"""The scope of an FP8 op in NNX, or in a Linen model that ``quantize_model`` converted."""

COUNTED = "fp8_site_"
"""The prefix of the scopes by which ``report`` finds and counts the contractions of a model."""

MODULE = "fp8_module"
"""The scope ``fp8_module(path)`` of the methods of a module while ``report`` traces its model."""

CUBLASLT = "fp8_cublaslt"
"""The scope of a GEMM of FP8 codes that asks for cublasLt and for the accumulation of the recipe."""

BLOCK_GEMM_HOPPER = "fp8_block_gemm_hopper"
"""Our GPU kernel for block scales that multiplies in Hopper's FP8 units."""

GROUPED_GEMM = "fp8_grouped_gemm"
"""Our GPU kernel that multiplies the experts of a ragged dot in Hopper's FP8 units."""

BLOCK_QUANTIZE = "fp8_block_quantize"
"""Our GPU kernel that casts a matrix with one scale per block, and returns codes for both of its GEMMs."""

NOT_CONVERTED, SWITCHED_OFF, KEPT_WIDE = "fp8_not_converted", "fp8_switched_off", "fp8_kept_wide"
CONVOLVED_WIDE, DEQUANTIZED = "fp8_convolved_wide", "fp8_dequantized"
"""The scopes of contractions that run in a wide dtype. The texts below say why."""

CHOSEN_WIDE = {
    NOT_CONVERTED: "quantize_model left it, fp8flax.report says why: multiplied in {dtypes}",
    SWITCHED_OFF: "FP8 is off here, by autocast(enabled=False): multiplied in {dtypes}",
    KEPT_WIDE: "the recipe keeps an operand of this GEMM wide: multiplied in {dtypes}",
}
"""Scopes of GEMMs that do not run in FP8 because the user chose so, each with the audit's reason.

If an op name contains several of these scopes, the first one in this dict gives the reason."""

WITHOUT_UNITS = {
    CONVOLVED_WIDE: "a convolution that is not a matmul: the same FP8 values, convolved in {dtypes}; "
    "XLA has no FP8 convolution with gradients",
    DEQUANTIZED: "nothing here multiplies these codes and scales: the same values, multiplied in {dtypes}",
}
"""Scopes of GEMMs of FP8 values that run in a wide dtype on a GPU with FP8 units, each with the reason."""

RESIDUAL_NAMES = ("fp8_input", "fp8_kernel", "fp8_scaling")
"""The ``checkpoint_name`` of each tensor that an FP8 matmul keeps for its backward pass.

The names stand for the quantized input, the quantized kernel, and the scales and amaxes. Quantized tensors
are kept as codes: FP8 in uint8, FP4 in uint4. The input is kept unquantized if the recipe computes wgrad in
high precision. The result of the forward GEMM is named ``"fp8_output"``. Use the names in policies for
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
"""The ``checkpoint_name`` of the kernel's codes for the forward GEMM, if other codes are kept for dgrad.

``accumulate_gradients`` finds these codes by this name, and computes them once for all microbatches."""

OUTPUT_NAME = "fp8_output"
"""The ``checkpoint_name`` of the result of the forward GEMM."""

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""The Linen collection whose "gradient" is its next value. Flax uses the same name."""

RNG = "fp8"
"""The name of the random numbers for stochastic rounding, in ``rngs`` of Linen and in ``nnx.Rngs``."""

PARAMS = "params"
"""The Linen collection of the trained parameters."""

OPERANDS: tuple[Role, Role] = ("input", "kernel")
"""The operands of a matmul."""

ROLES: tuple[Role, Role, Role] = (*OPERANDS, "output_grad")
"""The three tensors of a matmul that are quantized, as they appear in the names of the state."""

SCALE, AMAX_HISTORY = "_scale", "_amax_history"
"""The endings of the names of the state's variables, see ``state_leaf_names``."""


def state_leaf_names(role: str) -> tuple[str, str]:
    """Returns the variable names of a role's scale and amax history."""
    return role + SCALE, role + AMAX_HISTORY


KERNEL_TENSOR_SCALE = "kernel_tensor_scale"
"""The name of the variable with the scale of the tensor of a frozen NVFP4 kernel."""

STATE_LEAF_NAMES = frozenset(name for role in ROLES for name in state_leaf_names(role))
"""The variable names of all roles."""

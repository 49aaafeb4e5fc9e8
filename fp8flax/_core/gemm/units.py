"""Says which GPUs have FP8 units for a recipe, and warns where the device at hand has none.

These are answers for users, without shapes. ``lowering`` chooses what runs.
"""

from __future__ import annotations

import warnings

import jax

from fp8flax._core.gemm.gpus import (
    NATIVE_FP8,
    NATIVE_MX,
    Fp8EmulationWarning,
    compile_target,
    compute_capability,
    is_hopper,
)
from fp8flax._core.gemm.kernels.block_gemm import BLOCK
from fp8flax._core.gemm.kernels.block_gemm_hopper import multiplies_dtypes
from fp8flax._core.recipes import GemmRecipe


def is_for_hopper(recipe: GemmRecipe, capability: float) -> bool:
    """Returns whether our kernel for Hopper's FP8 units takes operands of these quantizers."""
    lhs, rhs = recipe.lhs, recipe.rhs
    assert lhs is not None
    assert rhs is not None
    is_of_blocks = lhs.scale_columns == rhs.scale_columns == BLOCK
    return is_hopper(capability) and is_of_blocks and multiplies_dtypes(lhs.dtype, rhs.dtype)


def has_units(recipe: GemmRecipe, capability: float) -> bool:
    """Returns whether a GPU multiplies operands with scales per block in FP8 units.

    On Hopper our own kernel does so.
    """
    return capability >= NATIVE_MX or is_for_hopper(recipe, capability)


def runs_in_fp8(recipe: GemmRecipe, capability: float) -> bool:
    """Returns whether a GPU of this compute capability multiplies a matmul in FP8 units."""
    lhs, rhs = recipe.lhs, recipe.rhs
    if capability < NATIVE_FP8 or lhs is None or rhs is None:
        return False
    if lhs.scales_along_contraction != rhs.scales_along_contraction:
        return False
    return not lhs.scales_along_contraction or has_units(recipe, capability)


def warn_if_emulated(*recipes: GemmRecipe, is_ragged: bool = False) -> None:
    """Warns, once, if the device at hand cannot multiply in FP8 what one of the recipes makes.

    Args:
        *recipes: of the GEMMs.
        is_ragged: whether they are those of a ragged dot, for which Blackwell has no units.
    """
    if compile_target.value is not None:
        return
    capability = compute_capability()
    has_kernel = not (is_ragged and capability >= NATIVE_MX)
    # Each from one place, so that Python's default filter shows it once.
    if capability < NATIVE_FP8:
        warnings.warn(
            f"FP8 matmuls are emulated on {jax.devices()[0].device_kind}: the values are those of FP8, the "
            "speed is not. fp8flax.audit shows what a GPU would run.",
            Fp8EmulationWarning,
            stacklevel=1,
        )
    elif not all(has_kernel and has_units(one, capability) for one in recipes if _has_block_scales(one)):
        warnings.warn(
            f"{jax.devices()[0].device_kind} has no units for these block scales: the FP8 values are "
            "multiplied in a wider dtype, at its speed. fp8flax.audit shows which. Float8CurrentScaling "
            "runs in FP8.",
            Fp8EmulationWarning,
            stacklevel=1,
        )


def _has_block_scales(recipe: GemmRecipe) -> bool:
    return all(q is not None and q.scales_along_contraction for q in (recipe.lhs, recipe.rhs))

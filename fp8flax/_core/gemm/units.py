"""Which recipes run in FP8 units on a GPU, and the warning if the current device has none.

The functions decide from dtypes and scales alone, for warnings and reports. ``gemm``, which also knows the
shapes, chooses what runs.
"""

from __future__ import annotations

import warnings

import jax

from fp8flax._core.formats import E5M2, OCP_DTYPES
from fp8flax._core.gemm.gpus import (
    NATIVE_FP8,
    NATIVE_MX,
    Fp8EmulationWarning,
    compute_capability,
    is_compiling_ahead,
    is_hopper,
)
from fp8flax._core.gemm.kernels.tiled_gemm_hopper import multiplies_dtypes
from fp8flax._core.qtensor import BLOCK
from fp8flax._core.quantizers import BlockQuantizer
from fp8flax._core.recipes import GemmRecipe


def has_units_for_blocks(lhs: BlockQuantizer, rhs: BlockQuantizer, capability: float) -> bool:
    """Returns whether a GPU multiplies operands with scales per block in FP8 units.

    Blackwell has units for scales that are powers of two, in blocks of equal width, but not for e5m2 times
    e5m2. On Hopper our own GPU kernel uses the FP8 units, with float32 scales per 128 columns.
    """
    dtypes = {lhs.dtype, rhs.dtype}
    if capability >= NATIVE_MX:
        has_scales = lhs.has_mx_scales and rhs.has_mx_scales and lhs.block[1] == rhs.block[1]
        return has_scales and dtypes <= OCP_DTYPES and dtypes != {E5M2}
    has_128_columns = lhs.scale_columns == rhs.scale_columns == BLOCK
    return is_hopper(capability) and has_128_columns and multiplies_dtypes(lhs.dtype, rhs.dtype)


def warn_if_emulated(*recipes: GemmRecipe, is_ragged: bool = False) -> None:
    """Warns, once, if the current device has no FP8 units for GEMMs with one of these recipes.

    Args:
        *recipes: the recipes of the GEMMs.
        is_ragged: whether the GEMMs belong to a ragged dot. Blackwell has no units for block scales there.
    """
    if is_compiling_ahead():
        return
    capability = compute_capability()
    has_kernel = not (is_ragged and capability >= NATIVE_MX)
    # Each warning is raised at a single line (stacklevel=1), so that Python's default filter shows it once.
    if capability < NATIVE_FP8:
        warnings.warn(
            f"FP8 matmuls are emulated on {jax.devices()[0].device_kind}: the values are those of FP8, the "
            "speed is not. fp8flax.audit shows what a GPU would run.",
            Fp8EmulationWarning,
            stacklevel=1,
        )
    elif not all(
        has_kernel and has_units_for_blocks(one.lhs, one.rhs, capability)
        for one in recipes
        if isinstance(one.lhs, BlockQuantizer) and isinstance(one.rhs, BlockQuantizer)
    ):
        warnings.warn(
            f"{jax.devices()[0].device_kind} has no units for these block scales: the FP8 values are "
            "multiplied in a wider dtype, at its speed. fp8flax.audit shows which. Float8CurrentScaling "
            "runs in FP8.",
            Fp8EmulationWarning,
            stacklevel=1,
        )

"""Multiplies two operands, by what the device that is compiled for has for them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.gemm.cuda import cuda_block_gemm, cuda_gemm, has_units
from fp8flax._core.gemm.gpus import (
    NATIVE_FP8,
    Fp8EmulationWarning,
    compile_target,
    compute_capability,
)
from fp8flax._core.gemm.reference import emulated_gemm, wide_gemm
from fp8flax._core.gemm.request import Gemm
from fp8flax._core.qtensor import QTensor
from fp8flax._core.recipes import GemmRecipe

_OCP_DTYPES = (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))

ONCE = (
    "The direct form of an FP8 matmul can be differentiated once, in reverse mode. For second derivatives "
    "use delayed scaling in the other form: partial(fp8flax.Fp8DotGeneralOp, form='qdq'), or "
    "fp8flax.quantize_model(…, form='qdq'). Or turn FP8 off for this part with "
    "fp8flax.autocast(enabled=False)."
)


def warn_if_emulated(*recipes: GemmRecipe, has_block_kernel: bool = True) -> None:
    """Warns, once, where the device at hand cannot multiply what one of the recipes makes.

    Args:
        *recipes: of the GEMMs.
        has_block_kernel: whether they may be those of the kernels for scales per block.
    """
    if compile_target.value is not None:
        return
    # Each from one place, so that Python's default filter shows it once.
    capability = compute_capability()
    if capability < NATIVE_FP8:
        warnings.warn(
            f"FP8 matmuls are emulated on {jax.devices()[0].device_kind}: the values are those of FP8, the "
            "speed is not. fp8flax.audit shows what a GPU would run.",
            Fp8EmulationWarning,
            stacklevel=1,
        )
    elif any(
        _has_block_scales(one) and not (has_block_kernel and has_units(one, capability)) for one in recipes
    ):
        warnings.warn(
            f"{jax.devices()[0].device_kind} has no units for these block scales: the FP8 values are "
            "multiplied in a wider dtype, at its speed. fp8flax.audit shows which. Float8CurrentScaling "
            "runs in FP8.",
            Fp8EmulationWarning,
            stacklevel=1,
        )


def runs_in_fp8(recipe: GemmRecipe, capability: float) -> bool:
    """Tells whether a GPU of this compute capability multiplies a matmul in FP8 units."""
    lhs, rhs = recipe.lhs, recipe.rhs
    if capability < NATIVE_FP8 or lhs is None or rhs is None:
        return False
    if lhs.scales_along_contraction != rhs.scales_along_contraction:
        return False
    return not lhs.scales_along_contraction or has_units(recipe, capability)


def _has_block_scales(recipe: GemmRecipe) -> bool:
    return all(q is not None and q.scales_along_contraction for q in (recipe.lhs, recipe.rhs))


def multiply(gemm: Gemm, lhs: Any, rhs: Any) -> jax.Array:
    """Returns ``dot_general`` of the values of two operands, in ``gemm.out_dtype``.

    Scales that do not change along the contraction multiply the result of FP8 operands; others are applied
    inside it.

    Args:
        gemm: what is multiplied.
        lhs: a ``QTensor``, or an array that stays wide.
        rhs: likewise.
    """
    if gemm.dequantized or not (isinstance(lhs, QTensor) and isinstance(rhs, QTensor)):
        return wide_gemm(gemm, lhs, rhs)
    per_block = lhs.quantizer.scales_along_contraction
    if per_block != rhs.quantizer.scales_along_contraction:
        return wide_gemm(gemm, lhs, rhs)
    is_for_gpu = compile_target.value is not None or jax.default_backend() == "gpu"
    is_too_old = is_for_gpu and compute_capability() < NATIVE_FP8 and not per_block
    if is_too_old or not {lhs.codes.dtype, rhs.codes.dtype} <= set(_OCP_DTYPES):
        return emulated_gemm(gemm, lhs, rhs)
    return _platform_gemm(gemm, lhs, rhs)


# A custom_jvp for one effect: it is opaque to the policies of jax.checkpoint. One that saves the results
# of dots would otherwise find those of both branches, and keep each of them.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _platform_gemm(gemm: Gemm, lhs: QTensor, rhs: QTensor) -> jax.Array:
    on_cuda = cuda_block_gemm if lhs.quantizer.scales_along_contraction else cuda_gemm
    return lax.platform_dependent(
        lhs, rhs, cuda=partial(on_cuda, gemm), default=partial(emulated_gemm, gemm)
    )


@_platform_gemm.defjvp
def _platform_gemm_jvp(gemm: Gemm, primals: Any, tangents: Any) -> Any:
    del gemm, primals, tangents
    raise TypeError(ONCE)

"""Returns the parameters of a GPU kernel in Pallas's Triton backend, for which JAX gives no warning.

Why: JAX calls this backend deprecated from 0.11 on, and JAX 0.12 warns each time it lowers a kernel for it.
The kernels are those of this package, so its users can do nothing about the warning. In tests that turn
warnings into errors, ``audit`` would fail. ``gpus.has_triton`` says what happens when JAX removes the
backend.

Internals: ``jax.extend.pallas``, to register a function that lowers kernels with these parameters, and
``jax._src.pallas.triton.pallas_call_registration``, for the function of JAX that it calls. Without them the
kernels work, and JAX warns.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax


def triton_params(*, num_warps: int, num_stages: int) -> Any:
    """Returns the ``compiler_params`` of a ``pallas_call``; requires that Pallas has its Triton backend."""
    return _class()(num_warps=num_warps, num_stages=num_stages)


@functools.cache
def _class() -> Any:
    """Returns the class of the parameters: one of ours from JAX 0.11 on, and JAX's own before."""
    from jax.experimental.pallas import triton

    if jax.__version_info__ < (0, 11):
        return triton.CompilerParams
    try:
        from jax._src.pallas.triton.pallas_call_registration import pallas_call_lowering
        from jax.extend.pallas import register_lowering_rule
    except ImportError:
        return triton.CompilerParams

    class TritonParams(triton.CompilerParams):
        """JAX's parameters. Pallas chooses by this class how it lowers a kernel."""

    def lower(*args: Any, **params: Any) -> Any:
        with warnings.catch_warnings():
            message = "The Pallas Triton backend is deprecated"
            warnings.filterwarnings("ignore", message, category=DeprecationWarning)
            return pallas_call_lowering(*args, **params)

    register_lowering_rule(TritonParams, lower, "gpu")
    return TritonParams

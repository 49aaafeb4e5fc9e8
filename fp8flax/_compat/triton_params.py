"""Returns the parameters of a GPU kernel in Pallas's Triton backend, for which JAX gives no warning.

Why: JAX calls this backend deprecated from 0.11 on, and JAX 0.12 warns each time it lowers a kernel for it.
The kernels are those of this package, so its users can do nothing about the warning. In tests that turn
warnings into errors, ``audit`` would fail. ``gpus.has_triton`` says what happens when JAX removes the
backend.

Internals: ``jax.extend.pallas``, to register a function that lowers kernels with these parameters, and
``jax._src.pallas.triton``, for the function of JAX that is copied. Without them the kernels work, and JAX
warns.
"""

from __future__ import annotations

import functools
import types
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
        from jax._src.pallas.triton import pallas_call_registration
        from jax.extend.pallas import register_lowering_rule

        lower = pallas_call_registration.pallas_call_lowering
    except (ImportError, AttributeError):
        return triton.CompilerParams

    class TritonParams(triton.CompilerParams):
        """JAX's parameters. Pallas chooses by this class how it lowers a kernel."""

    # A copy of JAX's function that calls another ``deprecations.warn``. A filter of Python's warnings would
    # be one of the whole process, and warnings that are shown once would be shown again after it.
    no_warnings = types.SimpleNamespace(warn=lambda *args, **kwargs: None)
    names = {**vars(pallas_call_registration), "deprecations": no_warnings}
    quiet = types.FunctionType(lower.__code__, names, None, lower.__defaults__, lower.__closure__)
    quiet.__kwdefaults__ = lower.__kwdefaults__
    register_lowering_rule(TritonParams, quiet, "gpu")
    return TritonParams

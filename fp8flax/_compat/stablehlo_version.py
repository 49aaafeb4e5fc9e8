"""Explains an error of JAX 0.12: it cannot compile an FP8 matmul for a GPU that is not in this machine.

A ``dot`` algorithm with FP8 types needs StableHLO 1.21. With a GPU, JAX writes a program in the version
that the GPU's plugin reports, which is new enough. Without a GPU, JAX 0.12 writes an older version.

Internals: ``jax._src.compiler``, to register a handler of XLA's errors. Without it JAX raises its own
error, which names neither the cause nor what to do. ``audit`` then raises this error too, and does not use
``plugin_compiler``.
"""

from __future__ import annotations

import jax
from jax._src import compiler


class StableHloTooOldError(RuntimeError):
    """Raised for a program with FP8 matmuls that JAX wrote in a version of StableHLO without them."""


def explain(error: Exception) -> StableHloTooOldError | None:
    """Returns the error to raise instead of this error of XLA; None to raise XLA's error."""
    text = str(error)
    if "Failed to serialize StableHLO" not in text or "dot_general" not in text:
        return None
    return StableHloTooOldError(
        f"JAX {jax.__version__} cannot compile an FP8 matmul for a GPU that is not in this machine: it "
        "writes the program in a version of StableHLO without FP8 algorithms. With the GPU it compiles. "
        "To see which matmuls run in FP8, use fp8flax.audit, which hands the program to the plugin itself. "
        "To compile ahead of time, install jax<0.12, or give the recipe "
        "accumulation=('default', 'default', 'default')."
    )


compiler.register_xla_runtime_error_handler(explain)

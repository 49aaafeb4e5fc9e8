"""The rates of the time model, which predicts how long a GPU takes for a compiled program."""

from __future__ import annotations

import dataclasses

from fp8flax._audit.gemms import AuditedGemm
from fp8flax._core.gemm.gpus import Gpu

_FULL_SIZE = 2 * 8192 * 4096 * 4096
"""FLOPs of the smallest GEMM that was measured."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What a GPU reaches: shares of its published peaks, and the seconds of a launch.

    The defaults are those of one H200. ``benchmarks/time_model.py`` fitted them on 2026-11-28 to the times
    in ``benchmarks/results/gpu.json`` (JAX 0.11.2).
    """

    wide: float = 0.713
    """Share of the bf16 peak in a GEMM of bf16. One of float32 counts half, which was not measured."""
    fast: float = 0.686
    """Share of the FP8 peak with fast accumulation."""
    exact: float = 0.640
    """Share of the FP8 or FP4 peak with exact accumulation, and where the program states none."""
    blocks: float = 0.440
    """Share of the FP8 peak in the GPU kernels of this package."""
    slowdown: float = 0.0236
    """A GEMM of ``s > 1`` times the FLOPs of 8192×4096×4096 runs at ``s**-slowdown`` of these rates."""
    bandwidth: float = 0.870
    """Share of the bandwidth in all other GPU kernels."""
    codes: float = 0.467
    """The same in those that read or write FP8 or FP4: XLA's kernels store single bytes."""
    launch: float = 3.80e-6
    """Seconds of a launch."""

    def seconds_of(self, gemm: AuditedGemm, gpu: Gpu) -> float:
        """Returns the time of a GEMM's operations or of its bytes, whichever is longer."""
        peak = gpu.fp4 if gemm.units == "FP4" else gpu.fp8 if gemm.units else 0
        if not peak:
            rate = self.wide * gpu.bf16 / (2 if "float32" in (gemm.lhs_dtype, gemm.rhs_dtype) else 1)
        elif gemm.backend == "Pallas":
            rate = self.blocks * peak
        else:
            rate = (self.fast if gemm.accumulation == "fast" else self.exact) * peak
        size = max(1, gemm.flops / gemm.trip_count / _FULL_SIZE)
        return max(gemm.flops / rate * size**self.slowdown, gemm.bytes / (self.bandwidth * gpu.bandwidth))

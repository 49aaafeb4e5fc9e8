"""Predicts the time of a compiled program on a GPU: its GEMMs, its other kernels, and their launches."""

from __future__ import annotations

from collections.abc import Sequence

from fp8flax._audit.gemms import AuditedGemm
from fp8flax._core.gemm.gpus import Gpu

BANDWIDTH_SHARE = 0.85
"""The share of a GPU's published bandwidth that elementwise kernels reach."""

LAUNCH_SECONDS = 3e-6
"""The time that each launch adds to the work of a kernel."""

PARTS = ("GEMMs", "other kernels", "launches")


def predicted_seconds(
    gpu: Gpu, gemms: Sequence[AuditedGemm], other_bytes: int, num_launches: int
) -> dict[str, float]:
    """Returns the seconds of each of ``PARTS``, by the model of ``AuditReport.predicted_seconds``.

    The time of a GEMM is that of its operations or that of its bytes, whichever is longer. Products of
    float32 run at half the rate of bfloat16. GEMMs that only may run in FP8 run at the rate of bfloat16.
    """
    bandwidth = BANDWIDTH_SHARE * gpu.bandwidth

    def seconds(gemm: AuditedGemm) -> float:
        is_wide = "float32" in (gemm.lhs_dtype, gemm.rhs_dtype)
        rate = gpu.fp8 if gemm.is_fp8 else gpu.bf16 / 2 if is_wide else gpu.bf16
        return max(gemm.flops / rate, gemm.bytes / bandwidth)

    times = sum(map(seconds, gemms)), other_bytes / bandwidth, num_launches * LAUNCH_SECONDS
    return dict(zip(PARTS, times))

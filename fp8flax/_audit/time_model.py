"""How long a compiled program should take on a GPU: its matmuls, its other kernels, and launching them."""

from __future__ import annotations

from collections.abc import Sequence

from fp8flax._audit.gemms import AuditedGemm
from fp8flax._core.gemm.gpus import Gpu

BANDWIDTH_SHARE = 0.85
"""Of a GPU's published bandwidth: what elementwise kernels reach."""

LAUNCH_SECONDS = 3e-6
"""What each kernel takes beside its work."""

PARTS = ("GEMMs", "other kernels", "launches")


def predicted_seconds(
    gpu: Gpu, gemms: Sequence[AuditedGemm], other_bytes: int, num_launches: int
) -> dict[str, float]:
    """Returns the seconds of each of ``PARTS``, by a model that was never compared with a GPU.

    A GEMM takes as long as its operations, at the rate that large ones reach, or its bytes, whichever is
    more; products of float32 are taken to run at half the rate of bfloat16, and those that only may run in
    FP8 at that of bfloat16. All other kernels move bytes, and each launch takes a while.

    Args:
        gpu: its rates.
        gemms: of the program.
        other_bytes: that all other kernels move.
        num_launches: of all kernels.
    """
    bandwidth = BANDWIDTH_SHARE * gpu.bandwidth

    def seconds(gemm: AuditedGemm) -> float:
        is_wide = "float32" in (gemm.lhs_dtype, gemm.rhs_dtype)
        rate = gpu.fp8 if gemm.is_fp8 else gpu.bf16 / 2 if is_wide else gpu.bf16
        return max(gemm.flops / rate, gemm.bytes / bandwidth)

    times = sum(map(seconds, gemms)), other_bytes / bandwidth, num_launches * LAUNCH_SECONDS
    return dict(zip(PARTS, times))

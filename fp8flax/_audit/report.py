"""The report of the audit: a compiled program as a table, as text and as numbers."""

from __future__ import annotations

import dataclasses
import re

from fp8flax._audit.gemms import AuditedGemm
from fp8flax._audit.times import Rates
from fp8flax._core.gemm.gpus import GPUS
from fp8flax._core.tables import table_lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditReport:
    """Contents of a compiled program: its GEMMs, kernels and bytes. Print it, or assert on its fields.

    Two kinds of code are counted approximately: a loop whose trip count XLA does not know counts once, and
    each branch of a conditional counts as if it were taken. A GEMM is what XLA shows as a matrix product or
    a convolution, or a GPU kernel of this package that multiplies. Other hand-written
    GPU kernels (Pallas, cuDNN attention) count among the other kernels, and on a GPU so does a matrix times
    a vector.
    """

    target: str
    """The name of the GPU that was compiled for, such as ``h200``, also for a mesh; or ``local``."""
    device: str
    """The name of the device that the program was compiled for."""
    jax_version: str
    compiled_by: str
    """``JAX``, or in one sentence how JAX compiled the program in another way than for a present GPU."""
    gemms: tuple[AuditedGemm, ...]
    """The GEMMs in the order in which they run; a GEMM in a loop is listed once."""
    num_kernels: int
    """Number of GPU kernels in the program; the body of a loop counts once."""
    num_launches: int
    """Number of GPU kernels that one call launches."""
    bytes_sent_by: dict[str, int] = dataclasses.field(hash=False)
    """Bytes that each device of a mesh sends in one call, by the collective operation (``all-gather``)."""
    other_bytes: int
    """Bytes that all GPU kernels other than GEMMs read and write in one call."""
    code_bytes: int
    """Those of ``other_bytes`` that GPU kernels move which read or write FP8 or FP4: casts, transposes."""
    temp_bytes: int
    """Bytes of memory for temporaries."""
    unknown_trip_counts: bool
    """Whether there is a loop with an unknown trip count, which was counted once."""

    @property
    def num_gemms(self) -> int:
        """Returns the number of GEMMs in the program; the body of a loop counts once."""
        return len(self.gemms)

    @property
    def num_fp8_gemms(self) -> int:
        """Returns the number of GEMMs that run in FP8; the body of a loop counts once."""
        return self._count("FP8")

    @property
    def num_fp4_gemms(self) -> int:
        """Returns the number of GEMMs that run in FP4; the body of a loop counts once."""
        return self._count("FP4")

    @property
    def flops(self) -> int:
        """Returns the floating-point operations of all GEMMs in one call."""
        return sum(gemm.flops for gemm in self.gemms)

    @property
    def fp8_flops_share(self) -> float:
        """Returns the share of ``flops`` that runs in FP8, 0 to 1; 0 without any GEMM."""
        return self._share("FP8")

    @property
    def fp4_flops_share(self) -> float:
        """Returns the share of ``flops`` that runs in FP4, 0 to 1."""
        return self._share("FP4")

    @property
    def maybe_fp8_flops_share(self) -> float:
        """Returns the share of ``flops`` that may run in FP8 (``AuditedGemm.units``), 0 to 1."""
        return self._share("maybe FP8")

    @property
    def gemm_bytes(self) -> int:
        """Returns the bytes that the GPU kernels of the GEMMs read and write in one call."""
        return sum(gemm.bytes for gemm in self.gemms)

    @property
    def bytes_sent(self) -> int:
        """Returns the bytes that each device of a mesh sends to the other devices in one call."""
        return sum(self.bytes_sent_by.values())

    @property
    def predicted_seconds(self) -> dict[str, float]:
        """Returns the predicted time of one call in seconds, by part.

        The keys are ``"GEMMs"``, ``"other kernels"``, ``"launches"`` and ``"total"``; the dict is empty for
        ``target="local"``.

        The times come from a model: for each GEMM the longer of its operations and its bytes, the bytes of
        all other GPU kernels, and the launches, each at the rate that one H200 reached. There it is within
        6 % of the measured steps and layers. A GEMM that may run in FP8 counts as one that does; for one
        layer of such GEMMs the predicted time is 24 % too short. For other GPUs the model takes the same
        shares of their published peaks. A hand-written GPU kernel, such as flash attention, counts by its
        bytes only, and so do random numbers.
        """
        return predict(self, Rates())

    @property
    def summary(self) -> str:
        """Returns the result in one sentence."""
        may = self._count("maybe FP8")
        maybe = f", {may} may ({percent(self.maybe_fp8_flops_share)})," if may else ""
        share, share_of_fp4 = percent(self.fp8_flops_share), percent(self.fp4_flops_share)
        in_fp4 = f", {self.num_fp4_gemms} in FP4 ({share_of_fp4})," if self.num_fp4_gemms else ""
        return (
            f"{self.num_fp8_gemms} of {self.num_gemms} GEMMs run in FP8 ({share} of their FLOPs){in_fp4}"
            f"{maybe} on {self.device}, JAX {self.jax_version}."
        )

    def _count(self, units: str) -> int:
        return sum(gemm.units == units for gemm in self.gemms)

    def _share(self, units: str) -> float:
        return sum(gemm.flops for gemm in self.gemms if gemm.units == units) / max(1, self.flops)

    def __str__(self) -> str:
        reasons = list(dict.fromkeys(gemm.reason for gemm in self.gemms if gemm.reason))
        header = "GEMM", "role", "M×K×N", "operands", "backend", "% FLOPs", "FP8?"
        lines = table_lines(header, [self._row(gemm, reasons) for gemm in self.gemms])
        if reasons:
            lines += ["", *(f"[{number}] {reason}" for number, reason in enumerate(reasons, 1))]
        return "\n".join([*lines, "", *self._totals()])

    def _row(self, gemm: AuditedGemm, reasons: list[str]) -> tuple[str, ...]:
        sizes = [gemm.m, gemm.k, gemm.n] if gemm.batch == 1 else [gemm.batch, gemm.m, gemm.k, gemm.n]
        may = "may " if gemm.units == "maybe FP8" else ""
        dtypes = [_short(dtype) for dtype in (gemm.lhs_dtype, gemm.rhs_dtype, gemm.out_dtype)]
        return (
            gemm.path or "(no name)",
            gemm.role,
            "×".join(map(str, sizes)) + (f" ({gemm.trip_count} times)" if gemm.trip_count > 1 else ""),
            "{}×{}→{}".format(*dtypes),
            gemm.backend + ("" if gemm.accumulation == "default" else f", {gemm.accumulation}"),
            f"{100 * gemm.flops / max(1, self.flops):.1f}",
            f"{may}[{reasons.index(gemm.reason) + 1}]" if gemm.reason else gemm.units,
        )

    def _totals(self) -> list[str]:
        lines = [
            self.summary,
            f"{self.num_kernels} kernels, {self.num_launches} launches. The GEMMs move "
            f"{_mebibytes(self.gemm_bytes)}, the other kernels {_mebibytes(self.other_bytes)}; "
            f"temporaries take {_mebibytes(self.temp_bytes)}.",
        ]
        if self.bytes_sent_by:
            parts = ", ".join(f"{kind} {_mebibytes(size)}" for kind, size in self.bytes_sent_by.items())
            lines.append(f"Each device sends {_mebibytes(self.bytes_sent)}; {parts}.")
        if predicted := {part: f"{1e3 * seconds:.3g}" for part, seconds in self.predicted_seconds.items()}:
            total = predicted.pop("total")
            parts = ", ".join(f"{part} {time}" for part, time in predicted.items())
            lines.append(f"Predicted (not measured): {total} ms; {parts}.")
            rates = "rates" if self.target == "h200" else "shares of the published peaks"
            lines.append(f"The prediction takes the {rates} that one H200 reached.")
        if self.unknown_trip_counts:
            lines.append("The trip count of a loop is not known, so its kernels count once.")
        if self.target != "local":
            lines.append("Compiled without the device, which might choose another backend after measuring.")
        if self.compiled_by != "JAX":
            lines.append(f"Compiled by {self.compiled_by}")
        return lines


def predict(report: AuditReport, rates: Rates) -> dict[str, float]:
    """Returns ``report.predicted_seconds`` at these rates."""
    gpu = GPUS.get(report.target)
    if gpu is None:
        return {}
    wide = (report.other_bytes - report.code_bytes) / rates.bandwidth
    parts = {
        "GEMMs": sum(rates.seconds_of(gemm, gpu) for gemm in report.gemms),
        "other kernels": (wide + report.code_bytes / rates.codes) / gpu.bandwidth,
        "launches": report.num_launches * rates.launch,
    }
    return {**parts, "total": sum(parts.values())}


def _short(dtype: str) -> str:
    """Returns the short name of a dtype: ``e4m3``, ``bf16``, ``f32``."""
    return re.sub(r"float[48]_(e\dm\d).*", r"\1", dtype).replace("float", "f")


def percent(share: float) -> str:
    """Returns a share as text; one below 1 is never shown as 100 %."""
    return ">99.9 %" if 0.9995 <= share < 1 else f"{100 * share:.1f} %"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"

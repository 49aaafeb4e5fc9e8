"""The report of a model, Linen or NNX: its contractions as a table, with predicted times."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from fp8flax._audit.report import AuditReport
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.gemm.gpus import GPUS, Gpu
from fp8flax._core.gemm.units import runs_in_fp8
from fp8flax._core.plans.ops import RAGGED_DOT
from fp8flax._core.plans.row import GemmSizes
from fp8flax._core.recipes import CustomRecipe, DelayedScaling
from fp8flax._model.rules import Decision, Site

_LEAST_QUANTIZATION_BYTES = 5.2
"""``Quantizer.quantization_bytes`` if nothing is quantized in the forward pass, as with delayed scaling."""

_ONE_PASS_BYTES = 4.1
"""``Quantizer.quantization_bytes`` of 128-blocks on Hopper: one GPU kernel quantizes for both GEMMs."""


def seconds(
    sizes: GemmSizes, gpu: Gpu, gemms: CustomRecipe | None, is_matmul: bool, is_ragged: bool = False
) -> float:
    """Returns the predicted seconds of the forward GEMM, both backward GEMMs, and their quantization."""
    b, m, k, n = sizes
    operations, elements = 3 * sizes.flops, b * (m * k + k * n + m * n)
    wide = max(operations / gpu.bf16, 6 * elements / gpu.bandwidth)
    if gemms is None:
        return wide
    used = [quantizer for quantizer in (gemms.forward.lhs, gemms.forward.rhs) if quantizer is not None]
    most = max((quantizer.quantization_bytes for quantizer in used), default=_LEAST_QUANTIZATION_BYTES)
    per_block = any(quantizer.scales_along_contraction for quantizer in used)
    if per_block and not gpu.has_mx_units and runs_in_fp8(gemms.forward, gpu.compute_capability):
        most = _ONE_PASS_BYTES
    quantization = most * elements / gpu.bandwidth
    if not is_matmul or (is_ragged and per_block and gpu.has_mx_units):
        return wide + quantization
    total = 0.0
    for gemm in (gemms.forward, gemms.dgrad, gemms.wgrad):
        in_fp8 = runs_in_fp8(gemm, gpu.compute_capability)
        peak, size = (gpu.fp8, 4) if in_fp8 else (gpu.bf16, 6)
        total += max(sizes.flops / peak, size * elements / 3 / gpu.bandwidth)
    return total + quantization


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One contraction of a model.

    Attributes:
        path: path of the module.
        kernel: path of the parameter that it multiplies with; None for a product of two activations.
        batch, m, k, n: the contraction is ``batch`` matmuls of (m, k) by (k, n).
        count: how often it is computed in one forward pass.
        converted: whether an FP8 op computes it. (``reason`` says if the op convolves in a wide dtype.)
        reason: the rule that converts it, or the reason why it is not converted.
        flops: FLOPs of all its computations in one forward pass.
        speedup: predicted time in bf16 over that in FP8, forward and backward; 1 if it is not converted.
    """

    path: str
    kernel: str | None
    batch: int
    m: int
    k: int
    n: int
    count: int
    converted: bool
    reason: str
    flops: int
    speedup: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReport:
    """Table of a model's contractions, and whether each of them runs in FP8.

    Attributes:
        rows: the contractions, in the order in which the model computes them.
        target: the GPU of the predictions.
        speedup: predicted speed-up of all contractions together.
        unseen: contractions in places that ``quantize_model`` does not convert, by place and shapes: in a
            ``lax.scan``, in ``jax.checkpoint``, or in a function with a derivative of its own.
        fp8: ``AuditReport`` of the forward and backward pass, compiled for the target; None if not
            compiled.
        wide: the same ``AuditReport`` without FP8, in the dtypes that the model has by itself.
    """

    rows: tuple[Row, ...]
    target: str
    speedup: float
    unseen: tuple[str, ...] = ()
    fp8: AuditReport | None = None
    wide: AuditReport | None = None

    @property
    def converted(self) -> tuple[Row, ...]:
        """Returns the rows that run in FP8."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def fp8_share(self) -> float:
        """Returns the share of FLOPs of the contractions that are converted."""
        total = sum(row.flops for row in self.rows)
        return sum(row.flops for row in self.converted) / total if total else 0.0

    @property
    def step_speedup(self) -> float | None:
        """Returns the predicted speed-up of the whole forward and backward pass; None if not compiled."""
        if self.fp8 is None or self.wide is None:
            return None
        return self.wide.predicted_seconds["total"] / self.fp8.predicted_seconds["total"]

    def plot(self) -> Any:
        """Draws the predicted time of the forward and backward pass by part, in FP8 and without.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ImportError: matplotlib is not installed (``fp8flax[demo]`` installs it).
            ValueError: the model was not compiled.
        """
        if self.fp8 is None or self.wide is None:
            raise ValueError(
                "plot needs a compiled model, and this report has none. Make it with fp8flax.report(…, "
                "compiled=True)."
            )
        return self.fp8.plot(wide=self.wide)

    def __str__(self) -> str:
        total = sum(row.flops for row in self.rows) or 1
        table = [("contraction", "kernel", "B×M×K×N", "times", "% FLOPs", "FP8?", "speed-up", "why")]
        for row in self.rows:
            sizes = (row.batch, row.m, row.k, row.n)[0 if row.batch != 1 else 1 :]
            name = (row.kernel or "").removeprefix(f"{row.path}/") if row.path else row.kernel or ""
            table.append(
                (
                    row.path or "(the model)",
                    name or "-",
                    "×".join(map(str, sizes)),
                    str(row.count),
                    f"{100 * row.flops / total:.1f}",
                    "FP8" if row.converted else "no",
                    f"{row.speedup:.2f}" if row.converted else "",
                    row.reason,
                )
            )
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "-" * max(map(len, lines)))
        unseen = "".join(f"\nNot looked into: {text}." for text in self.unseen)
        return "\n".join(lines) + (
            f"\n\n{len(self.converted)} of {len(self.rows)} contractions are converted "
            f"({100 * self.fp8_share:.1f} % of their FLOPs).\nPredicted for all of them on {self.target}, "
            f"forward and backward: {self.speedup:.2f} times as fast as in bf16.{unseen}{self._step()}"
        )

    def _step(self) -> str:
        if self.fp8 is None or self.wide is None:
            return ""
        table = [
            ("", "predicted ms", "GEMMs", "in FP8", "launches", "MiB beside the GEMMs", "temporary MiB")
        ]
        for name, one in (("FP8", self.fp8), ("without", self.wide)):
            table.append(
                (
                    name,
                    f"{1e3 * one.predicted_seconds['total']:.3g}",
                    str(one.num_gemms),
                    str(one.num_fp8_gemms),
                    str(one.num_launches),
                    f"{one.other_bytes / 2**20:.1f}",
                    f"{one.temp_bytes / 2**20:.1f}",
                )
            )
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in table]
        return (
            "\n\nCompiled, forward and backward, with all that the model computes:\n"
            + "\n".join(lines)
            + f"\n{self.step_speedup:.2f} times as fast in FP8, as predicted from these counts."
        )


SEE_AUDIT = " For any other function, fp8flax.audit reads the compiled program."
"""The end of the error for a model that does not come from ``quantize_model``."""


def gpu_named(target: str) -> Gpu:
    """Returns the GPU of a prediction; raises ``ValueError`` if there is none of this name."""
    if target not in GPUS:
        raise ValueError(f"target must be one of {sorted(GPUS)}; got {target!r}.")
    return GPUS[target]


def table_of(
    counts: Counter[tuple[str, GemmSizes]], decided: Mapping[str, tuple[Site, Decision]], gpu: Gpu
) -> ModelReport:
    """Returns the report of a model that was not compiled.

    Args:
        counts: how often each contraction runs with these sizes, by the key of the contraction.
        decided: the contractions and the decisions of the rules, by the same keys.
        gpu: the GPU of the predictions.
    """
    rows, wide, time = [], 0.0, 0.0
    for (key, sizes), count in counts.items():
        site, decision = decided[key]
        recipe = recipe_in_use(decision.recipe, DelayedScaling()) if decision.converts else None
        is_off = decision.converts and recipe is None
        gemms, is_ragged = None if recipe is None else recipe.gemms, site.op is RAGGED_DOT
        before, after = (count * seconds(sizes, gpu, g, site.is_matmul, is_ragged) for g in (None, gemms))
        wide, time = wide + before, time + after
        rows.append(
            Row(
                path=site.path,
                kernel=site.kernel,
                **sizes._asdict(),
                count=count,
                converted=recipe is not None,
                reason=f"FP8 is off; otherwise in FP8 {decision.reason}" if is_off else decision.reason,
                flops=count * sizes.flops,
                speedup=before / after if after else 1.0,
            )
        )
    speedup = wide / time if time else 1.0
    return ModelReport(rows=tuple(rows), target=gpu.name, speedup=speedup)

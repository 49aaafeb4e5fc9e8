"""The report of a model, Linen or NNX: its contractions as a table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.ops.row import GemmSizes
from fp8flax._core.recipes import DelayedScaling
from fp8flax._model.rules import Decision, Site


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelReport:
    """Table of a model's contractions, and whether each of them runs in FP8.

    Attributes:
        rows: the contractions, in the order in which the model computes them.
        unseen: contractions in places that ``quantize_model`` does not convert, by place and shapes: in a
            ``lax.scan``, in ``jax.checkpoint``, or in a function with a derivative of its own.
    """

    rows: tuple[Row, ...]
    unseen: tuple[str, ...] = ()

    @property
    def converted(self) -> tuple[Row, ...]:
        """Returns the rows that run in FP8."""
        return tuple(row for row in self.rows if row.converted)

    @property
    def fp8_share(self) -> float:
        """Returns the share of FLOPs of the contractions that are converted."""
        total = sum(row.flops for row in self.rows)
        return sum(row.flops for row in self.converted) / total if total else 0.0

    def __str__(self) -> str:
        total = sum(row.flops for row in self.rows) or 1
        table = [("contraction", "kernel", "B×M×K×N", "times", "% FLOPs", "FP8?", "why")]
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
                    row.reason,
                )
            )
        widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
        lines = ["  ".join(x.ljust(w) for x, w in zip(line, widths)).rstrip() for line in table]
        lines.insert(1, "-" * max(map(len, lines)))
        unseen = "".join(f"\nNot looked into: {text}." for text in self.unseen)
        return "\n".join(lines) + (
            f"\n\n{len(self.converted)} of {len(self.rows)} contractions are converted "
            f"({100 * self.fp8_share:.1f} % of their FLOPs).{unseen}"
        )


SEE_AUDIT = " For any other function, fp8flax.audit reads the compiled program."
"""The end of the error for a model that does not come from ``quantize_model``."""


def table_of(
    counts: Counter[tuple[str, GemmSizes]],
    decided: Mapping[str, tuple[Site, Decision]],
    unseen: Sequence[str] = (),
) -> ModelReport:
    """Returns the report of a model.

    Args:
        counts: how often each contraction runs with these sizes, by the key of the contraction.
        decided: the contractions and the decisions of the rules, by the same keys.
        unseen: as in ``ModelReport``.
    """
    rows = []
    for (key, sizes), count in counts.items():
        site, decision = decided[key]
        recipe = recipe_in_use(decision.recipe, DelayedScaling()) if decision.converts else None
        is_off = decision.converts and recipe is None
        rows.append(
            Row(
                path=site.path,
                kernel=site.kernel,
                **sizes._asdict(),
                count=count,
                converted=recipe is not None,
                reason=f"FP8 is off; otherwise in FP8 {decision.reason}" if is_off else decision.reason,
                flops=count * sizes.flops,
            )
        )
    return ModelReport(rows=tuple(rows), unseen=tuple(unseen))

"""How long should a training step take on an H200 and on a B200, by recipe and width, beside bf16?

Run ``make bench-recipes``; no GPU is needed. It takes about ten minutes.

The step: the matmuls of two of a Llama's layers (feed-forward 3.5 times the width, an elementwise product
in the place of attention), 8192 rows, a loss that is a mean of squares, and AdamW; weights in float32,
computed in bfloat16.

Formula: ms = 1000 * fp8.audit(step, state, x, target=gpu).predicted_seconds["total"]. This is a model, not
a measurement: for each GEMM the longer of its operations and its bytes, the bytes of all other GPU kernels,
and the launches, at the rates that one H200 reached (benchmarks/time_model.py). For a B200, which was not
measured, at the same shares of its published peaks. A GEMM that only may run in FP8 counts as FP8.

times bf16 = ms of bf16 over ms of the row, for the same GPU and width; below 1 FP8 is slower than bf16.

Other implementations, for an H200 and a width of 4096: flax-direct =
flax.linen.fp8_ops.Fp8DirectDotGeneralOp; flax-qdq = flax.linen.fp8_ops.Fp8DotGeneralOp; qwix =
qwix.QtProvider, e4m3 and e5m2 for gradients, one scale per tensor.

memory: MiB of temporaries per layer of width 4096 for an H200 (memory_analysis of the compiled step): half
of what the same step with four layers under nn.scan needs more than with two. Gradients are temporaries.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax

import fp8flax as fp8
from benchmarks import accuracy, common, fidelity, llama
from benchmarks.common import Row

GPUS = ("h200", "b200")
WIDTHS = (1024, 2048, 4096, 8192)
PACKAGES = ("jax", "jaxlib", "flax", "optax", "qwix", "jax-cuda13-plugin")
OTHERS_AT = "h200", 4096
_SAVES_CODES = jax.checkpoint_policies.save_only_these_names(*fp8.RESIDUAL_NAMES)
SCANNED: dict[str, Row] = {
    "no remat": {"has_remat": False},
    "`nn.remat`": {"has_remat": True},
    "`nn.remat` that saves `fp8.RESIDUAL_NAMES`": {"has_remat": True, "policy": _SAVES_CODES},
}
"""How the layers run of which the temporaries are reported."""
MEMORY_OF = ("bf16", "delayed", "current", "axiswise", "block128", "flax-direct", "flax-qdq")
"""Those that multiply in FP8 on an H200, beside bf16 and Flax's ops."""
NAMES = {"bf16": "bf16", **{n: f"`{accuracy.recipe_text(r)}`" for n, r in llama.RECIPES.items()}}


def cases() -> list[tuple[str, int, str]]:
    """Returns GPU, width and contender of each row; bf16 comes first."""
    ours = list(itertools.product(GPUS, WIDTHS, ("bf16", *llama.RECIPES)))
    return ours + [(*OTHERS_AT, name) for name in llama.OTHERS]


def predict(gpu: str, width: int, how: str) -> Row:
    """Returns what the audit reads from one compiled step, or why there is nothing."""
    row: Row = {"gpu": gpu, "width": width, "recipe": how}
    try:
        step, initial, x = llama.training_step(how, width)
        report = fp8.audit(step, jax.eval_shape(initial), x, target=gpu)
    except Exception as error:
        return {**row, "not_measured": common.reason_of(error)}
    ms = round(1e3 * report.predicted_seconds["total"], 3)
    return {**row, "ms": ms, **common.counts_of(report)}


def memory(how: str) -> Row:
    """Returns the MiB of temporaries per layer; Flax's ops do not name what a policy could save."""
    row: Row = {"recipe": how}
    for name, scanned in SCANNED.items():
        if how in llama.RECIPES or "policy" not in scanned:
            two, four = (temporaries(how, num_layers=n, **scanned) for n in (2, 4))
            row[name] = round((four - two) / 2**21)
    print(row, flush=True)
    return row


def temporaries(how: str, **scanned: Any) -> int:
    """Returns the bytes of temporaries of a step with layers under ``nn.scan``."""
    gpu, width = OTHERS_AT
    step, initial, x = llama.training_step(how, width, **scanned)
    jax.clear_caches()
    return fp8.audit(step, jax.eval_shape(initial), x, target=gpu).temp_bytes


def measure() -> Row:
    rows: list[Row] = []
    of_bf16: dict[Any, float] = {}
    for gpu, width, how in cases():
        row = predict(gpu, width, how)
        if how == "bf16":
            of_bf16[gpu, width] = row["ms"]
        if "ms" in row:
            row["times_bf16"] = round(of_bf16[gpu, width] / row["ms"], 3)
        rows.append(row)
        print(row, flush=True)
        jax.clear_caches()
    return {"rows": rows, "memory": [memory(how) for how in MEMORY_OF]}


def table(report: Row, gpu: str) -> str:
    """Returns a table of docs/recipes.md: a line for each recipe, beside its loss in fidelity.json."""
    runs = json.loads(fidelity.RESULT.read_text())["runs"]
    losses = {row["contender"]: fidelity.mean_of(row) for row in fidelity.compared(runs)}
    found = {(row["recipe"], row["width"]): row for row in report["rows"] if row["gpu"] == gpu}

    def cell(width: int, row: Row) -> str:
        return "{ms:.1f} ({times_bf16:.2f})".format(**found[row["recipe"], width])

    columns: common.Columns = {
        "recipe": common.word("name"),
        "state": lambda row: "yes" if row["recipe"] == "delayed" else "no",
        "loss above bf16": lambda row: losses[row["recipe"]] if row["recipe"] in llama.RECIPES else "",
        **{f"width {width}": partial(cell, width) for width in WIDTHS},
    }
    return common.markdown(columns, [{"recipe": name, "name": text} for name, text in NAMES.items()])


def memory_table(report: Row) -> str:
    """Returns the table of temporaries of docs/recipes.md."""
    others = {"flax-direct": "Flax's `Fp8DirectDotGeneralOp`", "flax-qdq": "Flax's `Fp8DotGeneralOp`"}
    columns: common.Columns = {
        "recipe": lambda row: (NAMES | others)[row["recipe"]],
        **{name: common.figure(name, ",.0f") for name in SCANNED},
    }
    return common.markdown(columns, report["memory"])


def main(argv: Sequence[str] | None = None) -> None:
    def tables(report: Row) -> str:
        return "\n\n".join([*(table(report, gpu) for gpu in GPUS), memory_table(report)])

    common.command(__doc__, "recipes", measure, tables, argv, packages=PACKAGES)


if __name__ == "__main__":
    main()

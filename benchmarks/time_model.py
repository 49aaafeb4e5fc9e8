"""How far is the time that the audit predicts from the time that an H200 took?

Run ``python -m benchmarks.time_model``; no GPU is needed. It takes about two minutes.

Programs: those that ``benchmarks/gpu.py`` timed on an H200 (results/gpu.json), compiled here for an H200.

error = predicted / measured - 1, with the numbers in fp8flax/_audit/times.py. left out = the same with
numbers that were fitted without this program. The fit minimizes the sum of the fourth powers of
log(predicted / measured). It leaves out fp8flax-triton, where XLA chooses GPU kernels by measuring: the
program has 19 launches and Triton's GEMMs as compiled here; on the H200 it had 31, and cublasLt's.

Axiswise programs, and the step in 128-blocks, have moved fewer bytes since the H200 ran them. They count
with the bytes and launches of that time, which commit 12f752c0 compiles.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from scipy.optimize import least_squares

import fp8flax as fp8
from benchmarks import common, dense, gpu, llama
from benchmarks.common import Row
from fp8flax._audit.report import predict
from fp8flax._audit.times import Rates

PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-cuda13-plugin")
MEASURED = common.RESULTS / "gpu.json"
NOT_FITTED = "fp8flax-triton"
AS_MEASURED: dict[tuple[str, str], Any] = {
    ("llama", "axiswise"): {
        "num_launches": 304,
        "other_bytes": 40_731_246_716,
        "code_bytes": 15_605_530_656,
    },
    ("llama", "block128"): {
        "num_launches": 148,
        "other_bytes": 31_025_340_588,
        "code_bytes": 6_990_045_184,
    },
    ("dense/8192x4096x4096", "fp8flax-axiswise"): {
        "num_launches": 25,
        "other_bytes": 1_177_255_936,
        "code_bytes": 604_651_520,
    },
}
"""What the audit read of programs that have changed since the H200 ran them. Their GEMMs are the same."""
NAMES = [field.name for field in dataclasses.fields(Rates)]


def programs_of(entry: str) -> gpu.Programs:
    """Returns the programs of an entry of ``gpu.json``; none for one that compares values."""
    kind, _, sizes = entry.partition("/")
    if kind == "llama":
        return gpu.llama_programs(4096, 8192, (gpu.BASE, *llama.RECIPES, "flax-direct"))
    shape = tuple(map(int, sizes.split("x"))) if kind in ("gemm", "dense") else ()
    return gpu.gemm_programs(shape) if kind == "gemm" else gpu.dense_programs(shape, [*dense.CONTENDERS])


def audit(entry: str, name: str) -> fp8.AuditReport:
    """Compiles a program for an H200; returns the audit of the program that the H200 ran."""
    program = programs_of(entry)[name]()
    report = fp8.audit(program.function, jax.eval_shape(program.carry), target="h200")
    return dataclasses.replace(report, **AS_MEASURED.get((entry, name), {}))


def cases() -> dict[tuple[str, str], tuple[fp8.AuditReport, float]]:
    """Returns the audit of each program that was timed, and the seconds that it took."""
    found = {}
    for entry, rows in json.loads(MEASURED.read_text())["entries"].items():
        for name in (name for name, row in rows.items() if "seconds" in row):
            found[entry, name] = audit(entry, name), rows[name]["seconds"]["median"]
            jax.clear_caches()
    return found


def seconds(report: fp8.AuditReport, rates: Rates) -> float:
    return predict(report, rates)["total"]


def fit(cases: Sequence[tuple[fp8.AuditReport, float]]) -> Rates:
    """Returns the numbers of the model that fit programs and their measured times."""
    start = np.array(dataclasses.astuple(Rates()))

    def rates_of(factors: np.ndarray) -> Rates:
        return Rates(**dict(zip(NAMES, map(float, factors * start))))

    def residuals(factors: np.ndarray) -> np.ndarray:
        rates = rates_of(factors)
        return 100 * np.square([np.log(seconds(report, rates) / wanted) for report, wanted in cases])

    return rates_of(least_squares(residuals, np.ones(len(start)), bounds=(0.1, 10)).x)


def measure() -> Row:
    found = cases()
    fitted = {key: case for key, case in found.items() if key[1] != NOT_FITTED}
    rows: list[Row] = []
    for (entry, program), (report, wanted) in found.items():
        row: Row = {"entry": entry, "program": program, "ms": 1e3 * wanted}
        others = fit([case for key, case in fitted.items() if key != (entry, program)])
        for name, rates in (("predicted", Rates()), ("left_out", others)):
            row[name] = seconds(report, rates) / wanted - 1
        rows.append(row)
    return {"fitted": dataclasses.asdict(fit([*fitted.values()])), "rows": rows}


COLUMNS: common.Columns = {
    "entry": common.word("entry"),
    "program": common.word("program"),
    "ms": common.figure("ms", ".3f"),
    "error %": common.figure("predicted", "+.1f", 100),
    "left out %": common.figure("left_out", "+.1f", 100),
}


def table(report: Row) -> str:
    fitted = ", ".join(f"{name} {value:.4g}" for name, value in report["fitted"].items())
    return f"{common.text_table(COLUMNS, report['rows'], 2)}\n\nFitted: {fitted}"


if __name__ == "__main__":
    common.command(__doc__, "time_model", measure, table, packages=PACKAGES)

"""Shared by the benchmarks: the command, the report and its file, statistics, timing and tables."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fp8flax as fp8

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
OWG = fp8.OVERWRITE_WITH_GRADIENT
GEMMS = ("forward", "dgrad", "wgrad")

Row = dict[str, Any]
Shape = tuple[int, ...]
Columns = Mapping[str, Callable[[Row], str]]
"""The columns of a table: by its header, what a row shows."""


def reason_of(error: Exception) -> str:
    """Returns the first line of an error, without folders."""
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, ImportError) else f"{type(error).__name__}: {lines[0]}"
    return re.sub(r"(?<![\w:])/\S*/", "", text)[:300]


# A script, and its report.


def question_and_method(doc: str | None) -> tuple[str, list[str]]:
    """Returns the first paragraph of a benchmark's docstring, and those on the method, a line each.

    A paragraph that begins with "Run" describes the command, so it is left out.
    """
    question, *rest = [" ".join(paragraph.split()) for paragraph in (doc or "").split("\n\n")]
    return question, [text.replace("::", ":") for text in rest if not text.startswith("Run ")]


def command(
    doc: str | None,
    result: str,
    measure: Callable[..., Row],
    table: Callable[[Row], str],
    argv: Sequence[str] | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    method: Sequence[str] = (),
    packages: Sequence[str] = PACKAGES,
) -> None:
    """Runs a benchmark: prints its question and method, measures, prints a table and writes the report.

    Args:
        doc: the docstring of the script; it states the question and the method.
        result: the name of the file in ``benchmarks/results``.
        measure: takes the options; returns what is added to the report.
        table: returns the report as text.
        argv: the arguments of the command line: only ``--json PATH``.
        options: arguments of ``measure``, such as shapes; the report contains them.
        method: further lines of the method.
        packages: whose versions the report names.
    """
    question, said = question_and_method(doc)
    parser = argparse.ArgumentParser(description=question)
    default = RESULTS / f"{result}.json"
    parser.add_argument("--json", type=Path, default=default, metavar="PATH", help="(%(default)s)")
    path = parser.parse_args(argv).json
    more = {"arguments": options} if options else {}
    report = begin(question, [*said, *method], machine(packages), **more)
    with quiet():
        report |= measure(**(options or {}))
    print("\n" + table(report), flush=True)
    write(report, path)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what Flax's ops and other libraries say about themselves, and what ours say of the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", fp8.Fp8EmulationWarning)
        yield


def version_of(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def machine(packages: Sequence[str] = PACKAGES) -> Row:
    """Returns the processor, the GPU or None, and versions."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    device = jax.devices()[0]
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": device.device_kind if device.platform == "gpu" else None,
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
        "fp8flax": fp8.__version__,
    }


def begin(question: str, method: Sequence[str], machine: Row, **more: Any) -> Row:
    """Prints what is asked, how and on what; returns the report, to which the figures are added."""
    print(f"Question: {question}\n")
    print("Method:", *method, sep="\n  - ")
    print("\nMachine:", ", ".join(f"{k} {v}" for k, v in machine.items()), flush=True)
    return {"question": question, "method": method, "machine": machine, **more}


def write(report: Row, path: Path) -> None:
    """Writes a report; a file that was there is replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(report, indent=2) + "\n")
    os.replace(temporary, path)
    print(f"\nWritten: {path}")


# Steps and products.


def make_step(apply: Callable[..., jax.Array]) -> Callable[..., tuple[Any, ...]]:
    """Returns the step ``(variables, *inputs, g) -> (output, gradients of variables and inputs)``."""

    def step(variables: Any, *inputs_and_g: jax.Array) -> tuple[Any, ...]:
        *inputs, g = inputs_and_g
        out, vjp = jax.vjp(apply, variables, *inputs)
        return out, *vjp(g)

    return step


def second_step(step: Callable[..., Any], variables: Any, *tensors: jax.Array) -> tuple[Any, ...]:
    """Returns what a step returns when its scaling state has seen the same tensors one step before."""
    if OWG in variables:
        variables = {**variables, OWG: step(variables, *tensors)[1][OWG]}
    return step(variables, *tensors)


# Counts and statistics.


def counts_of(report: fp8.AuditReport) -> Row:
    """Returns what an audit counts in a program."""
    return {
        "gemms": report.num_gemms,
        "fp8_gemms": report.num_fp8_gemms,
        "maybe_fp8_gemms": sum(gemm.units == "maybe FP8" for gemm in report.gemms),
        "kernels": report.num_kernels,
        "launches": report.num_launches,
        "gemm_bytes": report.gemm_bytes,
        "other_bytes": report.other_bytes,
        "temp_bytes": report.temp_bytes,
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    return summary([a / b for a, b in zip(values, base, strict=True)])


def sqnr(pairs: Iterable[tuple[Any, Any]]) -> float:
    """Returns the signal-to-quantization-noise ratio, in dB, of pairs of exact and measured arrays."""
    signal = noise = 0.0
    for exact, measured in pairs:
        wanted, got = (np.asarray(array, np.float64) for array in (exact, measured))
        signal += float(np.sum(np.square(wanted)))
        noise += float(np.sum(np.square(got - wanted)))
    return 10 * math.log10(signal / noise) if noise else math.inf


# Timing.


def interleaved(
    runs: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Returns the seconds of each run in each round, after rounds of warm-up; in rotated order."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(warm_up + rounds):
        # Rotated, so that none always runs after the same one.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            began = time.perf_counter()
            runs[name]()
            if i >= warm_up:
                seconds[name].append(time.perf_counter() - began)
    return seconds


# Text.


def text_of(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def word(key: str) -> Callable[[Row], str]:
    """Returns a cell that shows a word of the row."""
    return lambda row: str(row[key])


def figure(key: str, format: str, scale: float = 1.0) -> Callable[[Row], str]:
    """Returns a cell that shows a figure of the row, or the median of one; empty if the row has none."""

    def cell(row: Row) -> str:
        value = row.get(key)
        value = value["median"] if isinstance(value, dict) else value
        return "" if value is None else f"{scale * value:{format}}"

    return cell


def cells(columns: Columns, rows: Iterable[Row]) -> list[list[str]]:
    """Returns the header and the rows of a table, as text."""
    return [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]


def text_table(columns: Columns, rows: Iterable[Row], left: int) -> str:
    """Returns a line of text for each row: ``left`` columns of words, then numbers."""
    lines = cells(columns, rows)
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            [*map(str.ljust, line[:left], widths[:left]), *map(str.rjust, line[left:], widths[left:])]
        ).rstrip()
        for line in lines
    )


def markdown(columns: Columns, rows: Iterable[Row]) -> str:
    """Returns a table for a page of the documentation."""
    header, *lines = cells(columns, rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))

"""Shared by the benchmarks: the command, the report and its file, statistics, timing and tables."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fp8flax as fp8

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
OWG = fp8.OVERWRITE_WITH_GRADIENT
GEMMS = ("forward", "dgrad", "wgrad")
WARM_UP = 2
"""Rounds before those that are timed."""

Row = dict[str, Any]
Shape = tuple[int, ...]
Columns = Mapping[str, Callable[[Row], str]]
"""The columns of a table: by its header, what a row shows."""


class NotMeasuredError(Exception):
    """Why a row has no figures."""


def reason_of(error: Exception) -> str:
    """Returns the first line of an error, without folders."""
    if isinstance(error, NotMeasuredError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    text = lines[0] if isinstance(error, ImportError) else f"{type(error).__name__}: {lines[0]}"
    return re.sub(r"(?<![\w:])/\S*/", "", text)[:300]


# A script, and its report.


def run(main: Callable[[], object], **environment: str) -> None:
    """Runs a script, with variables that JAX reads when it starts."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    main()


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
    here: Callable[[], Row] | None = None,
) -> None:
    """Runs a benchmark: prints its question and method, measures, prints a table and writes the report.

    Args:
        doc: the docstring of the script; it states the question and the method.
        result: the name of the file in ``benchmarks/results``; it may name options in braces.
        measure: takes the options; returns what is added to the report.
        table: returns the report as text.
        argv: the arguments of the command line.
        options: the default values of the options: numbers, words, a shape as a tuple, or several shapes.
        method: further lines of the method.
        here: returns the machine and versions; ``machine`` by default.
    """
    question, said = question_and_method(doc)
    parser = argparse.ArgumentParser(description=question)
    for name, default in (options or {}).items():
        several = isinstance(default, tuple) and isinstance(default[0], tuple)
        example = default[0] if several else default
        kind: Any = parse_shape(len(example)) if isinstance(example, tuple) else type(example)
        text = " ".join(map(str, default)) if several else str(default)
        parser.add_argument(
            f"--{name}",
            type=_positive if kind is int else kind,
            nargs="+" if several else None,
            default=default,
            help=f"({text})",
        )
    parser.add_argument("--json", type=Path, metavar="PATH", help=f"(benchmarks/results/{result}.json)")
    arguments = vars(parser.parse_args(argv))
    path = arguments.pop("json") or RESULTS / f"{result.format(**arguments)}.json"
    more = {"arguments": json.loads(json.dumps(arguments))} if arguments else {}
    report = begin(question, [*said, *method], (here or machine)(), **more)
    with quiet():
        report |= measure(**arguments)
    print("\n" + table(report), flush=True)
    write(report, path)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return int(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what Flax's ops and other libraries say about themselves, and what ours say of the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", fp8.Fp8EmulationWarning)
        yield


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(packages: Sequence[str] = PACKAGES, also: Sequence[str] = ("gpu",)) -> Row:
    """Returns the CPU, versions, and what else is asked for: ``gpu``, ``cores``, ``load_average``."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    figures: dict[str, Callable[[], Any]] = {"cores": _cores, "load_average": _load, "gpu": _gpu}
    return {
        "cpu": cpu,
        **{name: figure() for name, figure in figures.items() if name in also},
        "python": platform.python_version(),
        **{package: version_of(package) for package in packages},
        "fp8flax": fp8.__version__,
    }


def _cores() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _gpu() -> str | None:
    device = jax.devices()[0]
    return device.device_kind if device.platform == "gpu" else None


def begin(question: str, method: Sequence[str], machine: Row, **more: Any) -> Row:
    """Prints what is asked, how and on what; returns the report, to which the figures are added."""
    print(f"Question: {question}\n")
    print("Method:", *method, sep="\n  - ")
    print("\nMachine:", ", ".join(f"{k} {v}" for k, v in machine.items()), flush=True)
    return {"question": question, "method": method, "machine": machine, **more}


def write(report: Row, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nWritten: {path}")


# Steps and products.


def make_step(apply: Callable[..., jax.Array]) -> Callable[..., tuple[Any, ...]]:
    """Returns the step ``(variables, *inputs, g) -> (output, gradients of variables and of each input)``.

    Args:
        apply: a Linen module's ``apply``.
    """

    def step(variables: Any, *inputs_and_g: jax.Array) -> tuple[Any, ...]:
        *inputs, g = inputs_and_g
        out, vjp = jax.vjp(apply, variables, *inputs)
        return out, *vjp(g)

    return step


def with_next_state(variables: Any, gradients: Any) -> Any:
    """Returns the variables with the next scaling state, which is the gradient of the present one."""
    return {**variables, OWG: gradients[OWG]} if OWG in variables else variables


def second_step(step: Callable[..., Any], variables: Any, *tensors: jax.Array) -> tuple[Any, ...]:
    """Returns what a step returns when its scaling state has seen the same tensors one step before."""
    if OWG in variables:
        variables = with_next_state(variables, step(variables, *tensors)[1])
    return step(variables, *tensors)


def three_gemms(x: Any, w: Any, g: Any) -> tuple[Any, Any, Any]:
    """Returns the products of a Dense layer: forward, dgrad and wgrad."""
    return x @ w, g @ w.T, x.T @ g


# Statistics.


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


def relative_error(got: Any, wanted: Any) -> float:
    """Returns the Frobenius norm of the difference over that of ``wanted``."""
    return float(np.linalg.norm(got - wanted) / np.linalg.norm(wanted))


# Timing.


def interleaved(
    runs: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = WARM_UP
) -> dict[str, list[float]]:
    """Returns the seconds of each run in each round, after rounds of warm-up; in rotated order."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
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


def parse_shape(length: int) -> Callable[[str], Shape]:
    """Returns what reads a shape of so many sizes, written as 8192x4096x4096."""

    def parse(text: str) -> Shape:
        sizes = re.split("[x×]", text)
        if len(sizes) != length or not all(size.isdecimal() and int(size) for size in sizes):
            raise argparse.ArgumentTypeError(f"a shape is {length} sizes, such as 8x16x8; got {text!r}")
        return tuple(map(int, sizes))

    return parse


def aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Returns lines of cells in columns: ``left`` columns of words, then numbers."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            [*map(str.ljust, line[:left], widths[:left]), *map(str.rjust, line[left:], widths[left:])]
        ).rstrip()
        for line in lines
    )


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


def text_table(columns: Columns, rows: Iterable[Row], left: int) -> str:
    """Returns a line of text for each row: ``left`` columns of words, then numbers."""
    return aligned([list(columns), *([cell(row) for cell in columns.values()] for row in rows)], left)


def markdown(columns: Columns, rows: Iterable[Row]) -> str:
    """Returns a table for a page of the documentation."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[cell(row) for cell in columns.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

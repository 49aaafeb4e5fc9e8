"""What the benchmarks share: their report and its file, statistics, timing, shapes and tables."""

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
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fp8flax as fp8

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
WARM_UP = 2
"""Rounds before those that are timed."""

Row = dict[str, Any]
Shape = tuple[int, int, int]


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
    # JAX 0.9 asks for CUDA's libraries where it finds the plugin.
    for name, value in {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", **environment}.items():
        os.environ.setdefault(name, value)
    main()


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


def add_json(parser: argparse.ArgumentParser, default: Path) -> None:
    """Adds the option for the file of the report."""
    text = f"to write (benchmarks/results/{default.name})"
    parser.add_argument("--json", type=Path, default=default, metavar="PATH", help=text)


def write(report: Row, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nWritten: {path}")


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


# Timing.


def seconds_of(fun: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    began = time.perf_counter()
    result = fun()
    return time.perf_counter() - began, result


def compilations(
    steps: Mapping[str, Callable[[], Any]], args: Mapping[str, tuple[Any, ...]], times: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, Any]]:
    """Traces and compiles jitted functions in turn, each time a new one and with caches cleared.

    Args:
        steps: by name, what makes the jitted function anew.
        args: by name, its arguments.
        times: how often.

    Returns:
        By name the seconds of each trace, those of each compilation, and what was compiled last.
    """
    trace_seconds: dict[str, list[float]] = {name: [] for name in steps}
    compile_seconds: dict[str, list[float]] = {name: [] for name in steps}
    compiled = {}
    for _ in range(times):
        for name, make in steps.items():
            step = make()
            jax.clear_caches()
            seconds, traced = seconds_of(partial(step.trace, *args[name]))
            trace_seconds[name].append(seconds)
            seconds, compiled[name] = seconds_of(partial(_compiled, traced))
            compile_seconds[name].append(seconds)
    return trace_seconds, compile_seconds, compiled


def _compiled(traced: Any) -> Any:
    return traced.lower().compile()


def interleaved(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each run in each round, after rounds of warm-up; in rotated order."""
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    for i in range(WARM_UP + rounds):
        # Rotated, so that none always runs after the same one.
        for name in names[i % len(names) :] + names[: i % len(names)]:
            began = time.perf_counter()
            runs[name]()
            if i >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds


# Text.


def text_of(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


def parse_shape(text: str) -> Shape:
    match = re.fullmatch(r"(\d+)[x×](\d+)[x×](\d+)", text)
    if match is None or 0 in map(int, match.groups()):
        raise argparse.ArgumentTypeError(f"a shape is written MxKxN, as in 8192x4096x4096; got {text!r}")
    M, K, N = map(int, match.groups())
    return M, K, N


def aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Returns lines of cells in columns, the first ``left`` of which are words and the others numbers."""
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        "  ".join(
            [*map(str.ljust, line[:left], widths[:left]), *map(str.rjust, line[left:], widths[left:])]
        )
        for line in lines
    )

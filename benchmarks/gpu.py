"""What does an NVIDIA GPU make of FP8: the values, the backends, the times, the memory, beside bf16?

Run ``make bench-gpu``, or ``python -m benchmarks.gpu`` with a Python whose JAX sees the GPU; ``--help``
for the options. A run takes up to nine minutes and writes each entry as soon as it is there. Started
again, it goes on with what is missing, without a program at which it ended twice. On a CPU
``--small`` runs all of it on tiny sizes, to see that it runs. ``--ahead`` compiles every program for an
H200 without one.

values: one float32 layer, forward and backward, beside the same on the CPU, where FP8 is emulated; the
tests compare the emulation with NumPy. relative error = |device - CPU| / |CPU| (Frobenius). Scaling
states are compared in bits.

dense: one nn.Dense, forward and backward; gemm: one GEMM; model: a training step of a Transformer on
bytes. TFLOP/s = 6MKN / seconds for a Dense layer, 2MKN for a GEMM, 6 x tokens x weights of matmuls for a
training step; GB/s = the least that must be moved / seconds. times base = seconds of the bf16 program in
the same round over those of this one.

Each program repeats its step inside; its seconds are those of a call over the steps, which hides the
host. gemms = of the program as optimized: backend and accumulation. program_bytes = arguments, results
and temporaries as compiled.

predicted = for each kernel the longer of its operations (1400 TFLOP/s in FP8, 720 in bf16) and its bytes
(3.4 TB/s), and 3 microseconds for each.

The autotuned kernels are those of this run; the GPU's clocks are as it keeps them; data are Gaussian.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import common, gpu_programs
from benchmarks.common import NotMeasuredError, Row, reason_of
from benchmarks.gpu_entries import Entry, entries
from fp8flax._audit.compiling import find_target

ROOT = common.RESULTS.parents[1]
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "qwix")
VERSIONS = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "fp8flax", "numpy")
QUESTION, METHOD = common.question_and_method(__doc__)


class Store:
    """The file of results: runs by machine and versions, entries by name; it is replaced as a whole."""

    def __init__(self, path: Path, machine: Mapping[str, Any], device: str) -> None:
        self.path, self._machine = path, dict(machine)
        versions = [f"{name} {machine[name]}" for name in VERSIONS if machine[name]]
        self.key = ", ".join([device, *versions])
        """The device and the versions that decide over a figure: entries with one key may be compared."""

    def read(self) -> dict[str, Any]:
        """Returns the whole file, with this run in it.

        Raises:
            SystemExit: the file is not one of ours.
        """
        runs: Any = {}
        if self.path.exists():
            try:
                runs = json.loads(self.path.read_text())["runs"]
                assert all(isinstance(run["entries"], dict) for run in runs.values())
            except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
                raise SystemExit(
                    f"{self.path} holds no results of this benchmark; expected a JSON object with 'runs'. "
                    "Move it away, or name another file by --json."
                ) from None
        runs.setdefault(self.key, {"machine": self._machine, "entries": {}})
        return {"question": QUESTION, "method": METHOD, "runs": runs}

    @property
    def entries(self) -> dict[str, Row]:
        """Returns the entries of this run, by name."""
        return self.read()["runs"][self.key]["entries"]

    def put(self, name: str, entry: Row | None) -> None:
        """Writes one entry of this run; None removes it."""
        report = self.read()
        run = report["runs"][self.key]
        run["machine"] = self._machine
        run["entries"].pop(name, None)
        if entry is not None:
            run["entries"][name] = entry
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(temporary, self.path)


def measure(entry: Entry, store: Store) -> Row:
    """Measures one entry and writes it; what goes wrong is written in its place.

    Before each program its name is written. A program at which two processes ended is left out.
    """
    before = store.entries.get(entry.name, {})
    ended = dict(before.get("ended", {}))
    if before.get("status") == "running" and "at" in before:
        ended[before["at"]] = ended.get(before["at"], 0) + 1
    running = {"status": "running", **({"ended": ended} if ended else {})}

    def at(program: str) -> None:
        if ended.get(program, 0) > 1:
            raise NotMeasuredError("the process that measured it ended twice")
        store.put(entry.name, {**running, "at": program})

    store.put(entry.name, running)
    began = time.monotonic()
    done: Row
    try:
        with common.quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            done = {**running, "status": "done", "result": entry.measure(at)}
    except Exception as error:
        if not isinstance(error, NotMeasuredError):
            traceback.print_exc()
        done = {**running, "status": "failed", "error": reason_of(error)}
    seconds = time.monotonic() - began
    done["took_seconds"] = round(seconds, 2)
    store.put(entry.name, done)
    print(f"{done['status']:7} {entry.name:30} {seconds:7.1f} s", flush=True)
    jax.clear_caches()
    return done


def compile_ahead(entry: Entry, store: Store) -> None:
    """Compiles the programs of an entry for an H200 that is not here, and writes what they would do."""
    rows: dict[str, Row] = {}
    with common.quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in entry.programs().items():
            try:
                program = make()
                compiled = gpu_programs.compiled_ahead(program)
                rows[name] = gpu_programs.reading(compiled, program.steps, find_target("h200"))
            except Exception as error:
                rows[name] = {"not_measured": reason_of(error)}
            print(f"compiled {entry.name} {name}", flush=True)
    gpu_programs.predict_times_base(rows, entry.base)
    store.put(entry.name, {"status": "done", "result": {"rows": rows}})


# The report.


def _remark(row: Row) -> str:
    differ = row.get("states_that_differ", 0)
    return f"{differ} elements of states differ" if differ else row.get("not_measured", "")


def _errors(row: Row) -> str:
    return " ".join(f"{row[gemm]:.0e}" for gemm in common.GEMMS if gemm in row)


COLUMNS: common.Columns = {
    "entry": lambda row: row["entry"],
    "program": lambda row: row.get("program", ""),
    "backends": lambda row: "+".join(sorted({gemm["backend"] for gemm in row.get("gemms", [])})),
    "remark": _remark,
    "errors": _errors,
    "us": common.figure("seconds", ".1f", 1e6),
    "times base": common.figure("times_base", ".2f"),
    "TFLOP/s": common.figure("tflops", ".0f"),
    "GB/s": common.figure("gigabytes_per_second", ".0f"),
    "GiB": common.figure("program_bytes", ".2f", 2**-30),
    "kernels": common.figure("kernels", "g"),
    "predicted us": common.figure("predicted_seconds", ".1f", 1e6),
    "times": common.figure("predicted_times_base", ".2f"),
    "ahead us": common.figure("ahead", ".1f", 1e6),
}


def rows_of(entries: Mapping[str, Row], ahead: Mapping[str, Row]) -> Iterator[Row]:
    """Yields a row of the table for each program, with what was predicted without the GPU."""
    for name, entry in entries.items():
        if entry["status"] != "done":
            yield {"entry": name, "not_measured": entry.get("error") or f"not measured: {entry['status']}"}
            continue
        expected = ahead.get(name, {}).get("result", {}).get("rows", {})
        for program, row in entry["result"]["rows"].items():
            predicted = expected.get(program, {}).get("predicted_seconds")
            yield {"entry": name, "program": program, "ahead": predicted, **row}


def predictions(path: Path) -> dict[str, Row]:
    """Returns the entries that were compiled ahead, by the last version that did."""
    runs = json.loads(path.read_text())["runs"].values() if path.exists() else ()
    return {name: entry for run in runs for name, entry in run["entries"].items()}


def chosen_entries(every: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """Returns the entries with these names, or whose names begin with one of them and a slash.

    Raises:
        SystemExit: a name fits none.
    """
    for name in names:
        if not any(f"{entry.name}/".startswith(f"{name}/") for entry in every):
            known = ", ".join(dict.fromkeys(entry.name.partition("/")[0] for entry in every))
            raise SystemExit(f"No entry is called {name!r}. There are {known}.")
    return [entry for entry in every if any(f"{entry.name}/".startswith(f"{n}/") for n in names)]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--json", type=Path, metavar="PATH", help="(benchmarks/results/h200.json)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="entries, such as dense")
    parser.add_argument("--redo", action="store_true", help="measure again what is there")
    parser.add_argument("--budget", type=float, default=520.0, help="seconds in all (%(default)g)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any device")
    parser.add_argument("--ahead", action="store_true", help="compile for an H200 without one, run nothing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if an entry failed, 2 if there is no GPU."""
    args = parse_args(argv)
    machine = common.machine(PACKAGES, ("cores", "load_average", "gpu"))
    if not (args.small or args.ahead or machine["gpu"]):
        hidden = " JAX_PLATFORMS hides it, if there is one." if os.environ.get("JAX_PLATFORMS") else ""
        print(
            f"JAX's first device is a {jax.devices()[0].platform.upper()}, not a GPU.{hidden} "
            "--small shows on any device that the benchmark runs; --ahead compiles it for an H200.",
            file=sys.stderr,
        )
        return 2
    predicted = common.RESULTS / "h200_ahead.json"
    default = predicted if args.ahead else common.RESULTS / "h200.json"
    if args.small:
        default = Path(tempfile.gettempdir()) / "fp8flax-bench-gpu-small.json"
    device = "compiled for an NVIDIA H200, not run" if args.ahead else machine["gpu"] or "CPU"
    store = Store(args.json or default, machine, device)
    every = entries(args.small)
    chosen = chosen_entries(every, args.only) if args.only else every
    for entry in chosen if args.redo else ():
        store.put(entry.name, None)
    print(f"Question: {QUESTION}\n\nMachine: {store.key}", flush=True)
    until = time.monotonic() + args.budget
    take = partial(compile_ahead, store=store) if args.ahead else partial(measure, store=store)
    failed_before = {name for name, entry in store.entries.items() if entry["status"] == "failed"}
    for entry in sorted(chosen, key=lambda entry: entry.name in failed_before):  # what failed comes last
        is_done = store.entries.get(entry.name, {}).get("status") == "done"
        if not is_done and (args.ahead or time.monotonic() + entry.expected <= until):
            take(entry)
    seen = store.entries
    print("\n" + common.text_table(COLUMNS, rows_of(seen, {} if args.ahead else predictions(predicted)), 4))
    missing = [entry.name for entry in chosen if entry.name not in seen]
    failed = [entry.name for entry in chosen if seen.get(entry.name, {}).get("status") == "failed"]
    if missing:
        print(f"\nNot yet measured; run again to go on: {', '.join(missing)}.")
    if failed:
        print(f"\nFailed, with the reason in the file: {', '.join(failed)}.")
    print(f"\nWritten: {store.path}")
    return 1 if failed else 0


if __name__ == "__main__":
    # Read when JAX meets the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if "--small" not in sys.argv:
        # Later runs take over the results of autotuning.
        cache = Path(tempfile.gettempdir()) / "fp8flax-bench-gpu-cache"
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

"""What does an H200 make of FP8: the values, the backends, the times, the memory?

Run ``make bench-gpu``, or ``python -m benchmarks.gpu`` with a Python whose JAX sees the GPU; ``--help`` for
the options. A run takes up to nine minutes, goes from what tells most to what tells least, and writes each
figure as soon as it is there: started again, it goes on with what is missing. On a CPU ``--small`` runs all
of it on tiny sizes, to see that it runs; ``--ahead`` compiles every program for an H200 without one, and
what is measured is printed beside that.

The formulas: TFLOP/s = 6MKN / seconds for one Dense layer forward and backward, 2MKN for a GEMM, 6 x tokens
x parameters for a training step; times_base = seconds of the bf16 program in the same round over those of
this one. predicted = for each kernel the longer of its operations (1400 TFLOP/s in FP8, 720 in bf16) and
its bytes (3.4 TB/s), and 3 microseconds for each.

Assumptions: the autotuned kernels are those of this run; the GPU's clocks are as it keeps them; data are
Gaussian.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import dense, gpu_entries
from benchmarks.common import RESULTS, NotMeasuredError, Row, quiet, reason_of, text_of
from benchmarks.gpu_entries import Entry
from fp8flax._audit.compiling import find_target

QUESTION = (
    "On an NVIDIA GPU: are the values of every recipe those of NumPy, which backend runs each GEMM, and "
    "what do FP8 GEMMs, one Dense layer, a training step of a 1B-parameter model and a decoding step cost "
    "beside bf16?"
)
ROOT = RESULTS.parents[1]
RESULT, RESULT_AHEAD = RESULTS / "h200.json", RESULTS / "h200_ahead.json"
BUDGET, OVERTIME = 520.0, 45.0
MOST_DEATHS = 3


class Store:
    """The file of results: runs by machine and versions, entries by name; it is replaced as a whole."""

    def __init__(self, path: Path, key: str, machine: Mapping[str, Any]) -> None:
        self.path, self.key, self._machine = path, key, dict(machine)

    def read(self) -> dict[str, Any]:
        """Returns the whole file, with this run in it.

        Raises:
            SystemExit: the file is not one of ours.
        """
        report: Any = {}
        if self.path.exists():
            try:
                report = json.loads(self.path.read_text())
                runs = report["runs"]
                assert all(isinstance(run["entries"], dict) for run in runs.values())
            except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
                raise SystemExit(
                    f"{self.path} holds no results of this benchmark; expected a JSON object with 'runs'. "
                    "Move it away, or name another file by --json."
                ) from None
        report = {"question": QUESTION, "method": method(), "runs": report.get("runs", {})}
        report["runs"].setdefault(self.key, {"machine": self._machine, "entries": {}})
        return report

    @property
    def entries(self) -> dict[str, Row]:
        """Those of this run, by name."""
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
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(json.dumps(report, indent=1) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise


def source() -> str:
    """Returns a digest of the package and of this benchmark, which each entry is marked with."""
    digest = hashlib.sha256()
    files = [*(ROOT / "fp8flax").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


VERSIONS = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "fp8flax", "numpy")


def key_of(machine: Mapping[str, Any]) -> str:
    """Returns what may be compared: the device and the versions that decide over a figure."""
    device = machine["gpu"] or "CPU"
    return ", ".join([device, *(f"{name} {machine[name]}" for name in VERSIONS if machine[name])])


# The process that measures.


class Noted(gpu_entries.Progress):
    """Writes down which program comes next, for the case that it ends the process."""

    def __init__(self, store: Store, name: str, entry: Row) -> None:
        super().__init__(entry.get("excluded"))
        self._store, self._name, self._entry = store, name, entry

    def at(self, name: str) -> None:
        """Writes the name; raises as the base does."""
        super().at(name)
        self._store.put(self._name, {**self._entry, "at": name})


def measure(entry: Entry, store: Store, limit: float | None = None) -> Row:
    """Measures one entry and writes it; what goes wrong is written in its place.

    With a limit the process ends if it takes more seconds than that.
    """
    before = store.entries.get(entry.name, {})
    running = {
        "status": "running",
        "source": source(),
        **{key: before[key] for key in ("excluded",) if key in before},
    }
    store.put(entry.name, running)
    began = time.monotonic()
    if limit is not None:
        faulthandler.dump_traceback_later(limit, exit=True)
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = entry.measure(Noted(store, entry.name, running))
        done = {**running, "status": "done", "result": result}
    except Exception as error:
        if not isinstance(error, NotMeasuredError):
            traceback.print_exc()
        done = {**running, "status": "failed", "error": reason_of(error)}
    finally:
        if limit is not None:
            faulthandler.cancel_dump_traceback_later()
    done["took_seconds"] = round(time.monotonic() - began, 2)
    store.put(entry.name, done)
    print(
        f"{done['status']:7} {entry.name:40} {done['took_seconds']:7.1f} s  {done.get('error', '')}",
        flush=True,
    )
    return done


def work(names: Sequence[str], sizes: gpu_entries.Sizes, store: Store, seconds: float) -> None:
    """Measures these entries, as long as there is time for the next."""
    until = time.monotonic() + seconds
    chosen = [entry for entry in gpu_entries.entries(sizes) if entry.name in names]
    for entry in sorted(chosen, key=lambda entry: names.index(entry.name)):
        left = until - time.monotonic()
        if entry.expected > left:
            break
        measure(entry, store, min(entry.limit, left + OVERTIME))


def end_with_parent() -> None:
    """Ends this process when the one that started it has gone: it holds the other end of our input."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


# The process that looks after it.


def next_group(pending: Sequence[Entry]) -> list[Entry]:
    """Returns the entries that the next process measures: the first, and what may follow it there."""
    first, *rest = pending
    group = [first]
    for entry in rest:
        if first.fresh or entry.fresh or entry.environment != first.environment:
            break
        group.append(entry)
    return group


def supervise(
    chosen: Sequence[Entry],
    store: Store,
    start: Callable[[list[Entry], float], tuple[int, str]],
    budget: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Has all entries measured that are missing, and then those that failed before, while there is time.

    Args:
        chosen: entries, in the order of their worth.
        store: where they are written.
        start: runs a process that measures entries within some seconds; returns its exit status and what it
            said last.
        budget: seconds.
        clock: tells the seconds.
    """
    until = clock() + budget
    tried: set[str] = set()
    while True:
        seen = store.entries
        order = {"failed": 1}
        pending = [
            entry
            for entry in sorted(chosen, key=lambda e: order.get(seen.get(e.name, {}).get("status", ""), 0))
            if seen.get(entry.name, {}).get("status") != "done"
            and entry.name not in tried
            and clock() + entry.expected <= until
        ]
        if not pending:
            return
        group = next_group(pending)
        status, said = start(group, until - clock())
        after = store.entries
        for entry in group:
            now = after.get(entry.name, {})
            if now.get("status") == "running":
                # At the end of the time it has done nothing wrong.
                is_late = clock() >= until
                store.put(
                    entry.name,
                    {**now, "status": "interrupted"} if is_late else after_death(now, status, said),
                )
            if store.entries.get(entry.name, {}).get("status") in ("done", "failed"):
                tried.add(entry.name)
        if all(after.get(entry.name) == seen.get(entry.name) for entry in group):
            # It did not even begin: not for lack of time alone, if it says something.
            if status:
                failed = {"status": "failed", "error": f"its process ended with {status}: {said}"}
                store.put(group[0].name, {**failed, "source": source()})
            tried.add(group[0].name)


def after_death(entry: Row, status: int, said: str) -> Row:
    """Returns what to write of an entry whose process ended: next, the program it was at is left out."""
    reason = f"its process ended with {status}: {said}"
    excluded = dict(entry.get("excluded", {}))
    at = entry.get("at")
    if at is None or at in excluded or len(excluded) + 1 >= MOST_DEATHS:
        return {**entry, "status": "failed", "error": f"at {at}: {reason}" if at else reason}
    return {**entry, "status": "died", "excluded": {**excluded, at: reason}, "at": None}


def last_words(text: str) -> str:
    """Returns of what a process wrote the lines that say why it ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [
        line
        for line in lines
        if re.search(r"Timeout \(|Check failed|^F\d{4} |Fatal|Error\b|out of memory", line)
    ]
    return re.sub(r"(?<![\w:])/\S*/", "", " | ".join((telling or lines)[-3:]))[:500]


def start_process(arguments: Sequence[str]) -> Callable[[list[Entry], float], tuple[int, str]]:
    """Returns what runs this file anew to measure entries, with these arguments."""

    def start(group: list[Entry], seconds: float) -> tuple[int, str]:
        environment = dict(os.environ)
        for name, value in group[0].environment.items():
            environment[name] = f"{environment.get(name, '')} {value}".strip()
        command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
        command += ["--work", str(seconds), *(entry.name for entry in group)]
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stderr=errors
            )
            # It ends by itself before, unless even its own watch hangs.
            with process, contextlib.suppress(subprocess.TimeoutExpired):
                try:
                    process.wait(timeout=seconds + OVERTIME + 15)
                finally:
                    process.kill()
            errors.seek(0)
            text = errors.read()
        if process.returncode:
            print(text[-2000:], file=sys.stderr, flush=True)
        return process.returncode, last_words(text)

    return start


# The report.


def method() -> list[str]:
    assert __doc__ is not None
    paragraphs = [" ".join(paragraph.split()) for paragraph in __doc__.split("\n\n")[2:]]
    contenders = gpu_entries.dense_contenders(in_full=True)
    return [
        *paragraphs,
        "values: one float32 nn.Dense, forward and backward, beside float64 products of the codes that "
        "NumPy and ml_dtypes make by the recipe's formulas; relative_error = |device - NumPy| / |NumPy| "
        "(Frobenius), error_of_fp8 = that of the codes' product beside the exact one; codes, scales and "
        "states are compared in bits.",
        "dense: " + "; ".join(f"{name} = {contender.what}" for name, contender in contenders.items()),
        "Each program repeats its step inside; its seconds are those of a call over the steps, which hides "
        "the host. gemms = of the program as optimized: backend, accumulation, tile or algorithm.",
        "memory: gigabytes per second of the least that must be moved. gaps: seconds of each of many "
        "kernels that do next to nothing, one after the other, with CUDA graphs and without.",
        "model: peak_bytes = peak_bytes_in_use of device.memory_stats() in a process of its own; "
        "program_bytes = arguments, results and temporaries as compiled.",
    ]


def lines_of(name: str, entry: Row, ahead: Row) -> Iterator[tuple[str, ...]]:
    """Yields the lines of the table for an entry: each measured figure beside the predicted one."""
    result = entry.get("result") or {}
    expected = (ahead.get("result") or {}).get("rows", {})
    if entry.get("status") != "done" or "not_measured" in result:
        why = result.get("not_measured") or entry.get("error") or f"not measured: {entry.get('status')}"
        yield (name, "", why)
        return
    if "relative_error" in result.get("forward", {}):
        errors = ", ".join(f"{g} {result[g]['relative_error']:.1e}" for g in gpu_entries.GEMMS)
        same = f"{result['codes_that_differ']} of {result['codes']} codes differ"
        yield (name, "", f"{errors}; {same}, {result['scales_that_differ']} scales")
        return
    for label, row in (result.get("rows") or {entry_program(name): result}).items():
        if "seconds" not in row:
            yield (name, label, summary_of(row))
            continue
        cells = [f"{1e6 * row['seconds']['median']:.1f} us"]
        for key, unit in (("times_base", "x"), ("tflops", " TFLOP/s"), ("gigabytes_per_second", " GB/s")):
            if key in row:
                cells.append(f"{row[key]['median']:.{2 if unit == 'x' else 0}f}{unit}")
        if row.get("peak_bytes"):
            cells.append(f"{row['peak_bytes'] / 2**30:.1f} GiB")
        if "predicted_seconds" in row:
            ratio = f" ({row['predicted_times_base']:.2f}x)" if "predicted_times_base" in row else ""
            seconds = f"{1e6 * row['predicted_seconds']:.1f} us{ratio}"
            cells.append(f"predicted {seconds}, {row['kernels']:g} kernels")
            cells.append("+".join(sorted({gemm["backend"] for gemm in row["gemms"]})))
        if label in expected and "predicted_seconds" in expected[label]:
            of = expected[label]
            cells.append(f"ahead {1e6 * of['predicted_seconds']:.1f} us, {of['kernels']:g} kernels")
        yield (name, label, ", ".join(filter(None, cells)))


def entry_program(name: str) -> str:
    return name.rpartition("/")[2]


def table(entries: Mapping[str, Row], ahead: Mapping[str, Row], current: str) -> str:
    """Returns the entries of a run as text."""
    lines = []
    for name, entry in entries.items():
        lines += list(lines_of(name, entry, ahead.get(name, {})))
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(2)]
    text = ["  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[2]]).rstrip() for line in lines]
    text += [*ratios_of_models(entries), *sums_of_transformer_engine(entries)]
    older = [n for n, e in entries.items() if e.get("source") not in (None, current)]
    if older:
        text.append(f"Measured with other source: {', '.join(older)}. Measure again with --redo.")
    return "\n".join(text)


def ratios_of_models(entries: Mapping[str, Row]) -> Iterator[str]:
    """Yields each training step's time and memory beside those of bf16."""
    results = {
        name: entry.get("result", {}) for name, entry in entries.items() if name.startswith("model/")
    }
    for name, row in results.items():
        base = results.get(f"{name.rpartition('/')[0]}/bf16", {})
        if row is base or "seconds" not in row or "seconds" not in base:
            continue
        text = f"{name}: {base['seconds']['median'] / row['seconds']['median']:.3f} times as fast as bf16"
        if "predicted_seconds" in row and "predicted_seconds" in base:
            text += f" (predicted {base['predicted_seconds'] / row['predicted_seconds']:.3f})"
        if row["peak_bytes"] and base["peak_bytes"]:
            text += f", {row['peak_bytes'] / base['peak_bytes']:.3f} of its memory"
        yield text + "."


def sums_of_transformer_engine(entries: Mapping[str, Row]) -> Iterator[str]:
    """Yields each contender's sum over the four layers that Transformer Engine publishes."""
    shapes = gpu_entries.FULL.transformer_engine
    rows = [
        entries.get(f"dense/{text_of(shape)}", {}).get("result", {}).get("rows", {}) for shape in shapes
    ]
    for label in rows[0]:
        of_both = [[row.get(name, {}) for row in rows] for name in (dense.BF16, label)]
        if label == dense.BF16 or not all("seconds" in row for side in of_both for row in side):
            continue
        base, own = (sum(row["seconds"]["median"] for row in side) for side in of_both)
        yield f"Transformer Engine's four layers, {label}: {base / own:.3f} times as fast as bf16."


def compile_ahead(chosen: Sequence[Entry], store: Store) -> None:
    """Compiles the programs of the entries for an H200 that is not here, and writes what they would do."""
    for entry in chosen:
        if store.entries.get(entry.name, {}).get("status") == "done":
            continue
        rows: dict[str, Row] = {}
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, program in entry.programs().items():
                try:
                    compiled = gpu_entries.compiled_ahead(program)
                    rows[name] = gpu_entries.reading(compiled, program.steps, find_target("h200"))
                except Exception as error:
                    rows[name] = {"not_measured": reason_of(error)}
                print(entry.name, name, summary_of(rows[name]), flush=True)
        if rows:
            gpu_entries.predict_times_base(rows, "bf16")
            store.put(entry.name, {"status": "done", "source": source(), "result": {"rows": rows}})


def summary_of(row: Row) -> str:
    """Returns what a row without a time of its own says."""
    if "not_measured" in row:
        return row["not_measured"]
    if "busy_seconds" in row:
        return f"{1e6 * row['busy_seconds']:.1f} us in kernels of {1e6 * row['span_seconds']:.1f} us"
    if "predicted_seconds" not in row:
        return ""
    moved, taken = row["bytes"] / 2**20, row["program_bytes"] / 2**30
    return (
        f"{row['kernels']:g} kernels, {moved:.1f} MiB moved, {taken:.2f} GiB taken, predicted "
        f"{1e6 * row['predicted_seconds']:.1f} us"
    )


def chosen_entries(every: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    """Returns the entries with these names, or whose names begin with one of them and a slash.

    Raises:
        SystemExit: a name fits none.
    """
    for name in names:
        if not any(entry.name == name or entry.name.startswith(f"{name}/") for entry in every):
            known = ", ".join(dict.fromkeys(entry.name.partition("/")[0] for entry in every))
            raise SystemExit(f"No entry is called {name!r}. There are {known}, and what --list shows.")
    return [e for e in every if any(e.name == n or e.name.startswith(f"{n}/") for n in names)]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--json", type=Path, metavar="PATH", help=f"(benchmarks/results/{RESULT.name})")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="entries, such as dense")
    parser.add_argument("--redo", nargs="+", default=[], metavar="NAME", help="entries to measure again")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds in all (%(default)g)")
    parser.add_argument(
        "--small", action="store_true", help="tiny sizes, on any device; to a file of its own"
    )
    parser.add_argument("--ahead", action="store_true", help="compile for an H200 without one, run nothing")
    parser.add_argument("--list", action="store_true", help="name the entries and stop")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.budget <= 0:
        parser.error("--budget must be more than 0 seconds.")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if an entry failed, 2 if there is no GPU."""
    args = parse_args(argv)
    sizes = gpu_entries.SMALL if args.small else gpu_entries.FULL
    every = gpu_entries.entries(sizes)
    if args.list:
        print(*(f"{entry.name:40} {entry.expected:g} s" for entry in every), sep="\n")
        return 0
    if not (args.small or args.ahead) and jax.devices()[0].platform != "gpu":
        hidden = " JAX_PLATFORMS hides it, if there is one." if os.environ.get("JAX_PLATFORMS") else ""
        first = jax.devices()[0].platform.upper()
        print(
            f"JAX's first device is a {first}, not a GPU.{hidden} --small shows on any device "
            "that the benchmark runs; --ahead compiles it for an H200 without one.",
            file=sys.stderr,
        )
        return 2
    machine = dense.full_machine()
    default = RESULT_AHEAD if args.ahead else RESULT
    if args.small:
        default = Path(tempfile.gettempdir()) / "fp8flax-bench-gpu-small.json"
    key = key_of({**machine, "gpu": "compiled for an NVIDIA H200, not run"} if args.ahead else machine)
    store = Store(args.json or default, key, machine)
    if args.work:
        end_with_parent()
        work(args.work[1:], sizes, store, float(args.work[0]))
        return 0
    chosen = chosen_entries(every, [*args.only, *args.redo]) if args.only or args.redo else every
    for entry in chosen_entries(every, args.redo):
        store.put(entry.name, None)
    print(f"Question: {QUESTION}\n\nMachine: {key}", flush=True)
    if args.ahead:
        compile_ahead(chosen, store)
    else:
        passed_on = ["--json", str(store.path), *(["--small"] if args.small else [])]
        supervise(chosen, store, start_process(passed_on), args.budget)
    return conclude(chosen, store, is_ahead=args.ahead)


def predictions() -> dict[str, Row]:
    """Returns the entries that were compiled ahead, by the last version that did."""
    if not RESULT_AHEAD.exists():
        return {}
    runs = json.loads(RESULT_AHEAD.read_text())["runs"].values()
    return {name: entry for run in runs for name, entry in run["entries"].items()}


def conclude(chosen: Sequence[Entry], store: Store, *, is_ahead: bool) -> int:
    """Prints what there is and what is missing; returns the exit status."""
    entries = store.entries
    print("\n" + table(entries, {} if is_ahead else predictions(), source()))
    statuses = {entry.name: entries.get(entry.name, {}).get("status") for entry in chosen}
    failed = [name for name, status in statuses.items() if status in ("failed", "died")]
    missing = [name for name, status in statuses.items() if status not in ("done", "failed", "died")]
    if missing and not is_ahead:
        print(f"\nNot yet measured; run again to go on: {', '.join(missing)}.")
    if failed:
        print(f"\nFailed, with the reason in the file: {', '.join(failed)}.")
    print(f"\nWritten: {store.path}")
    return 1 if failed else 0


if __name__ == "__main__":
    # Read when JAX meets the device. The processes share it with this one, which only asks what it is.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if "--small" not in sys.argv:
        # What autotuning found serves the processes that come later.
        cache = Path(tempfile.gettempdir()) / "fp8flax-bench-gpu-cache"
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache))
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

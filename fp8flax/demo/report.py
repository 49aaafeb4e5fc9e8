"""What the demo prints and saves: progress, a short result, tables, plots, and every figure as JSON."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import fp8flax as fp8
from fp8flax._host.files import replacing, write_text
from fp8flax.demo.training import ROLES, Record, Settings

COLOURS = {"bf16": "#444444", "fp8": "#d1495b"}
STEPS_PER_LINE = 25
"""How often progress is printed where there is no terminal."""


def print_line(console: Console, text: str) -> None:
    """Prints text as it is: paths are not read as markup, and lines are not wrapped."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class RunProgress(Progress):
    """Shows how far each run is: a bar on a terminal; elsewhere a line every ``STEPS_PER_LINE`` steps."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        # FORCE_COLOR makes ``console.is_terminal`` true for a file, too, where a bar is unreadable.
        self._prints_lines = not console.file.isatty() or console.is_dumb_terminal
        super().__init__(*columns, console=console, disable=self._prints_lines)

    def add_run(self, name: str, steps: int) -> TaskID:
        """Adds a run of so many steps."""
        return self.add_task(name, total=steps, state="")

    def show_step(self, run: TaskID, step: int, state: str) -> None:
        """Shows that ``step`` steps of a run are done."""
        self.update(run, completed=step, state=state)
        task = self._tasks[run]
        if self._prints_lines and (step % STEPS_PER_LINE == 0 or step == task.total):
            print_line(self.console, f"{task.description}: step {step} of {task.total}, {state}")

    def show_end(self, run: TaskID, state: str) -> None:
        """Shows the result of a run."""
        task = self._tasks[run]
        self.update(run, completed=task.total, state=state)
        if self._prints_lines:
            print_line(self.console, f"{task.description}: {state}")


def machine() -> dict[str, Any]:
    """Returns versions and device, for the results."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
    device = jax.devices()[0]
    return {
        "versions": {
            "fp8flax": fp8.__version__,
            "python": platform.python_version(),
            **{p: importlib.metadata.version(p) for p in packages},
        },
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
            "host_cpu": _cpu_name(),
            "host_cores": os.cpu_count(),
        },
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gap(records: dict[str, Record]) -> float | None:
    """Returns ``fp8 / bf16 - 1`` of the last validation losses, or None without both runs."""
    if set(records) != {"bf16", "fp8"}:
        return None
    in_fp8, in_bf16 = (float(records[p].validation_loss[-1]) for p in ("fp8", "bf16"))
    return in_fp8 / in_bf16 - 1


def _step_seconds(record: Record) -> float | None:
    return statistics.median(record.step_seconds) if record.step_seconds else None


def results(
    settings: Settings, corpus: dict[str, Any], runs: dict[int, dict[str, Record]]
) -> dict[str, Any]:
    """Returns every figure of the demo as plain numbers."""
    tokens = settings.batch_size * settings.length

    def of(record: Record) -> dict[str, Any]:
        seconds = _step_seconds(record)
        return {
            "validation_loss": float(record.validation_loss[-1]),
            "validation_curve": dict(
                zip(map(str, record.validation_steps), map(float, record.validation_loss))
            ),
            "train_loss": [float(x) for x in record.train_loss],
            "median_step_seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
            "timed_steps": len(record.step_seconds),
            "layers": {
                op: {
                    role: {
                        "final_scale": float(record.scale[-1, i, j]),
                        "scale_range": [
                            float(record.scale[:, i, j].min()),
                            float(record.scale[:, i, j].max()),
                        ],
                        "amax_range": [
                            float(record.amax[:, i, j].min()),
                            float(record.amax[:, i, j].max()),
                        ],
                    }
                    for j, role in enumerate(ROLES)
                }
                for i, op in enumerate(record.ops)
            },
        }

    return {
        **machine(),
        "settings": vars(settings),
        "corpus": corpus,
        "loss_unit": "nats per byte",
        "runs": [
            {
                "seed": seed,
                "relative_gap": gap(records),
                "precisions": {p: of(r) for p, r in records.items()},
            }
            for seed, records in runs.items()
        ],
    }


def _without_nan(value: Any) -> Any:
    """Replaces numbers that JSON does not have (a diverged loss) by null."""
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def write_json(path: Path, figures: dict[str, Any]) -> None:
    """Writes the figures, readable and in full."""
    write_text(path, json.dumps(_without_nan(figures), indent=1, allow_nan=False) + "\n")


def save_figure(path: Path, figure: Figure) -> None:
    """Writes a PNG."""
    with replacing(path) as new:
        figure.savefig(new, format="png", dpi=130)


def wrote(out: Path) -> str:
    """Returns the line that names the files in the folder."""
    names = (p.name for p in out.iterdir() if p.is_file() and not p.name.startswith("."))
    return f"Wrote {', '.join(sorted(names))} in {out}"


def print_result(
    console: Console, runs: dict[int, dict[str, Record]], settings: Settings, out: Path
) -> None:
    """Prints the last losses of each run, the files in ``out``, and last the gap between FP8 and bf16."""
    print_line(console, f"Losses in nats per byte after {settings.steps} steps, recipe {settings.recipe}:")
    for seed, records in runs.items():
        for precision, record in records.items():
            losses = f"training {record.train_loss[-1]:.4f}, validation {record.validation_loss[-1]:.4f}"
            print_line(console, f"  {precision}, seed {seed}: {losses}")
    print_line(console, f"Picture of the losses: {out / 'loss.png'}")
    print_line(console, wrote(out))
    print_line(console, _last_line(runs))


def _last_line(runs: dict[int, dict[str, Record]]) -> str:
    gaps = [g for g in map(gap, runs.values()) if g is not None]
    if not gaps:
        precision, record = next(iter(next(iter(runs.values())).items()))
        return f"{precision} validation loss: {record.validation_loss[-1]:.4f} nats per byte"
    mean = sum(gaps) / len(gaps)
    line = f"FP8 validation loss relative to bf16: {100 * mean:+.2f} %"
    if len(gaps) > 1:
        each = ", ".join(f"{100 * g:+.2f} %" for g in gaps)
        line += f" (mean of {len(gaps)} seeds: {each})"
    return line


def write_tables(path: Path, tables: list[RenderableType]) -> None:
    """Writes tables as plain text."""
    file = io.StringIO()
    console = Console(file=file, width=120, force_terminal=False, color_system=None)
    for table in tables:
        console.print(table)
    write_text(path, file.getvalue())


def tables_of(runs: dict[int, dict[str, Record]], settings: Settings) -> list[RenderableType]:
    """Returns a table of losses and step times, and one of the scaling state of the first seed's layers."""
    table = Table(title=f"Validation loss (nats per byte) and step time, recipe {settings.recipe}")
    for column in ("seed", "precision", "validation loss", "gap to bf16", "median step", "tokens/s"):
        table.add_column(column, justify="right")
    for seed, records in runs.items():
        for precision, record in records.items():
            seconds = _step_seconds(record)
            g = gap(records) if precision == "fp8" else None
            table.add_row(
                str(seed),
                precision,
                f"{record.validation_loss[-1]:.4f}",
                "" if g is None else f"{100 * g:+.2f} %",
                f"{1e3 * seconds:.0f} ms" if seconds else "not measured",
                f"{settings.batch_size * settings.length / seconds:,.0f}" if seconds else "not measured",
            )
    first = next(iter(runs.values()))
    return [table, _scaling_table(first["fp8"])] if "fp8" in first and first["fp8"].ops else [table]


def _scaling_table(record: Record) -> Table:
    table = Table(title=f"FP8 scaling state, seed {record.seed}: scale at the end, amax over the run")
    table.add_column("layer", no_wrap=True)
    for role in ROLES:
        table.add_column(f"{role}:\nscale, amax", justify="right")
    for i, op in enumerate(record.ops):
        cells = [
            f"{record.scale[-1, i, j]:.1e}, "
            f"{record.amax[:, i, j].min():.0e}–{record.amax[:, i, j].max():.0e}"
            for j in range(len(ROLES))
        ]
        table.add_row(op, *cells)
    return table


def plot_loss(path: Path, runs: dict[int, dict[str, Record]]) -> None:
    """Draws training loss (thin, smoothed) and validation loss (dots) of every run."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for seed, records in runs.items():
        for precision, record in records.items():
            first = seed == next(iter(runs))
            loss = record.train_loss
            width = min(10, len(loss))
            smooth = np.convolve(loss, np.ones(width) / width, mode="valid")
            style = "-" if precision == "bf16" else "--"
            axes.plot(
                np.arange(width, len(loss) + 1),
                smooth,
                style,
                color=COLOURS[precision],
                linewidth=1.2,
                label=f"{precision}, training (mean of {width} steps)" if first else None,
            )
            axes.plot(
                record.validation_steps,
                record.validation_loss,
                "o" if precision == "bf16" else "x",
                color=COLOURS[precision],
                label=f"{precision}, validation" if first else None,
            )
    gaps = [g for g in map(gap, runs.values()) if g is not None]
    title = "Byte-level language model, bf16 and FP8 from the same weights on the same batches"
    if gaps:
        seeds = "1 seed" if len(gaps) == 1 else f"mean of {len(gaps)} seeds"
        title += f"\nfinal validation gap {100 * float(np.mean(gaps)):+.2f} %, {seeds}"
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(path, figure)


def plot_scaling(path: Path, record: Record) -> None:
    """Draws, per tensor role, the amax and the scale of every FP8 layer over the steps.

    The scale of the first step is 1 everywhere (there is no history yet) and is left out: it would flatten
    the rest.
    """
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    grid = figure.subplots(2, 3, sharex=True)
    steps = np.arange(1, len(record.train_loss) + 1)
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(record.ops)))
    for j, role in enumerate(ROLES):
        for row, (name, values) in enumerate((("amax", record.amax), ("scale", record.scale))):
            axes: Axes = grid[row, j]
            for i, colour in enumerate(colours):
                positive = np.where(values[:, i, j] > 0, values[:, i, j], np.nan)
                first = row if len(steps) > 1 else 0
                axes.plot(steps[first:], positive[first:], color=colour, linewidth=0.9, alpha=0.8)
            axes.set_yscale("log")
            axes.grid(alpha=0.3, which="both")
            axes.set_title(f"{role}: {name}" + (" used, from step 2" if row else " seen"))
            if row:
                axes.set_xlabel("step")
    figure.suptitle(
        f"Delayed scaling: one line per FP8 layer ({len(record.ops)}), first layers dark, last bright"
    )
    save_figure(path, figure)


def print_worst(console: Console, step: int, found: Any) -> None:
    """Prints the five tensors that lose most in a step, worst first."""
    summary = fp8.summarize(found)
    worst = dataclasses.replace(summary, rows=summary.rows[:5])
    console.print(f"Step {step}, of {len(summary.rows)} FP8 tensors those that lose most:")
    console.print(str(worst), soft_wrap=True, markup=False, highlight=False)


def largest_kernel(variables: Any) -> tuple[str, np.ndarray]:
    """Returns the name and the values of the largest kernel in the variables of a model."""
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    kernels = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    name = max((name for name in kernels if name.endswith("kernel")), key=lambda name: kernels[name].size)
    return name, np.array(kernels[name])


def plot_statistics(folder: Path, history: dict[int, Any], name: str, kernel: np.ndarray) -> None:
    """Draws statistics by step, and a kernel on the grid of FP8.

    Those are amaxes and scales of the worst tensors, and what underflows where; and the values of the
    kernel in e4m3, with the scale of its amax.
    """
    save_figure(folder / "statistics.png", fp8.plot_history(history))
    save_figure(folder / "underflow.png", fp8.plot_underflow(history))
    scale = float(np.abs(kernel).max()) / float(jnp.finfo(jnp.float8_e4m3fn).max)
    figure = fp8.plot_histogram(kernel, jnp.float8_e4m3fn, scale)
    (axes,) = figure.axes
    axes.set_xlabel(f"log2 of the magnitude of {name}, in the last step that was looked at")
    save_figure(folder / "histogram.png", figure)

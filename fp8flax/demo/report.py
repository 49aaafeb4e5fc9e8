"""Prints and saves the results of the demo: a short summary, plots, and all figures as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from fp8flax._serve.files import replacing, write_text
from fp8flax.demo.training import PRECISIONS, ROLES, Run, Task


def write(console: Console, task: Task, runs: list[Run], options: dict[str, Any], out: Path) -> None:
    """Saves the results in the folder ``out`` and prints them; runs are sorted by seed and precision."""
    for name, text in task.files.items():
        write_text(out / name, text)
    packages = ("fp8flax", "jax", "jaxlib", "flax", "optax", "numpy", "orbax-checkpoint")
    figures = {
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "devices": list(map(str, jax.devices())),
        "host": f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores",
        "options": options,
        "data": task.about,
        "differences": differences(runs),
        "runs": [run.figures() for run in runs],
    }
    write_json(out / "results.json", figures)
    plot_loss(out / "loss.png", task, runs)
    if run_with_scales := next((run for run in runs if run.layers), None):
        plot_scaling(out / "scaling.png", run_with_scales)
    title = "Losses in nats per byte" if task.accuracy_of is None else f"Results of {options['task']}"
    console.print(f"{title} after {task.steps} steps, recipe {options['recipe']}:")
    for run in runs:
        training, validation = (run.arrays[f"{name}_loss"][-1] for name in ("train", "validation"))
        line = f"training {training:.4f}, validation {validation:.4f}"
        if run.accuracy is not None:
            line += f", {task.accuracy_of} accuracy {100 * run.accuracy:.2f} %"
        console.print(f"  {run.precision}, seed {run.seed}: {line}")
    console.print(f"Picture of the losses: {out / 'loss.png'}")
    names = sorted(path.name for path in out.iterdir() if path.is_file() and not path.name.startswith("."))
    console.print(f"Wrote {', '.join(names)} in {out}")
    console.print(last_line(task, runs))


def summary(run: Run) -> str:
    """Returns the final accuracy or validation loss of a run as text."""
    if run.accuracy is not None:
        return f"accuracy {100 * run.accuracy:.2f} %"
    return f"validation loss {run.arrays['validation_loss'][-1]:.3f}"


def differences(runs: list[Run]) -> list[float]:
    """Returns the difference of FP8 to bf16 for each seed: loss in percent, or accuracy in points."""
    pairs = zip(*([r for r in runs if r.precision == precision] for precision in PRECISIONS))
    if runs[0].accuracy is not None:
        return [100 * (in_fp8.accuracy - bf16.accuracy) for bf16, in_fp8 in pairs]
    losses = ((float(run.arrays["validation_loss"][-1]) for run in pair) for pair in pairs)
    return [100 * (in_fp8 / bf16 - 1) for bf16, in_fp8 in losses]


def last_line(task: Task, runs: list[Run]) -> str:
    """Returns the result of all runs in one line."""
    gaps, percent = differences(runs), " %" if task.accuracy_of is None else ""
    if not gaps and task.accuracy_of is not None:
        return f"{runs[0].precision}: {', '.join(map(summary, runs))}"
    if not gaps:
        losses = ", ".join(f"{run.arrays['validation_loss'][-1]:.4f}" for run in runs)
        return f"{runs[0].precision} validation loss: {losses} nats per byte"
    mean = f"{np.mean(gaps):+.2f}{percent or ' points'}"
    if len(gaps) > 1:
        mean += f" (mean of {len(gaps)} seeds: {', '.join(f'{gap:+.2f}{percent}' for gap in gaps)})"
    if task.accuracy_of is None:
        return f"FP8 validation loss relative to bf16: {mean}"
    bf16, in_fp8 = (100 * np.mean([r.accuracy for r in runs if r.precision == p]) for p in PRECISIONS)
    name = task.accuracy_of.capitalize()
    return f"{name} accuracy: bf16 {bf16:.2f} %, FP8 {in_fp8:.2f} %, difference {mean}"


def write_json(path: Path, values: Any) -> None:
    """Writes values as JSON, with null for a NaN or an Inf (of a diverged loss)."""
    values = json.loads(json.dumps(values), parse_constant=lambda number: None)
    write_text(path, json.dumps(values) + "\n")


def plot_loss(path: Path, task: Task, runs: list[Run]) -> None:
    """Draws training loss (thin, smoothed) and validation loss (dots) of every run."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    width = min(10, task.steps)
    for run in runs:
        colour, line, dot = {"bf16": ("#444444", "-", "o"), "fp8": ("#d1495b", "--", "x")}[run.precision]
        name = run.precision if run.seed == runs[0].seed else "_"  # "_" hides the label
        smooth = np.convolve(run.arrays["train_loss"], np.ones(width) / width, mode="valid")
        label = f"{name}, training (mean of {width} steps)"
        axes.plot(np.arange(width, task.steps + 1), smooth, line, color=colour, linewidth=1.2, label=label)
        label = f"{name}, validation"
        axes.plot(run.evaluated_after, run.arrays["validation_loss"], dot, color=colour, label=label)
    title = f"bf16 and FP8 from the same weights on the same batches\n{last_line(task, runs)}"
    axes.set(xlabel="step", ylabel="loss (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as new:
        figure.savefig(new, format="png", dpi=130)


def plot_scaling(path: Path, run: Run) -> None:
    """Draws the amax and the scale of every FP8 layer over the steps: two plots per tensor role."""
    figure, scaling = Figure(figsize=(13, 6.5), layout="constrained"), run.arrays["scaling"]
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.9, len(run.layers)))
    for (row, column), axes in np.ndenumerate(figure.subplots(2, 3, sharex=True)):
        # The scale of the first step is left out: it is 1, and would flatten the curves.
        first = row if len(scaling) > 1 else 0
        values, steps = scaling[first:, 1 - row, :, column], np.arange(first, len(scaling)) + 1
        for layer, colour in zip(np.where(values > 0, values, np.nan).T, colours):
            axes.plot(steps, layer, color=colour, linewidth=0.9, alpha=0.8)
        name = "scale used, from step 2" if row else "amax seen"
        axes.set(yscale="log", title=f"{ROLES[column]}: {name}", xlabel="step" if row else None)
        axes.grid(alpha=0.3, which="both")
    layers = f"one line per FP8 layer ({len(run.layers)}), first layers dark, last bright"
    figure.suptitle(f"Delayed scaling: {layers}")
    with replacing(path) as new:
        figure.savefig(new, format="png", dpi=130)

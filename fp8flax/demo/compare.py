"""Runs a classification task in both precisions; prints the result, saves tables, plots and figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console, RenderableType
from rich.table import Table

import fp8flax as fp8
from fp8flax._host.files import replacing, write_text
from fp8flax.demo import report
from fp8flax.demo.classify import Outcome, Task, quantized, train
from fp8flax.demo.training import PRECISIONS, ROLES

Outcomes = dict[int, dict[str, Outcome]]
"""By seed and precision."""


def run(task: Task, seeds: Sequence[int], out: Path, settings: dict[str, Any], console: Console) -> None:
    """Trains each seed in both precisions; prints the results, and saves them in ``out``.

    Args:
        task: what to train.
        seeds: one run in each precision for each.
        out: a folder that can be written to.
        settings: what else determined the numbers, for ``results.json``.
        console: where to print.
    """
    models = {"bf16": task.model, "fp8": quantized(task)}
    split = task.split(seeds[0])
    test = "" if split.test is None else f", {len(split.test):,} to test"
    report.print_line(
        console,
        f"{task.source}: {len(split.train):,} to train on, {len(split.validation):,} held out for "
        f"validation{test}. Results in {out}",
    )
    layers = str(fp8.report(models["fp8"], split.train.inputs[: task.batch_size]))
    outcomes = _train_all(task, models, seeds, console)

    write_text(out / "layers.txt", layers + "\n")
    tables = [_accuracies(task, outcomes), _variables(outcomes[seeds[0]]["fp8"])]
    report.write_tables(out / "tables.txt", tables)
    figures = {
        **report.machine(),
        "task": task.name,
        "settings": settings,
        "examples": {
            "train": len(split.train),
            "validation": len(split.validation),
            "test": None if split.test is None else len(split.test),
        },
        "accuracy_of": held_out_name(task),
        "mean_difference_points": float(np.mean([points(o) for o in outcomes.values()])),
        "runs": [
            {
                "seed": seed,
                "difference_points": points(both),
                "precisions": {p: _figures(outcome) for p, outcome in both.items()},
            }
            for seed, both in outcomes.items()
        ],
    }
    report.write_json(out / "results.json", figures)
    plot(out / "training.png", task, outcomes)
    first = outcomes[seeds[0]]["fp8"]
    if first.ops:
        report.plot_scaling(out / "scaling.png", first)
        arrays = {
            f"seed{seed}/{when}/{path}": value
            for seed, both in outcomes.items()
            for when, values in (("before", both["fp8"].fp8_before), ("after", both["fp8"].fp8_after))
            for path, value in values.items()
        }
        with replacing(out / "fp8_variables.npz") as new, new.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
    _print_result(console, task, outcomes, out)


def _print_result(console: Console, task: Task, outcomes: Outcomes, out: Path) -> None:
    report.print_line(console, f"Results of {task.name}, epochs {task.epochs}, recipe {task.recipe}:")
    name = held_out_name(task)
    for seed, both in outcomes.items():
        for precision, outcome in both.items():
            figures = (
                f"{name} accuracy {100 * outcome.accuracy:.2f} %, last training loss "
                f"{outcome.train_loss[-1]:.4f}, validation loss {outcome.validation_loss[-1]:.4f}"
            )
            report.print_line(console, f"  {precision}, seed {seed}: {figures}")
    report.print_line(console, f"Picture of losses and accuracies: {out / 'training.png'}")
    report.print_line(console, report.wrote(out))
    report.print_line(console, last_line(task, outcomes))


def held_out_name(task: Task) -> str:
    """Returns what the accuracy is taken on."""
    return "validation" if task.split(0).test is None else "test"


def points(outcomes: dict[str, Outcome]) -> float:
    """Returns the accuracy in FP8 less that in bf16, in percentage points."""
    return 100 * (outcomes["fp8"].accuracy - outcomes["bf16"].accuracy)


def last_line(task: Task, outcomes: Outcomes) -> str:
    """Returns the result in one line."""
    means = {p: 100 * np.mean([both[p].accuracy for both in outcomes.values()]) for p in PRECISIONS}
    differences = [points(both) for both in outcomes.values()]
    name = held_out_name(task)
    line = (
        f"{name.capitalize()} accuracy: bf16 {means['bf16']:.2f} %, FP8 {means['fp8']:.2f} %, "
        f"difference {np.mean(differences):+.2f} points"
    )
    if len(differences) > 1:
        each = ", ".join(f"{d:+.2f}" for d in differences)
        line += f" (mean of {len(differences)} seeds: {each})"
    return line


def _train_all(task: Task, models: dict[str, Any], seeds: Sequence[int], console: Console) -> Outcomes:
    outcomes: Outcomes = {}
    steps = task.steps(task.split(seeds[0]))
    optimizer = task.optimizer(steps)
    with report.RunProgress(console) as progress:
        for seed in seeds:
            split = task.split(seed)
            for precision in PRECISIONS:
                run = progress.add_run(f"{precision}, seed {seed}", steps)

                def on_step(step: int, loss: float, run: Any = run) -> None:
                    progress.show_step(run, step, f"loss {loss:.3f}")

                outcome = train(precision, seed, task, models, optimizer, split, on_step)
                progress.show_end(run, f"accuracy {100 * outcome.accuracy:.2f} %")
                outcomes.setdefault(seed, {})[precision] = outcome
    return outcomes


def _variables(outcome: Outcome) -> RenderableType:
    if not outcome.ops:
        return "This recipe has no FP8 variables: it scales each tensor by its own values."
    table = Table(title=f"FP8 variables before and after training, seed {outcome.seed}")
    table.add_column("layer", overflow="fold")
    table.add_column("tensor", no_wrap=True)
    for column in ("scale:\nbefore", "after", "newest\namax:\nbefore", "after"):
        table.add_column(column, justify="right")
    for op in sorted({path.rpartition("/")[0] for path in outcome.fp8_before}):
        for role in ROLES:
            cells = [
                f"{values[f'{op}/{role}_{leaf}'][0]:.2g}"
                for leaf in ("scale", "amax_history")
                for values in (outcome.fp8_before, outcome.fp8_after)
            ]
            table.add_row(op.rpartition("/")[0] if role == ROLES[0] else "", role, *cells)
    return table


def _accuracies(task: Task, outcomes: Outcomes) -> Table:
    name = held_out_name(task)
    table = Table(title=f"Accuracy of {task.name}, epochs {task.epochs}, recipe {task.recipe}")
    for column in ("seed", "precision", f"{name} accuracy", "FP8 − bf16", "validation loss", "median step"):
        table.add_column(column, justify="right")
    for seed, both in outcomes.items():
        for precision, outcome in both.items():
            seconds = _step_seconds(outcome)
            table.add_row(
                str(seed),
                precision,
                f"{100 * outcome.accuracy:.2f} %",
                f"{points(both):+.2f} points" if precision == "fp8" else "",
                f"{outcome.validation_loss[-1]:.4f}",
                f"{1e3 * seconds:.0f} ms" if seconds else "not measured",
            )
    return table


def _step_seconds(outcome: Outcome) -> float | None:
    return statistics.median(outcome.step_seconds) if outcome.step_seconds else None


def _figures(outcome: Outcome) -> dict[str, Any]:
    return {
        "accuracy": outcome.accuracy,
        "validation_steps": outcome.validation_steps,
        "validation_accuracy": [float(x) for x in outcome.validation_accuracy],
        "validation_loss": [float(x) for x in outcome.validation_loss],
        "train_loss": [float(x) for x in outcome.train_loss],
        "median_step_seconds": _step_seconds(outcome),
        "timed_steps": len(outcome.step_seconds),
        "fp8_ops": outcome.ops,
        "fp8_scales": {
            path: {"before": float(value[0]), "after": float(outcome.fp8_after[path][0])}
            for path, value in outcome.fp8_before.items()
            if path.endswith("_scale")
        },
    }


def plot(path: Path, task: Task, outcomes: Outcomes) -> None:
    """Draws the training loss, smoothed, and the validation accuracy after each epoch, of every run."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    of_loss, of_accuracy = figure.subplots(1, 2)
    for seed, both in outcomes.items():
        for precision, outcome in both.items():
            style = {
                "color": report.COLOURS[precision],
                "linestyle": "-" if precision == "bf16" else "--",
                "label": precision if seed == next(iter(outcomes)) else None,
            }
            width = min(20, len(outcome.train_loss))
            smooth = np.convolve(outcome.train_loss, np.ones(width) / width, mode="valid")
            of_loss.plot(np.arange(width, len(outcome.train_loss) + 1), smooth, linewidth=1.2, **style)
            epochs = np.arange(1, len(outcome.validation_accuracy) + 1)
            of_accuracy.plot(epochs, 100 * outcome.validation_accuracy, marker=".", **style)
    of_loss.set(xlabel="step", ylabel="loss (nats)", title=f"training loss, mean of {width} steps")
    of_loss.set_yscale("log")
    of_accuracy.set(xlabel="epoch", ylabel="accuracy (%)", title="validation accuracy")
    of_accuracy.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (of_loss, of_accuracy):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{task.title}: bf16 and FP8 from the same weights on the same batches")
    report.save_figure(path, figure)

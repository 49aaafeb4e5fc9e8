"""Reports what FP8 cost and what it gave: a table, one picture and one JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

import fp8flax as fp8
from fp8flax.demo import training
from fp8flax.demo.data import Examples

Runs = dict[str, list[dict[str, float]]]
"""What ``train`` yields, by precision."""

SHORT_RUN = """\
A short run hides most of the gap, because the loss is still far from its end: docs/accuracy.md has runs of
2,000 steps.
"""


def audit(task: training.Task, precision: str) -> fp8.AuditReport:
    """Audits the training step for an H200."""
    return fp8.audit(training.train_step, *training.arguments_of_step(task, precision), target="h200")


def mebibytes_kept(task: training.Task, precision: str) -> float:
    """Returns the size of all arrays that the forward pass keeps for the backward pass."""

    def backward(state: fp8.TrainState, examples: Examples) -> Any:
        return jax.vjp(lambda variables: training.loss_of_step(variables, state, examples), state.params)[1]

    kept = jax.eval_shape(backward, *training.arguments_of_step(task, precision))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)) / 2**20


def write(out: Path, task: training.Task, runs: Runs, options: dict[str, Any]) -> str:
    """Saves the results in the folder ``out``; returns a summary of them."""
    last = [runs[precision][-1] for precision in training.PRECISIONS]
    figures = {name: [run[name] for run in last] for name in ("validation loss", "validation accuracy")}
    share = fp8.report(task.models["fp8"], task.batch(0, 0).inputs).fp8_share
    figures["share of the matmuls' FLOPs in FP8"] = [0.0, share]
    figures["MiB kept for the backward pass"] = [mebibytes_kept(task, p) for p in training.PRECISIONS]
    try:
        speed = _predict(training.at_real_width(task), figures)
    except (ImportError, RuntimeError) as error:  # XLA fails at imdb in bf16: "output tile sizes"
        speed = f"No predicted time of a step on an H200: {str(error)[:200]}"
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "options": options,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "figures": {name: dict(zip(training.PRECISIONS, values)) for name, values in figures.items()},
        "runs": runs,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(runs).savefig(out / "loss.png", dpi=130)
    rows = [f"{name:36}{bf16:10.4g}{in_fp8:10.4g}" for name, (bf16, in_fp8) in figures.items()]
    table = "\n".join([f"{'':36}{'bf16':>10}{'FP8':>10}", *rows])
    remark = f"{SHORT_RUN}\n" if options["task"] == "lm" and task.steps < 2000 else ""
    end = [f"{headline(runs)}.", speed, f"Picture and figures: {out}"]
    return f"\n{table}\n\n{remark}" + "\n".join(end)


def _predict(task: training.Task, figures: dict[str, list[float]]) -> str:
    """Adds the predicted times of a step to the figures, and returns a line about them."""
    audits = [audit(task, precision) for precision in training.PRECISIONS]
    bf16, in_fp8 = (1e3 * one.predicted_seconds["total"] for one in audits)
    width = task.models["fp8"].width
    figures[f"predicted ms, H200, width {width}"] = [bf16, in_fp8]
    return (
        f"At width {width} a step on an H200 is predicted to run at {bf16 / in_fp8:.2f} times the speed of "
        f"bf16, with {audits[1].num_launches} launches of GPU kernels instead of {audits[0].num_launches}."
    )


def headline(runs: Runs) -> str:
    """Returns the result as a sentence."""
    bf16, in_fp8 = (runs[precision][-1] for precision in training.PRECISIONS)
    gap = 100 * (in_fp8["validation loss"] / bf16["validation loss"] - 1)
    side = "below" if gap < 0 else "above"
    return f"After {bf16['step']} steps the loss in FP8 is {abs(gap):.2f} % {side} that in bf16"


def draw(runs: Runs) -> Figure:
    """Draws the validation loss of both runs."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for precision, name, colour, width in (("bf16", "bf16", "#9aa5b1", 7), ("fp8", "FP8", "#d1495b", 2)):
        run = runs[precision]
        points = [(one["step"], one["validation loss"]) for one in run if "validation loss" in one]
        label = f"{name}, ends at {run[-1]['validation loss']:.4f}"
        axes.plot(*zip(*points), color=colour, linewidth=width, marker="o", label=label)
    axes.set(xlabel="step", ylabel="validation loss (nats)", title=headline(runs))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure

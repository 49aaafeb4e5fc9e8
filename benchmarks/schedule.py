"""How much of the loss that FP8 training costs comes back if the last steps run in bf16?

The model, the data and the optimizer are those of ``benchmarks.fidelity``, size small: a Transformer on
bytes with 4 layers of width 64, 2,000 steps, warm-up and cosine decay over all steps. All 25 linear layers
are in FP8 with delayed scaling, until the schedule turns FP8 off.

"forward in bf16" turns FP8 off in the forward GEMM of each layer alone.

Runs of one seed start from the same weights and see the same batches. The runs that end in bf16 continue
from the state that the run in FP8 had at that step, so they are the same run until then.

loss is the mean loss of 32,768 held-out bytes after the last step, in nats per byte, computed as the last
step computes; loss_in_bf16 is the same of the same weights, computed in bf16.

Run ``make bench-schedule``. Each seed is written as it ends, and is not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fp8flax as fp8
from benchmarks import fidelity
from benchmarks.common import PACKAGES, RESULTS, Row, begin, machine, question_and_method, quiet, run, write
from fp8flax.demo.data import Corpus, load_corpus, train_batch, validation_batches
from fp8flax.demo.training import Settings

RESULT = RESULTS / "schedule.json"
SETTINGS = fidelity.SIZES["small"]
FORWARD_WIDE = dataclasses.replace(fidelity.DELAYED, forward=fidelity.WIDE)
ENDS = {
    "delayed, last 20 % in bf16": (20, fp8.Phase(name="end", enabled=False)),
    "delayed, last 10 % in bf16": (10, fp8.Phase(name="end", enabled=False)),
    "delayed, last 20 % forward in bf16": (20, fp8.Phase(name="end", recipe=FORWARD_WIDE)),
}
"""The contenders whose last phase is another: its percentage of the steps, and the phase."""


def losses_of(seed: int, settings: Settings, corpus: Corpus) -> dict[str, Row]:
    """Trains all contenders of one seed; returns their losses."""
    held_out = list(
        validation_batches(corpus, settings.validation_batches, settings.batch_size, settings.length)
    )
    wide, delayed = fidelity.ALL["bf16"], fidelity.ALL["delayed"]

    @jax.jit
    def evaluate(state: Any, windows: jax.Array) -> jax.Array:
        return fidelity.loss(state.params, state.apply_fn, windows)

    def mean_loss(state: Any) -> float:
        return float(np.mean([float(evaluate(state, windows)) for windows in held_out]))

    def measured(state: Any, schedule: fp8.Schedule) -> Row:
        with schedule.at(settings.steps):
            loss = mean_loss(state)
        with fp8.autocast(enabled=False):
            return {"loss": loss, "loss_in_bf16": mean_loss(state)}

    def trained(state: Any, step: Any, schedule: fp8.Schedule, steps: Sequence[int]) -> Any:
        for i in steps:
            windows = train_batch(corpus, seed, i, settings.batch_size, settings.length)
            with schedule.at(i):
                state = step(state, jnp.asarray(windows))
        return state

    throughout = fp8.Schedule(phases=(fp8.Phase(name="throughout"),))
    state = trained(
        fidelity.initial_state(wide, seed, settings),
        fidelity.step_of(wide),
        throughout,
        range(settings.steps),
    )
    found = {"bf16": measured(state, throughout)}
    state, step = fidelity.initial_state(delayed, seed, settings), fidelity.step_of(delayed)
    done = 0
    for name, (share, end) in sorted(ENDS.items(), key=lambda contender: -contender[1][0]):
        begin = settings.steps * (100 - share) // 100
        recipe = fidelity.DELAYED if end.enabled else None
        schedule = fp8.Schedule(phases=(fp8.Phase(name="fp8", until=begin, recipe=recipe), end))
        state, done = trained(state, step, schedule, range(done, begin)), begin
        copy = jax.tree.map(jnp.copy, state)
        found[name] = measured(trained(copy, step, schedule, range(begin, settings.steps)), schedule)
    state = trained(state, step, throughout, range(done, settings.steps))
    return {**found, "delayed": measured(state, throughout)}


def gaps(runs: Sequence[Row], name: str, key: str, other: str = "bf16") -> list[float]:
    """Returns how far a contender lies above another in each seed, in percent of the loss of bf16.

    Args:
        runs: the seeds of the results.
        name: the contender.
        key: ``"loss"`` or ``"loss_in_bf16"``, of both.
        other: the other contender.
    """
    return [
        100 * (run["losses"][name][key] - run["losses"][other][key]) / run["losses"]["bf16"]["loss"]
        for run in runs
    ]


def mean_of(values: Sequence[float]) -> str:
    """Returns the mean over seeds and its standard error, as the page writes them."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return fidelity.mean_of({"mean_percent": statistics.mean(values), "error_percent": error})


def table(runs: Sequence[Row]) -> str:
    """Returns the table of docs/schedules.md."""
    lines = [
        "| | seeds | percent above bf16 | the same weights, computed in bf16 | points above `delayed` |",
        "|---|---|---|---|---|",
    ]
    for name in ("delayed", *ENDS):
        own, in_bf16 = (mean_of(gaps(runs, name, key)) for key in ("loss", "loss_in_bf16"))
        change = "" if name == "delayed" else mean_of(gaps(runs, name, "loss", "delayed"))
        lines.append(f"| `{name}` | {len(runs)} | {own} % | {in_bf16} % | {change} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    question, method = question_and_method(__doc__)
    parser = argparse.ArgumentParser(prog="make bench-schedule", description=question)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="SEED")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="PATH")
    options = parser.parse_args(argv)
    report = begin(question, method, machine((*PACKAGES, "optax"), ("cores",)), runs=[])
    if options.json.exists():
        report["runs"] = json.loads(options.json.read_text())["runs"]
    corpus = load_corpus(None, SETTINGS.length)
    for seed in options.seeds:
        if seed in [run["seed"] for run in report["runs"]]:
            continue
        began = time.perf_counter()
        with quiet(), jax.numpy_rank_promotion("allow"):
            losses = losses_of(seed, SETTINGS, corpus)
        minutes = (time.perf_counter() - began) / 60
        report["runs"].append({"seed": seed, "losses": losses, "minutes": round(minutes, 1)})
        write(report, options.json)
    print("\n" + table(report["runs"]))


if __name__ == "__main__":
    run(main, JAX_PLATFORMS="cpu", **fidelity.KEEP_MEMORY)

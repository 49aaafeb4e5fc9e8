"""The command line of the demo: ``python -m fp8flax.demo --help``."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

try:
    from fp8flax.demo import report, training
except ImportError as error:
    sys.exit(f"fp8flax.demo: {error.name} is missing; install it with: pip install 'fp8flax[demo]'")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options in the arguments of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fp8flax.demo",
        description="Trains a model in bf16 and in FP8, from the same weights on the same batches, and "
        "compares the two.",
    )
    add = parser.add_argument
    text = "lm (default): a byte-level Transformer; imdb: a classifier of film reviews"
    add("task", nargs="?", choices=("lm", "imdb"), default="lm", help=text)
    add("--steps", type=positive, help="training steps (default lm: 300, imdb: 2400)")
    add("--seed", type=int, default=0, help="of the weights and the batches (default 0)")
    text = "how FP8 tensors are scaled (default delayed)"
    add("--recipe", choices=tuple(training.RECIPES), default="delayed", help=text)
    text = "lm: a folder of text files (default: Python's standard library); imdb: the folder aclImdb"
    add("--data", metavar="DIR", help=text)
    add("--out", metavar="DIR", help="folder for the results (default runs/DATE-TIME)")
    text = "train nothing; list which matmuls of the training step run in FP8 on an H200"
    add("--audit", action="store_true", help=text)
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Returns the number in an argument; argparse reports an error if it is not 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more; got {number}")
    return number


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the demo, or only its audit."""
    options = parse(argv)
    if options.audit and not jax.config.jax_platforms:  # nothing runs, so no GPU is needed
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        jax.config.update("jax_platforms", "cpu")
    try:
        task = getattr(training, options.task)(options.steps, options.recipe, options.data)
        if options.audit:
            warnings.filterwarnings("ignore", "FP8 matmuls are emulated")
            print(report.audit(task, "fp8"))
            return
    except (ImportError, ValueError) as error:  # an extra or the data is missing
        sys.exit(f"fp8flax.demo: {error}")

    @functools.cache
    def note(text: str) -> None:
        print(f"Note: {text}", flush=True)

    with warnings.catch_warnings():
        # Each text once, without the place in the code where it comes from. Python forgets what it showed.
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        runs = train(task, options.seed)
        print("Counting what FP8 gives. To compile two steps for an H200 takes a minute.", flush=True)
        out = Path(options.out or time.strftime("runs/%Y%m%d-%H%M%S"))
        print(report.write(out, task, runs, vars(options)))


def train(task: training.Task, seed: int) -> report.Runs:
    """Trains in each precision; shows the progress and the time that is left."""
    runs: report.Runs = {precision: [] for precision in training.PRECISIONS}
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(soft_wrap=True)) as progress:
        for precision, run in runs.items():
            bar = progress.add_task(precision, total=task.steps)
            for figures in training.train(task, precision, seed):
                run.append(figures)
                progress.advance(bar)
                if "validation loss" in figures:
                    done = f"after step {figures['step']} of {task.steps}"
                    text = f"{precision}, loss {figures['loss']:.3f} {done}"
                    progress.console.print(text, highlight=False)
    return runs


if __name__ == "__main__":
    main()

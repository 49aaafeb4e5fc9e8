"""The command line of the demo: ``fp8flax demo --help``, or ``python -m fp8flax.demo``."""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fp8flax._serve.files import write_text
from fp8flax.demo.data import DemoError

_MISSING = "is missing; install it with: pip install 'fp8flax[demo]'"
try:
    import filelock
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from fp8flax.demo import report, tasks, training
    from fp8flax.demo.training import PRECISIONS, RECIPES, Run, Task
except ImportError as error:
    sys.exit(f"fp8flax demo: {error.name} {_MISSING}")

STEPS_PER_LINE = 25  # without a terminal


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DemoError(message)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options in the arguments of a command line."""
    parser = _Parser(
        prog="fp8flax demo",
        description="Trains a model in bf16 and in FP8, from the same weights on the same batches, and "
        "compares the two. The tasks are lm, a byte-level Transformer; imdb, Keras's float8 example, the "
        "sentiment of film reviews; and digits, a small Vision Transformer on images of scikit-learn.",
    )
    add = parser.add_argument
    add("task", nargs="?", choices=("lm", "imdb", "digits"), default="lm", help="the task (default lm)")
    add("--steps", type=int, help="training steps (default lm: 300, imdb: 3 epochs, digits: 15 epochs)")
    add("--seeds", type=int, nargs="+", metavar="SEED", help="a run for each (default 0; digits: 0 1 2)")
    add(
        "--precision", choices=(*PRECISIONS, "both"), default="both", help="what to train in (default both)"
    )
    text = "how FP8 tensors are scaled (default delayed)"
    add("--recipe", choices=tuple(RECIPES), default="delayed", help=text)
    text = "lm: a folder of text files (default: Python's standard library); imdb: the folder aclImdb"
    add("--data", metavar="DIR", help=text)
    add("--out", metavar="DIR", help="folder for the results (default runs/DATE-TIME)")
    text = "continue the run in --out, with its options (default: the newest run under runs/)"
    add("--resume", action="store_true", help=text)
    options = parser.parse_args(argv)
    if options.steps is not None and not 1 <= options.steps <= 100_000:  # every step is recorded
        raise DemoError(f"--steps must be from 1 to 100,000; got {options.steps}.")
    if options.seeds is None:
        options.seeds = [0, 1, 2] if options.task == "digits" else [0]
    if not all(0 <= seed < 2**32 for seed in options.seeds) or len(set(options.seeds)) < len(options.seeds):
        raise DemoError(f"--seeds must be distinct and from 0 to {2**32 - 1}; got {options.seeds}.")
    if options.data is not None and options.task == "digits":
        raise DemoError("digits takes no --data.")
    if options.resume and len(argv) > (1 if options.out is None else 3):
        raise DemoError("--resume takes --out alone; the run goes on with the options that it began with.")
    if options.out == "":
        raise DemoError("--out: '' is not a folder; name one, or leave it out.")
    return options


def run(argv: Sequence[str]) -> None:
    """Runs the demo with the given command line; raises ``DemoError`` for errors that users can correct."""
    options, digest = parse(argv), None
    if options.resume:
        where, pattern = (options.out, "config.json") if options.out else (tasks.RUNS, "*/config.json")
        configs = sorted(Path(where).glob(pattern), key=lambda path: path.stat().st_mtime)
        if not configs:
            raise DemoError(f"--resume: {where} holds no run; start one without --resume.")
        config = configs[-1]
        try:
            saved = json.loads(config.read_text())
            argv, digest = saved["command"], saved["digest"]
            options = parse(argv)
        except (DemoError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DemoError(f"--resume: {config} cannot be read: {error}.") from error
    else:
        config = Path(options.out or tasks.RUNS / time.strftime("%Y%m%d-%H%M%S"), "config.json")
    out = config.parent
    options.out = str(out)
    task = getattr(tasks, options.task)(options)
    data = training.digest([task.batch(0, 0), task.held_out(0, "validation")])
    out.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(out / ".lock", timeout=0):
        if digest is None and config.exists():
            raise DemoError(f"--out: {out} holds a run already; add --resume, or name another folder.")
        if digest not in (None, data):
            raise DemoError(f"--resume: the data has changed since the run in {out} began.")
        write_text(config, json.dumps({"command": argv, "digest": data}, indent=1) + "\n")
        console = Console(markup=False, highlight=False, soft_wrap=True)
        console.print(f"{task.about}. Results in {out}")
        report.write(console, task, train_all(options, task, out, console), vars(options), out)


def train_all(options: argparse.Namespace, task: Task, out: Path, console: Console) -> list[Run]:
    """Trains each seed in each precision; shows a bar on a terminal, and otherwise prints lines."""
    # FORCE_COLOR makes console.is_terminal true for a file too, and a bar in a file is unreadable.
    prints_lines = not console.file.isatty() or console.is_dumb_terminal
    name, state = "{task.description}", "{task.fields[state]}"
    columns = (name, BarColumn(), MofNCompleteColumn(), state, TimeRemainingColumn())
    tokens = None if task.accuracy_of else task.batch(0, 0).labels.size
    precisions = PRECISIONS if options.precision == "both" else (options.precision,)
    runs = []
    with Progress(*columns, console=console, disable=prints_lines) as progress:
        for seed, precision in itertools.product(options.seeds, precisions):
            name = f"{precision}, seed {seed}"
            bar = progress.add_task(name, total=task.steps, state="")
            run = Run(task, precision, seed)
            for step, loss in run.train(out / "checkpoints" / f"{precision}-seed{seed}"):
                speed = f", {tokens / run.step_seconds[-1]:,.0f} tokens/s" if tokens else ""
                state = f"loss {loss:.3f}{speed}"
                progress.update(bar, completed=step, state=state)
                if prints_lines and (step % STEPS_PER_LINE == 0 or step == task.steps):
                    console.print(f"{name}: step {step} of {task.steps}, {state}")
            progress.update(bar, completed=task.steps, state=report.summary(run))
            if prints_lines:
                console.print(f"{name}: {report.summary(run)}")
            runs.append(run)
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code (2 after an error, which is one line on stderr)."""
    for name in ("absl", "asyncio"):  # Orbax logs errors there that it also raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(sys.argv[1:] if argv is None else argv)
    except (DemoError, ImportError, OSError, MemoryError) as error:
        what = f"{error.name} {_MISSING}" if isinstance(error, ImportError) else error
        print(f"fp8flax demo: {str(what) or 'out of memory'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfp8flax demo: interrupted; what was saved goes on with --resume", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Command line of the demo: ``fp8flax demo --help``, or ``python -m fp8flax.demo``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

try:
    import filelock
    import matplotlib  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import rich  # noqa: F401
except ImportError as error:
    sys.exit(f"fp8flax demo: {error.name} is missing; install it with: pip install 'fp8flax[demo]'")

from rich.console import Console

from fp8flax._host.files import replacing, write_text
from fp8flax._host.interrupt import leave, raise_from_now_on
from fp8flax.demo import compare, digits, imdb, report, training
from fp8flax.demo.data import Corpus, DemoError, load_corpus
from fp8flax.demo.training import PRECISIONS, RECIPES, Record, Settings

_RUNS = Path("runs")
_CONFIG = "config.json"
_RESULTS = "results.json"
_LOCK = ".lock"
_MOST = 100_000
"""Steps, epochs or examples of a batch: every step is recorded."""
_SEEDS = 2**32
_OPTIONS = {
    "lm": ("data", "steps", "seeds", "precision", "recipe", "api", "statistics", "out", "resume"),
    "imdb": ("data", "epochs", "batch_size", "seeds", "recipe", "out"),
    "digits": ("epochs", "batch_size", "seeds", "recipe", "out"),
}
"""What each task can be told."""
_APIS = ("linen", "nnx")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DemoError(message)


def _flags(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _check_known(options: argparse.Namespace) -> None:
    known = _OPTIONS[options.task]
    given = [k for k, v in vars(options).items() if k != "task" and v is not None and v is not False]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise DemoError(f"--task {options.task} takes no {_flags(unknown)}; it knows {_flags(known)}.")
    if options.out == "":
        raise DemoError("--out: '' is not a folder; name one, or leave it out.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fp8flax demo",
        description="Trains a model in bf16 and in FP8, from the same weights on the same batches, and "
        "compares the two. The tasks are lm, a byte-level Transformer; imdb, Keras's float8 example, the "
        "sentiment of film reviews; and digits, a small Vision Transformer on images of scikit-learn.",
        epilog="  ".join(f"Options of {task}: {_flags(names)}." for task, names in _OPTIONS.items()),
    )
    parser.add_argument("--task", choices=tuple(_OPTIONS), default="lm", help="the task (default lm)")
    parser.add_argument("--steps", type=int, help=f"training steps (default {Settings().steps})")
    defaults = f"{imdb.Settings().epochs} for imdb, {digits.Settings().epochs} for digits"
    parser.add_argument("--epochs", type=int, help=f"passes over the training data (default {defaults})")
    defaults = f"{imdb.Settings().batch_size} for imdb, {digits.Settings().batch_size} for digits"
    parser.add_argument("--batch-size", type=int, help=f"examples per step (default {defaults})")
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        metavar="SEED",
        help="one run for each seed (default 0; digits: 0 1 2)",
    )
    parser.add_argument(
        "--precision", choices=(*PRECISIONS, "both"), help="what to train in (default both)"
    )
    parser.add_argument(
        "--recipe", choices=tuple(RECIPES), help="how FP8 tensors are scaled (default delayed)"
    )
    parser.add_argument("--api", choices=_APIS, help="the Flax API of the model (default linen)")
    parser.add_argument(
        "--statistics",
        type=int,
        metavar="N",
        help="every N steps print the FP8 tensors that lose most, and draw them at the end. Off by "
        "default, because compiling the statistics takes half a minute",
    )
    parser.add_argument("--out", metavar="DIR", help="folder for the results (default runs/DATE-TIME)")
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="lm: a folder of text files (default: the source of Python's standard library); imdb: the "
        "folder aclImdb",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out, with its options (default: the newest run under runs/)",
    )
    return parser


_VALID: dict[str, Callable[[Any], bool]] = {
    "steps": lambda x: type(x) is int,
    "seeds": lambda x: isinstance(x, list) and len(x) > 0 and all(type(seed) is int for seed in x),
    "precision": lambda x: x in (*PRECISIONS, "both"),
    "recipe": lambda x: isinstance(x, str) and x in RECIPES,
    "api": lambda x: x in _APIS,
    "data": lambda x: x is None or isinstance(x, str),
    "corpus": lambda x: isinstance(x, str),
}
"""What a run's config may hold."""


def _new_config(options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    return {
        "steps": options.steps,
        "seeds": options.seeds,
        "precision": options.precision,
        "recipe": options.recipe,
        "api": options.api,
        "data": None if options.data is None else str(Path(options.data).absolute()),
        "corpus": corpus.digest,
    }


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keeps other runs out of the folder, until this process ends, however it does."""
    lock = filelock.FileLock(out / _LOCK)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise DemoError(
            f"--out: another process writes to {out} now; wait until it is done, or name another folder."
        ) from error
    try:
        yield
    finally:
        lock.release()


def _find_run(options: argparse.Namespace) -> Path:
    if options.out is not None:
        folder = Path(options.out)
        if not (folder / _CONFIG).is_file():
            raise DemoError(f"--resume: {folder} holds no run ({_CONFIG} is missing).")
        return folder
    runs = [p.parent for p in _RUNS.glob(f"*/{_CONFIG}")]
    if not runs:
        raise DemoError(f"--resume: there is no run under {_RUNS}/; start one without --resume.")
    return max(runs, key=lambda run: (run / _CONFIG).stat().st_mtime)


def _resume_options(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Fills ``options`` from the run's config and returns that; conflicting options are refused."""
    try:
        values = {"recipe": "delayed", "api": "linen", **json.loads((out / _CONFIG).read_text())}
        wrong = [name for name, is_valid in _VALID.items() if not is_valid(values[name])]
        if wrong:
            raise ValueError(f"{wrong[0]} is {values[wrong[0]]!r}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DemoError(f"--resume: {out / _CONFIG} cannot be read: {error}.") from error
    asked = vars(options)
    if asked["data"] is not None:
        asked["data"] = str(Path(asked["data"]).absolute())
    for name in ("steps", "seeds", "precision", "recipe", "api", "data"):
        if asked[name] is not None and asked[name] != values[name]:
            raise DemoError(
                f"--resume: the run in {out} has {name} {values[name]}, not {asked[name]}; leave "
                f"--{name} out, or start a new run without --resume."
            )
        asked[name] = values[name]
    return values


@contextlib.contextmanager
def _new_run(options: argparse.Namespace) -> Iterator[Path]:
    """Makes the folder of a new run, and locks it."""
    out = Path(options.out) if options.out is not None else _RUNS / time.strftime("%Y%m%d-%H%M%S")
    with contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(out))
        except OSError as error:
            raise DemoError(f"--out: cannot write to {out}: {error.strerror}.") from error
        if (out / _CONFIG).exists():
            raise DemoError(f"--out: {out} holds a run already; add --resume, or name another folder.")
        if (out / _RESULTS).exists():
            raise DemoError(f"--out: {out} holds results already; name another folder.")
        yield out


def _validate(options: argparse.Namespace) -> None:
    for name in ("steps", "epochs", "batch_size", "statistics"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= _MOST:
            raise DemoError(f"{_flags([name])} must be from 1 to {_MOST:,}; got {value}.")
    seeds = options.seeds
    if not all(0 <= seed < _SEEDS for seed in seeds) or len(set(seeds)) != len(seeds):
        raise DemoError(f"--seeds must be distinct and from 0 to {_SEEDS - 1}; got {seeds}.")


def run(argv: Sequence[str] | None = None) -> None:
    """Runs the demo with the given command line.

    Raises:
        DemoError: something that the user can put right.
    """
    options = _parser().parse_args(argv)
    _check_known(options)
    if options.task == "lm":
        _run_lm(options, Console())
    else:
        _run_classifier(options, Console())


def _run_classifier(options: argparse.Namespace, console: Console) -> None:
    options.seeds = options.seeds or ([0, 1, 2] if options.task == "digits" else [0])
    _validate(options)
    asked = {"epochs": options.epochs, "batch_size": options.batch_size}
    asked = {name: value for name, value in asked.items() if value is not None}
    recipe = options.recipe or "delayed"
    settings: imdb.Settings | digits.Settings
    if options.task == "imdb":
        settings = imdb.Settings(**asked)
        task, tokenizer = imdb.make_task(options.data, settings, recipe)
    else:
        settings = digits.Settings(**asked)
        task, tokenizer = digits.make_task(settings, recipe), None
    with _new_run(options) as out:
        if tokenizer is not None:
            with replacing(out / "tokenizer.json") as new:
                tokenizer.save(str(new))
        compare.run(task, options.seeds, out, {**dataclasses.asdict(settings), "recipe": recipe}, console)


def _run_lm(options: argparse.Namespace, console: Console) -> None:
    with contextlib.ExitStack() as stack:
        config = None
        if options.resume:
            out = _find_run(options)
            stack.enter_context(_locked(out))
            config = _resume_options(options, out)
        defaults = {
            "steps": Settings().steps,
            "seeds": [0],
            "precision": "both",
            "recipe": "delayed",
            "api": "linen",
        }
        for name, value in defaults.items():
            if getattr(options, name) is None:
                setattr(options, name, value)
        _validate(options)
        if options.statistics is not None and options.precision == "bf16":
            raise DemoError(
                "--statistics needs FP8 tensors, and --precision bf16 has none. Use --precision fp8 or "
                "both."
            )
        settings = Settings(steps=options.steps, recipe=options.recipe, api=options.api)
        results = (_RUNS, *([Path(options.out)] if options.out is not None else []))
        corpus = load_corpus(options.data, settings.length, but_not=results)
        if config is None:
            out = stack.enter_context(_new_run(options))
            write_text(out / _CONFIG, json.dumps(_new_config(options, corpus), indent=1) + "\n")
        elif config["corpus"] != corpus.digest:
            raise DemoError(
                f"--resume: the text of {corpus.source} has changed since the run in {out} began; start a "
                "new run without --resume."
            )
        _train_and_report(options, settings, corpus, out, console)


def _train_and_report(
    options: argparse.Namespace, settings: Settings, corpus: Corpus, out: Path, console: Console
) -> None:
    precisions = PRECISIONS if options.precision == "both" else (options.precision,)
    about = {
        "source": corpus.source,
        "files": corpus.num_files,
        "train_bytes": len(corpus.train),
        "validation_bytes": len(corpus.validation),
        "digest": corpus.digest,
    }
    report.print_line(
        console,
        f"{corpus.source}: {corpus.num_files} files, {len(corpus.train):,} bytes to train on, "
        f"{len(corpus.validation):,} held out. Results in {out}",
    )
    looks = _Looks(options.statistics, console)
    runs = _train_all(console, options.seeds, precisions, settings, corpus, out, looks)

    report.write_tables(out / "tables.txt", report.tables_of(runs, settings))
    figures = report.results(settings, about, runs)
    report.write_json(out / _RESULTS, figures)
    report.plot_loss(out / "loss.png", runs)
    fp8_record = next((r["fp8"] for r in runs.values() if "fp8" in r), None)
    if fp8_record is not None and fp8_record.ops:
        report.plot_scaling(out / "scaling.png", fp8_record)
    if looks.history:
        report.plot_statistics(out, looks.history, *looks.kernel)
    report.print_result(console, runs, settings, out)


@dataclasses.dataclass
class _Looks:
    """Measures what FP8 leaves of the tensors, every so many steps, and prints the worst."""

    every: int | None
    console: Console
    history: dict[int, Any] = dataclasses.field(default_factory=dict)
    """Statistics by step."""
    kernel: tuple[str, Any] = ("", None)
    """The name and the values of the largest kernel in the last step that was looked at."""

    def __call__(self, step: int, measure: Callable[[], Any], variables: Callable[[], Any]) -> None:
        if self.every is not None and step % self.every == 0:
            self.history[step] = measure()
            self.kernel = report.largest_kernel(variables())
            report.print_worst(self.console, step, self.history[step])


def _api(name: str) -> training.Api:
    if name == "linen":
        return training.LINEN
    from fp8flax.demo.in_nnx import NNX  # which needs a newer Flax

    return NNX


def _train_all(
    console: Console,
    seeds: Sequence[int],
    precisions: Sequence[str],
    settings: Settings,
    corpus: Corpus,
    out: Path,
    looks: _Looks,
) -> dict[int, dict[str, Record]]:
    api = _api(settings.api)
    runs: dict[int, dict[str, Record]] = {}
    tokens = settings.batch_size * settings.length
    with report.RunProgress(console) as progress:
        for seed in seeds:
            for precision in precisions:
                run = progress.add_run(f"{precision}, seed {seed}", settings.steps)

                def on_step(step: int, loss: float, seconds: float, run: Any = run) -> None:
                    progress.show_step(run, step, f"loss {loss:.3f}, {tokens / seconds:,.0f} tokens/s")

                folder = out / "checkpoints" / f"{precision}-seed{seed}"
                look = {"before_step": looks} if precision == "fp8" and seed == seeds[0] else {}
                record = training.train(api, precision, seed, settings, corpus, folder, on_step, **look)
                progress.show_end(run, f"validation loss {record.validation_loss[-1]:.3f}")
                runs.setdefault(seed, {})[precision] = record
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code (2: a line on stderr says what to put right)."""
    raise_from_now_on()
    for name in ("absl", "asyncio"):  # Orbax's threads report there what it raises anyway
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        run(argv)
    except (DemoError, OSError, MemoryError) as error:
        print(f"fp8flax demo: {str(error) or 'out of memory'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nfp8flax demo: interrupted; what --task lm has saved goes on with --resume", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    leave(main())

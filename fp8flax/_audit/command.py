"""The command line of the audit."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from fp8flax._audit.auditing import audit
from fp8flax._audit.compiling import TARGETS
from fp8flax._audit.report import AuditReport
from fp8flax._core.gemm.gpus import Fp8EmulationWarning


class _UsageError(Exception):
    """An error that the user can correct; its text is one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message)


@contextlib.contextmanager
def _exit_is_error(what: str) -> Iterator[None]:
    """Turns ``sys.exit`` into an error, because the command would end without a report."""
    try:
        yield
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code).partition("\n")[0]
        raise _UsageError(f"no report, because {what} ended the program with sys.exit({code})") from error


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"a share must be between 0 and 1; got {text}")
    return share


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fp8flax audit",
        description="Compiles a function for a GPU, which need not be present. Lists which of its GEMMs "
        "run in FP8, and why the others do not.",
        epilog="Exit status: 0; 1 if a smaller share than --min-flops runs in FP8; 2 if there is no "
        "report, or it cannot be written; 130 after Ctrl-C.",
    )
    parser.add_argument(
        "program",
        metavar="demo | module:function",
        help="demo: the training step of the demo. module:function: a function without arguments that "
        "returns (fn, *args). fn(*args) is compiled, and args may hold jax.ShapeDtypeStruct. Modules "
        "in the current folder are found too",
    )
    parser.add_argument(
        "--target", choices=TARGETS, default="h200", help="the device to compile for (default %(default)s)"
    )
    parser.add_argument(
        "--min-flops",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="exit with 1 if less than this share (0 to 1) of the GEMMs' FLOPs runs in FP8. GEMMs that may "
        "run in FP8, but need not, do not count",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the report to this file, as JSON"
    )
    return parser


def _load_demo() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    try:
        from fp8flax.demo.data import load_corpus
        from fp8flax.demo.training import Settings, language_model, make_state, train_step
    except ImportError as error:
        raise _UsageError(
            f"{error.name} is missing; install it with: pip install 'fp8flax[demo]'"
        ) from error
    settings = Settings()
    task = language_model(settings, load_corpus(None, settings.length))
    args = jax.eval_shape(lambda: (make_state(task, "fp8", 0), task.batch(0, 0), jax.random.key(0)))
    return train_step, args


def _load(program: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function to compile and its arguments."""
    if program == "demo":
        return _load_demo()
    module_name, colon, name = program.partition(":")
    if not (module_name and colon and name):
        raise _UsageError(f"the program must be demo or module:function; got {program!r}")
    if os.getcwd() not in sys.path:  # the console script begins with its own folder instead
        sys.path.insert(0, os.getcwd())
    try:
        with _exit_is_error(f"the import of {module_name}"):
            module = importlib.import_module(module_name)
    except _UsageError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise _UsageError(f"cannot import {module_name} ({type(error).__name__}: {reason})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise _UsageError(f"{module_name} has no function {name}")
    with _exit_is_error(program):
        loaded = function()
    if not (isinstance(loaded, tuple) and loaded and callable(loaded[0])):
        raise _UsageError(f"{program} must return (fn, *args); it returned {type(loaded).__name__}")
    with contextlib.suppress(ValueError):  # a builtin without a signature
        signature = inspect.signature(loaded[0])
        try:
            signature.bind(*loaded[1:])
        except TypeError as error:
            raise _UsageError(
                f"{program} must return (fn, *args), with the arguments of fn{signature}; it returned "
                f"{len(loaded) - 1} ({error})"
            ) from error
    return loaded[0], loaded[1:]


def _report(options: argparse.Namespace) -> AuditReport:
    with warnings.catch_warnings():
        if options.target != "local":
            # The program is compiled and never runs, so it does not matter that FP8 would be emulated here.
            warnings.simplefilter("ignore", Fp8EmulationWarning)
        fn, args = _load(options.program)
    try:
        with _exit_is_error(f"the function that {options.program} returned"):
            return audit(fn, *args, target=options.target)
    except ImportError as error:
        raise _UsageError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    stdout = sys.stdout  # the program may replace sys.stdout
    # Otherwise JAX looks for CUDA's libraries when it starts. The compiler does not need them.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        options = _parser().parse_args(argv)
        if options.target != "local" and not jax.config.jax_platforms:
            jax.config.update("jax_platforms", "cpu")  # no program runs, so no GPU is needed
        report = _report(options)
        try:
            stdout.write(f"{report}\n")
            stdout.flush()
        finally:  # if standard output fails, the file is still written
            if options.json is not None:
                Path(options.json).write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    except (_UsageError, OSError) as error:
        sys.stderr.write(f"fp8flax audit: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nfp8flax audit: interrupted\n")
        return 130
    except SystemExit:  # raised by --help
        raise
    except BaseException:  # raised by the audited function
        traceback.print_exc()
        return 2
    if report.fp8_flops_share < options.min_flops:
        sys.stderr.write(
            f"fp8flax audit: {100 * report.fp8_flops_share:.1f} % of the GEMMs' FLOPs run in FP8; at least "
            f"{100 * options.min_flops:.1f} % were asked for\n"
        )
        return 1
    return 0

"""Runs notebooks from a clean kernel and saves them with their outputs.

Usage::

    python notebooks/execute.py                      # every notebook beside this file
    python notebooks/execute.py --check 01*.ipynb    # run one, write nothing
    python notebooks/execute.py --into build         # write to a folder what it does not have
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 600


def kernel_environment() -> dict[str, str]:
    """Returns the environment of a kernel: this process's, importing the package of this checkout."""
    environment = dict(os.environ)
    environment.setdefault("JAX_PLATFORMS", "cpu")
    # A relative entry would mean another folder to the kernel, which runs in the notebook's.
    inherited = environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(FOLDER.parent), *(os.path.abspath(p) for p in inherited if p)]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    # The kernel picks its inline backend only where no other is set.
    environment.pop("MPLBACKEND", None)
    return environment


def execute(path: Path) -> nbformat.NotebookNode:
    """Runs a notebook from a clean kernel, in its own folder.

    Args:
        path: the notebook's file, which is left as it is.

    Returns:
        The notebook with fresh outputs, and without metadata that changes from run to run.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
        nbclient.exceptions.CellTimeoutError: a cell took longer than ``TIMEOUT_S``.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.resolve().parent)}},
    )
    client.execute(env=kernel_environment())
    strip_volatile_metadata(notebook)
    return notebook


def sources_of(path: Path) -> list[str]:
    """Returns the cells of a notebook, without their outputs."""
    return [cell.source for cell in nbformat.read(path, as_version=4).cells]


def strip_volatile_metadata(notebook: nbformat.NotebookNode) -> None:
    """Removes, in place, timestamps and the version of Python."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata.get("language_info", {}).pop("version", None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Executes the notebooks named on the command line; see the top of this file."""
    parser = argparse.ArgumentParser(
        description="Run notebooks from a clean kernel and save their outputs."
    )
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all *.ipynb beside this script")
    parser.add_argument("--check", action="store_true", help="run without writing")
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FOLDER",
        help="write to this folder, what has other cells than the notebook of that name there",
    )
    options = parser.parse_args(arguments)
    for path in options.notebooks or sorted(FOLDER.glob("*.ipynb")):
        saved = path if options.into is None else options.into / path.name
        if saved != path and saved.exists() and sources_of(saved) == sources_of(path):
            continue
        start = time.perf_counter()
        notebook = execute(path)
        if not options.check:
            saved.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook, saved)
        verb = "checked" if options.check else "saved"
        print(f"{path.name}: {verb} after {time.perf_counter() - start:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()

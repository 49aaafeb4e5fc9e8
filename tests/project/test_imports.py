"""Folders stand on floors: what a file may import, also inside of functions.

A folder imports from folders before it. Files do not import each other in a circle. Only ``_compat`` uses
private parts of JAX and Flax.
"""

import ast
import graphlib

import pytest

from tests import ROOT

PACKAGE = ROOT / "fp8flax"
FOLDERS = ("_compat", "_core", "_audit", "_linen", "_nnx", "_model", "_train", "_serve", "nnx", "demo")
PRIVATE = ("jax._src.", "jax.interpreters.", "jax.extend.", "flax.core.lift.", "flax.core.scope.")


def names_in(path):
    """Yields the dotted name of everything that a file imports or reads as an attribute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_of_a_folder(folder):
    after = tuple(f"fp8flax.{name}." for name in FOLDERS[FOLDERS.index(folder) + 1 :])
    for path in (PACKAGE / folder).rglob("*.py"):
        names = set(names_in(path))
        assert not {n for n in names if f"{n}.".startswith(after)}, path
        assert folder == "_compat" or not {n for n in names if f"{n}.".startswith(PRIVATE)}, path


def test_every_folder_is_listed():
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(FOLDERS)


def test_no_circle_of_files():
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in PACKAGE.rglob("*.py")
    }

    def imported(path):
        prefixes = {name.rsplit(".", i)[0] for name in names_in(path) for i in range(2)}
        return prefixes & (files.keys() - {"fp8flax", "fp8flax.nnx"})

    graphlib.TopologicalSorter({name: imported(path) for name, path in files.items()}).prepare()

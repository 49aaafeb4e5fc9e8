"""A folder imports only from folders before it, and only ``_compat`` uses private parts of JAX and Flax."""

import ast

import pytest

from tests import ROOT

PACKAGE = ROOT / "fp8flax"
FOLDERS = ("_compat", "_core", "_linen", "_train", "_audit", "_model", "_serve", "nnx", "demo")
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

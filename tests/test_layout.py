"""A file imports only from files above it in the list, and two files alone use JAX internals."""

import ast
import inspect
from pathlib import Path

import pytest

import fp8flax

PACKAGE = Path(fp8flax.__file__).parent
ORDER = [
    "_files",
    "_formats",
    "_max_dtype",
    "_transforms",
    "_scaling",
    "_quantize",
    "_recipes",
    "_autocast",
    "_state",
    "_check",
    "_qdq",
    "_operands",
    "_kernels",
    "_gemm",
    "_dot_general",
    "_conv",
    "_ragged",
    "_modules",
    "_train",
    "_convert",
    "_inference",
    "_hlo",
    "_audit",
    "_intercept",
    "_lift",
    "_rules",
    "_models",
    "_report",
    "_freeze",
    "_safetensors",
]
COMMANDS = ("audit",)  # what python -m runs
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path):
    """Yields the dotted name of everything that a file imports, at any depth of the code."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def internal_uses(path):
    """Yields attribute chains such as ``jax._src.core`` that reach JAX internals without an import."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            yield ast.unparse(node)


def test_every_file_is_in_the_list():
    names = {p.stem for p in PACKAGE.iterdir() if p.stem.startswith("_")} - {"__init__", "__pycache__"}
    files = {p.stem for p in FILES if p.parent == PACKAGE} - {"__init__", *COMMANDS}
    assert files <= names
    assert names == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_up_the_list(name):
    above = ORDER[: ORDER.index(name)]
    path = PACKAGE / name
    files = path.glob("*.py") if path.is_dir() else [PACKAGE / f"{name}.py"]
    for imported in (i for file in files for i in imports(file)):
        if imported.startswith("fp8flax"):
            assert imported.split(".")[1] in above, f"{name} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_jax_internals_in_two_files(path):
    internals = [i for i in imports(path) if "._src" in i] + list(internal_uses(path))
    assert bool(internals) == (path.name in ("_max_dtype.py", "_intercept.py")), internals


@pytest.mark.parametrize("path", sorted((PACKAGE / "demo").glob("*.py")), ids=lambda p: p.name)
def test_demo_uses_the_public_api(path):
    """And, as it is no example of that, the package's way to write a file."""
    for imported in imports(path):
        if imported.startswith("fp8flax") and not imported.startswith("fp8flax._files."):
            assert not any(part.startswith("_") for part in imported.split(".")), imported


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_star_imports(path):
    assert not any(i.endswith(".*") for i in imports(path))


def test_all_is_complete_and_sorted_by_the_linter():
    public = {n for n, v in vars(fp8flax).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert set(fp8flax.__all__) == public

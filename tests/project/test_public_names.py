"""Public names: type checkers know them, tools find sources and annotations, and a page describes each."""

import ast
import inspect
import re
import subprocess
import sys
import typing
from collections import Counter
from pathlib import Path

import pytest

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from tests import ROOT

PACKAGES = pytest.mark.parametrize("package", [fp8, fp8nnx], ids=lambda package: package.__name__)


def names_of(package):
    """Returns the names that a package imports in a form that type checkers take for public."""
    body = ast.parse(Path(package.__file__).read_text()).body
    imported = {alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    public = {alias.asname for alias in imported} - {None} | set(getattr(package, "__all__", ()))
    assert {alias.name for alias in imported} == public
    return sorted(public)


@pytest.mark.newest
@PACKAGES
def test_tools_find_sources_and_annotations(package):
    values = [getattr(package, name) for name in names_of(package)]
    documented = [value for value in values if inspect.isfunction(value) or inspect.isclass(value)]
    assert len(documented) > len(values) / 2
    for value in documented:
        assert inspect.getsource(value)
        # Optax's alias for a tree of arrays names itself, and Flax's TrainState does not import the name.
        typing.get_type_hints(value, localns={"ArrayTree": typing.Any})  # raises if a name is unknown


@PACKAGES
def test_each_name_is_on_one_page_of_the_api(package):
    pages = (path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
    described = Counter(name for text in pages for name in re.findall(r"^::: (\S+)$", text, re.M))
    of_nnx = Counter({name: n for name, n in described.items() if name.startswith("fp8flax.nnx.")})
    names = Counter(f"{package.__name__}.{name}" for name in names_of(package))
    assert names == (of_nnx if package is fp8nnx else described - of_nnx)


def test_nnx_is_imported_at_its_first_use():
    """``fp8.nnx`` is there without an import of its own, and users of Linen do not pay for it."""
    script = (
        "import sys, fp8flax as fp8; assert 'flax.nnx' not in sys.modules; op = fp8.nnx.Fp8DotGeneralOp();"
        "assert not hasattr(fp8, 'jax')"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)

"""Public names: what ``__all__`` lists, and that tools find sources, annotations and examples."""

import ast
from pathlib import Path

import pytest

import fp8flax as fp8
import fp8flax.nnx as fp8nnx

PACKAGES = pytest.mark.parametrize("package", [fp8, fp8nnx], ids=lambda package: package.__name__)


@pytest.mark.newest
@PACKAGES
def test_all_is_what_is_imported(package):
    imports = (
        n for n in ast.parse(Path(package.__file__).read_text()).body if isinstance(n, ast.ImportFrom)
    )
    names = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    assert sorted(package.__all__) == sorted(names)
    namespace = {}
    exec(f"from {package.__name__} import *", namespace)
    assert namespace.keys() - {"__builtins__"} == names

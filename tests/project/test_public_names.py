"""Public names: what ``__all__`` lists, and that tools find sources, annotations and examples."""

import ast
import doctest
import inspect
import pickle
import re
import typing
from pathlib import Path

import cloudpickle
import pytest

import fp8flax as fp8
import fp8flax.nnx as fp8nnx

PACKAGES = pytest.mark.parametrize("package", [fp8, fp8nnx], ids=lambda package: package.__name__)
PUBLIC = [
    pytest.param(getattr(package, name), id=f"{package.__name__}.{name}")
    for package in (fp8, fp8nnx)
    for name in package.__all__
    if inspect.isroutine(getattr(package, name)) or inspect.isclass(getattr(package, name))
]
"""Public classes and functions."""


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


@pytest.mark.newest
@pytest.mark.parametrize("value", PUBLIC)
def test_tools_find_the_source_and_the_annotations(value):
    value = inspect.unwrap(value)
    kind = "class" if inspect.isclass(value) else "def"
    assert re.search(rf"^{kind} {value.__name__}\b", inspect.getsource(value), re.MULTILINE)
    # The annotations of Flax's TrainState, the base class of ours, name a type that only Optax knows.
    foreign = {"ArrayTree": typing.Any} if value is fp8.TrainState else None
    hints = typing.get_type_hints(value, localns=foreign)
    assert kind == "class" or hints


@pytest.mark.parametrize("value", PUBLIC)
def test_it_is_pickled_by_reference(value):
    assert pickle.loads(pickle.dumps(value)) is value
    assert cloudpickle.loads(cloudpickle.dumps(value)) is value


@pytest.mark.parametrize("value", PUBLIC)
def test_examples_are_found(value):
    module = inspect.getmodule(value)
    found = {test.name for test in doctest.DocTestFinder().find(module) if test.examples}
    assert ">>>" not in (value.__doc__ or "") or f"{module.__name__}.{value.__qualname__}" in found

"""Public names: ``__all__``, ``dir``, and how classes and functions print, pickle and are documented."""

import ast
import dataclasses
import doctest
import inspect
import json
import pickle
import typing
from pathlib import Path

import cloudpickle
import jax.numpy as jnp
import jaxtyping
import pytest

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._core import recipes
from fp8flax._host.public import publish

PACKAGES = pytest.mark.parametrize("package", [fp8, fp8nnx], ids=lambda package: package.__name__)
MOVED = [
    (package, value)
    for package in (fp8, fp8nnx)
    for value in dict.fromkeys(
        value
        for value in (getattr(package, name) for name in package.__all__)
        if callable(value) and "fp8flax" in (value.__module__ or "") and hasattr(value, "__qualname__")
    )
]
"""Public classes and functions with their package, without aliases."""
CLASSES = [value for _, value in MOVED if inspect.isclass(value)]


@pytest.mark.oldest
@PACKAGES
def test_only_public_names_are_listed_and_imported(package):
    imports = (
        n for n in ast.parse(Path(package.__file__).read_text()).body if isinstance(n, ast.ImportFrom)
    )
    names = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    assert len(names) > 20
    namespace = {}
    exec(f"from {package.__name__} import *", namespace)
    assert namespace.keys() - {"__builtins__"} == names
    assert sorted(package.__all__) == sorted(names)
    assert set(dir(package)) - names == ({"__version__", "nnx"} if package is fp8 else set())


def test_a_subpackage_is_listed_once_it_is_there():
    namespace = {"__name__": "package", "json": json, "_private": 1, "public": 2}
    publish(namespace, "json", "later")
    assert namespace["__all__"] == ["public"]
    assert namespace["__dir__"]() == ["public", "json"]
    namespace["later"] = json
    assert namespace["__dir__"]() == ["public", "json", "later"]


@pytest.mark.oldest
def test_classes_and_functions_belong_to_their_package():
    assert len(MOVED) > 90
    for package, value in MOVED:
        assert value.__module__ == package.__name__, value
        assert getattr(package, value.__qualname__) is value
        if inspect.isclass(value) or inspect.isfunction(value):  # of jax.custom_jvp there is one
            assert pickle.loads(pickle.dumps(value)) is value
            assert cloudpickle.loads(cloudpickle.dumps(value)) is value
    assert repr(fp8.Fp8DotGeneralOp) == "<class 'fp8flax.Fp8DotGeneralOp'>"
    assert repr(fp8nnx.Fp8DotGeneralOp) == "<class 'fp8flax.nnx.Fp8DotGeneralOp'>"


@pytest.mark.parametrize(
    "name", [f"float8_{e}" for e in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
)
def test_a_dtype_of_jax_numpy_is_found_with_a_warning(name):
    with pytest.warns(
        DeprecationWarning, match=rf"^fp8flax\.{name} will .* Use jax\.numpy\.{name}\.$"
    ) as caught:
        assert getattr(fp8, name) is getattr(jnp, name)
    assert [warning.filename for warning in caught] == [__file__]
    assert name not in dir(fp8)


def test_another_name_is_not_found():
    with pytest.raises(AttributeError, match=r"^module 'fp8flax' has no attribute 'float8_e4m3'$"):
        fp8.float8_e4m3  # noqa: B018


def test_a_row_of_an_audit_is_public():
    fields = {field.name: field.type for field in dataclasses.fields(fp8.AuditReport)}
    assert fields["gemms"] == "tuple[AuditedGemm, ...]"
    assert typing.get_type_hints(fp8.AuditReport)["gemms"] == tuple[fp8.AuditedGemm, ...]
    assert repr(fp8.AuditedGemm) == "<class 'fp8flax.AuditedGemm'>"


def test_values_are_pickled_under_public_names_and_read_from_older_pickles():
    recipe = fp8.DelayedScaling(margin=1)
    written = pickle.dumps(recipe, protocol=2)
    assert b"cfp8flax\nDelayedScaling\n" in written
    older = written.replace(b"cfp8flax\nDelayedScaling\n", b"cfp8flax._core.recipes\nDelayedScaling\n")
    assert pickle.loads(written) == pickle.loads(older) == recipe


@pytest.mark.oldest
def test_type_hints_of_classes_are_found():
    """Annotations are text, which ``typing.get_type_hints`` evaluates in ``__module__``."""
    hints = {
        cls: typing.get_type_hints(cls, localns=vars(jaxtyping) | {"ArrayTree": None}) for cls in CLASSES
    }
    assert sum(map(len, hints.values())) > 100
    assert hints[fp8.DelayedScaling]["margin"] is int
    assert hints[fp8.DelayedScaling]["fp8_format"] is fp8.Format

    class Derived(fp8.DelayedScaling):
        more: int

    assert typing.get_type_hints(Derived) == {**typing.get_type_hints(fp8.DelayedScaling), "more": int}


def test_the_source_of_functions_and_methods_is_found():
    assert inspect.getsource(fp8.value_and_grad).startswith("def value_and_grad(")
    assert inspect.getsource(fp8.DelayedScaling.__post_init__).lstrip().startswith("def __post_init__(")
    with pytest.raises(OSError, match="class definition|source code"):
        inspect.getsource(fp8.DelayedScaling)


@pytest.mark.oldest
@PACKAGES
def test_doctest_finds_every_example(package):
    """doctest asks ``__module__`` which objects belong to a module."""
    found = {test.name for test in doctest.DocTestFinder().find(package) if test.examples}
    have = {
        f"{package.__name__}.{value.__qualname__}"
        for of, value in MOVED
        if of is package and ">>>" in (value.__doc__ or "")
    }
    methods = {
        f"{package.__name__}.{method.__qualname__}"
        for of, value in MOVED
        if of is package and inspect.isclass(value)
        for method in vars(value).values()
        if inspect.isfunction(method) and method.__module__ == value.__module__
        if ">>>" in (method.__doc__ or "")
    }
    assert found == have | methods
    assert [test for test in doctest.DocTestFinder().find(recipes) if test.examples] == []

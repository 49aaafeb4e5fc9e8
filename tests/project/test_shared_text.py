"""Docstrings have the text that stands in one place, and describe each argument."""

import inspect
import re

import pytest
from fp8flax._host.shared_text import _TEXTS, insert_shared_text

import fp8flax as fp8
import fp8flax.nnx as fp8nnx


def test_a_name_becomes_its_text():
    def grad():
        pass

    before = "Text.\n\n    {recipe}\n        {errors}\n    {a}_scale: b.\n    {other}\n"
    grad.__doc__ = before
    insert_shared_text(grad)
    first, second = _TEXTS["recipe"].splitlines()
    after = before.replace("{recipe}", f"{first}\n    {second}")
    assert grad.__doc__ == after.replace("{errors}", _TEXTS["grad.errors"])
    insert_shared_text(1)


@pytest.mark.parametrize("package", [fp8, fp8nnx])
def test_no_public_docstring_has_a_name_left(package):
    docstrings = {name: getattr(package, name).__doc__ or "" for name in package.__all__}
    assert [name for name, doc in docstrings.items() if re.search(r"^ *\{\w+\}$", doc, re.M)] == []
    assert "``DelayedScaling()`` outside of it." in docstrings["Fp8DotGeneralOp"]


def parameters(value):
    """Yields the names of the arguments of a function, or of the class of an NNX module."""
    function = value.__init__ if inspect.isclass(value) else inspect.unwrap(value)
    yield from (name for name in inspect.signature(function).parameters if name != "self")


@pytest.mark.parametrize("package", [fp8, fp8nnx])
def test_each_argument_is_described(package):
    """In place of a rule of the linter, which does not see the inserted text."""
    missing = {
        (name, parameter)
        for name in package.__all__
        if "\n    Args:\n" in (getattr(package, name).__doc__ or "")
        for parameter in parameters(getattr(package, name))
        if not re.search(rf"^ +\**{parameter}(, \**\w+)*:", getattr(package, name).__doc__, re.M)
    }
    assert missing == set()

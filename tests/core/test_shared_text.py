"""Docstrings have the text that stands in one place, at the indentation of its name."""

import re

import pytest

import fp8flax as fp8
import fp8flax.nnx as fp8nnx
from fp8flax._core.shared_text import _TEXTS, with_shared_text


def documented(docstring):
    class Documented:
        __doc__ = docstring

    return with_shared_text(Documented)


def test_a_name_becomes_its_text():
    first, second = _TEXTS["recipe"].splitlines()
    before = "Op.\n\n    Args:\n        {recipe}\n        {a}_scale: not alone.\n        {other}\n"
    assert documented(before).__doc__ == before.replace("{recipe}", f"{first}\n        {second}")
    assert documented(None).__doc__ is None


@pytest.mark.parametrize("package", [fp8, fp8nnx])
def test_no_public_docstring_has_a_name_left(package):
    docstrings = {name: getattr(package, name).__doc__ or "" for name in package.__all__}
    assert [name for name, doc in docstrings.items() if re.search(r"^ *\{\w+\}$", doc, re.M)] == []
    assert "``DelayedScaling()`` outside of it." in docstrings["Fp8DotGeneralOp"]

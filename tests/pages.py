"""The code on pages of the documentation."""

import re

import jax

from tests import ROOT


def examples_of(text):
    """Returns the blocks of code of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def examples_for(package):
    """Returns the blocks of a section of docs/trainers.md, which need a package."""
    page = (ROOT / "docs/trainers.md").read_text()
    section = re.search(rf"^## {package}\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)[1]
    return re.findall(r"^```py\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def run(blocks, name, namespace=None):
    """Runs blocks of code one after another, as users do, and returns the names that they define."""
    namespace = {} if namespace is None else namespace
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, name, "exec"), namespace)
    return namespace

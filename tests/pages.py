"""The code on pages of the documentation."""

import re

import jax


def examples_of(text):
    """Returns the blocks of code of a page."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(blocks, name, namespace=None):
    """Runs blocks of code one after another, as users do, and returns the names that they define."""
    namespace = {} if namespace is None else namespace
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, name, "exec"), namespace)
    return namespace

"""Returns the variables of a Flax scope without copying them.

Why: conversion asks of every value whether it is a parameter. ``Scope.variables()`` is public, but copies
the tree each time.

Internals: ``_variables`` of ``flax.core.Scope``. Without it the public method is used, which is slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def variables_of(root: Any) -> Mapping[str, Any]:
    """Returns the collections of a root scope."""
    try:
        found: Mapping[str, Any] = root._variables
    except AttributeError:
        found = root.variables()
    return found

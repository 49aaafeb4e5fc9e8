"""Returns the variables of a Flax scope without copying them.

Why: the conversion of a model looks up, for each value, whether it is a parameter. ``Scope.variables()`` is
public, but copies the tree of variables at each call.

Internals: ``_variables`` of ``flax.core.Scope``. Without it the public method is used, which is slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def variables_of(root: Any) -> Mapping[str, Any]:
    """Returns the collections of variables of a root scope, by name."""
    try:
        found: Mapping[str, Any] = root._variables
    except AttributeError:
        found = root.variables()
    return found

"""Finds the call of a converted model that a Linen scope belongs to, by a flag of the scope.

Linen passes the flags of a scope on to the scopes below it, also through its transformations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CALL = "fp8flax"
"""The name of the flag whose value is the innermost running call of a converted model."""


def call_of(scope: Any) -> Any:
    """Returns the innermost running call that a scope belongs to, or None.

    The call takes part in each Linen op. ``call.on_op(op, recipe, compute, lhs, rhs, *rest)``, if it is not
    None, replaces ``compute(lhs, rhs, *rest)``; the recipe is None if FP8 is off. ``compute`` declares the
    state of the op and computes. ``call.state_of(op, name, leaf)`` returns one array of the state, or None
    if it is not among the parameters.
    """
    return None if scope is None else scope.flags.get(CALL)


@contextmanager
def having(owner: Any, **attributes: Any) -> Iterator[None]:
    """A context in which an object has these attributes of its own."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    own.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del own[name]
        own.update(before)

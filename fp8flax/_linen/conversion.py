"""Finds the calls of converted models that a Linen scope belongs to, by a flag of the scope.

Linen passes the flags of a scope on to the scopes below it, also through its transformations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flax.core

_FLAG = "fp8flax"


def calls_of(scope: Any) -> tuple[Any, ...]:
    """Returns the running calls that a scope belongs to, from the outermost to the innermost.

    The innermost call takes part in each Linen op. ``call.on_op(op, recipe, compute, lhs, rhs, *rest)``, if
    it is not None, replaces ``compute(lhs, rhs, *rest)``; the recipe is None if FP8 is off. ``compute``
    declares the state of the op and computes. ``call.state_of(op, leaf)`` returns one array of the state,
    or None if it is in its collection.
    """
    calls: tuple[Any, ...] = () if scope is None else scope.flags.get(_FLAG, ())
    return calls


@contextmanager
def in_call(scope: Any, call: Any) -> Iterator[None]:
    """A context in which this call is the innermost one of a scope, and of the scopes made from it."""
    before = scope.flags
    scope.flags = flax.core.freeze({**before, _FLAG: (*calls_of(scope), call)})
    try:
        yield
    finally:
        scope.flags = before

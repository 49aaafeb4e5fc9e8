"""Holds, in one context variable, the calls of converted models that surround the running code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_calls: ContextVar[tuple[Any, ...]] = ContextVar("calls", default=())


def running_calls() -> tuple[Any, ...]:
    """Returns the running calls of converted models, from the outermost to the innermost.

    The innermost call takes part in each Linen op. ``call.on_op(op, recipe, compute, lhs, rhs, *rest)``, if
    it is not None, replaces ``compute(lhs, rhs, *rest)``; the recipe is None if FP8 is off. ``compute``
    declares the state of the op and computes. ``call.state_of(op, leaf)`` returns one array of the state,
    or None if it is in its collection.
    """
    return _calls.get()


@contextmanager
def in_call(call: Any) -> Iterator[None]:
    """A context in which this call is the innermost one."""
    token = _calls.set((*_calls.get(), call))
    try:
        yield
    finally:
        _calls.reset(token)

"""Holds, in one context variable, the calls of converted models that surround the running code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Conversion(NamedTuple):
    """The calls of converted models that are running, and what their ops do otherwise."""

    calls: tuple[Any, ...] = ()
    """The running calls, from the outermost to the innermost."""
    counted: int | None = None
    """The number of calls that surround the model whose contractions are counted instead of converted.

    None if no model is counted."""
    on_op: Callable[..., Any] | None = None
    """A function that replaces ``compute(lhs, rhs, *rest)`` in each op.

    It is called as ``(op, recipe, compute, lhs, rhs, *rest)``; the recipe is None if FP8 is off.
    ``compute`` declares the state of the op and computes. With ``frozen=(states, recipe)`` it uses these
    states and declares none."""
    state_of: Callable[..., Any] | None = None
    """A function that returns one array of the state of an op, or None if there is none.

    It is called as ``(op, leaf)``, with a ``StateLeaf``. If it is None, the state is in its collection."""


_NONE = Conversion()
_running: ContextVar[Conversion] = ContextVar("running", default=_NONE)


def conversion() -> Conversion:
    """Returns the conversion that surrounds the running code."""
    return _running.get()


@contextmanager
def converting(**changes: Any) -> Iterator[None]:
    """Returns a context in which these fields of the conversion have other values."""
    token = _running.set(_running.get()._replace(**changes))
    try:
        yield
    finally:
        _running.reset(token)


def counting() -> AbstractContextManager[None]:
    """Returns a context in which no contraction is converted, and each is computed in its ``Site.scope``.

    Only the model that is called here is counted, and no converted model inside of it. A model may be
    traced there although nothing in it is converted.
    """
    return converting(counted=len(conversion().calls))

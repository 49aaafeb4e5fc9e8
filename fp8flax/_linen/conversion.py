"""Holds, in one context variable, the conversion of models that surrounds the running code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Stacking(NamedTuple):
    """How ``nn.scan`` or ``nn.vmap`` stacks the variables of a layer.

    An axis may be counted from the end. It is None if the variables are not stacked.
    """

    params: int | None
    """The axis of the parameters."""
    state: int | None
    """The axis of the collection ``Conversion.beside_params``."""


class Conversion(NamedTuple):
    """The calls of converted models that are running, and the options of their conversion."""

    calls: tuple[Any, ...] = ()
    """The running calls, from the outermost to the innermost."""
    counted: int | None = None
    """The number of calls that surround the model whose contractions are counted instead of converted.

    None if no model is counted."""
    beside_params: str | None = None
    """The collection that lifted transformations treat like the parameters."""
    on_op: Callable[..., Any] | None = None
    """A function that replaces ``compute(lhs, rhs, *rest)`` in each op.

    It is called as ``(op, recipe, compute, lhs, rhs, *rest)``; the recipe is None if FP8 is off.
    ``compute`` declares the state of the op and computes. With ``frozen=(states, recipe)`` it uses these
    states and declares none."""
    stacked: tuple[Stacking, ...] = ()
    """How the variables of the running code are stacked, from the outermost transformation inwards."""
    in_custom_vjp: bool = False
    """Whether the running code is inside of ``nn.custom_vjp``."""
    in_map: bool = False
    """Whether the running code is inside of an ``nn.map_variables`` of the model that maps parameters."""


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

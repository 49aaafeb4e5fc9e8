"""What the running code is part of, while a converted model is traced: one ambient record."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

OnMap = Callable[[Any, Any, Any], None]
"""Called as ``(scope, given, mapped)``: the scope that has the variables, those that are mapped, and the
scope of what was made of them."""


class Conversion(NamedTuple):
    """The calls of converted models that are running, and what was asked of them."""

    calls: tuple[Any, ...] = ()
    """From the outermost to the innermost."""
    is_reporting: bool = False
    """Whether a model of which nothing is converted may be traced."""
    counted: int | None = None
    """How many calls are around the model whose contractions are counted, and none of them converted."""
    beside_params: str | None = None
    """The collection that lifted transformations take along with the parameters."""
    on_map: tuple[OnMap, ...] = ()
    """Each is told what ``nn.map_variables`` makes of parameters."""
    on_op: Callable[..., Any] | None = None
    """Called as ``(op, recipe, compute, lhs, rhs, *rest)`` in the place of ``compute(lhs, rhs, *rest)``,
    which declares an op's state and computes, or takes ``fixed`` states with their recipe. The recipe is
    None where FP8 is off."""
    in_custom_vjp: bool = False
    """Whether the code is that of ``nn.custom_vjp``."""


_NONE = Conversion()
_running: ContextVar[Conversion] = ContextVar("running", default=_NONE)


def conversion() -> Conversion:
    """Returns what the code that runs is part of."""
    return _running.get()


@contextmanager
def converting(**changes: Any) -> Iterator[None]:
    """A context in which these fields of the ``Conversion`` are others."""
    token = _running.set(_running.get()._replace(**changes))
    try:
        yield
    finally:
        _running.reset(token)


@contextmanager
def reporting(*, counting: bool = False) -> Iterator[None]:
    """A context in which a model of which nothing is converted may be traced.

    With ``counting`` nothing at all is converted, and each contraction stands in its ``SeenSite.scope``.
    """
    # What another model computes inside of the one in question is not counted.
    counted = len(conversion().calls) if counting else None
    with converting(is_reporting=True, counted=counted):
        yield

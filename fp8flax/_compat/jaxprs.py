"""Iterates over the equations of a program that JAX has traced (a jaxpr), and of the programs inside it.

Why: the conversion of a model, and its report, read what a function computes. JAX has no public way to do
so.

Internals: ``jax.extend.core``, for the classes of jaxprs. JAX shows it to other libraries, but does not
promise that it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax.extend import core


class Equation(NamedTuple):
    """An equation of a program, and its position: the scopes and loops around it."""

    eqn: Any
    outer_scopes: str
    """The scopes of the equations around it."""
    times: int
    """How often it is computed: the product of the lengths of the scans around it."""

    @property
    def scopes(self) -> str:
        """All scopes (``jax.named_scope``) that the equation is in, from the outermost, joined by ``/``."""
        return f"{self.outer_scopes}/{self.eqn.source_info.name_stack}".strip("/")


def equations(
    program: Any,
    looks_into: Callable[[Equation], bool] = lambda equation: True,
    outer_scopes: str = "",
    times: int = 1,
) -> Iterator[Equation]:
    """Yields the equations of a program in order, each followed by the equations of the programs inside it.

    Args:
        program: a jaxpr, closed or not.
        looks_into: a function that returns whether to yield the equations inside of an equation.
        outer_scopes: the scopes around the program.
        times: how often the program is computed.
    """
    for eqn in getattr(program, "jaxpr", program).eqns:
        equation = Equation(eqn, outer_scopes, times)
        yield equation
        values = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
        inside = [one for each in values for one in each if isinstance(one, core.Jaxpr | core.ClosedJaxpr)]
        if inside and looks_into(equation):
            length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            for inner in inside:
                yield from equations(inner, looks_into, equation.scopes, times * length)

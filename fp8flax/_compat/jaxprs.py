"""Reads a program that JAX has traced (a jaxpr): its equations, and which inputs it needs.

Why: the conversion of a model, and its report, read what a function computes, and ``freeze`` must know
whether anything but an FP8 op reads a kernel. JAX has no public way to do so.

Internals: ``jax.extend.core``, for the classes of jaxprs. JAX shows it to other libraries, but does not
promise that it stays. ``UnspecifiedValue``, which stands for a sharding that a jitted function was not
given. ``jax._src.interpreters.partial_eval``, whose ``dce_jaxpr`` removes dead code, also inside of loops,
branches and ``jax.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax._src.interpreters import partial_eval
from jax.extend import core

Program: TypeAlias = core.ClosedJaxpr
"""A program that JAX has traced, as ``jax.make_jaxpr`` returns it."""

Primitive: TypeAlias = core.Primitive
Operands: TypeAlias = Sequence[jax.Array]
Params: TypeAlias = Any
"""The parameters of a primitive, by their names."""
Results: TypeAlias = jax.Array | Operands
Compute: TypeAlias = Callable[[], Operands]
"""A function that computes what has no program."""


def has_shardings(params: Params) -> bool:
    """Returns whether a jitted function was given shardings of its inputs or results."""
    shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings)


class Equation(NamedTuple):
    """An equation of a program, and its position: the scopes, loops and functions around it."""

    eqn: core.JaxprEqn
    scopes: str
    """All scopes (``jax.named_scope``) that it is in, from the outermost, joined by ``/``."""
    times: int
    """How often it is computed: the product of the lengths of the scans around it. All branches count."""
    inside: tuple[str, ...]
    """The names of the primitives whose programs it is in, from the outermost, such as ``scan``."""


def equations(
    program: Program | core.Jaxpr, scopes: str = "", times: int = 1, inside: tuple[str, ...] = ()
) -> Iterator[Equation]:
    """Yields the equations of a program in order, each followed by the equations of the programs inside it.

    Args:
        program: a jaxpr, closed or not.
        scopes: the scopes around the program.
        times: how often the program is computed.
        inside: the names of the primitives around the program.
    """
    for eqn in getattr(program, "jaxpr", program).eqns:
        own_scopes = f"{scopes}/{eqn.source_info.name_stack}".strip("/")
        yield Equation(eqn, own_scopes, times, inside)
        name = eqn.primitive.name
        length = eqn.params["length"] if name == "scan" else 1
        values = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
        for inner in (x for each in values for x in each):
            if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                yield from equations(inner, own_scopes, times * length, (*inside, name))


def needed_inputs(program: Program) -> list[bool]:
    """Returns for each input of a closed jaxpr whether a result of the program depends on it."""
    jaxpr = program.jaxpr
    _, needed = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return list(needed)

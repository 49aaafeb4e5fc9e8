"""What a jaxpr does: which of its inputs it reads, and which contractions it computes.

Internals: ``jax._src.core``, for the class of jaxprs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax._src import core

from fp8flax._core.names import BY_OP

DOT, CONV, RAGGED_DOT = "dot_general", "conv_general_dilated", "ragged_dot_general"
CONTRACTIONS = (DOT, CONV, RAGGED_DOT)
# What changes the place or the dtype of values, and nothing else.
CAST = "convert_element_type"
MOVEMENTS = (
    *("broadcast_in_dim", "concatenate", CAST, "copy", "copy_p", "reshape", "rev"),
    *("sharding_constraint", "slice", "split", "squeeze", "transpose"),
)
# Of these, what leaves every value in its place.
CASTS = (CAST, "copy", "copy_p", "sharding_constraint")
# What leaves every value somewhere, once.
BIJECTIONS = (*CASTS, "reshape", "rev", "squeeze", "transpose")
# What may return an operand as it is.
_RETURNING = ("jit", "checkpoint", "remat2")  # two names of jax.checkpoint
# A whole element of a stack of names, where a module's name may only begin alike.
_IN_OP = re.compile(rf"\b{BY_OP}\b")


def reads_otherwise(primitive: str, params: dict[str, Any], count: int) -> list[bool]:
    """Tells of each operand of a primitive whether it reads it, other than by an FP8 op inside of it.

    Linen's transformations give all parameters to their bodies, whatever these do with them.
    """
    if "branches" in params:
        inside = [_invars_read(branch.jaxpr, may_return=True) for branch in params["branches"]]
        return [True, *(any(reads) for reads in zip(*inside))]
    if primitive == "while":
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        cond, body = (_invars_read(params[name].jaxpr) for name in ("cond_jaxpr", "body_jaxpr"))
        carry = (a or b for a, b in zip(cond[of_cond:], body[of_body:]))
        return [*cond[:of_cond], *body[:of_body], *carry]
    jaxpr = params.get("jaxpr", params.get("call_jaxpr"))
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if isinstance(jaxpr, core.Jaxpr) and len(jaxpr.invars) == count:
        return _invars_read(jaxpr, may_return=primitive in _RETURNING)
    return [True] * count


def passed_through(primitive: str, params: dict[str, Any]) -> list[int | None] | None:
    """Tells of each result of a primitive which operand it is, where it is one.

    Linen's transformations return the variables that a method might have changed.
    """
    if "branches" in params:
        jaxprs, first = [branch.jaxpr for branch in params["branches"]], 1
    elif primitive in _RETURNING and "jaxpr" in params:
        jaxprs, first = [getattr(params["jaxpr"], "jaxpr", params["jaxpr"])], 0
    else:
        return None
    passed: list[int | None] = []
    for outvars in zip(*(jaxpr.outvars for jaxpr in jaxprs)):
        found = {
            jaxpr.invars.index(var) if var in jaxpr.invars else None for jaxpr, var in zip(jaxprs, outvars)
        }
        index = found.pop() if len(found) == 1 else None
        passed.append(None if index is None else index + first)
    return passed


def _invars_read(jaxpr: core.Jaxpr, may_return: bool = False) -> list[bool]:
    """Tells of each input of a jaxpr whether anything reads or returns it that is not part of an FP8 op."""
    owes = {var: {i} for i, var in enumerate(jaxpr.invars)}
    read: set[int] = set()
    for eqn in jaxpr.eqns:
        inputs = [owes.get(var, set()) if isinstance(var, core.Var) else set() for var in eqn.invars]
        if not any(inputs) or _IN_OP.search(str(eqn.source_info.name_stack)):
            continue
        if eqn.primitive.name in MOVEMENTS and all(inputs):
            owes.update((var, set().union(*inputs)) for var in eqn.outvars if isinstance(var, core.Var))
            continue
        for indices, reads in zip(inputs, reads_otherwise(eqn.primitive.name, eqn.params, len(inputs))):
            if reads:
                read |= indices
    for var in jaxpr.outvars:
        if isinstance(var, core.Var) and not (may_return and var in jaxpr.invars):
            read |= owes.get(var, set())
    return [i in read for i in range(len(jaxpr.invars))]


def has_contraction(jaxpr: Any) -> bool:
    """Tells whether a jaxpr computes a contraction where opening jitted functions finds it."""
    return any(
        eqn.primitive.name in CONTRACTIONS
        or (eqn.primitive.name == "jit" and has_contraction(eqn.params["jaxpr"].jaxpr))
        for eqn in jaxpr.eqns
    )


class JaxprContraction(NamedTuple):
    """A contraction in a jaxpr."""

    stack: str
    """The scopes that it is in."""
    primitive: str
    params: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    """Of the two operands and the result."""
    times: int
    """How often it is computed: the product of the lengths of the scans around it."""


def contractions_in(jaxpr: Any, stack: str = "", times: int = 1) -> Iterator[JaxprContraction]:
    """Yields the contractions that a jaxpr computes, but those inside of FP8 ops."""
    for eqn in jaxpr.eqns:
        here = f"{stack}/{eqn.source_info.name_stack}".strip("/")
        if _IN_OP.search(here):
            continue
        if eqn.primitive.name in CONTRACTIONS:
            shapes = tuple(v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars[:1]))
            yield JaxprContraction(here, eqn.primitive.name, eqn.params, shapes, times)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if isinstance(inner, core.Jaxpr):
                    length = eqn.params["length"] if eqn.primitive.name == "scan" else 1
                    yield from contractions_in(inner, here, times * length)

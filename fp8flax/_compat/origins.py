"""Says how a value that JAX traces was made: as a sum, or by a function of ours from which arguments.

Why: the next scaling state must be what a step made of the old one. The mean of several next states, of
microbatches, has values that a step could make, too, so its values alone do not tell. And where the program
tells, its values need no check.

Internals: ``parent`` and ``val`` of the tracers of ``jax.jit``. Without them nothing is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from jax.extend.core import Literal

_MadeBy: TypeAlias = Callable[[Any], tuple[Any, int] | None]
"""Returns the equation that makes a value, and the place of the value among its results."""

_KEEPS_SUMS = ("mul", "div", "convert_element_type", "sharding_constraint", "reshard", "copy")


def is_made_from(argument: object, x: object, function: str) -> bool:
    """Returns whether ``x`` is a result of a jitted function, and ``argument`` the argument in its place.

    The function is found by its name. The places are those among the leaves of results and arguments.
    """
    found = _of_tracer(x)
    if found is None or found[0].params.get("name") != function:
        return False
    eqn, place = found
    passed = eqn.invars[place]
    while (made := _of_tracer(passed)) and made[0].primitive.name == "stop_gradient":
        passed = made[0].invars[0]
    return passed is argument


def is_sum(x: object) -> bool:
    """Returns whether a tracer is a sum of two values, or of the passes of a loop."""
    return _is_sum(x, _of_tracer)


def _is_sum(x: Any, made_by: _MadeBy) -> bool:
    found = made_by(x)
    if found is None:
        return False
    eqn, place = found
    if eqn.primitive.name in ("add", "add_any"):
        return True
    if eqn.primitive.name in _KEEPS_SUMS:  # a factor is a scalar that was broadcast
        return any(_is_sum(y, made_by) for y in eqn.invars if y.aval.shape == x.aval.shape)
    program = eqn.params.get("jaxpr", eqn.params.get("body_jaxpr"))
    program = getattr(program, "jaxpr", program)
    has_same_results = program is not None and len(program.outvars) == len(eqn.outvars)
    if not has_same_results or eqn.params.get("length") == 1:  # a sum over one pass is its summand
        return False
    made = {y: (each, i) for each in program.eqns for i, y in enumerate(each.outvars)}
    return _is_sum(program.outvars[place], lambda y: None if isinstance(y, Literal) else made.get(y))


def _of_tracer(x: Any) -> tuple[Any, int] | None:
    eqn = getattr(x, "parent", None)
    places = [i for i, var in enumerate(getattr(eqn, "outvars", ())) if var is getattr(x, "val", None)]
    return (eqn, places[0]) if places else None

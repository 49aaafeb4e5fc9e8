"""Finds where a traced value comes from: a cast, a loop, a function of ours, or arithmetic.

Why: our GPU kernel that quantizes in blocks reads the float32 parameter, without a cast to bfloat16 before.
A user is warned of a gradient inside of a loop that does not carry the scaling state. And the next scaling
state must be what a step makes of the old one. Values alone do not tell a mean of several next states, or
a newest amax that was clipped, from a state that a step could make. JAX has no function for this.

Internals: attributes of tracers and of traces. A tracer has its trace (``_trace``). A trace that records a
program has a ``frame``, whose ``debug_info`` says for which function of JAX (``traced_for``). Its tracers
have the equation that made them (``parent``), which keeps the tracers that it read (``in_tracers``), and
their variable in the program (``val``). A trace that computes derivatives has a ``parent_trace``, and its
tracers hold a tracer of that trace (``primal``). Without these attributes nothing is found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from jax.extend.core import Literal

from fp8flax._compat.traces import trace_behind

# Casts and loops.


def before_cast(x: Any) -> Any:
    """Returns the array that ``x`` was cast from, without a derivative, in the trace that is current.

    For the kernel that ``nn.Dense(dtype=jnp.bfloat16)`` gives its op, it is the float32 parameter. Returns
    None if ``x`` was not cast, was cast outside of the loop that JAX traces now, or has a value.
    """
    x = _without_derivative(x)
    eqn: Any = getattr(x, "parent", None)
    is_cast = eqn is not None and eqn.primitive.name == "convert_element_type"
    return eqn.in_tracers[0] if is_cast and x._trace is _recording() else None


def is_constant_of_loop(x: Any) -> bool:
    """Returns whether JAX traces the body of a loop now, and ``x`` comes from outside of the loop."""
    trace = _recording()
    debug_info = getattr(getattr(trace, "frame", None), "debug_info", None)
    is_in_body = getattr(debug_info, "traced_for", None) in ("scan", "fori_loop", "while_body")
    return is_in_body and getattr(_without_derivative(x), "_trace", None) is not trace


def _without_derivative(x: Any) -> Any:
    """Returns the value that a tracer of a derivative holds; returns any other value unchanged."""
    while hasattr(x, "primal"):
        x = x.primal
    return x


def _recording() -> Any:
    """Returns the trace that records the program, also if JAX computes derivatives of it now."""
    trace: Any = trace_behind()
    while not hasattr(trace, "frame") and getattr(trace, "parent_trace", None):
        trace = trace.parent_trace
    return trace


# Functions of ours, and arithmetic.

_MadeBy: TypeAlias = Callable[[Any], tuple[Any, int] | None]
"""Returns the equation that makes a value, and the place of the value among its results."""

_KEEPS_VALUE = ("stop_gradient", "sharding_constraint", "reshard", "copy")
_KEEPS_ARITHMETIC = (*_KEEPS_VALUE, "mul", "div", "convert_element_type")
_ARITHMETIC = ("add", "add_any", "psum", "psum_invariant", "min", "clamp")


def is_made_from(argument: object, x: object, function: str) -> bool:
    """Returns whether ``x`` is a result of a jitted function, and ``argument`` the argument in its place.

    The function is found by its name. The places are those among the leaves of results and arguments. ``x``
    may also be the maximum over devices of such results.
    """
    return _argument(x, function, _of_tracer) is argument


def _argument(x: Any, function: str, made_by: _MadeBy) -> Any:
    """Returns the argument in the place of ``x``; None if it is not a result of the function.

    For example, a step calls the jitted ``gradient``, which calls ``next_state_of(old, new)``::

        c = jit[name=gradient jaxpr={ lambda ; d e. let
            f = add d e
            g = jit[name=next_state_of jaxpr=...] d f
          in (g,) }] a b
        h = copy c

    ``h`` has the value of ``c``, result 0 of ``gradient``. Inside, this is ``g``, result 0 of
    ``next_state_of``, whose argument 0 is ``d``: argument 0 of ``gradient``. So the answer is ``a``.
    """
    x, found = _followed(x, (*_KEEPS_VALUE, "pmax", "pvary"), made_by)
    if found is None:
        return None
    eqn, place = found
    if eqn.params.get("name") == function:
        return _followed(eqn.invars[place], _KEEPS_VALUE, made_by)[0]
    if eqn.primitive.name != "jit":
        return None
    program = eqn.params["jaxpr"].jaxpr  # of another jitted function, in which the function was called
    argument = _argument(program.outvars[place], function, _in_program(program))
    places = [i for i, var in enumerate(program.invars) if var is argument]
    return _followed(eqn.invars[places[0]], _KEEPS_VALUE, made_by)[0] if places else None


def is_arithmetic(x: object) -> bool:
    """Returns whether a tracer was clipped, or is a sum: of values, of a loop's passes, or over devices.

    A product with a scalar is, if its other factor is. So the mean of two states is found::

        c = add a b                      a sum
        d = broadcast_in_dim 0.5         of no shape before: a scalar, whose own origin does not count
        e = mul c d                      followed to ``c``, which has the shape of ``e``

    The result of a jitted function or of a loop is followed to the equation in it that makes the result.
    """
    return _is_arithmetic(x, _of_tracer)


def _is_arithmetic(x: Any, made_by: _MadeBy) -> bool:
    found = made_by(x)
    if found is None:
        return False
    eqn, place = found
    if eqn.primitive.name in _ARITHMETIC:
        return True
    if eqn.primitive.name in _KEEPS_ARITHMETIC:  # a factor is a scalar that was broadcast
        return any(_is_arithmetic(y, made_by) for y in eqn.invars if y.aval.shape == x.aval.shape)
    program = eqn.params.get("jaxpr", eqn.params.get("body_jaxpr"))
    program = getattr(program, "jaxpr", program)
    has_same_results = program is not None and len(program.outvars) == len(eqn.outvars)
    if not has_same_results or eqn.params.get("length") == 1:  # a sum over one pass is its summand
        return False
    return _is_arithmetic(program.outvars[place], _in_program(program))


def _followed(x: Any, primitives: tuple[str, ...], made_by: _MadeBy) -> tuple[Any, tuple[Any, int] | None]:
    """Returns the value that some primitives made ``x`` of, and how that value was made."""
    while (found := made_by(x)) and found[0].primitive.name in primitives:
        x = found[0].invars[found[1]]
    return x, found


def _of_tracer(x: Any) -> tuple[Any, int] | None:
    eqn = getattr(x, "parent", None)
    places = [i for i, var in enumerate(getattr(eqn, "outvars", ())) if var is getattr(x, "val", None)]
    return (eqn, places[0]) if places else None


def _in_program(program: Any) -> _MadeBy:
    made = {y: (each, i) for each in program.eqns for i, y in enumerate(each.outvars)}
    return lambda y: None if isinstance(y, Literal) else made.get(y)

"""Finds where a traced value comes from: the array that was cast to it, and the loop that it is in.

Why: our GPU kernel that quantizes in blocks reads the float32 parameter, without a cast to bfloat16 before.
A user is warned of a gradient inside of a loop that does not carry the scaling state. JAX cannot be asked.

Internals: attributes of tracers and of traces. A trace that records a program has a ``frame``. Its tracers
have the equation that made them (``parent``). A trace that computes derivatives has a ``parent_trace``, and
its tracers hold a tracer of that trace (``primal``).
"""

from __future__ import annotations

from typing import Any

from fp8flax._compat.traces import trace_behind


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

"""Puts a trace of ours in front of JAX's trace, to see each primitive before JAX computes it.

Why: ``quantize_model`` must find the contractions in a model's methods, by whichever function they are
written. ``nn.Dense``, ``x @ w`` and ``jnp.einsum`` all bind the same primitive of JAX.

Internals: ``jax._src.core``, for the class of traces, to read and set the current trace, and for
``eval_jaxpr``; ``jax._src.config``, for a value of ours in the key of what ``jax.jit`` has traced;
``jax._src.source_info_util``, for the scopes by which FP8 ops mark the contractions that they compute.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partialmethod
from typing import Any, TypeAlias

from jax._src import core, source_info_util
from jax._src.config import config_ext

from fp8flax._compat.jaxprs import Operands, Params, Primitive, Program, Results
from fp8flax._compat.stand_in import refuse_stand_ins

Trace: TypeAlias = core.Trace

_KEY = config_ext.Config("fp8flax_front", None, include_in_jit_key=True)
"""A reference to the current trace, if it is a front trace.

``jax.jit`` must not run there what it has compiled without it, because the trace would not see inside."""


class FrontTrace(core.Trace):
    """A trace that sees each primitive before the trace behind it computes the primitive.

    It stands in front of another trace of JAX, and its arrays and tracers are those of that trace. NNX
    refuses to change a variable in another trace than that which made it, so this trace passes for that
    one.

    Args:
        handler: an object with two methods. ``on_primitive(front, primitive, operands, params)`` returns
            the result of a primitive: that of ``front.compute``, or another. ``on_function(is_custom_vjp,
            operands, compute)`` returns ``compute()``, the results of a function that has no jaxpr yet,
            such as one with a derivative of its own. Its primitives are not seen.
    """

    def __init__(self, handler: Any) -> None:
        super().__init__()
        self.handler = handler
        self.behind = core.trace_ctx.trace
        self.requires_low, self._weakref = self.behind.requires_low, self.behind._weakref

    def compute(self, primitive: Primitive, operands: Operands, params: Params) -> Results:
        """Returns the result of a primitive, as the trace behind computes it."""
        refuse_stand_ins(operands)
        return self.behind.process_primitive(primitive, operands, params)

    def open(self, program: Program, operands: Operands) -> Operands:
        """Computes a jaxpr, closed or not, primitive by primitive, and sees each primitive."""
        jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
        with core.set_current_trace(self):  # JAX has no current trace while a primitive is processed
            return core.eval_jaxpr(jaxpr, consts, *operands)

    def process_primitive(self, primitive: Primitive, operands: Operands, params: Params, /) -> Results:
        return self.handler.on_primitive(self, primitive, operands, params)

    def _hand_on(self, method: str, *args: Any, **kwargs: Any) -> Operands:
        # The arguments of these methods differ between versions of JAX. The lists among them hold the
        # operands.
        operands = [x for values in args if isinstance(values, list | tuple) for x in values]
        refuse_stand_ins(operands)
        is_custom_vjp = method == "process_custom_vjp_call"
        compute = getattr(self.behind, method)
        return self.handler.on_function(is_custom_vjp, operands, lambda: compute(*args, **kwargs))

    # JAX calls these methods instead of ``process_primitive`` for functions without a jaxpr.
    process_call = partialmethod(_hand_on, "process_call")
    process_custom_jvp_call = partialmethod(_hand_on, "process_custom_jvp_call")
    process_custom_vjp_call = partialmethod(_hand_on, "process_custom_vjp_call")

    def stage_value(self, *args: Any, **kwargs: Any) -> Any:
        return self.behind.stage_value(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


def is_watched() -> bool:
    """Returns whether code runs in a ``FrontTrace``, or in a function that JAX traces there."""
    return _KEY.value is not None


def current_scopes() -> str:
    """Returns the scopes (``jax.named_scope``) of the code that runs, joined by ``/``."""
    return str(source_info_util.current_name_stack())


def current_handler() -> Any:
    """Returns the handler of the current trace of JAX if it is a ``FrontTrace``; otherwise None."""
    trace = core.trace_ctx.trace
    return trace.handler if isinstance(trace, FrontTrace) else None


def trace_behind() -> Trace:
    """Returns the current trace of JAX, or the trace behind it if it is a ``FrontTrace``."""
    trace = core.trace_ctx.trace
    while isinstance(trace, FrontTrace):
        trace = trace.behind
    return trace


@contextlib.contextmanager
def running_in(trace: Trace) -> Iterator[None]:
    """A context in which this trace is the current one."""
    before = _KEY.swap_local(weakref.ref(trace) if isinstance(trace, FrontTrace) else None)
    try:
        with core.set_current_trace(trace):
            yield
    finally:
        _KEY.set_local(before)


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Returns a context without a ``FrontTrace``."""
    return running_in(trace_behind())


def before_cast(x: Any) -> Any:
    """Returns the array that ``x`` was cast from, without a derivative, in the trace that is current.

    Returns None if ``x`` was not cast, was cast outside of the loop that JAX traces now, or has a value.
    """
    while hasattr(x, "primal"):
        x = x.primal
    eqn: Any = getattr(x, "parent", None)
    is_cast = eqn is not None and eqn.primitive.name == "convert_element_type" and x._trace is _recording()
    return eqn.in_tracers[0] if is_cast else None


def _recording() -> Any:
    """Returns the current trace of JAX, or that of which it computes derivatives."""
    trace: Any = trace_behind()
    while not hasattr(trace, "frame") and getattr(trace, "parent_trace", None):
        trace = trace.parent_trace
    return trace


def is_constant_of_loop(x: Any) -> bool:
    """Returns whether JAX traces the body of a loop now, and ``x`` comes from outside of the loop."""
    trace = _recording()
    while hasattr(x, "primal"):
        x = x.primal
    debug_info = getattr(getattr(trace, "frame", None), "debug_info", None)
    is_in_body = getattr(debug_info, "traced_for", None) in ("scan", "fori_loop", "while_body")
    return is_in_body and getattr(x, "_trace", None) is not trace

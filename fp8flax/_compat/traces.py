"""Puts a trace of ours in front of JAX's trace, to see each primitive before JAX computes it.

Why: ``quantize_model`` must find the contractions in a model's methods, by whichever function they are
written. ``nn.Dense``, ``x @ w`` and ``jnp.einsum`` all bind the same primitive of JAX.

A *trace* is what computes primitives: one computes arrays, one records a program for ``jax.jit``, one
computes derivatives. JAX asks the current one. While that is a ``FrontTrace``, ``x @ w`` runs so:

1. ``jnp.matmul`` binds ``dot_general_p``. JAX calls ``FrontTrace.process_primitive``.
2. The ``FrontTrace`` calls ``on_primitive`` of its handler, which may return an FP8 product.
3. Otherwise the handler returns ``FrontTrace.compute``, the result of the trace that was current before.

Internals: ``jax._src.core``, for the class of traces, to read and set the current trace, and for
``eval_jaxpr``; ``jax._src.config``, for a value of ours in the key of what ``jax.jit`` has traced;
``jax._src.source_info_util``, for the scopes by which FP8 ops mark the contractions that they compute.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partialmethod
from typing import Any, Protocol, TypeAlias

from jax._src import core, source_info_util
from jax._src.config import config_ext

from fp8flax._compat.jaxprs import Compute, Operands, Params, Primitive, Program, Results
from fp8flax._compat.stand_in import refuse_stand_ins

Trace: TypeAlias = core.Trace


class Handler(Protocol):
    """What a ``FrontTrace`` asks for the results of primitives."""

    def on_primitive(
        self, front: FrontTrace, primitive: Primitive, operands: Operands, params: Params
    ) -> Results:
        """Returns the result of a primitive: that of ``front.compute``, or another."""

    def on_function(self, is_custom_vjp: bool, operands: Operands, compute: Compute) -> Operands:
        """Returns ``compute()``, the results of a function that has no jaxpr yet.

        Such a function has a derivative of its own. Its primitives are not seen.
        """


class FrontTrace(core.Trace):
    """A trace that sees each primitive before the trace behind it computes the primitive.

    It stands in front of the trace that is current when it is made. Its arrays and tracers are those of
    that trace, and so are all its attributes that are not defined here.
    """

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self.handler = handler
        self.behind = core.trace_ctx.trace
        # The class Trace defines both. NNX refuses to change a variable in another trace than that which
        # made it, which it compares by the weak reference.
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

    def _process_function(self, method: str, *args: Any, **kwargs: Any) -> Operands:
        """Computes a function without a jaxpr: ``method`` is the one that JAX calls for such functions."""
        # Its arguments differ between versions of JAX. The lists among them hold the operands.
        operands = [x for values in args if isinstance(values, list | tuple) for x in values]
        refuse_stand_ins(operands)
        is_custom_vjp = method == "process_custom_vjp_call"
        compute = getattr(self.behind, method)
        return self.handler.on_function(is_custom_vjp, operands, lambda: compute(*args, **kwargs))

    process_call = partialmethod(_process_function, "process_call")
    process_custom_jvp_call = partialmethod(_process_function, "process_custom_jvp_call")
    process_custom_vjp_call = partialmethod(_process_function, "process_custom_vjp_call")

    def stage_value(self, *args: Any, **kwargs: Any) -> Any:  # the class Trace defines this, too
        return self.behind.stage_value(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.behind, name)


# The current trace.

_KEY = config_ext.Config("fp8flax_front", None, include_in_jit_key=True)
"""A reference to the ``FrontTrace`` that code runs in, also in a function that JAX traces there; or None.

It is a part of the cache key of ``jax.jit``, which would otherwise run there what it has compiled without a
``FrontTrace``. The trace would not see inside."""


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


def is_watched() -> bool:
    """Returns whether code runs in a ``FrontTrace``, or in a function that JAX traces there."""
    return _KEY.value is not None


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


def current_scopes() -> str:
    """Returns the scopes (``jax.named_scope``) of the code that runs, joined by ``/``."""
    return str(source_info_util.current_name_stack())

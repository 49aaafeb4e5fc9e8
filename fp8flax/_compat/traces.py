"""Puts a trace of ours in front of JAX's trace, to see each primitive before JAX computes it.

Why: ``quantize_model`` must find the contractions in a model's methods, by whichever function they are
written. ``nn.Dense``, ``x @ w`` and ``jnp.einsum`` all bind the same primitive of JAX.

Internals: ``jax._src.core``, for the class of traces, to read and set the current trace, and for
``eval_jaxpr``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partialmethod
from typing import Any

from jax._src import core


class FrontTrace(core.Trace):
    """A trace that sees each primitive before the trace behind it computes the primitive.

    It stands in front of another trace of JAX, and its arrays and tracers are those of that trace.
    """

    def __init__(self) -> None:
        behind = core.trace_ctx.trace
        super().__init__()
        self.parent_trace = behind
        self.requires_low = behind.requires_low

    def on_primitive(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Returns the result of a primitive: the result of ``compute``, or another; a subclass decides."""
        raise NotImplementedError

    def on_function(self, operands: Sequence[Any]) -> None:
        """Records the operands of a function that has no jaxpr yet, such as one with a ``jax.custom_vjp``.

        A subclass implements it. It does not get the primitives of this function.
        """
        raise NotImplementedError

    def compute(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Returns the result of a primitive, as the trace behind computes it."""
        return self.parent_trace.process_primitive(primitive, operands, params)

    def behind(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which this trace sees nothing, for code that ``on_primitive`` runs."""
        # JAX has no current trace while a primitive is processed.
        context: contextlib.AbstractContextManager[Any] = core.set_current_trace(self.parent_trace)
        return context

    def open(self, program: Any, operands: Sequence[Any]) -> Any:
        """Computes a closed jaxpr primitive by primitive, and sees each primitive."""
        with core.set_current_trace(self):
            return core.eval_jaxpr(program.jaxpr, program.consts, *operands)

    def process_primitive(self, primitive: Any, operands: Any, params: Any, /) -> Any:
        return self.on_primitive(primitive, operands, params)

    def _hand_on(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Passes the operands of a function to ``on_function``, and calls ``method`` of the trace behind.

        The arguments of these methods differ between versions of JAX. The lists among the arguments hold
        the operands.
        """
        for values in args:
            if isinstance(values, list | tuple):
                self.on_function(values)
        return getattr(self.parent_trace, method)(*args, **kwargs)

    # JAX calls these methods instead of ``process_primitive`` for functions without a jaxpr.
    process_call = partialmethod(_hand_on, "process_call")
    process_map = partialmethod(_hand_on, "process_map")
    process_custom_jvp_call = partialmethod(_hand_on, "process_custom_jvp_call")
    process_custom_vjp_call = partialmethod(_hand_on, "process_custom_vjp_call")

    def stage_value(self, *args: Any, **kwargs: Any) -> Any:
        return self.parent_trace.stage_value(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parent_trace, name)


def current_trace() -> Any:
    """Returns the current trace of JAX, which may be a ``FrontTrace``."""
    return core.trace_ctx.trace


def running_in(trace: FrontTrace) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which a ``FrontTrace`` is the current trace."""
    context: contextlib.AbstractContextManager[Any] = core.set_current_trace(trace)
    return context


def unwatched() -> contextlib.AbstractContextManager[Any]:
    """Returns a context without the current ``FrontTrace``, if there is one."""
    trace = core.trace_ctx.trace
    behind = trace.parent_trace if isinstance(trace, FrontTrace) else trace
    context: contextlib.AbstractContextManager[Any] = core.set_current_trace(behind)
    return context

"""Puts a trace of ours in front of JAX's trace, to see each primitive before JAX computes it.

Why: ``quantize_model`` must find the contractions in a model's methods, by whichever function they are
written. ``nn.Dense``, ``x @ w`` and ``jnp.einsum`` all bind the same primitive of JAX.

Internals: ``jax._src.core``, for the class of traces, to read and set the current trace, and for
``eval_jaxpr``.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from jax._src import core


class Watcher(ABC):
    """Receives the primitives and functions that the code under a ``FrontTrace`` passes to JAX."""

    @abstractmethod
    def on_primitive(
        self, front: FrontTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Returns the result of a primitive: the result of ``front.compute``, or a result of its own."""

    @abstractmethod
    def on_function(self, operands: Sequence[Any]) -> None:
        """Records the operands of a function that has no jaxpr yet, such as one with a ``jax.custom_vjp``.

        The watcher does not get the primitives of this function, and does not change its result.
        """


class FrontTrace(core.Trace):
    """A trace that passes each primitive to a watcher.

    It stands in front of another trace of JAX, and its arrays and tracers are those of that trace.
    """

    def __init__(self, watcher: Watcher) -> None:
        behind = core.trace_ctx.trace
        super().__init__()
        self.parent_trace = behind
        self.requires_low = behind.requires_low
        self.watcher = watcher

    def compute(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        """Returns the result of a primitive, as the trace behind computes it."""
        return self.parent_trace.process_primitive(primitive, operands, params)

    def behind(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which the watcher sees nothing, for code that ``on_primitive`` runs."""
        # JAX has no current trace while a primitive is processed.
        context: contextlib.AbstractContextManager[Any] = core.set_current_trace(self.parent_trace)
        return context

    def open(self, program: Any, operands: Sequence[Any]) -> Any:
        """Computes a closed jaxpr primitive by primitive, and passes each primitive to the watcher."""
        with core.set_current_trace(self):
            return core.eval_jaxpr(program.jaxpr, program.consts, *operands)

    def process_primitive(self, primitive: Any, operands: Any, params: Any, /) -> Any:
        return self.watcher.on_primitive(self, primitive, operands, params)

    def _hand_on(self, method: str, args: Any, kwargs: Any) -> Any:
        """Passes the operands of a function to the watcher, and calls ``method`` of the trace behind.

        The arguments of these methods differ between versions of JAX. The lists among the arguments hold
        the operands.
        """
        for values in args:
            if isinstance(values, list | tuple):
                self.watcher.on_function(values)
        return getattr(self.parent_trace, method)(*args, **kwargs)

    # JAX calls these methods instead of ``process_primitive`` for functions without a jaxpr. The signatures
    # differ between versions of JAX.
    def process_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on("process_call", args, kwargs)

    def process_map(self, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on("process_map", args, kwargs)

    def process_custom_jvp_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on("process_custom_jvp_call", args, kwargs)

    def process_custom_vjp_call(self, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on("process_custom_vjp_call", args, kwargs)

    def stage_value(self, *args: Any, **kwargs: Any) -> Any:
        return self.parent_trace.stage_value(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parent_trace, name)


def current_watcher() -> Watcher | None:
    """Returns the watcher of the current trace; None if the current trace is not a ``FrontTrace``."""
    trace = core.trace_ctx.trace
    return trace.watcher if isinstance(trace, FrontTrace) else None


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Puts a ``FrontTrace`` in front of the current trace, so that the watcher gets all primitives."""
    with core.set_current_trace(FrontTrace(watcher)):
        yield


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Removes the current ``FrontTrace``, if there is one, so that its watcher gets no primitives."""
    trace = core.trace_ctx.trace
    with core.set_current_trace(trace.parent_trace if isinstance(trace, FrontTrace) else trace):
        yield

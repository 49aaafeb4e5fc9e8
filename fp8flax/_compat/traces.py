"""Puts a trace of ours in front of JAX's: it sees each primitive that code binds, before JAX computes it.

Why: ``quantize_model`` must meet the contractions of a model's methods, whatever these are written with.
``nn.Dense``, ``x @ w`` and ``jnp.einsum`` have only in common that they bind one primitive of JAX.

Internals: ``jax._src.core``, for the class of traces, the current one, how another one is made current, and
``eval_jaxpr``. Without it a model that ``quantize_model`` converted raises an error when it runs.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from fp8flax._compat.missing import MissingPart

_Trace: Any = object
try:
    from jax._src import core

    _NEEDED = core.trace_ctx, core.set_current_trace, core.eval_jaxpr
    _Trace = core.Trace
except (ImportError, AttributeError):
    core = MissingPart("jax._src.core", "fp8flax.quantize_model")


class Watcher(ABC):
    """Sees what the code that runs asks of JAX."""

    @abstractmethod
    def on_primitive(
        self, front: FrontTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Returns the result of a primitive: that of ``front.compute``, or another one."""

    @abstractmethod
    def on_function(self, operands: Sequence[Any]) -> None:
        """Is called with what goes into a function that has no jaxpr yet, as of ``jax.custom_vjp``."""


class FrontTrace(_Trace):
    """A trace that shows each primitive to a watcher. Its values are those of the trace behind it."""

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
        """Computes a closed jaxpr primitive by primitive; the watcher sees each."""
        with core.set_current_trace(self):
            return core.eval_jaxpr(program.jaxpr, program.consts, *operands)

    def process_primitive(self, primitive: Any, operands: Any, params: Any, /) -> Any:
        return self.watcher.on_primitive(self, primitive, operands, params)

    def _hand_on(self, method: str, args: Any, kwargs: Any) -> Any:
        for values in args:
            if isinstance(values, list | tuple):
                self.watcher.on_function(values)
        return getattr(self.parent_trace, method)(*args, **kwargs)

    # With the signatures of the JAX version at hand.
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
    """Returns the watcher of the current trace; None if it is one of JAX's."""
    trace = core.trace_ctx.trace
    return trace.watcher if isinstance(trace, FrontTrace) else None


@contextlib.contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """A context in which the watcher sees all that goes to the current trace."""
    with core.set_current_trace(FrontTrace(watcher)):
        yield


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """A context in which the watcher of the current trace sees nothing."""
    trace = core.trace_ctx.trace
    with core.set_current_trace(trace.parent_trace if isinstance(trace, FrontTrace) else trace):
        yield

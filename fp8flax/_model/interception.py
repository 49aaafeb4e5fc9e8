"""Finds the contractions that the methods of Linen modules compute, whatever they are written with.

``nn.Dense``, ``x @ w``, ``jnp.einsum`` and ``lax.dot_general`` all bind one JAX primitive. While a module's
method runs, a trace of our own stands in front of the one that was current: it hands every primitive on as
it is, except that contractions go to a handler, together with the module; and it tells the provenance what
became of which values.

Internals: ``jax._src.core``, for the class of traces and how the current one is set;
``jax._src.source_info_util``, for the scopes around a contraction; and what a scope of Flax holds,
``_variables``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from jax._src import core, source_info_util

from fp8flax._core.names import BY_OP, COUNTED, NOT_CONVERTED
from fp8flax._model.jaxprs import CONTRACTIONS, has_contraction
from fp8flax._model.provenance import Derived, Provenance

# Whole elements of a stack of names, where a module's name may only begin alike.
_OURS = re.compile(rf"\b(?:{BY_OP}|{NOT_CONVERTED}|{COUNTED}[0-9a-f]{{8}})\b")


class Frame(NamedTuple):
    """A method of a module that is running."""

    module: nn.Module
    method: str
    """Empty for ``__call__`` and for compact methods."""
    counts: dict[str, int]
    """How many contractions of a kind it has computed."""
    is_apart: bool = False
    """Whether the module is one that a method applies to variables of its own, outside of the model."""

    @property
    def path(self) -> tuple[str, ...]:
        """The module's."""
        scope: Any = self.module.scope
        return scope.path

    def count(self, kind: str) -> int:
        """Returns the number of this contraction of its kind."""
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        return number


class Contraction(NamedTuple):
    """A contraction that a method is about to compute."""

    primitive: str
    operands: tuple[Any, ...]
    params: dict[str, Any]
    derived: tuple[Derived | None, ...]
    """For each of the first two operands, what it owes to parameters."""
    elsewhere: str | None
    """The path of a variable outside of ``params`` that one of the two is made of."""
    frame: Frame


class Left(NamedTuple):
    """What a handler returns for a contraction to be computed as it is."""

    scope: str = NOT_CONVERTED
    """The ``jax.named_scope`` that it is computed in."""


Handler = Callable[[Contraction], Any]
"""Returns the result of a contraction, or a ``Left``."""


class Interception:
    """What all traces of one call of a model share: the handler, and where values come from."""

    def __init__(
        self,
        handler: Handler,
        provenance: Provenance,
        leave_alone: Callable[[nn.Module], bool],
        model: type[nn.Module],
        state: str,
    ) -> None:
        self.handler = handler
        self.provenance = provenance
        self._leave_alone = leave_alone
        self._model = model
        self._state = state
        self.is_passing = False
        """Whether a trace has dealt with what reaches those behind it, as under ``nn.vmap``."""
        self.is_apart = False
        """Whether a module runs that a method applies to variables of its own, outside of the model."""

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A context in which all traces hand everything on."""
        before, self.is_passing = self.is_passing, True
        try:
            yield
        finally:
            self.is_passing = before

    @contextlib.contextmanager
    def frame_of(self, module: nn.Module, method: str) -> Iterator[Frame]:
        """A context with the frame of a method that runs in it."""
        root: Any = module.scope.root  # type: ignore[union-attr]
        # The model may apply itself, to all of its variables.
        is_itself = isinstance(module, self._model) and self._state in root._variables
        before = self.is_apart
        self.is_apart |= not (self.provenance.has_place(root) or is_itself)
        try:
            yield Frame(module, method, {}, self.is_apart)
        finally:
            self.is_apart = before

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """A context of which nothing is looked into, as of an op."""
        with _behind(), self.passing(), jax.named_scope(BY_OP):
            yield

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which contractions of Linen modules' methods go to the handler.

        The handler runs outside of the interception. Methods of modules of which ``leave_alone`` is true
        are not looked into. Nor is what a transformation of JAX makes a program of (a
        ``lax.scan``, a ``jax.checkpoint``, a function with a derivative of its own), unless Linen's form of
        it is used.
        """

        def around(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            if self.is_passing:
                return call(*args, **kwargs)
            if self._leave_alone(context.module) or context.module.scope is None:
                with self.unseen():
                    return call(*args, **kwargs)
            is_main = context.method_name == "__call__" or hasattr(context.orig_method, "compact")
            with _in_frame(self, context.module, "" if is_main else context.method_name):
                return call(*args, **kwargs)

        return nn.intercept_methods(around)

    def active_in_setup(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which ``setup`` is looked into, and nothing else."""

        def around(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            if context.method_name != "setup" or context.module.scope is None:
                return call(*args, **kwargs)
            with _in_frame(self, context.module, "setup"):
                return call(*args, **kwargs)

        return nn.intercept_methods(around)


class _Trace(core.Trace):
    """Hands everything to the trace behind it, but contractions."""

    def __init__(self, behind: Any, interception: Interception) -> None:
        super().__init__()
        self.parent_trace = behind
        self.interception = interception
        self.frames: list[Frame] = []
        self.requires_low = behind.requires_low

    def process_primitive(self, primitive: Any, operands: Any, params: Any, /) -> Any:
        frame, interception = self.frames[-1], self.interception
        if interception.is_passing:
            return self.parent_trace.process_primitive(primitive, operands, params)
        if primitive.name in CONTRACTIONS and not _was_dealt_with(source_info_util.current_name_stack()):
            provenance, scope = interception.provenance, frame.module.scope
            derived = tuple(provenance.of(x, scope) for x in operands[:2])
            elsewhere = [provenance.elsewhere(x, scope) for x in operands[:2]]
            with core.set_current_trace(self.parent_trace), interception.passing():
                result = interception.handler(
                    Contraction(
                        primitive.name,
                        tuple(operands),
                        params,
                        derived,
                        next(filter(None, elsewhere), None),
                        frame,
                    )
                )
            if not isinstance(result, Left):
                return result
            with jax.named_scope(result.scope), interception.passing():
                results = self.parent_trace.process_primitive(primitive, operands, params)
            interception.provenance.follow(primitive, operands, params, results, frame.module.scope)
            return results
        if primitive.name == "jit" and self._should_open(operands, params, frame):
            with core.set_current_trace(self):
                return core.eval_jaxpr(params["jaxpr"].jaxpr, params["jaxpr"].consts, *operands)
        with interception.passing():
            results = self.parent_trace.process_primitive(primitive, operands, params)
        interception.provenance.follow(primitive, operands, params, results, frame.module.scope)
        return results

    def _should_open(self, operands: Any, params: Any, frame: Frame) -> bool:
        """Tells whether to look into a jitted function, such as those that ``jax.numpy`` consists of."""
        specified = (*params["in_shardings"], *params["out_shardings"])
        if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in specified):
            return False
        if _was_traced(params["jaxpr"].jaxpr):
            return False
        return has_contraction(params["jaxpr"]) or any(
            self.interception.provenance.of(x, frame.module.scope) is not None for x in operands
        )

    def _hand_on(self, method: str, args: Any, kwargs: Any) -> Any:
        """Lets the trace behind do what has no jaxpr to look into; reads what is given to it."""
        for values in () if self.interception.is_passing else args:
            for value in values if isinstance(values, list | tuple) else ():
                self.interception.provenance.use(value, self.frames[-1].module.scope)
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


def _was_traced(jaxpr: core.Jaxpr) -> bool:
    """Tells whether a jaxpr is that of ``nn.jit``, whose modules were looked into when it was made."""
    return any(_was_dealt_with(eqn.source_info.name_stack) for eqn in jaxpr.eqns)


def _was_dealt_with(stack: Any) -> bool:
    """Tells whether what is computed in these scopes is a contraction that was seen, or its derivative."""
    return _OURS.search(str(stack)) is not None


@contextlib.contextmanager
def _behind() -> Iterator[None]:
    """Lets what is inside pass by the interception."""
    trace = core.trace_ctx.trace
    with core.set_current_trace(trace.parent_trace if isinstance(trace, _Trace) else trace):
        yield


@contextlib.contextmanager
def _in_frame(interception: Interception, module: nn.Module, method: str) -> Iterator[None]:
    trace = core.trace_ctx.trace
    if isinstance(trace, _Trace) and trace.interception is interception:
        if trace.frames[-1].module.scope is module.scope:  # a method that another one calls
            yield
            return
        with interception.frame_of(module, method) as frame:
            trace.frames.append(frame)
            try:
                yield
            finally:
                trace.frames.pop()
        return
    # Inside nn.scan, nn.remat, jax.vmap and the like another trace is current than outside.
    trace = _Trace(trace, interception)
    with interception.frame_of(module, method) as frame, core.set_current_trace(trace):
        trace.frames.append(frame)
        try:
            yield
        finally:
            trace.frames.clear()  # JAX may hold the trace for longer

"""Finds the contractions that the methods of Linen modules compute, in any way they are written.

``nn.Dense``, ``x @ w``, ``jnp.einsum`` and ``lax.dot_general`` all bind one JAX primitive. While a module's
method runs, a trace of this package is in front of the current one (``_compat.traces``). It lets JAX
compute every primitive except contractions. These go to a handler, together with the module whose method
computes them. ``ParamOrigins`` gets all other primitives, to know which values are parameters.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fp8flax._compat import name_scopes
from fp8flax._compat.jaxprs import Equation, equations
from fp8flax._compat.traces import FrontTrace, Watcher, current_watcher, unwatched, watched_by
from fp8flax._core.names import BY_OP, COUNTED, NOT_CONVERTED
from fp8flax._core.plans.row import OpRow, row_of
from fp8flax._model.param_origin import Origin, ParamOrigins
from fp8flax._model.program_reads import IN_OP

# Matches a whole element of a stack of scopes, because a module's name may begin with the same text.
_OURS = re.compile(rf"\b(?:{BY_OP}|{NOT_CONVERTED}|{COUNTED}[0-9a-f]{{8}})\b")


def has_contraction(program: Any) -> bool:
    """Returns whether a program has a contraction, in itself or in the jitted functions inside of it."""
    found = equations(program, looks_into=lambda equation: equation.eqn.primitive.name == "jit")
    return any(row_of(one.eqn.primitive) is not None for one in found)


def contractions_in(program: Any) -> Iterator[tuple[OpRow, Equation]]:
    """Yields the contractions of a program outside of its FP8 ops, each with its row in the table."""

    def is_outside(equation: Equation) -> bool:
        row = row_of(equation.eqn.primitive)
        return row is None and IN_OP.search(equation.scopes) is None

    for one in equations(program, looks_into=is_outside):
        row = row_of(one.eqn.primitive)
        if row is not None and IN_OP.search(one.scopes) is None:
            yield row, one


class Frame(NamedTuple):
    """A method of a module that is running."""

    module: nn.Module
    method: str
    """The name of the method; empty for ``__call__`` and for compact methods."""
    counts: dict[str, int]
    """The number of contractions of each kind that the method has computed."""
    is_apart: bool = False
    """Whether a method applies the module to other variables than those of the model."""

    @property
    def path(self) -> tuple[str, ...]:
        """The path of the module in the model."""
        scope: Any = self.module.scope
        return scope.path

    def count(self, kind: str) -> int:
        """Counts a contraction, and returns its number among those of its kind, from 0."""
        number = self.counts.get(kind, 0)
        self.counts[kind] = number + 1
        return number


class Contraction(NamedTuple):
    """A contraction that a method is about to compute."""

    op: OpRow
    operands: tuple[Any, ...]
    params: dict[str, Any]
    origins: tuple[Origin | None, ...]
    """The origins of the first two operands; None for one that comes from anything but parameters."""
    elsewhere: str | None
    """The path of a variable outside of ``params`` that one of the two operands comes from, or None."""
    frame: Frame


class Left(NamedTuple):
    """The value that a handler returns for a contraction that stays wide."""

    scope: str = NOT_CONVERTED
    """The ``jax.named_scope`` that the contraction is computed in."""


Handler = Callable[[Contraction], Any]
"""Returns the result of a contraction, or a ``Left``."""


class Interception:
    """Sends the contractions of one call of a model to a handler. All traces of the call share it."""

    def __init__(
        self,
        handler: Handler,
        origins: ParamOrigins,
        leave_alone: Callable[[nn.Module], bool],
        model: type[nn.Module],
        state: str,
    ) -> None:
        self.handler = handler
        self.origins = origins
        self._leave_alone = leave_alone
        self._model = model
        self._state = state
        self.is_passing = False
        """Whether watchers pass on all primitives, because an earlier one handles them (``nn.vmap``)."""
        self.is_apart = False
        """Whether the running module is applied to other variables than those of the model."""

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A context in which all watchers pass all primitives on."""
        before, self.is_passing = self.is_passing, True
        try:
            yield
        finally:
            self.is_passing = before

    @contextlib.contextmanager
    def frame_of(self, module: nn.Module, method: str) -> Iterator[Frame]:
        """A context in which a method runs; its value is the frame of the method."""
        root: Any = module.scope.root  # type: ignore[union-attr]
        # A model that applies itself to all of its variables still has its place for state.
        is_itself = isinstance(module, self._model) and self._state in root.variables()
        before = self.is_apart
        self.is_apart |= not (self.origins.has_place(root) or is_itself)
        try:
            yield Frame(module, method, {}, self.is_apart)
        finally:
            self.is_apart = before

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """A context in which no primitive is intercepted, for the computation of an op."""
        with unwatched(), self.passing(), jax.named_scope(BY_OP):
            yield

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which contractions of Linen modules' methods go to the handler.

        The handler itself runs outside of the interception. Modules for which ``leave_alone`` returns True
        are not intercepted. Functions inside of JAX's own transformations (``lax.scan``,
        ``jax.checkpoint``, custom derivatives) are not intercepted either; those inside of Linen's
        transformations are.
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


class _Watcher(Watcher):
    """Sends the contractions of the methods that run in one trace of JAX to the handler."""

    def __init__(self, interception: Interception) -> None:
        self.interception = interception
        self.frames: list[Frame] = []

    def on_primitive(
        self, front: FrontTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        frame, interception = self.frames[-1], self.interception
        if interception.is_passing:
            return front.compute(primitive, operands, params)
        scope, origins = frame.module.scope, interception.origins
        computed_in: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        op = row_of(primitive)
        if op is not None and not _was_handled(name_scopes.current()):
            elsewhere = [origins.elsewhere(x, scope) for x in operands[:2]]
            contraction = Contraction(
                op,
                tuple(operands),
                params,
                tuple(origins.of(x, scope) for x in operands[:2]),
                next(filter(None, elsewhere), None),
                frame,
            )
            with front.behind(), interception.passing():
                result = interception.handler(contraction)
            if not isinstance(result, Left):
                return result
            computed_in = jax.named_scope(result.scope)
        elif primitive.name == "jit" and self._should_open(operands, params, frame):
            return front.open(params["jaxpr"], operands)
        with computed_in, interception.passing():
            results = front.compute(primitive, operands, params)
        origins.follow(primitive, operands, params, results, scope)
        return results

    def on_function(self, operands: Sequence[Any]) -> None:
        for value in () if self.interception.is_passing else operands:
            self.interception.origins.use(value, self.frames[-1].module.scope)

    def _should_open(self, operands: Any, params: Any, frame: Frame) -> bool:
        """Returns whether to trace into a jitted function, such as the functions of ``jax.numpy``."""
        specified = (*params["in_shardings"], *params["out_shardings"])
        if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in specified):
            return False
        # The modules in a function of nn.jit were already intercepted when the function was traced.
        top_level = equations(params["jaxpr"], looks_into=lambda _: False)
        if any(_was_handled(one.scopes) for one in top_level):
            return False
        return has_contraction(params["jaxpr"]) or any(
            self.interception.origins.of(x, frame.module.scope) is not None for x in operands
        )


def _was_handled(scopes: str) -> bool:
    """Returns whether these scopes belong to a contraction that was handled before, or its derivative."""
    return _OURS.search(scopes) is not None


@contextlib.contextmanager
def _in_frame(interception: Interception, module: nn.Module, method: str) -> Iterator[None]:
    """A context in which a method of a module runs, and its contractions are intercepted."""
    watcher = current_watcher()
    if not isinstance(watcher, _Watcher) or watcher.interception is not interception:
        # Each trace needs its own watcher; nn.scan, nn.remat and jax.vmap start another trace.
        with watched_by(_Watcher(interception)), _in_frame(interception, module, method):
            yield
        return
    # A method that is called by another method of its module shares the frame of that method.
    if watcher.frames and watcher.frames[-1].module.scope is module.scope:
        yield
        return
    with interception.frame_of(module, method) as frame:
        watcher.frames.append(frame)
        try:
            yield
        finally:
            watcher.frames.pop()  # JAX may keep the trace and the watcher alive

"""Finds the contractions that the methods of Linen modules compute, in any way they are written.

``nn.Dense``, ``x @ w``, ``jnp.einsum`` and ``lax.dot_general`` all bind one JAX primitive. While a module's
method runs, a trace of this package is in front of the current one (``_compat.traces``). It lets JAX
compute every primitive except contractions. These go to ``Interception.contract``, together with the module
whose method computes them. ``ParamOrigins`` gets all other primitives, to know which values are parameters.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fp8flax._compat import name_scopes
from fp8flax._compat.jaxprs import Equation, equations
from fp8flax._compat.traces import FrontTrace, current_trace, running_in, unwatched
from fp8flax._core.names import BY_OP, COUNTED, NOT_CONVERTED, OVERWRITE_WITH_GRADIENT
from fp8flax._core.ops.row import OpRow, row_of
from fp8flax._linen.op import Fp8Op
from fp8flax._model.param_origin import ParamOrigins
from fp8flax._model.program_reads import IN_OP

# Matches a whole element of a stack of scopes, because a module's name may begin with the same text.
_OURS = re.compile(rf"\b(?:{BY_OP}|{NOT_CONVERTED}|{COUNTED}[0-9a-f]{{8}})\b")


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


class Interception(ABC):
    """Sends the contractions of one call of a model to ``contract``. All traces of the call share it."""

    beside_params = OVERWRITE_WITH_GRADIENT
    """The collection with the variables of the ops."""

    def __init__(self, cls: type[nn.Module]) -> None:
        self.cls = cls
        """The class of the model."""
        self.origins = ParamOrigins()
        self.is_passing = False
        """Whether all primitives are passed on, because an earlier trace handles them (``nn.vmap``)."""
        self.is_apart = False
        """Whether the running module is applied to other variables than those of the model."""

    @abstractmethod
    def contract(
        self, row: OpRow, operands: Sequence[Any], params: dict[str, Any], frame: Frame
    ) -> tuple[Any, str]:
        """Computes a contraction in FP8, or leaves it wide; it runs outside of the interception.

        Returns:
            The result, and an empty text. Or None, and the ``jax.named_scope`` to compute the contraction
            in without FP8.
        """

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """A context in which all traces of the call pass all primitives on."""
        before, self.is_passing = self.is_passing, True
        try:
            yield
        finally:
            self.is_passing = before

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which contractions of Linen modules' methods go to ``contract``.

        FP8 ops are not intercepted. Functions inside of JAX's own transformations (``lax.scan``,
        ``jax.checkpoint``, custom derivatives) are not intercepted either; those inside of Linen's
        transformations are.
        """

        def around(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
            if self.is_passing:
                return call(*args, **kwargs)
            if isinstance(context.module, Fp8Op) or context.module.scope is None:
                with unwatched(), self.passing(), jax.named_scope(BY_OP):
                    return call(*args, **kwargs)
            is_main = context.method_name == "__call__" or hasattr(context.orig_method, "compact")
            with self._in_frame(context.module, "" if is_main else context.method_name):
                return call(*args, **kwargs)

        return nn.intercept_methods(around)

    @contextlib.contextmanager
    def _in_frame(self, module: nn.Module, method: str) -> Iterator[None]:
        """A context in which a method of a module runs, and its contractions are intercepted."""
        front = current_trace()
        if not isinstance(front, _Front) or front.interception is not self:
            # Each trace needs its own front; nn.scan, nn.remat and jax.vmap start another trace.
            with running_in(_Front(self)), self._in_frame(module, method):
                yield
            return
        # A method that is called by another method of its module shares the frame of that method.
        if front.frames and front.frames[-1].module.scope is module.scope:
            yield
            return
        root: Any = module.scope.root  # type: ignore[union-attr]
        # A model that applies itself to all of its variables still has its place for state.
        is_itself = isinstance(module, self.cls) and self.beside_params in root.variables()
        before = self.is_apart
        self.is_apart |= not (self.origins.has_place(root) or is_itself)
        front.frames.append(Frame(module, method, {}, self.is_apart))
        try:
            yield
        finally:
            front.frames.pop()  # JAX may keep the trace alive
            self.is_apart = before


class _Front(FrontTrace):
    """Sends the contractions of the methods that run in one trace of JAX to an ``Interception``."""

    def __init__(self, interception: Interception) -> None:
        super().__init__()
        self.interception = interception
        self.frames: list[Frame] = []

    def on_primitive(self, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        frame, interception = self.frames[-1], self.interception
        if interception.is_passing:
            return self.compute(primitive, operands, params)
        computed_in: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        row = row_of(primitive)
        if row is not None and not _was_handled(name_scopes.current()):
            with self.behind(), interception.passing():
                result, scope = interception.contract(row, operands, params, frame)
            if result is not None:
                return result
            computed_in = jax.named_scope(scope)
        elif primitive.name == "jit" and self._should_open(operands, params, frame):
            return self.open(params["jaxpr"], operands)
        with computed_in, interception.passing():
            results = self.compute(primitive, operands, params)
        interception.origins.follow(primitive, operands, params, results, frame.module.scope)
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
        inside = equations(params["jaxpr"], looks_into=lambda one: one.eqn.primitive.name == "jit")
        return any(row_of(one.eqn.primitive) is not None for one in inside) or any(
            self.interception.origins.of(x, frame.module.scope) is not None for x in operands
        )


def _was_handled(scopes: str) -> bool:
    """Returns whether these scopes belong to a contraction that was handled before, or its derivative."""
    return _OURS.search(scopes) is not None

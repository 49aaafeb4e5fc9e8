"""Finds the contractions that the methods of modules compute, in any way they are written.

``nn.Dense``, ``x @ w``, ``jnp.einsum`` and ``lax.dot_general`` all bind one JAX primitive. While a module's
method runs, a trace of this package is in front of the current one (``_compat.traces``). It lets JAX
compute every primitive except contractions. These go to ``Interception.contract``. ``ParamOrigins`` gets
all other primitives, to know which values are parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from fp8flax._compat import name_scopes
from fp8flax._compat.jaxprs import equations
from fp8flax._compat.traces import FrontTrace, current_handler, running_in
from fp8flax._core.names import BY_OP, COUNTED, NOT_CONVERTED
from fp8flax._core.ops.op import Op
from fp8flax._linen.ops import row_of
from fp8flax._model.param_origin import Origin, ParamOrigins
from fp8flax._model.rules import Site

Path = tuple[str, ...]

# It matches a whole element of a stack of scopes, because a module's name may begin with the same text.
_OURS = re.compile(rf"\b(?:{BY_OP}|{NOT_CONVERTED}|{COUNTED}[0-9a-f]{{8}})\b")


@dataclasses.dataclass
class Frame:
    """A method of a module that is running."""

    path: Path
    """The path of the module; empty in NNX, which finds parameters below the module, whatever its path."""
    module: Any
    method: str | None
    """The name of the method; empty for ``__call__`` and for compact methods.

    None for what a Linen transformation of the model's class computes around its methods."""
    scope: Any = None
    """The scope of a Linen module."""
    trace: Any = None
    """The trace of JAX that a method of a Linen module runs in."""
    num_params: int = -1
    """How many parameters, or modules with parameters, of the module are recorded."""
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """The number of contractions without a kernel that the method has computed, by their names."""


class Interception(ABC):
    """Sends the contractions of one call of a model to ``contract``. All traces of the call share it."""

    frame: Frame
    """The innermost method that is running."""
    is_nnx = False

    def __init__(self) -> None:
        self.origins = ParamOrigins()
        self.custom_vjps: list[bool] = []
        """Whether the running functions that are not looked into have derivatives of their own."""
        self.is_passing = False
        """Whether all primitives are passed on, because an earlier trace handles them (``nn.vmap``)."""

    @abstractmethod
    def contract(self, site: Site, kernel: Origin | None, by: Callable[[Any], jax.Array]) -> Any:
        """Returns ``by(op)`` for the FP8 op of a contraction, or the scope to compute it in without FP8.

        ``site.name`` is the part of the op's name that comes from the kernel. ``kernel`` is None for two
        activations or two parameters.
        """

    @abstractmethod
    def look_for_params(self) -> None:
        """Records the parameters of the running module in ``origins``."""

    @contextlib.contextmanager
    def having(self, **fields: Any) -> Iterator[None]:
        """A context in which these fields of the call have other values."""
        before = {name: getattr(self, name) for name in fields}
        vars(self).update(fields)
        try:
            yield
        finally:
            vars(self).update(before)

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the contractions of the current trace go to ``contract``.

        Functions inside of transformations (``lax.scan``, ``jax.checkpoint``, custom derivatives) run in
        other traces. The modules inside of Flax's transformations call this method again.
        """
        if current_handler() is self:
            return contextlib.nullcontext()
        return running_in(FrontTrace(self, passes_for_behind=self.is_nnx))

    def _contraction(self, row: type[Op], operands: Sequence[Any], params: Mapping[str, Any]) -> Any:
        """Returns the contraction that a primitive computes, as the arguments of ``contract``."""
        lhs, rhs, *more = operands
        arguments: tuple[Any, ...] = (*more, *row.arguments(params))
        left, kernel = self.origins.of(lhs), self.origins.of(rhs)
        restore: Callable[[Any], Any] = lambda out: out  # noqa: E731
        is_swapped = left is not None and kernel is None and row.swapped is not None
        if is_swapped and row.swapped is not None:
            arguments, restore = row.swapped(lhs, rhs, *arguments)
            lhs, rhs, left, kernel = rhs, lhs, None, left
        impossible, kind = row.unsupported(params), "product"
        if left is not None and kernel is not None:
            impossible, kind, kernel = impossible or "a product of two parameters", "parameters", None
        frame = self.frame
        if kernel is None:
            product = f"{frame.method or ''}_{kind}".lstrip("_")
            name = f"{product}_{frame.counts[product]}"
            frame.counts[product] += 1
        else:
            name = kernel.name(frame.path, arguments[0][0][1] if row.primitive == "dot_general" else ())
        site = Site(
            path="/".join(frame.path),
            module=frame.module,
            kernel=None if kernel is None else "/".join(kernel.sources[0].path),
            op=row,
            shapes=(lhs.shape, rhs.shape),
            dtypes=(lhs.dtype, rhs.dtype),
            sizes=row.sizes(lhs.shape, rhs.shape, *arguments),
            is_matmul=row.is_matmul(lhs, rhs, *arguments),
            impossible=impossible,
            name=name,
            is_swapped=is_swapped,
            in_custom_vjp=any(self.custom_vjps),
        )
        return site, kernel, lambda op: restore(op(lhs, rhs, *arguments))

    def on_primitive(
        self, front: FrontTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Computes a primitive, or sends it to ``contract``; the trace in front calls this method."""
        if self.is_passing:
            return front.compute(primitive, operands, params)
        self.look_for_params()  # for every primitive, so it must be fast
        scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        row = row_of(primitive)
        if row is not None and not _was_handled(name_scopes.current()):
            with running_in(front.behind), self.having(is_passing=True):
                result = self.contract(*self._contraction(row, operands, params))
            if not isinstance(result, str):
                return result
            scope = jax.named_scope(result)
        elif primitive.name == "jit" and self._should_open(operands, params):
            return front.open(params["jaxpr"], operands)
        with scope, self.having(is_passing=True):
            results = front.compute(primitive, operands, params)
        self.origins.follow(primitive, operands, params, results)
        return results

    def on_function(self, is_custom_vjp: bool, operands: Sequence[Any], compute: Any) -> Any:
        """Computes a function that is not looked into; the trace in front calls this method."""
        if self.is_passing:
            return compute()
        self.look_for_params()
        self.custom_vjps.append(is_custom_vjp)
        try:
            results = compute()
        finally:
            self.custom_vjps.pop()
        self.origins.call(operands, results)
        return results

    def _should_open(self, operands: Any, params: Any) -> bool:
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
            self.origins.of(x) is not None for x in operands
        )


def _was_handled(scopes: str) -> bool:
    """Returns whether these scopes belong to a contraction that was handled before, or its derivative."""
    return _OURS.search(scopes) is not None

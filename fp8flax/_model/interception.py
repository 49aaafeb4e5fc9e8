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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from fp8flax._compat.jaxprs import equations
from fp8flax._compat.stand_in import READ, StandIn, refuse
from fp8flax._compat.traces import FrontTrace, current_handler, current_scopes, running_in
from fp8flax._core.names import BY_OP, COUNTED, NOT_CONVERTED
from fp8flax._core.ops.op import Op
from fp8flax._linen.conversion import having
from fp8flax._linen.ops import row_of
from fp8flax._model.param_origin import CAST, MOVEMENTS, Origin, ParamOrigins
from fp8flax._model.rules import Site

HANDLED = re.compile(rf"\b(?:{BY_OP}|{NOT_CONVERTED}|{COUNTED}[0-9a-f]{{8}})\b")
"""Scopes of a contraction that was handled before, or of its derivative.

The pattern matches a whole element of a stack of scopes, because a module's name may begin with the same
text."""


@dataclasses.dataclass
class Frame:
    """A method of a module that is running."""

    module: Any
    method: str | None
    """The name of the method; empty for ``__call__`` and for compact methods.

    None for what a Linen transformation of the model's class computes around its methods."""
    path: tuple[str, ...] = ()
    """The path of the module; empty in NNX, which finds parameters below the module, whatever its path."""
    trace: Any = None
    """The trace of JAX that a method of a Linen module runs in."""
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """The number of contractions without a kernel that the method has computed, by their names."""


class Interception:
    """Sends the contractions of one call of a model to ``contract``. All traces of the call share it."""

    is_passing = False
    """Whether all primitives are passed on, because an earlier trace handles them (``nn.vmap``)."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        """The methods that are running, from the outermost to the innermost."""
        self.origins = ParamOrigins()
        self.custom_vjps: list[bool] = []
        """Whether the running functions that are not looked into have derivatives of their own."""

    def contract(self, site: Site, kernel: Origin | None, by: Callable[[Any], jax.Array]) -> Any:
        """Returns ``by(op)`` for the FP8 op of a contraction, or the scope to compute it in without FP8.

        ``site.name`` is the part of the op's name that comes from the kernel. ``kernel`` is None for two
        activations or two parameters.
        """
        raise NotImplementedError

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the contractions of the current trace go to ``contract``.

        In another trace, such as that of a loop's body, modules call this method again.
        """
        if current_handler() is self:
            return contextlib.nullcontext()
        return running_in(FrontTrace(self))

    def _contraction(self, row: type[Op], operands: Sequence[Any], params: Mapping[str, Any]) -> Any:
        """Returns the contraction that a primitive computes, as the arguments of ``contract``."""
        lhs, rhs, *more = operands
        arguments: tuple[Any, ...] = (*more, *row.arguments(params))
        left, kernel = self.origins.of(lhs), self.origins.of(rhs)
        restore: Callable[[Any], Any] | None = None
        if left is not None and kernel is None and row.swapped is not None:
            arguments, restore = row.swapped(lhs, rhs, *arguments)
            lhs, rhs, left, kernel = rhs, lhs, None, left
        frame, impossible = self.frames[-1], row.unsupported(params)
        if kernel is not None and left is None:
            name = kernel.name(frame.path, arguments[0][0][1] if row.primitive == "dot_general" else ())
        else:
            kind = "product" if kernel is None else "parameters"
            impossible = impossible or (None if kernel is None else "a product of two parameters")
            product, kernel = f"{frame.method or ''}_{kind}".lstrip("_"), None
            name = f"{product}_{frame.counts[product]}"
            frame.counts[product] += 1

        def by(op: Callable[..., jax.Array]) -> jax.Array:
            out = op(lhs, rhs, *arguments)
            return out if restore is None else restore(out)

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
            is_swapped=restore is not None,
            in_custom_vjp=any(self.custom_vjps),
        )
        return site, kernel, by

    def on_primitive(
        self, front: FrontTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """Computes a primitive, or sends it to ``contract``; the trace in front calls this method."""
        if self.is_passing:
            return front.compute(primitive, operands, params)
        scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        row = row_of(primitive)
        if row is not None and not HANDLED.search(current_scopes()):
            with running_in(front.behind), having(self, is_passing=True):
                result = self.contract(*self._contraction(row, operands, params))
            if not isinstance(result, str):
                return result
            scope = jax.named_scope(result)
        elif primitive.name == "jit" and self._should_open(operands, params):
            return front.open(params["jaxpr"], operands)
        with scope, having(self, is_passing=True):
            results = self.compute(front, primitive, operands, params)
        all_results = results if primitive.multiple_results else [results]
        self.origins.follow(operands, all_results, primitive, params)
        return results

    def compute(self, front: FrontTrace, primitive: Any, operands: Sequence[Any], params: Any) -> Any:
        """Computes a primitive that is not a contraction in FP8.

        A cast or a movement of a kernel that a frozen model stores moves its codes.
        """
        kernel = operands[0] if operands else None
        if primitive.name == READ:
            return StandIn(front, kernel, **params)
        if not isinstance(kernel, StandIn) or primitive.name not in MOVEMENTS:
            return front.compute(primitive, operands, params)
        if primitive.name == CAST:
            return StandIn(front, kernel.codes, params["new_dtype"], kernel.source)
        codes = front.compute(primitive, [kernel.codes], params)
        if getattr(codes, "size", None) != kernel.size:  # a part, several parts, or copies
            raise refuse(kernel.source)
        return StandIn(front, codes, kernel.dtype, kernel.source)

    def on_function(self, is_custom_vjp: bool, operands: Sequence[Any], compute: Any) -> Any:
        """Computes a function that is not looked into; the trace in front calls this method."""
        if self.is_passing:
            return compute()
        self.custom_vjps.append(is_custom_vjp)
        try:
            results = compute()
        finally:
            self.custom_vjps.pop()
        self.origins.follow(operands, results)
        return results

    def _should_open(self, operands: Any, params: Any) -> bool:
        """Returns whether to trace into a jitted function, such as the functions of ``jax.numpy``."""
        specified = (*params["in_shardings"], *params["out_shardings"])
        if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in specified):
            return False
        inside = [*equations(params["jaxpr"])]
        # The modules in a function of nn.jit were already intercepted when the function was traced.
        if any(HANDLED.search(one.scopes) for one in inside):
            return False
        has_contraction = any(row_of(one.eqn.primitive) is not None for one in inside)
        return has_contraction or any(self.origins.of(x) is not None for x in operands)

"""Finds the contractions that the methods of modules compute, in any way they are written.

``nn.Dense``, ``x @ w``, ``jnp.einsum`` and ``lax.dot_general`` all bind one JAX primitive. While a module's
method runs, a ``FrontTrace`` is in front of JAX's current trace, and sends each primitive here:

* A contraction goes to ``Interception.choose``, which returns the FP8 op that computes it, or the scope to
  compute it in without FP8. A contraction in one of the scopes ``HANDLED`` went there before.
* A jitted function, in NNX also one under ``jax.checkpoint``, is looked into if a contraction is in it that
  was not handled.
* JAX computes every other primitive. It may trace functions then, such as the body of a loop. The modules
  in it begin again, in front of the trace of the loop.

``ParamOrigins`` follows all primitives, to know which values are parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax

from fp8flax._compat.flax_internals import having
from fp8flax._compat.jaxprs import Compute, Operands, Params, Primitive, Results, equations
from fp8flax._compat.stand_in import READ, StandIn, refuse
from fp8flax._compat.traces import FrontTrace, Trace, current_handler, current_scopes, running_in
from fp8flax._core.names import BY_OP, COUNTED, MODULE, NOT_CONVERTED, SWITCHED_OFF
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.op import Op, OpBase
from fp8flax._core.types import OutSharding, Path
from fp8flax._linen.ops import op_type_of
from fp8flax._model.param_origin import CAST, MOVEMENTS, Origin, ParamOrigins
from fp8flax._model.rules import Site

HANDLED = re.compile(rf"\b(?:{BY_OP}|{NOT_CONVERTED}|{SWITCHED_OFF}|{COUNTED}[0-9]+)\b")
"""Scopes of a contraction that was handled before, or of its derivative.

The pattern matches a whole element of a stack of scopes, because a module's name may begin with the same
text."""

Restore: TypeAlias = Callable[[jax.Array], jax.Array]
"""Makes the result of a primitive from the result of its op, if they differ."""

GIVEN = "an op of its own"
"""The reason in reports for an op that the user gave to a layer."""


def scope_in(sites: dict[Hashable, Site], site: Site) -> str:
    """Returns the scope of a contraction among those of a model, by which ``report`` finds it."""
    return f"{COUNTED}{[*sites].index(site.key)}"


def given_site(op: OpBase, path: Path, kernel: str | None, *operands: jax.Array) -> Site:
    """Returns the contraction of an op that the user gave to the module at this path."""
    lhs, rhs, *arguments = operands
    shapes, dtypes, op_type = (lhs.shape, rhs.shape), (lhs.dtype, rhs.dtype), op.op_type
    sizes = op_type.sizes(*shapes, *arguments)
    site = Site(path, type(op), kernel, op_type, shapes, dtypes, sizes, is_matmul=True)
    return site._replace(name=op_type.name, converts=True, recipe=op.recipe, reason=GIVEN)


def in_module(path: Path) -> contextlib.AbstractContextManager[None]:
    """Returns a scope by which ``report`` finds the module of a contraction."""
    return jax.named_scope(f"{MODULE}({'/'.join(path)})")


@dataclasses.dataclass
class Frame:
    """A method of a module that is running."""

    module: Any
    method: str | None
    """The name of the method; empty for ``__call__`` and for compact methods.

    None for what a Linen transformation of the model's class computes around its methods."""
    path: Path = ()
    """The path of the module; empty in NNX, which finds parameters below the module, whatever its path."""
    trace: Trace | None = None
    """The trace of JAX that a method of a Linen module runs in."""
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """The number of contractions without a kernel that the method has computed, by their names."""


class Interception:
    """Chooses how the contractions of one call of a model are computed. All traces of the call share it."""

    opens: tuple[str, ...] = ("jit",)
    """The primitives that are looked into, if there is a contraction."""
    is_passing = False
    """Whether all primitives are passed on: an earlier trace handles them, as around ``nn.vmap``."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        """The methods that are running, from the outermost to the innermost."""
        self.origins = ParamOrigins()
        self.custom_vjps: list[bool] = []
        """Whether the running functions that are not looked into have derivatives of their own."""

    def choose(self, site: Site, kernel: Origin | None) -> Callable[..., jax.Array] | str:
        """Returns the FP8 op that computes a contraction, or the scope to compute it in without FP8."""
        raise NotImplementedError

    def origin_of(self, value: jax.Array) -> Origin | None:
        """Returns the origin of an operand; None if it is an activation."""
        return self.origins.of(value)

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the primitives of the current trace come here.

        In another trace, such as that of a loop's body, modules call this method again.
        """
        if current_handler() is self:
            return contextlib.nullcontext()
        return running_in(FrontTrace(self))

    def on_primitive(
        self, front: FrontTrace, primitive: Primitive, operands: Operands, params: Params
    ) -> Results:
        """Returns the result of a primitive; the trace in front calls this method."""
        if self.is_passing:
            return front.compute(primitive, operands, params)
        scope: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        op_type = op_type_of(primitive)
        if op_type is not None and not HANDLED.search(current_scopes()):
            with running_in(front.behind), having(self, is_passing=True):
                site, kernel, arguments, keywords, restore = self._contraction(op_type, operands, params)
                op = self.choose(site, kernel)
                if not isinstance(op, str):
                    with jax.named_scope(BY_OP):
                        out = op(*arguments, **keywords)
                    return out if restore is None else restore(out)
            scope = jax.named_scope(op)
        elif primitive.name in self.opens and self._should_open(primitive.name, operands, params):
            if primitive.name == "jit":
                return front.open(params["jaxpr"], operands)
            return self._rematerialized(front, operands, params)
        with scope, having(self, is_passing=True):
            results = self.compute(front, primitive, operands, params)
        all_results: Any = results if primitive.multiple_results else [results]
        self.origins.follow(operands, all_results, primitive, params)
        for x in all_results:
            if isinstance(x, StandIn):
                origin = self.origins.of(x)
                if origin is None or origin.steps is None:  # such as copies
                    raise refuse(x.source)
                x.cut = origin.cut
        return results

    def _contraction(
        self, op_type: type[Op], operands: Operands, params: Params
    ) -> tuple[Site, Origin | None, tuple[Any, ...], dict[str, OutSharding], Restore | None]:
        """Returns the contraction that a primitive computes, as a call of its op: the kernel on the right.

        The ``name`` of the site is the part of the op's name that comes from the kernel. The origin of the
        kernel is None for two activations or two parameters. The arguments and the keywords are those of
        ``Op.plain``.
        """
        lhs, rhs, *more = operands
        arguments: tuple[Any, ...] = (*more, *op_type.arguments(params))
        left, kernel = self.origin_of(lhs), self.origin_of(rhs)
        restore: Restore | None = None
        if left is not None and kernel is None and op_type.swapped is not None:
            arguments, restore = op_type.swapped(lhs, rhs, *arguments)
            lhs, rhs, left, kernel = rhs, lhs, None, left
        frame, impossible = self.frames[-1], op_type.unsupported(params)
        is_swapped, sharding = restore is not None, params.get("out_sharding")
        if is_swapped and sharding is not None:
            impossible = "its kernel is on the left, and the model gives the sharding of its result"
        if kernel is not None and left is None:
            name = kernel.name(frame.path, arguments[0][0][1] if op_type.primitive == "dot_general" else ())
        else:
            kind = "product" if kernel is None else "parameters"
            impossible = impossible or (None if kernel is None else "a product of two parameters")
            product, kernel = f"{frame.method or ''}_{kind}".lstrip("_"), None
            name = f"{product}_{frame.counts[product]}"
            frame.counts[product] += 1
        site = Site(
            path=frame.path,
            module=frame.module,
            kernel=None if kernel is None else "/".join(kernel.sources[0].path),
            op=op_type,
            shapes=(lhs.shape, rhs.shape),
            dtypes=(lhs.dtype, rhs.dtype),
            sizes=op_type.sizes(lhs.shape, rhs.shape, *arguments),
            is_matmul=op_type.is_matmul(lhs, rhs, *arguments),
            impossible=impossible,
            name=name,
            product=self.origins.note(lhs, rhs) if kernel is None else "",
            is_swapped=is_swapped,
            in_custom_vjp=any(self.custom_vjps),
        )
        keywords = {}
        if sharding is not None and op_type is DotGeneral:
            keywords["out_sharding"] = sharding
        elif sharding is not None:
            restore = lambda out: jax.sharding.reshard(out, sharding)  # noqa: E731
        return site, kernel, (lhs, rhs, *arguments), keywords, restore

    def compute(
        self, front: FrontTrace, primitive: Primitive, operands: Operands, params: Params
    ) -> Results:
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
        moved: Any = front.compute(primitive, [kernel.codes], params)
        if primitive.multiple_results:
            return [StandIn(front, codes, kernel.dtype, kernel.source) for codes in moved]
        return StandIn(front, moved, kernel.dtype, kernel.source)

    def on_function(self, is_custom_vjp: bool, operands: Operands, compute: Compute) -> Operands:
        """Computes a function that has no program to look into; the trace in front calls this method."""
        if self.is_passing:
            return compute()
        self.custom_vjps.append(is_custom_vjp)
        try:
            results = compute()
        finally:
            self.custom_vjps.pop()
        self.origins.follow(operands, results)
        return results

    def _rematerialized(self, front: FrontTrace, operands: Operands, params: Params) -> Operands:
        """Computes what ``jax.checkpoint`` has traced under ``jax.checkpoint`` again, and looks into it."""

        def compute(*inputs: jax.Array) -> Operands:
            self.origins.pass_on(operands, inputs)
            inner = FrontTrace(self)
            with running_in(inner):
                return inner.open(params["jaxpr"], inputs)

        jaxpr, options = params["jaxpr"], {name: params[name] for name in ("prevent_cse", "policy")}
        with running_in(front.behind):
            results = jax.checkpoint(compute, **options)(*operands)
        self.origins.follow(operands, results)
        # nnx.remat returns the parameters that it gets.
        given = dict(zip(jaxpr.invars, operands))
        self.origins.pass_on([given.get(var) for var in jaxpr.outvars], results)
        return results

    def _should_open(self, name: str, operands: Operands, params: Params) -> bool:
        """Returns whether to trace into a function, such as the jitted functions of ``jax.numpy``."""
        shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
        if any(type(sharding).__name__ != "UnspecifiedValue" for sharding in shardings):
            return False
        inside = [*equations(params["jaxpr"])]
        # The modules in a function of nn.jit or nnx.jit were already watched when it was traced.
        is_handled = [HANDLED.search(equation.scopes) is not None for equation in inside]
        for equation, handled in zip(inside, is_handled):
            if op_type_of(equation.eqn.primitive) and not handled and {*equation.inside} <= {*self.opens}:
                return True
        has_params = any(self.origins.of(x) is not None for x in operands)
        return name == "jit" and has_params and not any(is_handled)

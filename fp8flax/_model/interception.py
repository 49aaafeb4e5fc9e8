"""Finds the contractions that the methods of modules compute, in any way they are written.

``nn.Dense``, ``x @ w``, ``jnp.einsum`` and ``lax.dot_general`` all bind one JAX primitive. An
``Interception`` watches one call of a model: while a method of a module runs, a ``FrontTrace`` is in front
of JAX's current trace, and sends each primitive to ``on_primitive``::

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", init, (4, 8))   # its origin is recorded: the parameter "w"
            w = w.astype(jnp.bfloat16)          # JAX computes the cast; the result has the origin "w"
            return jnp.tanh(x @ w)              # a contraction with the kernel "w" goes to ``choose``

``choose`` returns what computes the contraction. These calls are watched, each by a class. The first four
have a ``choose`` of their own; the last two bring a ``compute`` along, for all other primitives:

* all calls of a converted model, to compute its contractions in FP8: ``Call`` (Linen), ``ModuleCall`` (NNX)
* calls that list contractions (``report``; NNX ``quantize_model``, too): ``CountingCall``, ``DryRunCall``
* calls that ``freeze`` traces, to see which code reads which parameter: ``RecordingCall`` in ``_serve``
* all calls of a frozen model, to bring the FP8 codes of kernels to their ops: ``ServingCall`` in ``_serve``

JAX may trace a function while it computes a primitive, such as the body of a loop. The modules that run in
the function put a ``FrontTrace`` in front of this inner trace. All of them report to one ``Interception``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax

from fp8flax._compat.flax_internals import having
from fp8flax._compat.jaxprs import Compute, Operands, Params, Primitive, Results, equations, has_shardings
from fp8flax._compat.stand_in import READ, refuse
from fp8flax._compat.traces import FrontTrace, Trace, current_handler, current_scopes, running_in
from fp8flax._core.names import BY_OP, COUNTED, NOT_CONVERTED, SWITCHED_OFF
from fp8flax._core.ops.contract import traced
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.op import Op
from fp8flax._core.types import Path
from fp8flax._linen.ops import op_type_of
from fp8flax._model.param_origin import Origin, ParamOrigins
from fp8flax._model.rules import Site

HANDLED = re.compile(rf"\b(?:{BY_OP}|{NOT_CONVERTED}|{SWITCHED_OFF}|{COUNTED}[0-9]+)\b")
"""Scopes of a contraction that was handled before, or of its derivative.

The pattern matches whole words, because a module's name, such as ``fp8_op_1``, may begin with one."""


@dataclasses.dataclass
class Frame:
    """A method of a module that is running."""

    module: Any
    method: str | None
    """The name of the method; empty for ``__call__`` and for compact methods.

    None for what a Linen transformation of the model's class computes around its methods."""
    trace: Trace
    """The trace of JAX that the method runs in."""
    path: Path = ()
    """The path of the module; empty in NNX, which finds parameters below the module, whatever its path."""
    below: Mapping[Path, Path] = dataclasses.field(default_factory=dict)
    """In NNX, the paths of variables below the module, by their first paths in the call."""
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    """The number of contractions without a kernel that the method has computed, by their names."""


def _ambient_precision() -> Any:
    """Returns the precision that JAX gives to a contraction without a precision of its own."""
    if jax.config.jax_default_matmul_precision is None:
        return None
    return traced(jax.lax.dot_general, (1.0, 1.0), (((), ()), ((), ())))[1]["precision"]


class Interception:
    """Chooses how the contractions of one call of a model are computed. All traces of the call share it."""

    opens: tuple[str, ...] = ("jit",)
    """The primitives whose programs are looked into, if there is a contraction."""
    is_passing = False
    """Whether JAX computes all primitives, because they belong to one that was handled already.

    A contraction inside of ``nn.vmap`` comes here for one example. To compute it, JAX binds the contraction
    of the whole batch in the trace around, which may be a ``FrontTrace`` of this call, too."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        """The methods that are running, from the outermost to the innermost."""
        self.origins = ParamOrigins()
        self.custom_vjps: list[bool] = []
        """For each running function without a program, whether it has a derivative of its own."""

    def choose(self, site: Site) -> Callable[..., jax.Array] | str:
        """Returns the FP8 op that computes a contraction, or the scope to compute it in without FP8."""
        raise NotImplementedError

    def origin_of(self, value: jax.Array) -> Origin | None:
        """Returns the origin of an operand; None if it is an activation."""
        return self.origins.of(value)

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the primitives of JAX's current trace come here."""
        if current_handler() is self:
            return contextlib.nullcontext()
        return running_in(FrontTrace(self))

    def on_primitive(
        self, front: FrontTrace, primitive: Primitive, operands: Operands, params: Params
    ) -> Results:
        """Returns the result of a primitive; the trace in front calls this method."""
        if self.is_passing:
            return front.compute(primitive, operands, params)
        op_type = op_type_of(primitive)
        if op_type is not None and not HANDLED.search(current_scopes()):
            with running_in(front.behind), having(self, is_passing=True):
                site, arguments, keywords, restore = self._contraction(op_type, operands, params)
                op = self.choose(site)
                if not isinstance(op, str):
                    with jax.named_scope(BY_OP):
                        out = op(*arguments, **keywords)
                    return restore(out)
            with jax.named_scope(op):
                return self.compute(front, primitive, operands, params)
        if primitive.name in self.opens and self._should_open(primitive.name, operands, params):
            if primitive.name == "jit":
                return front.open(params["jaxpr"], operands)
            return self._rematerialized(front, operands, params)
        return self.compute(front, primitive, operands, params)

    def compute(
        self, front: FrontTrace, primitive: Primitive, operands: Operands, params: Params
    ) -> Results:
        """Computes a primitive without FP8, and records the origins of its results."""
        if primitive.name == READ:  # only the call of a frozen model can read a kernel that is stored
            raise refuse(params["source"])
        with having(self, is_passing=True):
            results: Any = front.compute(primitive, operands, params)
        all_results = results if primitive.multiple_results else [results]
        self.origins.follow(operands, all_results, primitive, params)
        return results

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

    def _contraction(
        self, op_type: type[Op], operands: Operands, params: Params
    ) -> tuple[Site, tuple[object, ...], dict[str, object], Callable[[jax.Array], jax.Array]]:
        """Returns the contraction that a primitive computes, with the kernel on the right.

        The ``name`` of the site is the part of the op's name that comes from the kernel. Also returns the
        arguments and keywords of its op, those of ``Op.plain``, and a function of the op's result.
        """
        lhs, rhs, *more = operands
        frame = self.frames[-1]
        if params["precision"] == _ambient_precision() and getattr(frame.module, "precision", None) is None:
            params = {**params, "precision": None}  # the recipe sets the accumulation, as for ops by hand
        arguments: tuple[Any, ...] = (*more, *op_type.arguments(params))
        left, kernel, impossible = self.origin_of(lhs), self.origin_of(rhs), op_type.unsupported(params)
        restore: Callable[[jax.Array], jax.Array] = lambda out: out  # noqa: E731
        swap = op_type.swapped if left is not None and kernel is None else None
        if swap is not None:  # the kernel is on the left, as in w @ x
            arguments, restore = swap(lhs, rhs, *arguments)
            lhs, rhs, left, kernel = rhs, lhs, None, left

        keywords, sharding = {}, params.get("out_sharding")
        if sharding is not None and op_type is not DotGeneral:
            restore = lambda out: jax.sharding.reshard(out, sharding)  # noqa: E731
        elif sharding is not None:
            keywords["out_sharding"] = sharding
            if swap is not None:
                impossible = "its kernel is on the left, and the model gives the sharding of its result"

        if kernel is not None and left is None:
            name = kernel.name(frame.path, arguments[0][0][1] if op_type.primitive == "dot_general" else ())
        elif kernel is not None:
            kernel, name = None, self._numbered(frame, "parameters")
            impossible = impossible or "a product of two parameters"
        else:
            name = self._numbered(frame, "product")
        site = Site(
            path=frame.path,
            module=frame.module,
            sources=() if kernel is None else kernel.sources,
            op=op_type,
            shapes=(lhs.shape, rhs.shape),
            dtypes=(lhs.dtype, rhs.dtype),
            sizes=op_type.sizes(lhs.shape, rhs.shape, *arguments),
            is_matmul=op_type.is_matmul(lhs, rhs, *arguments),
            impossible=impossible,
            name=name,
            product=self.origins.note(lhs, rhs) if kernel is None else "",
            is_swapped=swap is not None,
            in_custom_vjp=any(self.custom_vjps),
        )
        return site, (lhs, rhs, *arguments), keywords, restore

    def _numbered(self, frame: Frame, kind: str) -> str:
        """Returns the name of a contraction without a kernel, such as ``decode_product_0``."""
        name = f"{frame.method or ''}_{kind}".lstrip("_")
        frame.counts[name] += 1
        return f"{name}_{frame.counts[name] - 1}"

    def _should_open(self, name: str, operands: Operands, params: Params) -> bool:
        """Returns whether to look into a function: for a contraction, or to follow a parameter through it.

        Many functions of ``jax.numpy`` are jitted, such as ``jnp.matmul`` and ``jnp.squeeze``.
        """
        if has_shardings(params):  # they would be lost
            return False
        inside = [*equations(params["jaxpr"])]
        # The modules in a function of nn.jit or nnx.jit were already watched when it was traced.
        is_handled = [HANDLED.search(equation.scopes) is not None for equation in inside]
        for equation, handled in zip(inside, is_handled):
            if op_type_of(equation.eqn.primitive) and not handled and {*equation.inside} <= {*self.opens}:
                return True
        has_params = any(self.origins.of(x) is not None for x in operands)
        return name == "jit" and has_params and not any(is_handled)

    def _rematerialized(self, front: FrontTrace, operands: Operands, params: Params) -> Operands:
        """Looks into what ``jax.checkpoint`` has traced, and computes it under ``jax.checkpoint`` again.

        ``front.open`` alone would keep all residuals.
        """

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

"""Runs one call of a converted model: computes each contraction as the rules decide, and records its op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import BY_OP, NOT_CONVERTED, PARAMS
from fp8flax._core.ops.row import OpRow
from fp8flax._core.recipes import CustomRecipe, Recipe
from fp8flax._linen.conversion import Stacking, conversion, converting
from fp8flax._linen.op import Fp8Op
from fp8flax._model.beside_params import beside_params
from fp8flax._model.contraction_site import as_op
from fp8flax._model.interception import Frame, Interception
from fp8flax._model.param_origin import Move, Origin
from fp8flax._model.program_reads import CAST
from fp8flax._model.rules import Decision, Rules, Site


class SeenOp(NamedTuple):
    """The record of an FP8 op that a model computes."""

    op: type[Fp8Op]
    gemms: CustomRecipe
    kernel: Origin | None
    """The origin of the kernel; None if the kernel does not come from parameters only. If the op multiplies
    by several kernels, all their parameters are joined in it."""
    args: tuple[Any, ...]
    """The arguments of the op, with shapes and dtypes instead of arrays."""
    stacked: tuple[Stacking, ...]
    """How the variables of the op are stacked, from the outermost transformation to the innermost."""
    has_several_kernels: bool = False


class Seen:
    """The record of the contractions and the FP8 ops that a model computes; its clones share it."""

    def __init__(self) -> None:
        self.decided: list[tuple[Site, Decision]] = []
        self.ops: dict[tuple[str, ...], SeenOp] = {}
        self.used_otherwise: set[tuple[str, ...]] = set()

    def __deepcopy__(self, memo: Any) -> Seen:
        return self  # a copy of the model shares the record

    def __reduce__(self) -> Any:
        return Seen, ()  # an unpickled model starts with an empty record


def seen_of(model: Any) -> Seen:
    """Returns the record of a converted model, which is empty before its first call."""
    if "_fp8_seen" not in vars(model):
        object.__setattr__(model, "_fp8_seen", Seen())
    seen: Seen = model._fp8_seen
    return seen


class Call(Interception):
    """One call of a converted model by code outside of the model."""

    collections: tuple[str, ...] = (PARAMS,)
    """The collections that ``put_in`` and ``take_out`` convert."""
    is_init = False
    """Whether ``init`` makes the call, to make the variables."""
    is_counting = False
    """Whether no contraction is converted, and each is computed in its ``Site.scope``."""

    def __init__(self, cls: type, rules: Rules) -> None:
        super().__init__(cls)
        self.rules = self._rules_here = rules
        self.decided: list[tuple[Site, Decision]] = []
        self.ops: dict[tuple[str, ...], SeenOp] = {}

    def contract(
        self, row: OpRow, operands: Sequence[Any], params: dict[str, Any], frame: Frame
    ) -> tuple[Any, str]:
        """Computes a contraction in FP8 if the rules convert it."""
        scope: Any = frame.module.scope
        lhs, rhs = (self.origins.of(x, scope) for x in operands[:2])
        site, arguments, restore = as_op(row, operands, params, (lhs, rhs), frame)
        decision = self._rules_here.decide(site)
        if self._rules_here is not self.rules:
            decision = decision._replace(rule=None)  # it is an index into the rules of another model
        bare = site._replace(module=type(site.module))  # the scope of a module must not outlive its trace
        self.decided.append((bare, decision))
        if self.is_counting:
            return None, site.scope
        if not decision.converts:
            return None, NOT_CONVERTED
        with jax.named_scope(BY_OP):
            options = {"form": self._rules_here.form} if row.has_form else {}
            parent = scope.push(site.name, reuse=True)
            op = Fp8Op._for_row(row)(recipe=decision.recipe, **options, parent=parent)
            out = op(*arguments)
        return restore(out), ""

    def on_op(
        self,
        op: Fp8Op,
        recipe: Recipe | None,
        compute: Any,
        lhs: Any,
        rhs: Any,
        *rest: Any,
        **keywords: Any,
    ) -> jax.Array:
        """Records an op, and computes it."""
        if recipe is not None and not self.is_apart:
            kernel = self.origins.of(rhs, op.scope)
            # The record outlives the call, so it must not hold arrays.
            args = jax.tree.map(_as_struct, (lhs, rhs, *rest))
            self._record(op.path, SeenOp(type(op), recipe.gemms, kernel, args, conversion().stacked))
        return compute(lhs, rhs, *rest, **keywords)

    def _record(self, path: tuple[str, ...], found: SeenOp) -> None:
        before = self.ops.get(path)
        if before is not None and not _is_same_kernel(before, found):
            # The op multiplies by several kernels with one state, so none of them can be stored for it.
            kernels = [kernel for kernel in (before.kernel, found.kernel) if kernel is not None]
            sources = dict.fromkeys(source for kernel in kernels for source in kernel.sources)
            found = found._replace(kernel=Origin(tuple(sources), None), has_several_kernels=True)
        self.ops[path] = found

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """A context for the model's method, whose loops treat the variables of ops like the parameters."""
        self.origins.mark(model.scope)
        with converting(on_op=self.on_op, in_map=False), beside_params(self.beside_params):
            yield

    @contextmanager
    def ruled_by(self, rules: Rules) -> Iterator[None]:
        """A context in which other rules decide, for a converted model inside of this model."""
        before, self._rules_here = self._rules_here, rules
        try:
            yield
        finally:
            self._rules_here = before

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the collections of the caller as the method sees them: with JAX arrays."""
        return jax.tree.map(as_jax, variables)

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the collections of the method as the caller sees them."""
        return variables

    def finish(self, model: Any, method: str) -> None:
        """Records what the method has computed.

        Raises:
            ValueError: ``init`` called ``__call__``, and a rule matched nothing or nothing is converted.
        """
        seen = seen_of(model)
        seen.decided = self.decided
        if not self.is_counting:
            found_here, self.ops = self.ops, dict(seen.ops)
            for path, found in found_here.items():
                if _is_of_other_variables(seen.ops.get(path), found):
                    del self.ops[path]
                self._record(path, found)
            seen.ops = self.ops
            seen.used_otherwise |= self.origins.used_otherwise
        if method == "__call__" and model.is_initializing():
            self.rules.check_matched(self.decided)
            is_converted = self.ops or any(decision.converts for _, decision in self.decided)
            if not (is_converted or self.is_counting):
                raise ValueError(self.rules.why_unconverted(self.decided))


def _as_struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def as_jax(x: Any) -> Any:
    """Returns a NumPy array as a JAX array, which keeps its identity in a computation."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _is_same_kernel(a: SeenOp, b: SeenOp) -> bool:
    """Returns whether two calls of an op multiply by the same kernel."""
    if a.kernel is None or b.kernel is None:
        return a.kernel is b.kernel
    return a.kernel.sources == b.kernel.sources and _steps(a.kernel) == _steps(b.kernel)


def _steps(kernel: Origin) -> Any:
    """Returns the steps that made a kernel from a parameter, without casts that change no value."""
    if kernel.moves is None:
        return None
    moves = [(m.primitive, m.params, m.result) for m in kernel.moves if not _is_exact_cast(m)]
    return moves, kernel.is_moved


def _is_exact_cast(move: Move) -> bool:
    """Returns whether a step is a cast that changes no value."""
    if move.primitive.name != CAST:
        return False
    wide, narrow = move.params["new_dtype"], move.dtype
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (wide, narrow)):
        return bool(wide == narrow)
    of_wide, of_narrow = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(of_narrow.nmant <= of_wide.nmant and of_narrow.maxexp <= of_wide.maxexp)


def _is_of_other_variables(before: SeenOp | None, found: SeenOp) -> bool:
    """Returns whether parameters of an op have another dtype or shape than in an earlier call."""
    if before is None or before.kernel is None or found.kernel is None:
        return False
    olds, news = before.kernel.sources, found.kernel.sources
    return [old.path for old in olds] == [new.path for new in news] and olds != news

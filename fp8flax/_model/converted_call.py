"""Runs one call of a converted model: computes each contraction as the rules decide, and records its op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import BY_OP, OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.recipes import CustomRecipe, Recipe
from fp8flax._linen.conversion import Stacking, conversion, converting
from fp8flax._linen.op import Fp8Op
from fp8flax._model.beside_params import beside_params
from fp8flax._model.contraction_site import as_op, name_of, site_of
from fp8flax._model.decisions import NOTHING_SEEN, SeenSite, check_matched, why_unconverted
from fp8flax._model.interception import Contraction, Interception, Left
from fp8flax._model.param_origin import Move, Origin, ParamOrigins
from fp8flax._model.program_reads import CAST
from fp8flax._model.rules import Rules


class SeenOp(NamedTuple):
    """The record of an FP8 op that a model computes."""

    op: type[Fp8Op]
    gemms: CustomRecipe
    kernel: Origin | None
    """The origin of the kernel; None if the kernel does not come from parameters only, or if the op
    multiplies by several kernels."""
    args: tuple[Any, ...]
    """The arguments of the op, with shapes and dtypes instead of arrays."""
    stacked: tuple[Stacking, ...]
    """How the variables of the op are stacked, from the outermost transformation to the innermost."""
    others: frozenset[tuple[str, ...]] = frozenset()
    """The parameters of all kernels, if the op multiplies by several kernels; otherwise empty."""


class Seen:
    """The record of the contractions and the FP8 ops that a model computes; its clones share it."""

    def __init__(self) -> None:
        self.sites: list[SeenSite] = []
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


class Call:
    """One call of a converted model by code outside of the model."""

    beside_params = OVERWRITE_WITH_GRADIENT
    """The collection with the variables of the ops."""
    collections: tuple[str, ...] = (PARAMS,)
    """The collections that ``put_in`` and ``take_out`` convert."""
    is_init = False
    """Whether ``init`` makes the call, to make the variables."""
    is_counting = False
    """Whether no contraction is converted, and each is computed in its ``SeenSite.scope``."""

    def __init__(self, cls: type, rules: Rules) -> None:
        self.cls = cls
        self.rules = self._rules_here = rules
        self.sites: list[SeenSite] = []
        self.ops: dict[tuple[str, ...], SeenOp] = {}
        self.origins = ParamOrigins()
        self.interception = Interception(
            self.convert,
            self.origins,
            leave_alone=lambda module: isinstance(module, Fp8Op),
            model=cls,
            state=self.beside_params,
        )

    def convert(self, contraction: Contraction) -> Any:
        """Computes a contraction in FP8 if the rules convert it; otherwise returns a ``Left``."""
        found = as_op(contraction)
        site, op = site_of(contraction, found), Fp8Op._for_row(contraction.op)
        decision = self._rules_here.decide(site)
        if self._rules_here is not self.rules:
            decision = decision._replace(rule=None)  # it is an index into the rules of another model
        name = f"{op.__name__}_{name_of(site, contraction, found)}"
        scope: Any = contraction.frame.module.scope
        bare = site._replace(module=type(site.module))  # the scope of a module must not outlive its trace
        seen = SeenSite(bare, decision, name, found.is_swapped)
        self.sites.append(seen)
        if self.is_counting:
            return Left(seen.scope)
        if not decision.converts:
            return Left()
        with jax.named_scope(BY_OP):
            options = {"form": self._rules_here.form} if op.row.has_form else {}
            made = op(recipe=decision.recipe, **options, parent=scope.push(name, reuse=True))
            out = made(*found.arguments)
        return found.restore(out)

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
        if recipe is not None and not self.interception.is_apart:
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
            others = before.others.union(source.path for kernel in kernels for source in kernel.sources)
            self.origins.used_otherwise |= others
            found = found._replace(kernel=None, others=others)
        elif before is not None:
            found = found._replace(others=before.others)
        self.ops[path] = found

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """A context for the model's method, whose loops treat the variables of ops like the parameters."""
        self.origins.mark(model.scope)
        with (
            converting(on_op=self.on_op),
            beside_params(self.beside_params, self.origins.on_map),
        ):
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
        seen.sites = self.sites
        if not self.is_counting:
            found_here, self.ops = self.ops, dict(seen.ops)
            for path, found in found_here.items():
                if _is_of_other_variables(seen.ops.get(path), found):
                    del self.ops[path]
                self._record(path, found)
            seen.ops = self.ops
            seen.used_otherwise |= self.origins.used_otherwise
        if method == "__call__" and model.is_initializing():
            check_matched(self.rules, self.sites)
            is_converted = self.ops or any(found.decision.converts for found in self.sites)
            if not (is_converted or conversion().is_reporting):
                raise ValueError(why_unconverted(self.rules, self.sites) if self.sites else NOTHING_SEEN)


def _as_struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def as_jax(x: Any) -> Any:
    """Returns a NumPy array as a JAX array, which keeps its identity in a computation."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _is_same_kernel(a: SeenOp, b: SeenOp) -> bool:
    """Returns whether two calls of an op multiply by the same kernel."""
    if a.kernel is None or b.kernel is None:
        return a.kernel is b.kernel
    return a.kernel.sources == b.kernel.sources and _as_values(a.kernel) == _as_values(b.kernel)


def _as_values(kernel: Origin) -> Any:
    """Returns the steps that made a kernel from parameters, without casts that change no value."""

    def without(move: Move) -> Move:
        params = move.params
        if move.primitive == CAST:
            if _can_represent(params["new_dtype"], params["from"]):
                return without(move.operands[0])
            params = {**params, "from": None}
        return move._replace(params=params, operands=tuple(map(without, move.operands)))

    return without(kernel.moves)


def _can_represent(wide: Any, narrow: Any) -> bool:
    """Returns whether the dtype ``wide`` can represent all values of the dtype ``narrow``."""
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

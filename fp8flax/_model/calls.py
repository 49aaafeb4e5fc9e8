"""Runs one call of a converted model: decides for each contraction, computes it, and remembers the op."""

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
from fp8flax._linen.conversion import conversion, converting
from fp8flax._linen.op import Fp8Op
from fp8flax._linen.ops import class_of
from fp8flax._model.beside_params import beside_params
from fp8flax._model.decisions import NOTHING_SEEN, SeenSite, check_matched, why_unconverted
from fp8flax._model.interception import Contraction, Interception, Left
from fp8flax._model.jaxprs import CAST
from fp8flax._model.param_origin import Move, Origin, ParamOrigins
from fp8flax._model.rules import Rules
from fp8flax._model.sites import as_op, name_of, site_of


class SeenOp(NamedTuple):
    """An FP8 op that a model computes."""

    op: type[Fp8Op]
    gemms: CustomRecipe
    kernel: Origin | None
    """The parameters that its kernel comes from; None if it comes from anything else."""
    args: tuple[Any, ...]
    """Shapes and dtypes of the input and the kernel; dimension numbers, precision, dtype of the result."""
    others: frozenset[tuple[str, ...]] = frozenset()
    """The parameters of all kernels of an op that multiplies by several; else empty."""


class Seen:
    """What a model was last seen to compute, shared by its clones."""

    def __init__(self) -> None:
        self.sites: list[SeenSite] = []
        self.ops: dict[tuple[str, ...], SeenOp] = {}
        self.used_otherwise: set[tuple[str, ...]] = set()

    def __deepcopy__(self, memo: Any) -> Seen:
        return self  # by a copy of the model

    def __reduce__(self) -> Any:
        return Seen, ()  # nothing of it outlives the process


def seen_of(model: Any) -> Seen:
    """Returns what a converted model was last seen to compute."""
    if "_fp8_seen" not in vars(model):
        object.__setattr__(model, "_fp8_seen", Seen())
    seen: Seen = model._fp8_seen
    return seen


class Call:
    """One call of a converted model from outside."""

    beside_params = OVERWRITE_WITH_GRADIENT
    """The collection of what the ops have."""
    collections: tuple[str, ...] = (PARAMS,)
    """The collections that the method sees otherwise than the caller."""
    is_init = False
    """Whether it is one of ``init``, which makes the variables."""
    is_counting = False
    """Whether nothing is converted, and each contraction stands in its ``SeenSite.scope``."""

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
        """Computes a contraction as the rules say."""
        found = as_op(contraction)
        site, op = site_of(contraction, found), class_of(contraction.op)
        decision = self._rules_here.decide(site)
        if self._rules_here is not self.rules:
            decision = decision._replace(rule=None)  # none of the model's own
        name = f"{op.__name__}_{name_of(site, contraction, found)}"
        scope: Any = contraction.frame.module.scope
        bare = site._replace(module=type(site.module))  # of whose scope nothing may outlive its trace
        seen = SeenSite(bare, decision, name, found.is_swapped)
        self.sites.append(seen)
        if self.is_counting:
            return Left(seen.scope)
        if not decision.converts:
            return Left()
        with jax.named_scope(BY_OP):
            out = op(
                recipe=decision.recipe, form=self._rules_here.form, parent=scope.push(name, reuse=True)
            )(*found.arguments)
        return found.restore(out)

    def on_op(
        self, op: Fp8Op, recipe: Recipe | None, compute: Any, lhs: Any, rhs: Any, *rest: Any, **told: Any
    ) -> jax.Array:
        """Remembers what an op computes, and computes it."""
        if recipe is not None and not self.interception.is_apart:
            kernel = self.origins.of(rhs, op.scope)
            args = jax.tree.map(_as_struct, (lhs, rhs, *rest))  # no arrays: it outlives the call
            self._remember(op.path, SeenOp(type(op), recipe.gemms, kernel, args))
        return compute(lhs, rhs, *rest, **told)

    def _remember(self, path: tuple[str, ...], found: SeenOp) -> None:
        before = self.ops.get(path)
        if before is not None and not _is_same_kernel(before, found):
            # One op, and one state, of several kernels: none of them is the op's own.
            kernels = [kernel for kernel in (before.kernel, found.kernel) if kernel is not None]
            others = before.others.union(source.path for kernel in kernels for source in kernel.sources)
            self.origins.used_otherwise |= others
            found = found._replace(kernel=None, others=others)
        self.ops[path] = found

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """A context for the model's method, whose loops take what ops have along with the parameters."""
        self.origins.mark(model.scope)
        with (
            converting(on_op=self.on_op),
            beside_params(self.beside_params, self.origins.on_map),
            self.interception.active(),
        ):
            yield

    @contextmanager
    def ruled_by(self, rules: Rules) -> Iterator[None]:
        """A context for a method of a converted model inside of the model."""
        before, self._rules_here = self._rules_here, rules
        try:
            yield
        finally:
            self._rules_here = before

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns these collections as the method sees them, NumPy's arrays as JAX's."""
        return jax.tree.map(as_jax, variables)

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns these collections as the caller sees them."""
        return variables

    def finish(self, model: Any, method: str) -> None:
        """Looks at what the method has computed."""
        seen = seen_of(model)
        seen.sites = self.sites
        if not self.is_counting:
            found_here, self.ops = self.ops, dict(seen.ops)
            for path, found in found_here.items():
                if _is_of_other_variables(seen.ops.get(path), found):
                    del self.ops[path]
                self._remember(path, found)
            seen.ops = self.ops
            seen.used_otherwise |= self.origins.used_otherwise
        if method == "__call__" and model.is_initializing():
            check_matched(self.rules, self.sites)
            if not conversion().is_reporting:
                check_converted(self.rules, self.sites, self.ops)


def _as_struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def as_jax(x: Any) -> Any:
    """Returns NumPy's arrays as JAX's, which keep their identity in a computation."""
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _is_same_kernel(a: SeenOp, b: SeenOp) -> bool:
    """Tells whether an op multiplied with the same kernel twice."""
    if a.kernel is None or b.kernel is None:
        return a.kernel is b.kernel
    return a.kernel.sources == b.kernel.sources and _as_values(a.kernel) == _as_values(b.kernel)


def _as_values(kernel: Origin) -> Any:
    """Returns how a kernel came from parameters, without the casts that change no value."""

    def without(move: Move) -> Move:
        params = move.params
        if move.primitive == CAST:
            if _holds(params["new_dtype"], params["from"]):
                return without(move.operands[0])
            params = {**params, "from": None}
        return move._replace(params=params, operands=tuple(map(without, move.operands)))

    return without(kernel.moves)


def _holds(wide: Any, narrow: Any) -> bool:
    """Tells whether a dtype has all values of another one."""
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (wide, narrow)):
        return bool(wide == narrow)
    of_wide, of_narrow = jnp.finfo(wide), jnp.finfo(narrow)
    return bool(of_narrow.nmant <= of_wide.nmant and of_narrow.maxexp <= of_wide.maxexp)


def _is_of_other_variables(before: SeenOp | None, found: SeenOp) -> bool:
    """Tells whether an op was called with other variables before: its parameter was cast, or has grown."""
    if before is None or before.kernel is None or found.kernel is None:
        return False
    olds, news = before.kernel.sources, found.kernel.sources
    return [old.path for old in olds] == [new.path for new in news] and olds != news


def check_converted(rules: Rules, sites: list[SeenSite], ops: Mapping[Any, SeenOp]) -> None:
    """Raises ``ValueError`` where nothing at all runs in FP8."""
    if ops or any(found.decision.converts for found in sites):
        return
    raise ValueError(why_unconverted(rules, sites) if sites else NOTHING_SEEN)

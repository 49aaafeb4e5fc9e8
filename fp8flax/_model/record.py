"""The record of the FP8 ops that a converted model computes, which ``freeze`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from fp8flax._core.names import state_leaf_names
from fp8flax._core.recipes import CustomRecipe
from fp8flax._linen.op import Fp8Op
from fp8flax._model.param_origin import Move, Origin
from fp8flax._model.program_reads import CAST
from fp8flax._model.rules import Decision, Site
from fp8flax._model.state_places import KERNEL_AXES, STATE_AXES, state_at

Path = tuple[str, ...]


class Stacking(NamedTuple):
    """How ``nn.scan`` or ``nn.vmap`` stacks the variables of a layer.

    An axis may be counted from the end. It is None if the variables are not stacked.
    """

    params: int | None
    """The axis of the parameters."""
    state: int | None
    """The axis of the state."""


class SeenOp(NamedTuple):
    """The record of an FP8 op that a model computes."""

    op: type[Fp8Op]
    gemms: CustomRecipe
    kernel: Origin | None
    """The origin of the kernel; None if the kernel does not come from parameters only. If the op multiplies
    by several kernels, all their parameters are joined in it."""
    args: tuple[Any, ...]
    """The arguments of the op, with shapes and dtypes instead of arrays."""
    stacked: tuple[Stacking, ...] = ()
    """How the variables of the op are stacked, from the outermost transformation to the innermost."""
    has_several_kernels: bool = False


class Seen:
    """The record of the contractions and the FP8 ops that a model computes; its clones share it."""

    def __init__(self) -> None:
        self.decided: list[tuple[Site, Decision]] = []
        self.ops: dict[Path, SeenOp] = {}
        self.used_otherwise: set[Path] = set()
        self.stacked: dict[Path, tuple[Stacking, ...]] = {}
        """``SeenOp.stacked`` by the paths of ops, from calls of ``init``."""

    def add(
        self, ops: Mapping[Path, SeenOp], stacked: Mapping[Path, Any], used_otherwise: set[Path]
    ) -> None:
        """Adds what one call has computed; ``stacked`` holds None where the call does not show it."""
        # ``trace_apply`` keeps the old dict, so it is not changed in place.
        found_before, self.ops = self.ops, dict(self.ops)
        for path, found in ops.items():
            if _is_of_other_variables(found_before.get(path), found):
                del self.ops[path]
            self.stacked[path] = stacked[path] or self.stacked.get(path, ())
            add_op(self.ops, path, found._replace(stacked=self.stacked[path]))
        self.used_otherwise |= used_otherwise

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


def add_op(ops: dict[Path, SeenOp], path: Path, found: SeenOp) -> None:
    """Adds the record of one call of an op to those of other calls."""
    before = ops.get(path)
    if before is not None and not _is_same_kernel(before, found):
        # The op multiplies by several kernels with one state, so none of them can be stored for it.
        kernels = [kernel for kernel in (before.kernel, found.kernel) if kernel is not None]
        sources = dict.fromkeys(source for kernel in kernels for source in kernel.sources)
        found = found._replace(kernel=Origin(tuple(sources), None), has_several_kernels=True)
    ops[path] = found


def stacking(found: SeenOp, variables: Any, path: Path) -> tuple[Stacking, ...] | None:
    """Returns ``SeenOp.stacked`` of an op, from the variables that ``init`` has made.

    None if they do not show it: after other calls, or if the op is in no loop.
    """
    arrays = state_at(variables, path)
    if KERNEL_AXES.swapcase() not in arrays:
        return None
    kernel, state = (_inserted(arrays[name.swapcase()].shape) for name in (KERNEL_AXES, STATE_AXES))
    for role in found.gemms.delayed:
        history = arrays.get(state_leaf_names(role)[1].swapcase())
        is_one = role not in found.op.row.stacked
        if history is not None and is_one and history.ndim != len(state) + 1:
            # Layers that share the parameters, and not the state.
            return (Stacking(None, 0),) * (history.ndim - 1)
    return tuple(map(Stacking, kernel, state))


def _inserted(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes by which an array without elements was stacked, the first one first."""
    axes = [axis for axis, size in enumerate(shape) if size]
    return tuple(axis - number for number, axis in enumerate(axes))


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

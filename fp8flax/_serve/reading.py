"""How the code of a model reads its parameters: by its FP8 ops, or in another way.

``freeze`` must know both. So it traces the model, and each op in the trace multiplies by zeros instead of
its kernel. If the traced program still needs a kernel after its dead code is removed, something else reads
the kernel, and it stays wide. A frozen model must know both, too, to bring FP8 codes to its ops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._compat.flax_internals import having
from fp8flax._compat.stand_in import READ, StandIn, refuse
from fp8flax._compat.traces import FrontTrace
from fp8flax._core.ops.op import Op
from fp8flax._core.ops.stored import StoredContraction
from fp8flax._core.quantizers import CurrentQuantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe, Recipe
from fp8flax._core.types import Path
from fp8flax._model.interception import Interception
from fp8flax._model.param_origin import CAST, MOVEMENTS, Origin, ParamOrigins

Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
"""The positional and the keyword inputs of a call of each method to trace, by the method's name."""

WEIGHT_ONLY = CustomRecipe(
    forward=GemmRecipe(rhs=CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise"))
)


class Reading(Interception):
    """Calls that know which parameters other code than an op reads, and in which FP8 codes may be kernels.

    The source of the model casts, reshapes or transposes a float32 kernel before the matmul. So a method
    that reads a stored kernel gets a ``StandIn``, which has the kernel's shape and dtype, and no values.
    The codes move as the model moves the stand-in, and the op takes them from it. All other code that needs
    the values raises an error. (An op that cast a wide kernel back to FP8 would be simpler. But XLA would
    make all layers of a loop wide.)
    """

    def on_read(self, path: Path) -> None:
        """Is called for each parameter that is read, with its path as the frames of the call see it."""
        raise NotImplementedError

    def compute(self, front: FrontTrace, primitive: Any, operands: Sequence[Any], params: Any) -> Any:
        """Computes a primitive, which reads its operands unless it moves them or holds programs."""
        is_movement, stored = primitive.name in MOVEMENTS, operands[0] if operands else None
        if not (is_movement or any("jaxpr" in name or name == "branches" for name in params)):
            for origin in (self.origins.of(x) or Origin() for x in operands):
                for source in origin.sources:
                    self.on_read(source.path)
        if primitive.name == READ:
            moved = [StandIn(front, stored, **params)]
        elif not (is_movement and isinstance(stored, StandIn)):
            return super().compute(front, primitive, operands, params)
        elif primitive.name == CAST:
            moved = [StandIn(front, stored.codes, params["new_dtype"], stored.source)]
        else:
            with having(self, is_passing=True):
                codes: Any = front.compute(primitive, [stored.codes], params)
            codes = codes if primitive.multiple_results else [codes]
            moved = [StandIn(front, x, stored.dtype, stored.source) for x in codes]
        self.origins.follow(operands, moved, primitive, params)
        for x in moved:
            known = self.origins.of(x)
            if known is None or known.steps is None:  # such as copies
                raise refuse(x.source)
            x.cut = known.cut
        return moved if primitive.multiple_results else moved[0]


Scales = dict[str, jax.Array]
"""Scales of an op by their names."""


class SeenOp(NamedTuple):
    """The record of an FP8 op that a traced model runs."""

    path: Path
    op_type: type[Op]
    gemms: CustomRecipe
    plan: StoredContraction | None
    """The plan of the op; None for a convolution."""
    kernel: Origin
    """The origin of the kernel; it has no sources if the kernel does not come from parameters only."""
    scales: Scales
    """The delayed scales of the next step, which ``freeze_ops`` adds."""

    @property
    def kernel_dims(self) -> Any:
        """The dimensions of the kernel that the op sums over, and its batch dimensions."""
        return self.plan and tuple(of_kernel for _, of_kernel in self.plan.dimension_numbers)


@dataclasses.dataclass
class Recording:
    """What the traced calls of a model run and read."""

    weight_only: bool
    """Whether the ops are recorded with the recipe of ``freeze(…, weight_only=True)`` instead of theirs."""
    ops: dict[Path, SeenOp] = dataclasses.field(default_factory=dict)
    """The FP8 ops that ran."""
    read: set[Path] = dataclasses.field(default_factory=set)
    """The parameters that anything else reads, or changes."""
    origins: ParamOrigins = dataclasses.field(default_factory=ParamOrigins)
    """What the values of all calls are made of, by the paths of parameters in the model."""

    def run(
        self, path: Path, op_type: type[Op], recipe: Recipe, *arguments: Any, **keywords: Any
    ) -> jax.Array:
        """Records an op that runs in a trace; the result does not depend on the kernel."""
        lhs, rhs, *rest = arguments
        gemms, kernel = WEIGHT_ONLY if self.weight_only else recipe.gemms, self.origins.of(rhs) or Origin()
        # The record outlives the trace, so it must not hold arrays.
        structs = jax.tree.map(as_struct, arguments)
        plan: Any = op_type.plans["direct"](*structs, recipe=gemms) if op_type.stores_kernel else None
        op, quantizer = SeenOp(path, op_type, gemms, plan, kernel, {}), gemms.forward.rhs
        before = self.ops.setdefault(path, op)
        # The op reads a wide kernel, or one that needs scales along other dimensions than before.
        if not (quantizer and (quantizer.has_one_scale or op.kernel_dims == before.kernel_dims)):
            self.read |= {source.path for source in kernel.sources}
        if before.kernel != kernel:  # one op multiplies by several kernels
            self.ops[path] = before._replace(kernel=Origin(before.kernel.sources + kernel.sources))
        return op_type.plain(lhs, jnp.zeros_like(rhs), *rest, **keywords)


def as_struct(x: Any) -> Any:
    """Returns the shape and the dtype of an array; another value unchanged."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x

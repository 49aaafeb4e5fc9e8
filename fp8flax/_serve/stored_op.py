"""Freezes and computes one op: its kernel is stored in FP8, and its scales no longer change.

Linen and NNX find the ops of a model by a trace, in which each op multiplies by zeros instead of its
kernel. So if the traced program still needs a kernel after its dead code is removed, something else reads
the kernel, and it stays wide.
"""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._compat.stand_in import StandIn
from fp8flax._compat.traces import FrontTrace
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.names import KERNEL_TENSOR_SCALE, OVERWRITE_WITH_GRADIENT, state_leaf_names
from fp8flax._core.ops.canonical import Shape
from fp8flax._core.ops.op import MissingStateError, Op
from fp8flax._core.ops.stored import StoredContraction, frozen, packed_kernel
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantizers import CurrentQuantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe
from fp8flax._core.state.state import step_scale
from fp8flax._core.state.tree import StateTree, path_names
from fp8flax._core.types import Path, PyTree
from fp8flax._model.converted_call import as_struct
from fp8flax._model.interception import Interception
from fp8flax._model.param_origin import MOVEMENTS, Origin
from fp8flax._train.check import warn_if_damaged

Arrays = dict[Path, jax.Array]
Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
"""The positional and the keyword inputs of a call of each method to trace, by the method's name."""
Groups = tuple[tuple[int, ...], ...]
"""Groups of dimensions of an array, counted without those that stack layers."""

INPUT_SCALE, KERNEL_SCALE = (state_leaf_names(role)[0] for role in ("input", "kernel"))
WEIGHT_ONLY = CustomRecipe(
    forward=GemmRecipe(rhs=CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise"))
)


class SeenOp(NamedTuple):
    """The record of an FP8 op that a model computes."""

    row: type[Op]
    gemms: CustomRecipe
    plan: StoredContraction | None
    """The plan of the op; None for a convolution."""
    kernel: Origin
    """The origin of the kernel; it has no sources if the kernel does not come from parameters only."""
    stacked: Shape | None
    """The axes along which layers are stacked in the parameter; None if only its shape shows them."""


class ServedOp(NamedTuple):
    """Description of an op in a frozen model (hashable).

    An op whose kernel stays wide has only a path and a recipe. It computes as in training.
    """

    path: Path
    gemms: CustomRecipe
    scales: tuple[str, ...] = ()
    """The names of its scales in the variables."""
    kernel: Path | None = None
    """The path of the parameter in FP8 that is the kernel."""
    layout: Groups | None = None
    """The output dimensions and the summed dimensions of the kernel.

    They are counted without the dimensions that stack layers, and without those that stack kernels, such as
    the experts. None if the op does not read the kernel as it is stored."""
    dtype: np.dtype | None = None
    """The dtype of the kernel before it was stored."""
    stack: tuple[int, ...] = ()
    """The axes along which layers are stacked in the kernel. In the scales they are always the first."""


class Reading(Interception):
    """Calls that know which parameters other code than an op reads."""

    def on_read(self, path: Path) -> None:
        """Is called for each parameter that is read, with its path as the frames of the call see it."""
        raise NotImplementedError

    def compute(self, front: FrontTrace, primitive: Any, operands: Sequence[Any], params: Any) -> Any:
        """Computes a primitive, which reads its operands unless it moves them or holds programs."""
        holds_programs = any("jaxpr" in name or name == "branches" for name in params)
        if not (primitive.name in MOVEMENTS or holds_programs):
            for origin in (self.origins.of(x) or Origin() for x in operands):
                for source in origin.sources:
                    self.on_read(source.path)
        return super().compute(front, primitive, operands, params)


def leaves_of(tree: PyTree) -> dict[Path, Any]:
    """Returns the leaves of a tree without boxes by their paths."""
    return {path_names(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


# Freezing.


def record(
    seen: dict[Path, SeenOp],
    path: Path,
    row: type[Op],
    gemms: CustomRecipe,
    kernel: Origin | None,
    stacked: Shape | None,
    *arguments: Any,
    **keywords: Any,
) -> jax.Array:
    """Records an op that runs in a trace; the result does not depend on the kernel."""
    lhs, rhs, *rest = arguments
    # The record outlives the trace, so it must not hold arrays.
    structs = jax.tree.map(as_struct, arguments)
    plan: Any = row.plans["direct"](*structs, recipe=gemms) if row.stores_kernel else None
    kernel = kernel or Origin()
    before = seen.setdefault(path, SeenOp(row, gemms, plan, kernel, stacked))
    if before.kernel != kernel:  # one op multiplies by several kernels
        seen[path] = before._replace(kernel=Origin(before.kernel.sources + kernel.sources))
    return row.plain(lhs, jnp.zeros_like(rhs), *rest, **keywords)


class Stored(NamedTuple):
    """The kernel of an op in a frozen model."""

    codes: jax.Array
    scales: dict[str, jax.Array]
    op: ServedOp
    """The description of the op, which lacks its path and the names of its scales."""


def freeze_ops(
    seen: Mapping[Path, SeenOp],
    read: Collection[Path],
    params: Mapping[Path, jax.Array],
    state: PyTree,
    unseen: Collection[Path],
    *,
    may_share: bool = False,
) -> tuple[list[ServedOp], Arrays, Arrays]:
    """Returns the frozen ops, the codes of the stored kernels, and their scales; warns as ``freeze`` does.

    ``read`` are the kernels that something else than an op reads, and ``unseen`` the ops that did not run.
    ``may_share`` is whether ops that multiply by one kernel in the same way share its codes.
    """
    if not seen:
        raise ValueError(
            "No FP8 op ran in the calls that freeze traced. Convert the model by "
            "fp8flax.quantize_model(model, include=…); fp8flax.report(model, x) says what is converted. If "
            "other methods run its FP8 ops, pass their inputs: freeze(…, methods={'decode': (z,)}). Call "
            "freeze outside of autocast(enabled=False)."
        )
    delayed, groups = _delayed_scales(seen, state), dict[Any, list[Path]]()
    for path, op in seen.items():
        dims = op.plan and op.plan.dimension_numbers
        key = (op.row, op.kernel, op.gemms.forward, dims and tuple(of_kernel for _, of_kernel in dims))
        groups.setdefault(key if may_share else path, []).append(path)
    uses = Counter([*read, *(x.path for first, *_ in groups.values() for x in seen[first].kernel.sources)])
    kernels = dict[Path, Stored | str | None]()
    for paths in groups.values():
        of_ops = [delayed[path] for path in paths]
        kernels |= dict.fromkeys(paths, _stored(seen[paths[0]], of_ops, params, uses))
    ops, codes, scales = list[ServedOp](), Arrays(), Arrays()
    wide = dict.fromkeys(unseen, "it did not run in the calls that freeze traced")
    for path, kernel in kernels.items():
        op = seen[path]
        if isinstance(kernel, Stored):
            own = delayed[path] | kernel.scales
            ops.append(kernel.op._replace(path=path, gemms=op.gemms, scales=tuple(own)))
            codes[op.kernel.sources[0].path] = kernel.codes
            scales |= {(*path, name): x for name, x in own.items()}
        else:
            ops.append(ServedOp(path, CustomRecipe() if op.gemms is WEIGHT_ONLY else op.gemms))
            wide |= {source.path: kernel for source in op.kernel.sources if kernel}
    if wide:
        text = "; ".join(f"{'/'.join(path)} ({reason})" for path, reason in sorted(wide.items()))
        warnings.warn(f"These kernels of FP8 ops stay wide: {text}.", stacklevel=4)
    return ops, codes, scales


def _delayed_scales(seen: Mapping[Path, SeenOp], state: PyTree) -> dict[Path, dict[str, jax.Array]]:
    """Returns the delayed scales of each op by their names; warns about those that have seen no data."""
    advice = "The frozen scales are computed from it. Call calibrate before freeze."
    warn_if_damaged(state, advice, stacklevel=6)
    tree = StateTree.of(state)
    states = dict(zip((path_names(tree.paths[i]) for i, _ in tree.pairs), tree.states()))
    scales, fresh = {path: dict[str, jax.Array]() for path in seen}, list[str]()
    for path, op in seen.items():
        for role, quantizer in CustomRecipe(forward=op.gemms.forward).delayed.items():
            name, _ = state_leaf_names(role)
            place = *path, name
            if place not in states:
                raise MissingStateError(
                    f"{OVERWRITE_WITH_GRADIENT}/{'/'.join(place)} is missing from the variables: freeze "
                    "needs the scales that training or fp8flax.calibrate left, or fresh ones from "
                    "fp8flax.add_fp8_state, or in NNX from a new op."
                )
            scales[path][name] = step_scale(quantizer, states[place])[..., None]
            history = states[place].amax_history
            if not isinstance(history, jax.core.Tracer) and not np.any(jax.device_get(history)):
                fresh.append("/".join(place))
    if fresh:
        warnings.warn(
            f"These scales are frozen although they have seen no data: {', '.join(fresh)}. To take them "
            "from sample batches, call calibrate before freeze.",
            stacklevel=5,
        )
    return scales


def _stored(
    op: SeenOp,
    delayed: Sequence[Mapping[str, jax.Array]],
    params: Mapping[Path, jax.Array],
    uses: Mapping[Path, int],
) -> Stored | str | None:
    """Returns the kernel of an op, or of several with ``delayed`` scales, in a frozen model.

    If it stays wide, returns the reason; None if it is not quantized, or no parameter.
    """
    plan, quantizer = op.plan, op.gemms.forward.rhs
    if quantizer is None or not op.kernel.sources:
        return None
    if plan is None:
        return "it is the kernel of a convolution"
    if not op.kernel.is_whole_parameter:
        return "its matmul does not multiply by this parameter as a whole"
    source = op.kernel.sources[0]
    if uses[source.path] > 1:
        return "something else reads it, or changes it"
    (contract, _), _ = plan.dimension_numbers
    if reason := quantizer.why_not_stored(math.prod(plan.lhs.shape[i] for i in contract)):
        return reason
    parameter = params[source.path]
    stacks = _stacks(op, parameter.shape, [x.shape for x in delayed[0].values()])
    if len(stacks) != 1:
        return "its shape and its state do not show along which axes loops stack it (in NNX only the first)"
    (stack,), kernel = stacks, op.kernel
    of_kernel = [scales[KERNEL_SCALE] for scales in delayed if KERNEL_SCALE in scales]
    is_known = isinstance(parameter, jax.Array) and not isinstance(parameter, jax.core.Tracer)
    # The codes are on the devices of the parameter, if there are several.
    is_on_several = is_known and len(parameter.sharding.device_set) > 1
    places = {"out_shardings": (parameter.sharding, None)} if is_on_several else {}
    # Without the path, equal layers have one program.
    how = kernel._replace(sources=(source._replace(path=()),)), plan, stack
    scale = functools.reduce(jnp.maximum, of_kernel) if of_kernel else None
    quantize = jax.jit(_quantized, static_argnums=(0, 1, 2), **places)
    codes, scales = quantize(*how, parameter, scale)
    layout, dtype = _layout(kernel, plan, stack), jnp.result_type(parameter)
    return Stored(codes, scales, ServedOp((), op.gemms, (), source.path, layout, dtype, stack))


def _stacks(op: SeenOp, whole: Shape, scales: Sequence[Shape]) -> list[Shape]:
    """Returns the axes along which layers may be stacked in a kernel, for each possibility.

    ``whole`` is the shape of the parameter, and ``scales`` are the shapes of the delayed scales, which must
    be stacked in the same order.
    """
    part = tuple(op.kernel.sources[0].shape)
    experts = part[:1] if op.row.is_stack else ()  # their kernels have a scale each

    def fits(stack: Shape) -> bool:
        sizes = tuple(whole[i] for i in stack)
        is_rest = tuple(n for i, n in enumerate(whole) if i not in stack) == part
        return is_rest and all(shape[:-1] in (sizes, (*sizes, *experts)) for shape in scales)

    choices = itertools.combinations(range(len(whole)), max(0, len(whole) - len(part)))
    return [stack for stack in choices if op.stacked in (None, stack) and fits(stack)]


def _quantized(
    origin: Origin, plan: StoredContraction, stack: Shape, parameter: jax.Array, scale: jax.Array | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the codes of a kernel in the places of its parameter, and its scales.

    ``scale`` is the scale that the scaling state determines, if it does.
    """

    def of_one(parameter: jax.Array, scale: jax.Array | None) -> Any:
        packed = packed_kernel(plan, origin.rebuild(parameter).astype(plan.rhs.dtype), scale)
        scales = {KERNEL_SCALE: packed.scale}
        if packed.tensor_scale is not None:
            scales[KERNEL_TENSOR_SCALE] = packed.tensor_scale
        # A scalar scale is stored in the shape (1,), as the scaling state has it.
        return origin.into_parameter(packed.codes), jax.tree.map(jnp.atleast_1d, scales)

    for i, axis in reversed([*enumerate(stack)]):  # scales are stacked along the first axes
        of_one = jax.vmap(of_one, in_axes=(axis - i, 0), out_axes=(axis - i, 0))
    codes, scales = of_one(parameter, scale)
    return codes, scales


def _layout(kernel: Origin, plan: StoredContraction, stack: Shape) -> Groups | None:
    """Returns the ``layout`` of a ``ServedOp``."""
    (_, summed), (_, batch) = plan.dimension_numbers
    in_order, quantizer = tuple(sorted(summed)), plan.recipe.forward.rhs
    are_first = (batch, stack) == (tuple(range(len(batch))), tuple(range(len(stack))))
    # jnp.einsum orders what it sums over by name, and blocks of several dimensions are in this order.
    is_in_order = not (quantizer and quantizer.block) or tuple(summed) == in_order
    out = (i for i in range(len(plan.rhs.shape)) if i not in (*batch, *summed))
    groups = tuple(tuple(i - len(batch) for i in group) for group in (out, in_order))
    return groups if are_first and is_in_order and kernel.is_one_parameter else None


# Computing.


@jax.custom_jvp
def constant(x: PyTree) -> PyTree:
    """Returns codes and scales unchanged; differentiating them raises ``TypeError``."""
    return x


@constant.defjvp
def _constant_jvp(primals: PyTree, tangents: PyTree) -> PyTree:
    raise TypeError(
        "The FP8 kernels and the scales of a frozen model have no gradient. Differentiate with respect to "
        "the inputs, or to wide parameters only, with the other variables closed over. To train the "
        "kernels, train the model that was frozen."
    )


def not_seen(path: Path) -> ValueError:
    """Returns the error for an op that gets another kernel than in the calls that ``freeze`` traced."""
    return ValueError(
        f"The FP8 op at {'/'.join(path)} did not run with this kernel when the model was frozen. Freeze "
        "the model with inputs that reach the op as it is called here."
    )


def computed(
    row: type[Op],
    gemms: CustomRecipe,
    scales: Mapping[str, jax.Array],
    lhs: jax.Array,
    kernel: StandIn,
    *arguments: Any,
    **keywords: Any,
) -> jax.Array:
    """Returns the result of an op with a plan for its stored kernel and its scales."""
    if recipe_in_use(gemms, gemms) is None:
        raise ValueError(
            "fp8flax.autocast(enabled=False) cannot turn FP8 off in a frozen model, whose kernels are "
            "stored in FP8. Call it outside of that context, or call the original model."
        )
    if kernel.codes.dtype.itemsize != 1:
        raise TypeError(
            f"The kernel of a frozen model must stay in FP8; got {kernel.codes.dtype}. Cast wide variables "
            "alone."
        )
    lhs = lhs.astype(np.promote_types(lhs.dtype, kernel.dtype))
    codes, scales = constant((kernel.codes, dict(scales)))
    # ``_stored`` gives a scalar scale the shape (1,).
    of = {name: x.reshape(()) if x.shape == (1,) else x for name, x in scales.items()}
    assert gemms.forward.rhs is not None
    quantizer, tensor_scale = gemms.forward.rhs.stored, of.get(KERNEL_TENSOR_SCALE)
    rhs = QTensor(codes, of[KERNEL_SCALE], quantizer, tensor_scale=tensor_scale)
    keywords |= {"recipe": gemms, "input_scale": scales.get(INPUT_SCALE)}
    return frozen(row, lhs, rhs, *arguments, **keywords)

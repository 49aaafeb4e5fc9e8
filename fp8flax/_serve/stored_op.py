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
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._compat.flax_internals import having
from fp8flax._compat.stand_in import READ, StandIn, refuse
from fp8flax._compat.traces import FrontTrace
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.names import KERNEL_TENSOR_SCALE, OVERWRITE_WITH_GRADIENT, state_leaf_names
from fp8flax._core.ops.canonical import Shape
from fp8flax._core.ops.op import MissingStateError, Op
from fp8flax._core.ops.stored import StoredContraction, frozen, packed_kernel
from fp8flax._core.qtensor import QTensor, Quantizer
from fp8flax._core.quantizers import CurrentQuantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe
from fp8flax._core.state.state import step_scale
from fp8flax._core.state.tree import StateTree, path_names
from fp8flax._core.types import Path, PyTree
from fp8flax._model.interception import Interception
from fp8flax._model.param_origin import CAST, MOVEMENTS, Origin, hold_each_once
from fp8flax._train.check import warn_if_damaged

Arrays = dict[Path, jax.Array]
Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
"""The positional and the keyword inputs of a call of each method to trace, by the method's name."""
Groups = tuple[tuple[int, ...], ...]
"""Which dimensions of a variable are one dimension of its tensor in a file.

For a kernel (16, 4, 8) of ``nn.DenseGeneral((4, 8))`` they are ``((1, 2), (0,))``: its weight is (32, 16),
``(out, in)``. They are counted without the dimensions that stack layers. ``freeze`` knows them from the op
(``ServedOp.groups``), and ``export.merged`` writes files by them. ``load_into`` has no op, so it finds them
by the two shapes, and ``export.unmerged`` reads by them."""

INPUT_SCALE, KERNEL_SCALE = (state_leaf_names(role)[0] for role in ("input", "kernel"))
WEIGHT_ONLY = CustomRecipe(
    forward=GemmRecipe(rhs=CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise"))
)


class SeenOp(NamedTuple):
    """The record of an FP8 op that a model computes."""

    op_type: type[Op]
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
    """The path of the parameter in FP8 that is the kernel, or that the kernel is a slice of."""
    groups: Groups | None = None
    """The output dimensions and the summed dimensions of the kernel.

    They are counted without the dimensions that stack layers, and without those that stack kernels, such as
    the experts. None if the op does not read the kernel as it is stored."""
    dtype: np.dtype | None = None
    """The dtype of the kernel before it was stored."""
    stack: tuple[int, ...] = ()
    """The axes along which layers are stacked in the kernel. In the scales they are always the first."""
    cut: tuple[int, int, int] | None = None
    """The axis, the start and the end, if the kernel is a slice of the parameter."""


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


def as_struct(x: Any) -> Any:
    """Returns the shape and the dtype of an array; another value unchanged."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def leaves_of(tree: PyTree) -> dict[Path, Any]:
    """Returns the leaves of a tree without boxes by their paths."""
    return {path_names(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


# Freezing.


def record(
    seen: dict[Path, SeenOp],
    path: Path,
    op_type: type[Op],
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
    plan: Any = op_type.plans["direct"](*structs, recipe=gemms) if op_type.stores_kernel else None
    kernel = kernel or Origin()
    before = seen.setdefault(path, SeenOp(op_type, gemms, plan, kernel, stacked))
    if before.kernel != kernel:  # one op multiplies by several kernels
        seen[path] = before._replace(kernel=Origin(before.kernel.sources + kernel.sources))
    return op_type.plain(lhs, jnp.zeros_like(rhs), *rest, **keywords)


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
    delayed, users = _delayed_scales(seen, state), dict[Path, dict[Any, list[Path]]]()
    for path, op in seen.items():
        dims = op.plan and op.plan.dimension_numbers
        key = (op.op_type, op.kernel, op.gemms.forward, dims and tuple(of_kernel for _, of_kernel in dims))
        for source in op.kernel.sources:
            if op.gemms.forward.rhs is None:  # the op reads a wide kernel
                read = {*read, source.path}
            else:
                users.setdefault(source.path, {}).setdefault(key if may_share else path, []).append(path)
    stored, ops, codes, scales = dict[Path, Stored](), list[ServedOp](), Arrays(), Arrays()
    wide = dict.fromkeys(unseen, "it did not run in the calls that freeze traced")
    for name, by_key in users.items():
        # For each slice of the parameter, the paths of the ops that share its codes.
        slices = sorted(by_key.values(), key=lambda paths: seen[paths[0]].kernel.cut or ())
        of_ops = [[delayed[path] for path in paths] for paths in slices]
        made = _stored([seen[paths[0]] for paths in slices], of_ops, params[name], name in read)
        if isinstance(made, str):
            wide[name] = made
        else:
            codes[name], kernels = made
            stored |= {path: kernel for paths, kernel in zip(slices, kernels) for path in paths}
    for path, op in seen.items():
        if path in stored:
            own = delayed[path] | stored[path].scales
            ops.append(stored[path].served._replace(path=path, gemms=op.gemms, scales=tuple(own)))
            scales |= {(*path, name): x for name, x in own.items()}
        else:
            ops.append(ServedOp(path, CustomRecipe() if op.gemms is WEIGHT_ONLY else op.gemms))
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


class Stored(NamedTuple):
    """The scales of a kernel, and the description of its op without path, recipe and names of scales."""

    scales: dict[str, jax.Array]
    served: ServedOp


def _stored(
    ops: Sequence[SeenOp],
    delayed: Sequence[Sequence[Mapping[str, jax.Array]]],
    parameter: jax.Array,
    is_read: bool,
) -> tuple[jax.Array, list[Stored]] | str:
    """Returns the codes of a parameter, and the kernel of each op that multiplies by it.

    If the parameter stays wide, returns the reason. ``ops`` are in the order of their slices. ``delayed``
    are the scales of each op, or of several that share a kernel. ``is_read`` is whether other code reads
    the parameter.
    """
    if reason := _why_wide(ops, is_read):
        return reason
    shapes = [x.shape for of_op in delayed for x in of_op[0].values()]
    if len(stacks := _stacks(ops[0], parameter.shape, shapes)) != 1:
        return "its shape and its state do not show along which axes loops stack it (in NNX only the first)"
    (stack,) = stacks
    scales = list[jax.Array | None]()
    for of_op in delayed:
        known = [names[KERNEL_SCALE] for names in of_op if KERNEL_SCALE in names]
        scales.append(functools.reduce(jnp.maximum, known) if known else None)
    is_known = isinstance(parameter, jax.Array) and not isinstance(parameter, jax.core.Tracer)
    # The codes are on the devices of the parameter, if there are several.
    is_on_several = is_known and len(parameter.sharding.device_set) > 1
    places = {"out_shardings": (parameter.sharding, None)} if is_on_several else {}
    # Without the path, equal layers have one program.
    source, plans = ops[0].kernel.sources[0], [cast(StoredContraction, op.plan) for op in ops]
    kernels = [op.kernel._replace(sources=(source._replace(path=()),)) for op in ops]
    quantize = jax.jit(_quantized, static_argnums=(0, 1), **places)
    codes, made = quantize(tuple(zip(kernels, plans)), stack, parameter, scales)
    kinds = {(op.gemms.forward, _groups(op.kernel, plan, stack)) for op, plan in zip(ops, plans)}
    groups = kinds.pop()[1] if len(kinds) == 1 else None
    served = ServedOp((), CustomRecipe(), (), source.path, groups, jnp.result_type(parameter), stack)
    return codes, [Stored(own, served._replace(cut=kernel.cut)) for own, kernel in zip(made, kernels)]


def _why_wide(ops: Sequence[SeenOp], is_read: bool) -> str | None:
    """Returns why a parameter that ops multiply by cannot be stored; None if it can be."""
    if any(op.plan is None for op in ops):
        return "it is the kernel of a convolution"
    is_once = hold_each_once([op.kernel for op in ops])
    if not is_once and any(op.kernel.cut or op.kernel.steps is None for op in ops):
        return (
            "its matmul does not multiply by this parameter as a whole, or by one of the slices that "
            "divide it along one axis"
        )
    if is_read or not is_once:
        return "something else reads it, or changes it"
    for op in ops:
        if op.gemms.forward.lhs and op.gemms.forward.lhs.stochastic_rounding:  # an op of codes has no key
            return "its recipe rounds the input at random"
        plan, quantizer = cast(StoredContraction, op.plan), cast(Quantizer, op.gemms.forward.rhs)
        (contract, _), _ = plan.dimension_numbers
        if reason := quantizer.why_not_stored(math.prod(plan.lhs.shape[i] for i in contract)):
            return reason
    return None


def _stacks(op: SeenOp, whole: Shape, scales: Sequence[Shape]) -> list[Shape]:
    """Returns the axes along which layers may be stacked in a parameter, for each possibility.

    ``whole`` is the shape of the parameter, and ``scales`` are the shapes of the delayed scales, which must
    be stacked in the same order. ``op`` is one of the ops that multiply by it.
    """
    part = tuple(op.kernel.sources[0].shape)
    # The kernels of experts have a scale each.
    experts = cast(StoredContraction, op.plan).rhs.shape[:1] if op.op_type.is_stack else ()

    def fits(stack: Shape) -> bool:
        sizes = tuple(whole[i] for i in stack)
        is_rest = tuple(n for i, n in enumerate(whole) if i not in stack) == part
        return is_rest and all(shape[:-1] in (sizes, (*sizes, *experts)) for shape in scales)

    choices = itertools.combinations(range(len(whole)), max(0, len(whole) - len(part)))
    return [stack for stack in choices if op.stacked in (None, stack) and fits(stack)]


def _quantized(
    kernels: Sequence[tuple[Origin, StoredContraction]],
    stack: Shape,
    parameter: jax.Array,
    scales: Sequence[jax.Array | None],
) -> tuple[jax.Array, list[dict[str, jax.Array]]]:
    """Returns the codes of a parameter, and the scales of each kernel that it holds.

    ``scales`` are those that the scaling state determines, if it does.
    """

    def of_one(parameter: jax.Array, scales: Sequence[jax.Array | None]) -> Any:
        codes, of_kernels = [], []
        for (origin, plan), scale in zip(kernels, scales):
            kernel = origin.after_steps(origin.cut_of(parameter)).astype(plan.rhs.dtype)
            packed = packed_kernel(plan, kernel, scale)
            own = {KERNEL_SCALE: packed.scale}
            if packed.tensor_scale is not None:
                own[KERNEL_TENSOR_SCALE] = packed.tensor_scale
            codes.append(origin.into_cut(packed.codes))
            # A scalar scale is stored in the shape (1,), as the scaling state has it.
            of_kernels.append(jax.tree.map(jnp.atleast_1d, own))
        cut = kernels[0][0].cut
        return jnp.concatenate(codes, axis=cut[0]) if cut else codes[0], of_kernels

    for i, axis in reversed([*enumerate(stack)]):  # scales are stacked along the first axes
        of_one = jax.vmap(of_one, in_axes=(axis - i, 0), out_axes=(axis - i, 0))
    codes, of_kernels = of_one(parameter, scales)
    return codes, of_kernels


def _groups(kernel: Origin, plan: StoredContraction, stack: Shape) -> Groups | None:
    """Returns the ``groups`` of a ``ServedOp``."""
    (_, summed), (_, batch) = plan.dimension_numbers
    in_order, quantizer = tuple(sorted(summed)), plan.recipe.forward.rhs
    are_first = (batch, stack) == (tuple(range(len(batch))), tuple(range(len(stack))))
    are_first &= kernel.cut is None or (len(plan.rhs.shape) > 1 and not batch)
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
    op_type: type[Op],
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
    return frozen(op_type, lhs, rhs, *arguments, **keywords)

"""``freeze_ops``: quantizes the kernels of a model that was traced, and fixes the scales of its ops."""

from __future__ import annotations

import functools
import itertools
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import KERNEL_TENSOR_SCALE, OVERWRITE_WITH_GRADIENT, state_leaf_names
from fp8flax._core.ops.canonical import Shape
from fp8flax._core.ops.op import MissingStateError
from fp8flax._core.ops.stored import StoredContraction, packed_kernel
from fp8flax._core.qtensor import Quantizer
from fp8flax._core.recipes import CustomRecipe
from fp8flax._core.state.state import step_scale
from fp8flax._core.state.tree import StateTree, path_names
from fp8flax._core.types import Path, PyTree
from fp8flax._model.param_origin import Origin, hold_each_once
from fp8flax._serve.reading import WEIGHT_ONLY, Recording, Scales, SeenOp
from fp8flax._serve.stored_op import KERNEL_SCALE, Arrays, Groups, ServedOp, groups_in_weight
from fp8flax._train.check import warn_if_damaged


def freeze_ops(
    recording: Recording,
    params: Mapping[Path, jax.Array],
    state: PyTree,
    unseen: Collection[Path],
    *,
    is_nnx: bool = False,
) -> tuple[list[ServedOp], Arrays, Arrays]:
    """Returns the frozen ops, the codes of the stored kernels, and their scales; warns as ``freeze`` does.

    ``_with_delayed_scales`` gives each op the scales of the next step. ``_users`` lists the ops of each
    parameter. ``_stacks`` and ``_why_wide`` say whether the parameter can be stored. If so, ``_quantize``
    returns its codes, and ``_served`` describes its ops. All other ops compute as in training.

    ``unseen`` are the ops that did not run. In NNX several ops may share a kernel, and layers are stacked
    along the first axes.
    """
    if not recording.ops:
        raise ValueError(
            "No FP8 op ran in the calls that freeze traced. Convert the model by "
            "fp8flax.quantize_model(model, include=…); fp8flax.report(model, x) says what is converted. If "
            "other methods run its FP8 ops, pass their inputs: freeze(…, methods={'decode': (z,)}). Call "
            "freeze outside of autocast(enabled=False)."
        )
    seen = _with_delayed_scales(recording.ops.values(), state)
    wide = dict.fromkeys(unseen, "it did not run in the calls that freeze traced")
    # With weight_only an op of a wide kernel multiplies in the inputs' dtype.
    gemms = {op.path: CustomRecipe() if op.gemms is WEIGHT_ONLY else op.gemms for op in seen}
    served = {path: ServedOp(path, of_op) for path, of_op in gemms.items()}
    codes, scales = Arrays(), Arrays()
    for name, slices in _users(seen, is_nnx).items():
        firsts, parameter = [ops[0] for ops in slices], params[name]
        stacks = _stacks(firsts, parameter.shape, is_nnx)
        if reason := _why_wide(firsts, name in recording.read, stacks):
            wide[name] = reason
            continue
        codes[name], ops = _quantize(slices, parameter, *stacks)
        groups = _groups(firsts, *stacks)
        for op in ops:
            served[op.path] = _served(op, groups, jnp.result_type(parameter), *stacks)
            scales |= {(*op.path, scale): x for scale, x in op.scales.items()}
    if wide:
        text = "; ".join(f"{'/'.join(path)} ({reason})" for path, reason in sorted(wide.items()))
        warnings.warn(f"These kernels of FP8 ops stay wide: {text}.", stacklevel=4)
    return [*served.values()], codes, scales


def _with_delayed_scales(ops: Iterable[SeenOp], state: PyTree) -> list[SeenOp]:
    """Returns the ops with their delayed scales; warns about scales that have seen no data."""
    advice = "The frozen scales are computed from it. Call calibrate before freeze."
    warn_if_damaged(state, advice, stacklevel=6)
    tree = StateTree.of(state)
    states = dict(zip((path_names(tree.paths[i]) for i, _ in tree.pairs), tree.states()))
    result, fresh = list[SeenOp](), list[str]()
    for op in ops:
        scales = Scales()
        for role, quantizer in CustomRecipe(forward=op.gemms.forward).delayed.items():
            name, _ = state_leaf_names(role)
            place = *op.path, name
            if place not in states:
                raise MissingStateError(
                    f"{OVERWRITE_WITH_GRADIENT}/{'/'.join(place)} is missing from the variables: freeze "
                    "needs the scales that training or fp8flax.calibrate left, or fresh ones from "
                    "fp8flax.add_fp8_state, or in NNX from a new op."
                )
            scales[name] = step_scale(quantizer, states[place])[..., None]
            history = states[place].amax_history
            if not isinstance(history, jax.core.Tracer) and not np.any(jax.device_get(history)):
                fresh.append("/".join(place))
        result.append(op._replace(scales=scales))
    if fresh:
        warnings.warn(
            f"These scales are frozen although they have seen no data: {', '.join(fresh)}. To take them "
            "from sample batches, call calibrate before freeze.",
            stacklevel=5,
        )
    return result


def _users(ops: Iterable[SeenOp], is_nnx: bool) -> dict[Path, list[list[SeenOp]]]:
    """Returns for each parameter the ops that multiply by it, in the order of their slices.

    The ops of one slice share its codes: in NNX all ops that multiply by it in one way, otherwise one op.
    """
    users = dict[Path, dict[Any, list[SeenOp]]]()
    for op in ops:
        way = op.op_type, op.kernel, op.gemms.forward, op.kernel_dims
        for source in op.kernel.sources if op.gemms.forward.rhs else ():
            users.setdefault(source.path, {}).setdefault(way if is_nnx else op.path, []).append(op)
    by_cut = lambda ops: ops[0].kernel.cut or ()  # noqa: E731
    return {name: sorted(slices.values(), key=by_cut) for name, slices in users.items()}


def _stacks(ops: Sequence[SeenOp], whole: Shape, is_nnx: bool) -> list[Shape]:
    """Returns the axes along which layers may be stacked in a parameter, for each possibility.

    ``whole`` is the shape of the parameter. Its delayed scales are stacked in the same order. NNX slices
    the kernel and the scales of a frozen layer alike, so they must be stacked along the first axes.
    """
    part, experts = ops[0].kernel.sources[0].shape, Shape()
    if ops[0].op_type.is_stack:  # the kernels of experts have a scale each
        experts = cast(StoredContraction, ops[0].plan).rhs.shape[:1]
    shapes = {x.shape[:-1] for op in ops for x in op.scales.values()}

    def fits(stack: Shape) -> bool:
        sizes = tuple(whole[i] for i in stack)
        is_rest = tuple(n for i, n in enumerate(whole) if i not in stack) == part
        return is_rest and shapes <= {sizes, (*sizes, *experts)}

    choices = itertools.combinations(range(len(whole)), max(0, len(whole) - len(part)))
    found = [*filter(fits, choices)]
    are_first = all(stack == tuple(range(len(stack))) for stack in found)
    return found if are_first or not is_nnx else []


def _why_wide(ops: Sequence[SeenOp], is_read: bool, stacks: Sequence[Shape]) -> str | None:
    """Returns why a parameter that ops multiply by cannot be stored; None if it can be.

    ``ops`` are in the order of their slices. ``is_read`` is whether other code reads the parameter.
    """
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
    if len(stacks) != 1:
        return "its shape and its state do not show along which axes loops stack it (in NNX only the first)"
    return None


def _quantize(
    slices: Sequence[Sequence[SeenOp]], parameter: jax.Array, stack: Shape
) -> tuple[jax.Array, list[SeenOp]]:
    """Returns the codes of a parameter, and the ops that multiply by it with all of their scales."""
    known = [[op.scales[KERNEL_SCALE] for op in ops if KERNEL_SCALE in op.scales] for ops in slices]
    scales = [functools.reduce(jnp.maximum, own) if own else None for own in known]
    # Without the path, equal layers have one program.
    source = slices[0][0].kernel.sources[0]._replace(path=())
    kernels = tuple((op.kernel._replace(sources=(source,)), op.plan) for op, *_ in slices)
    is_known = isinstance(parameter, jax.Array) and not isinstance(parameter, jax.core.Tracer)
    # The codes are on the devices of the parameter, if there are several.
    is_on_several = is_known and len(parameter.sharding.device_set) > 1
    places = {"out_shardings": (parameter.sharding, None)} if is_on_several else {}
    quantize = jax.jit(_quantized, static_argnums=(0, 1), **places)
    codes, of_slices = quantize(kernels, stack, parameter, scales)
    return codes, [op._replace(scales=op.scales | x) for ops, x in zip(slices, of_slices) for op in ops]


def _quantized(
    kernels: Sequence[tuple[Origin, StoredContraction]],
    stack: Shape,
    parameter: jax.Array,
    scales: Sequence[jax.Array | None],
) -> tuple[jax.Array, list[Scales]]:
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


def _served(op: SeenOp, groups: Groups, dtype: np.dtype, stack: Shape) -> ServedOp:
    """Returns the description of an op whose kernel is stored."""
    scales = tuple((name, x.shape[len(stack) :]) for name, x in op.scales.items())
    kernel, cut = op.kernel.sources[0].path, op.kernel.cut
    return ServedOp(op.path, op.gemms, scales, kernel, groups, dtype, stack, cut)


def _groups(ops: Sequence[SeenOp], stack: Shape) -> Groups:
    """Returns the ``groups`` of the ops that multiply by the slices of a parameter; none if they differ."""
    found = {
        (op.gemms.forward, _groups_of(op.kernel, cast(StoredContraction, op.plan), stack)) for op in ops
    }
    return found.pop()[1] if len(found) == 1 else ()


def _groups_of(kernel: Origin, plan: StoredContraction, stack: Shape) -> Groups:
    """Returns the ``groups`` of an op with this plan."""
    (_, summed), (_, batch) = plan.dimension_numbers
    in_order, quantizer = tuple(sorted(summed)), plan.recipe.forward.rhs
    are_first = (batch, stack) == (tuple(range(len(batch))), tuple(range(len(stack))))
    are_first &= kernel.cut is None or (len(plan.rhs.shape) > 1 and not batch)
    # jnp.einsum orders what it sums over by name, and blocks of several dimensions are in this order.
    is_in_order = not (quantizer and quantizer.block) or tuple(summed) == in_order
    shape = plan.rhs.shape
    out = tuple(i for i in range(len(shape)) if i not in (*batch, *summed))
    groups = tuple(tuple(i - len(batch) for i in group) for group in (out, in_order))
    weight = *(shape[i] for i in batch), *(math.prod(shape[i] for i in dims) for dims in (out, in_order))
    # In a file a square kernel ``(out, in)`` would be taken for ``(in, out)``.
    is_in_order &= groups_in_weight(weight, shape) in ([], [groups])
    return groups if are_first and is_in_order and kernel.is_one_parameter else ()

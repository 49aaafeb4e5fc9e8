"""Freezes and computes one op: its kernel is stored in FP8, and its scales no longer change.

Linen and NNX find the ops of a model by a trace, in which each op multiplies by zeros instead of its
kernel. So if the traced program still needs a kernel after its dead code is removed, something else reads
the kernel, and it stays wide.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, state_leaf_names
from fp8flax._core.ops.dot_general import packed_kernel
from fp8flax._core.ops.op import MissingStateError, Op
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantizers import CurrentQuantizer, DelayedQuantizer, NVFP4Quantizer
from fp8flax._core.recipes import CustomRecipe, GemmRecipe
from fp8flax._core.state.state import ScalingState, scale_of
from fp8flax._core.state.tree import history_axis, path_names
from fp8flax._model.param_origin import Origin
from fp8flax._train.check import warn_if_damaged

Path = tuple[str, ...]
Arrays = dict[Path, jax.Array]
Scales = dict[str, jax.Array]
"""The scales of an op, by their names in the variables."""

_SCALES = {role: state_leaf_names(role)[0] for role in ("input", "kernel")}
INPUT_SCALE, KERNEL_SCALE = _SCALES.values()
WEIGHT_ONLY = CustomRecipe(
    forward=GemmRecipe(rhs=CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise"))
)


class SeenOp(NamedTuple):
    """The record of an FP8 op that a model computes."""

    row: type[Op]
    gemms: CustomRecipe
    kernel: Origin | None
    """The origin of the kernel; None if the kernel does not come from parameters only."""
    args: tuple[Any, ...]
    """The arguments of the op, with shapes and dtypes instead of arrays."""
    stacked: tuple[int, ...] | None = None
    """The axes along which layers are stacked in the parameter; None if only its shape shows them."""

    @property
    def kernel_paths(self) -> tuple[Path, ...]:
        """The paths of the parameters that the kernel is made of."""
        return () if self.kernel is None else tuple({source.path for source in self.kernel.sources})


class Layout(NamedTuple):
    """The dimensions of a kernel, counted without those by which layers are stacked."""

    out: tuple[int, ...]
    """The dimensions of the output."""
    summed: tuple[int, ...]
    """The dimensions that the matmul sums over."""


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
    layout: Layout | None = None
    """The layout of the kernel; None if the op does not read it as it is stored."""
    dtype: np.dtype | None = None
    """The dtype of the kernel before it was stored."""


def leaves_of(tree: Any) -> Arrays:
    """Returns the leaves of a tree without boxes by their paths."""
    return {path_names(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


# Freezing.


def freeze_ops(
    seen: Mapping[Path, SeenOp],
    read: Collection[Path],
    params: Mapping[Path, Any],
    state: Mapping[Path, Any],
    weight_only: bool,
    unseen: Collection[str] = (),
) -> tuple[list[ServedOp], Arrays, Arrays]:
    """Returns the frozen ops, the codes of the stored kernels, and their scales.

    Warns about kernels that stay wide, and about scales that have seen no data or that no training leaves.

    Args:
        seen: the ops that a trace of the model has found.
        read: the kernels that something else than an FP8 op reads.
        params, state: arrays of the model.
        weight_only: as in ``freeze``.
        unseen: further ops, which the trace has not found.
    """
    if not seen:
        raise ValueError(
            "No FP8 op ran. Pass inputs to trace the model with: freeze(model, variables, x), or "
            "freeze(model, x) in NNX. If it has no FP8 ops, convert it by "
            "fp8flax.quantize_model(model, include=…); fp8flax.report(model, x) says what is converted. "
            "Call freeze outside of autocast(enabled=False)."
        )
    advice = "The frozen scales are computed from it. Call calibrate before freeze."
    warn_if_damaged(unflatten_dict(state), advice, stacklevel=5)
    uses = Counter([*(path for op in seen.values() for path in op.kernel_paths), *read])
    ops, codes, scales, fresh = list[ServedOp](), Arrays(), Arrays(), list[str]()
    wide = dict.fromkeys(unseen, "no layer of Flax, such as nnx.Linear, multiplied by it as a whole")
    for path, found in seen.items():
        gemms = WEIGHT_ONLY if weight_only else found.gemms
        states = _states(path, gemms, state, fresh)
        reason = _why_wide(found, gemms, uses, params)
        op = ServedOp(path, CustomRecipe() if weight_only else gemms)
        if reason is None:
            (kernel,), (stacked,) = found.kernel_paths, _stacks(found, params)
            plan = found.row.plan(*found.args, recipe=gemms)  # type: ignore[misc]
            codes[kernel], own = _stored(plan, found, params[kernel], states, stacked)
            scales.update({(*path, name): x for name, x in own.items()})
            is_leading = stacked == tuple(range(len(stacked)))
            layout = _layout_of(plan, found) if is_leading else None
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(params[kernel].dtype))
            op = ServedOp(path, gemms, tuple(own), kernel, layout, dtype)
        elif reason:
            wide.update({"/".join(kernel): reason for kernel in found.kernel_paths})
        ops.append(op)
    if wide:
        text = "; ".join(f"{path} ({reason})" for path, reason in sorted(wide.items()))
        warnings.warn(f"These kernels of FP8 ops stay wide: {text}.", stacklevel=4)
    if fresh:
        warnings.warn(
            f"These scales are frozen although they have seen no data: {', '.join(fresh)}. To take them "
            "from sample batches, call calibrate before freeze.",
            stacklevel=4,
        )
    return ops, codes, scales


def _why_wide(
    found: SeenOp, gemms: CustomRecipe, uses: Mapping[Path, int], params: Mapping[Path, Any]
) -> str | None:
    """Returns why the kernel of an op cannot be stored in FP8; None if it can be.

    The reason is empty if the recipe keeps kernels wide, or the kernel does not come from parameters.
    """
    if gemms.forward.rhs is None or found.kernel is None:
        return ""
    if isinstance(gemms.forward.rhs, NVFP4Quantizer):
        return "freeze does not store NVFP4"
    if found.row.plan is None:
        return "it is the kernel of a convolution or of a ragged dot"
    if not found.kernel.is_whole_parameter:
        return "its matmul does not multiply by this parameter as a whole"
    if uses[found.kernel_paths[0]] > 1:
        return "something else reads it, or changes it"
    is_clear = len(_stacks(found, params)) == 1
    return None if is_clear else "its shape does not show along which axes loops stack it"


def _stacks(found: SeenOp, params: Mapping[Path, Any]) -> list[tuple[int, ...]]:
    """Returns the axes along which layers may be stacked in a kernel, for each possibility."""
    if found.stacked is not None:
        return [found.stacked]
    assert found.kernel is not None
    whole, part = (params[found.kernel_paths[0]].shape, found.kernel.sources[0].shape)
    choices = itertools.combinations(range(len(whole)), max(0, len(whole) - len(part)))
    return [c for c in choices if [n for i, n in enumerate(whole) if i not in c] == list(part)]


def _states(
    path: Path, gemms: CustomRecipe, state: Mapping[Path, Any], fresh: list[str]
) -> dict[str, ScalingState]:
    """Returns the states of the delayed quantizers of input and kernel, by role.

    The names of scales that have seen no data are appended to ``fresh``.
    """
    states = {}
    for role, used in (("input", gemms.forward.lhs), ("kernel", gemms.forward.rhs)):
        if not isinstance(used, DelayedQuantizer):
            continue
        names = state_leaf_names(role)
        place = "/".join((*path, names[0]))
        scale, history = (state.get((*path, name)) for name in names)
        if scale is None or history is None:
            raise MissingStateError(
                f"{OVERWRITE_WITH_GRADIENT}/{place} is missing from the variables: freeze needs the scales "
                "that training or fp8flax.calibrate left, or fresh ones from fp8flax.add_fp8_state."
            )
        if not isinstance(history, jax.core.Tracer) and not np.any(jax.device_get(history)):
            fresh.append(place)
        states[role] = ScalingState(jnp.asarray(scale), jnp.asarray(history))
    return states


def _stored(
    plan: Any,
    found: SeenOp,
    parameter: Any,
    states: Mapping[str, ScalingState],
    stacked: Sequence[int],
) -> tuple[jax.Array, Scales]:
    """Returns the codes of a kernel in the places of its parameter, and all scales of the op.

    ``stacked`` are the axes of the parameter that stack layers.
    """
    origin, delayed = found.kernel, plan.recipe.delayed
    assert origin is not None

    def of_one(parameter: jax.Array, states: Mapping[str, ScalingState]) -> Any:
        scales = {_SCALES[role]: scale_of(delayed[role], x)[None] for role, x in states.items()}
        kernel = origin.rebuild(parameter).astype(found.args[1].dtype)
        packed = packed_kernel(plan, kernel, scales.get(KERNEL_SCALE))
        bits = origin.into_parameter(jax.lax.bitcast_convert_type(packed.codes, jnp.uint8))
        # A scalar scale is stored in the shape (1,), as the scaling state has it.
        scale = packed.scale if packed.scale.ndim else packed.scale.reshape((1,))
        return jax.lax.bitcast_convert_type(bits, packed.codes.dtype), {**scales, KERNEL_SCALE: scale}

    for i, axis in reversed([*enumerate(stacked)]):
        of_states = {role: _stack_axes(state)[i] - i for role, state in states.items()}
        of_one = jax.vmap(of_one, in_axes=(axis - i, of_states), out_axes=axis - i)
    is_traced = isinstance(parameter, jax.core.Tracer)
    sharding = None if is_traced else getattr(parameter, "sharding", None)
    # The codes are on the devices of the parameter, if there are several.
    places = (
        {} if sharding is None or len(sharding.device_set) == 1 else {"out_shardings": (sharding, None)}
    )
    result: tuple[jax.Array, Scales] = jax.jit(of_one, **places)(parameter, states)
    return result


def _stack_axes(state: ScalingState) -> list[int]:
    """Returns the axes by which the states of layers are stacked."""
    own = history_axis(*state)
    return [axis for axis in range(state.scale.ndim) if axis != own]


def _layout_of(plan: Any, found: SeenOp) -> Layout | None:
    """Returns the layout of a kernel that an op reads as it is stored, without batch dimensions."""
    (_, summed), (_, batch) = plan.dimension_numbers
    if batch or found.kernel is None or not found.kernel.is_one_parameter:
        return None
    return Layout(tuple(i for i in range(found.args[1].ndim) if i not in summed), summed)


# Computing.


@jax.custom_jvp
def constant(x: Any) -> Any:
    """Returns codes and scales unchanged; differentiating them raises ``TypeError``."""
    return x


@constant.defjvp
def _constant_jvp(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "The FP8 kernels and the scales of a frozen model have no gradient. Differentiate with respect to "
        "the inputs, or to wide parameters only, with the other variables closed over. To train the "
        "kernels, train the model that was frozen."
    )


def computed(
    row: type[Op],
    gemms: CustomRecipe,
    codes: jax.Array,
    scales: Mapping[str, jax.Array],
    lhs: jax.Array,
    *arguments: Any,
    **keywords: Any,
) -> jax.Array:
    """Returns the result of an op with a plan for the codes of its kernel and its scales."""
    if recipe_in_use(gemms, gemms) is None:
        raise ValueError(
            "fp8flax.autocast(enabled=False) cannot turn FP8 off in a frozen model, whose kernels are "
            "stored in FP8. Call it outside of that context, or call the original model."
        )
    codes, scales = constant((codes, dict(scales)))
    scale = scales[KERNEL_SCALE]
    # ``_stored`` gives a scalar scale the shape (1,).
    kernel = QTensor(codes, scale.reshape(()) if scale.shape == (1,) else scale, gemms.forward.rhs)
    input_scale = scales.get(INPUT_SCALE)
    return row.in_fp8(lhs, kernel, *arguments, recipe=gemms, input_scale=input_scale, **keywords)

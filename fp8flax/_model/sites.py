"""A contraction as an op computes it, and as the rules see it: its op, name, kind, shapes and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from fp8flax._core.plans.conv import is_matmul
from fp8flax._linen.conversion import conversion
from fp8flax._linen.op import Fp8Op
from fp8flax._linen.ops import Fp8ConvGeneralDilatedOp, Fp8DotGeneralOp, Fp8RaggedDotOp
from fp8flax._model.interception import Contraction
from fp8flax._model.jaxprs import CONV, DOT, RAGGED_DOT
from fp8flax._model.rules import GemmSizes, Site


def as_op(contraction: Contraction) -> tuple[type[Fp8Op], tuple[Any, ...], Callable[[Any], Any]]:
    """Returns the op that computes a contraction, its arguments, and what to do with its result.

    Of the arguments of a matmul the second is the kernel, if one of them is.
    """
    operands, params = contraction.operands, contraction.params
    rest = params["precision"], params["preferred_element_type"]
    if contraction.primitive == CONV:
        names = (
            *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
            *("feature_group_count", "batch_group_count"),
        )
        return Fp8ConvGeneralDilatedOp, (*operands, *(params[name] for name in names), *rest), _as_it_is
    if contraction.primitive == RAGGED_DOT:
        return Fp8RaggedDotOp, (*operands, *rest), _as_it_is
    lhs, rhs = operands
    dims = params["dimension_numbers"]
    left, right = contraction.origins
    if left is None or right is not None:
        return Fp8DotGeneralOp, (lhs, rhs, dims, *rest), _as_it_is
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    num_batch, num_left = len(lhs_batch), lhs.ndim - len(lhs_batch) - len(lhs_contract)

    def restore(out: jax.Array) -> jax.Array:
        axes, split = list(range(out.ndim)), out.ndim - num_left
        return jax.lax.transpose(out, (*axes[:num_batch], *axes[split:], *axes[num_batch:split]))

    swapped = ((rhs_contract, lhs_contract), (rhs_batch, lhs_batch))
    return Fp8DotGeneralOp, (rhs, lhs, swapped, *rest), restore


def _as_it_is(out: jax.Array) -> jax.Array:
    return out


def name_of(site: Site, contraction: Contraction, arguments: tuple[Any, ...]) -> str:
    """Returns what tells a contraction from the others of its module, whatever else a method computes.

    For a Linen layer that takes ops, what the op would be called that is given to it by hand. Else by its
    kernel: one that is used twice alike has one state, as a layer that is called twice has. Products of
    activations have nothing to be called by, and are counted.
    """
    frame = contraction.frame
    left, right = contraction.origins
    kernel = left if right is None else right
    if site.kind != "kernel" or kernel is None:
        kind = f"{frame.method}_{site.kind}".lstrip("_")
        return f"{kind}_{frame.count(kind)}"
    paths = dict.fromkeys(
        path[len(frame.path) :] if path[: len(frame.path)] == frame.path else path
        for path in (source.path for source in kernel.sources)
    )
    is_linens = type(frame.module).__module__.startswith("flax.")  # and has no other contraction
    if _takes_ops(frame.module) and (("kernel",) in paths or is_linens):
        return "0"
    summed: tuple[int, ...] = ()
    if contraction.primitive == DOT:
        summed = arguments[2][0][1]
    return "-".join(name.replace("/", "-") for path in paths for name in path) + kernel.part(summed)


def _takes_ops(module: nn.Module) -> bool:
    """Tells whether a layer has a field for an FP8 op; ``fp8flax.Einsum`` is ``nn.Einsum`` with one."""
    fields = ("dot_general_cls", "conv_general_dilated_cls")
    return isinstance(module, nn.Einsum) or any(hasattr(module, field) for field in fields)


def site_of(contraction: Contraction, arguments: tuple[Any, ...]) -> Site:
    """Returns a contraction as the rules see it, given the arguments of its op."""
    left, right = contraction.origins
    kernel = left if right is None else right
    kind = "product" if kernel is None else "kernel" if None in (left, right) else "parameters"
    if contraction.primitive != DOT and right is None:  # the first operand of these is never the kernel
        kind = "product"
    lhs, rhs = arguments[:2]
    reason = None
    if contraction.params.get("out_sharding") is not None:
        reason = "it is told the sharding of its result"
    elif isinstance(contraction.frame.module, nn.WeightNorm | nn.SpectralNorm):
        reason = "part of a normalization of weights"
    elif conversion().in_custom_vjp:
        reason = "in nn.custom_vjp, whose derivative is the model's own"
    elif contraction.frame.is_apart:
        reason = "in a module that is applied to variables of its own, where there is no place for state"
    elif contraction.primitive == RAGGED_DOT and not _is_plain_ragged(contraction.params):
        reason = "a ragged dot of other dimensions than lax.ragged_dot"
    return Site(
        path="/".join(contraction.frame.path),
        module=contraction.frame.module,
        kernel="/".join(kernel.sources[0].path) if kind == "kernel" and kernel is not None else None,
        kind=kind,
        primitive=contraction.primitive,
        shapes=(lhs.shape, rhs.shape),
        dtypes=(lhs.dtype, rhs.dtype),
        sizes=_sizes(contraction, arguments),
        is_matmul=contraction.primitive != CONV or is_matmul(*arguments[:-1]),
        impossible=reason,
        elsewhere=contraction.elsewhere,
    )


def _is_plain_ragged(params: dict[str, Any]) -> bool:
    numbers = params["ragged_dot_dimension_numbers"]
    dims = jax.tree.map(int, numbers.dot_dimension_numbers)
    places = (*numbers.lhs_ragged_dimensions, *numbers.rhs_group_dimensions)
    return jax.tree.leaves(dims) == [1, 1] and places == (0, 0) and params.get("group_offset") is None


def _sizes(contraction: Contraction, arguments: tuple[Any, ...]) -> GemmSizes:
    lhs, rhs = contraction.operands[:2]
    out = ()
    if contraction.primitive == CONV:
        _, _, *rest = arguments
        convolve = jax.lax.conv_general_dilated
        out = jax.eval_shape(lambda a, b: convolve(a, b, *rest[:-1]), lhs, rhs).shape
    shapes = lhs.shape, rhs.shape, out
    return sizes_of(contraction.primitive, contraction.params, shapes, arguments[0] is not lhs)


def sizes_of(
    primitive: str, params: dict[str, Any], shapes: tuple[tuple[int, ...], ...], is_swapped: bool = False
) -> GemmSizes:
    """Returns the sizes of a contraction.

    Args:
        primitive: its name.
        params: those of the primitive.
        shapes: of its operands and of its result.
        is_swapped: whether the kernel is its left operand.
    """
    lhs, rhs, out = shapes
    if primitive == RAGGED_DOT:
        return GemmSizes(math.prod(lhs[:-2]), lhs[-2], *rhs[-2:])
    if primitive == CONV:
        _, kernel, result = params["dimension_numbers"]
        k = math.prod(rhs[i] for i in kernel[1:])
        return GemmSizes(1, math.prod(out[i] for i in (result[0], *result[2:])), k, rhs[kernel[0]])
    (lhs_contract, _), (lhs_batch, _) = params["dimension_numbers"]
    batch, k = (math.prod(lhs[i] for i in dims) for dims in (lhs_batch, lhs_contract))
    m, n = (math.prod(shape) // max(1, batch * k) for shape in (lhs, rhs))
    return GemmSizes(batch, n, k, m) if is_swapped else GemmSizes(batch, m, k, n)

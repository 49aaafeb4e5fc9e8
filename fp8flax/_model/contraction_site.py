"""Describes a contraction for the rules, names its op, and brings it into the form that the op computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn

from fp8flax._core.ops.row import OpRow
from fp8flax._linen.conversion import conversion
from fp8flax._model.interception import Frame
from fp8flax._model.param_origin import Origin
from fp8flax._model.rules import Site


def as_op(
    row: OpRow,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    origins: tuple[Origin | None, Origin | None],
    frame: Frame,
) -> tuple[Site, tuple[Any, ...], Callable[[Any], Any]]:
    """Returns a contraction in the form that an op computes.

    Args:
        row: the op.
        operands: the operands of the primitive.
        params: the parameters of the primitive.
        origins: the origins of the first two operands; None for one that comes from anything but
            parameters.
        frame: the method that computes the contraction.

    Returns:
        The description of the contraction for the rules. Then the two operands and the other arguments of
        the op; if one operand is a kernel, it is the second. Then a function that makes the result of the
        contraction from the result of the op.
    """
    lhs, rhs, *more = operands
    arguments: tuple[Any, ...] = (*more, *row.arguments(params))
    left, kernel = origins
    restore: Callable[[Any], Any] = lambda out: out  # noqa: E731
    is_swapped = left is not None and kernel is None and row.swapped is not None
    if is_swapped and row.swapped is not None:
        swapped = row.swapped(lhs, rhs, *arguments)
        lhs, rhs, arguments, restore = rhs, lhs, swapped.arguments, swapped.restore
        left, kernel = kernel, left
    kind = "product" if kernel is None else "kernel" if left is None else "parameters"
    path: str | None = None
    if kernel is not None and left is None:
        name, path = _name_of(row, kernel, arguments, frame), "/".join(kernel.sources[0].path)
    else:
        product = f"{frame.method}_{kind}".lstrip("_")
        name = f"{product}_{frame.count(product)}"
    site = Site(
        path="/".join(frame.path),
        module=frame.module,
        kernel=path,
        kind=kind,
        op=row,
        shapes=(lhs.shape, rhs.shape),
        dtypes=(lhs.dtype, rhs.dtype),
        sizes=row.sizes(lhs.shape, rhs.shape, *arguments),
        is_matmul=row.is_matmul(lhs, rhs, *arguments),
        impossible=row.unsupported(params) or _why_no_op(frame),
        name=f"{row.name}_{name}",
        is_swapped=is_swapped,
    )
    return site, (lhs, rhs, *arguments), restore


def _name_of(row: OpRow, kernel: Origin, arguments: tuple[Any, ...], frame: Frame) -> str:
    """Returns the part of an op's name that follows the name of its class.

    It comes from the kernel, so it does not depend on what else a method computes. Different kernels of a
    module have different names, but for those that ``Origin.part`` names alike. A kernel that is used twice
    in the same way has one state, as a layer that is called twice has. In a Linen layer that takes ops, the
    op has the name that an op given by hand would have.
    """
    paths = dict.fromkeys(
        path[len(frame.path) :] if path[: len(frame.path)] == frame.path else path
        for path in (source.path for source in kernel.sources)
    )
    is_linen_layer = type(frame.module).__module__.startswith("flax.")  # such a layer has one contraction
    if _takes_ops(frame.module) and (("kernel",) in paths or is_linen_layer):
        return "0"
    summed: tuple[int, ...] = ()
    if row.primitive == "dot_general":
        (_, summed), _ = arguments[0]
    return "-".join(name.replace("/", "-") for path in paths for name in path) + kernel.part(summed)


def _takes_ops(module: nn.Module) -> bool:
    """Returns whether a layer can take an FP8 op, or is Linen's ``Einsum``, which is converted alike."""
    fields = ("dot_general_cls", "conv_general_dilated_cls")
    return isinstance(module, nn.Einsum) or any(hasattr(module, field) for field in fields)


def _why_no_op(frame: Frame) -> str | None:
    """Returns the reason why no op can be at the place of a contraction; None if one can."""
    if isinstance(frame.module, nn.WeightNorm | nn.SpectralNorm):
        return "part of a normalization of weights"
    if conversion().in_custom_vjp:
        return "in nn.custom_vjp, whose derivative is the model's own"
    if frame.is_apart:
        return "in a module that is applied to variables of its own, where there is no place for state"
    return None

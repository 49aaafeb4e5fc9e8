"""Describes a contraction for the rules, names its op, and brings it into the form that the op computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from fp8flax._linen.conversion import conversion
from fp8flax._model.interception import Contraction
from fp8flax._model.rules import Site


class AsOp(NamedTuple):
    """A contraction in the form that an op computes."""

    arguments: tuple[Any, ...]
    """The two operands and the other arguments of the op. If one operand is a kernel, it is the second."""
    is_swapped: bool
    """Whether the model has the operands in the opposite order."""
    restore: Callable[[jax.Array], jax.Array]
    """Makes the result of the contraction from the result of the op."""


def as_op(contraction: Contraction) -> AsOp:
    """Returns a contraction in the form that an op computes."""
    row = contraction.op
    (lhs, rhs, *more), rest = contraction.operands, row.arguments(contraction.params)
    left, right = contraction.origins
    if row.swapped is None or left is None or right is not None:
        return AsOp((lhs, rhs, *more, *rest), False, lambda out: out)
    swapped = row.swapped(lhs, rhs, *more, *rest)
    return AsOp((rhs, lhs, *swapped.arguments), True, swapped.restore)


def name_of(site: Site, contraction: Contraction, found: AsOp) -> str:
    """Returns the part of an op's name that follows the name of its class.

    It comes from the kernel, so it does not depend on what else a method computes. Different kernels of a
    module have different names, but for those that ``Origin.part`` names alike. A kernel that is used twice
    in the same way has one state, as a layer that is called twice has. In a Linen layer that takes ops, the
    op has the name that an op given by hand would have. Products of activations have no kernel, so they are
    numbered.
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
    is_linen_layer = type(frame.module).__module__.startswith("flax.")  # such a layer has one contraction
    if _takes_ops(frame.module) and (("kernel",) in paths or is_linen_layer):
        return "0"
    summed: tuple[int, ...] = ()
    if contraction.op.primitive == "dot_general":
        (_, summed), _ = found.arguments[2]
    return "-".join(name.replace("/", "-") for path in paths for name in path) + kernel.part(summed)


def _takes_ops(module: nn.Module) -> bool:
    """Returns whether a layer can take an FP8 op, or is Linen's ``Einsum``, which is converted alike."""
    fields = ("dot_general_cls", "conv_general_dilated_cls")
    return isinstance(module, nn.Einsum) or any(hasattr(module, field) for field in fields)


def site_of(contraction: Contraction, found: AsOp) -> Site:
    """Returns the description of a contraction for the rules, given the form that its op computes."""
    left, right = contraction.origins
    row, kernel = contraction.op, left if right is None else right
    kind = "product" if kernel is None else "kernel" if None in (left, right) else "parameters"
    if row.swapped is None and right is None:
        kind = "product"
    lhs, rhs, *arguments = found.arguments
    return Site(
        path="/".join(contraction.frame.path),
        module=contraction.frame.module,
        kernel="/".join(kernel.sources[0].path) if kind == "kernel" and kernel is not None else None,
        kind=kind,
        op=row,
        shapes=(lhs.shape, rhs.shape),
        dtypes=(lhs.dtype, rhs.dtype),
        sizes=row.sizes(lhs.shape, rhs.shape, *arguments),
        is_matmul=row.is_matmul(lhs, rhs, *arguments),
        impossible=row.unsupported(contraction.params) or _why_no_op(contraction),
        elsewhere=contraction.elsewhere,
    )


def _why_no_op(contraction: Contraction) -> str | None:
    """Returns the reason why no op can be at the place of a contraction; None if one can."""
    if isinstance(contraction.frame.module, nn.WeightNorm | nn.SpectralNorm):
        return "part of a normalization of weights"
    if conversion().in_custom_vjp:
        return "in nn.custom_vjp, whose derivative is the model's own"
    if contraction.frame.is_apart:
        return "in a module that is applied to variables of its own, where there is no place for state"
    return None

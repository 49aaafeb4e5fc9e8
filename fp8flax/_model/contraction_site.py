"""Brings a contraction into the form that an op computes, and describes it for the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fp8flax._core.ops.row import OpRow
from fp8flax._model.param_origin import Origin, ParamOrigins
from fp8flax._model.rules import Site

Path = tuple[str, ...]


class Contraction(NamedTuple):
    """A contraction in the form that an op computes."""

    row: OpRow
    arguments: tuple[Any, ...]
    """The two operands and the other arguments of the op; if one operand is a kernel, it is the second."""
    restore: Callable[[Any], Any]
    """Returns the result of the contraction, given the result of the op."""
    kind: str
    """``"kernel"``, ``"product"`` (of two activations) or ``"parameters"``."""
    kernel: Origin | None
    """The origin of the kernel; None for a contraction of another kind."""
    is_swapped: bool
    """Whether the kernel is the left operand in the model."""
    unsupported: str | None
    """The reason why the op cannot compute the contraction; None if it can."""

    def name(self, path: Path) -> str:
        """Returns the part of the op's name that comes from the kernel, for a module at ``path``.

        It does not depend on what else a method computes. Different kernels of a module have different
        names, but for those that ``Origin.part`` names alike. A kernel that is used twice in the same way
        has one state, as a layer that is called twice has.
        """
        assert self.kernel is not None
        summed: tuple[int, ...] = ()
        if self.row.primitive == "dot_general":
            (_, summed), _ = self.arguments[2]
        names = dict.fromkeys(
            "-".join(name.replace("/", "-") for name in _below(source.path, path)) + source.part
            for source in self.kernel.sources
        )
        return "-".join(names) + self.kernel.part(summed)

    def site(self, path: Path, module: Any, name: str, impossible: str | None = None) -> Site:
        """Returns the description of the contraction for the rules.

        Args:
            path: the path of the module.
            module: the module that computes the contraction.
            name: the name of the op.
            impossible: the reason why no op can be at this place; None if one can.
        """
        lhs, rhs, *_ = self.arguments
        return Site(
            path="/".join(path),
            module=module,
            kernel=None if self.kernel is None else "/".join(self.kernel.sources[0].path),
            kind=self.kind,
            op=self.row,
            shapes=(lhs.shape, rhs.shape),
            dtypes=(lhs.dtype, rhs.dtype),
            sizes=self.row.sizes(lhs.shape, rhs.shape, *self.arguments[2:]),
            is_matmul=self.row.is_matmul(*self.arguments),
            impossible=self.unsupported or impossible,
            name=name,
            is_swapped=self.is_swapped,
        )


def contraction(
    row: OpRow, operands: Sequence[Any], params: Mapping[str, Any], origins: ParamOrigins
) -> Contraction:
    """Returns a contraction in the form that an op computes.

    Args:
        row: the op.
        operands: the operands of the primitive.
        params: the parameters of the primitive.
        origins: the origins of the values of the model.
    """
    lhs, rhs, *more = operands
    arguments: tuple[Any, ...] = (*more, *row.arguments(params))
    left, kernel = origins.of(lhs), origins.of(rhs)
    restore: Callable[[Any], Any] = lambda out: out  # noqa: E731
    is_swapped = left is not None and kernel is None and row.swapped is not None
    if is_swapped and row.swapped is not None:
        swapped = row.swapped(lhs, rhs, *arguments)
        lhs, rhs, arguments, restore = rhs, lhs, swapped.arguments, swapped.restore
        left, kernel = kernel, left
    kind = "product" if kernel is None else "kernel" if left is None else "parameters"
    return Contraction(
        row=row,
        arguments=(lhs, rhs, *arguments),
        restore=restore,
        kind=kind,
        kernel=kernel if kind == "kernel" else None,
        is_swapped=is_swapped,
        unsupported=row.unsupported(params),
    )


def _below(path: Path, module: Path) -> Path:
    """Returns the path of a parameter as seen from a module, if the module holds it."""
    return path[len(module) :] if path[: len(module)] == module else path

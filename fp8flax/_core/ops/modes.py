"""Reports the tensors of a contraction to the host, for ``calibrate`` and ``statistics``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import merge_amax, on_automatic_axes
from fp8flax._core.measuring import Number, Numbers, numbers_of
from fp8flax._core.names import OPERANDS
from fp8flax._core.observe import Report, mode, report, report_amax
from fp8flax._core.ops.contract import Contraction, Operands, Scales, States
from fp8flax._core.quantize import on_cotangent
from fp8flax._core.types import PyTree

_places = itertools.count()
"""Numbers the places in programs that call an op. A loop calls the op at one place several times."""

Tensors = dict[str, jax.Array]
"""Input and kernel, or the output gradient, by role."""

Seen: TypeAlias = tuple[list[jax.Array], jax.Array | None]
"""The tensors after their report, and the number of the call."""


class Errors(NamedTuple):
    """What an op reports for ``statistics`` in one pass; its leaves are the arrays of the report."""

    of_roles: Sequence[Number]
    """The ``Numbers`` of the tensor of each role, one row for each of its quantizers."""
    of_kernel: Number | None = None
    """Sums of the kernel, which differ if kernels differ. Only in a forward pass."""
    call: Number | None = None
    """The number of the call, from the report of its forward pass. Only in a backward pass."""

    @classmethod
    def of(cls, report: Report) -> Errors:
        """Returns the record that an op has reported."""
        *of_roles, last = report.numbers
        is_backward = report.label[2] == ("output_grad",)
        return cls(of_roles, call=last) if is_backward else cls(of_roles, last)


def observed(
    plan: Contraction, compute: Callable[..., jax.Array], operands: Operands, states: States, scales: Scales
) -> jax.Array:
    """Returns the product, and reports its tensors to the host, for ``calibrate`` or ``statistics``."""
    observing = mode.value
    look: Callable[..., Seen] = (
        _with_amax if observing.calibrates else partial(_with_errors, observing.path, next(_places))
    )

    def look_at_cotangent(g: jax.Array, args: tuple[PyTree, ...]) -> tuple[jax.Array, PyTree]:
        plan, _, scales, _ = args
        (g,), _ = look({"output_grad": g}, *args)
        # ``calibrate`` differentiates the states alone, so their gradient must depend on the report.
        amaxes = dict.fromkeys(scales)
        if observing.calibrates and "output_grad" in scales:
            amaxes["output_grad"] = merge_amax(_amax(plan, "output_grad", g), scales["output_grad"])
        return g, (None, None, amaxes, None)

    # The mode is part of jit's cache key. Without the path in it, layers with equal plans share one trace.
    with mode(None):
        (x, w), call = look(dict(zip(OPERANDS, operands)), plan, states, scales, None)
        out = compute((x, w), scales)
        args = plan, states, scales, call
        return (
            cast(jax.Array, on_cotangent(look_at_cotangent, out, args, args)) if observing.backward else out
        )


def _amax(plan: Contraction, role: str, x: jax.Array) -> jax.Array:
    """Returns the amax of a tensor, or the amaxes of a stack."""
    return plan.amax(role, plan.canonical(role, lax.stop_gradient(x)))


def _with_amax(tensors: Tensors, plan: Contraction, states: States, *_: object) -> Seen:
    """Reports the amax of each tensor with delayed scaling."""
    seen = tensors | {
        role: report_amax(plan.recipe.delayed[role], x, _amax(plan, role, x), states[role])
        for role, x in tensors.items()
        if role in states
    }
    return [*seen.values()], None


def _with_errors(path: tuple[str, ...], place: int, tensors: Tensors, *args: PyTree) -> Seen:
    """Reports the ``Errors`` of a pass for ``statistics``, under the label ``(path, place, roles)``."""
    plan, _, scales, call = lax.stop_gradient(args)
    roles = tuple(role for role in tensors if any(plan.recipe.of_role(role)))
    if not roles and "output_grad" in tensors:  # a wide backward pass has nothing to report
        return [*tensors.values()], None

    def numbers(role: str, x: jax.Array, scales: Scales) -> jax.Array:
        x = plan.canonical(role, x)
        first, second = uses = list(zip(plan.recipe.of_role(role), plan.dims[role]))
        if first[0] is not None and first[0] == second[0] and first[0].serves_both:
            uses = uses[:1]
        found = [numbers_of(q, dims, x, scales.get(role)) for q, dims in uses if q is not None]
        # ``nonfinite`` counts elements of the tensor; the other counts are per cast.
        counted = Numbers._fields.index("nonfinite")
        return jnp.stack([found[0], *(each.at[counted].set(0) for each in found[1:])])

    def measured(tensors: Tensors, scales: Scales) -> Errors:
        found = Errors([numbers(role, tensors[role], scales) for role in roles])
        if "kernel" not in tensors:
            return found
        wide = tensors["kernel"].astype(np.float32)
        return found._replace(of_kernel=jnp.stack([jnp.sum(wide), jnp.sum(jnp.abs(wide))]))

    first, *others = tensors.values()
    found = on_automatic_axes(measured, first)(lax.stop_gradient(tensors), scales)._replace(call=call)
    first, number = report(first, (path, place, roles), *jax.tree.leaves(found))
    return [first, *others], number

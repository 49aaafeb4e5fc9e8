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
from fp8flax._core.qtensor import Given
from fp8flax._core.quantize import on_cotangent
from fp8flax._core.types import PyTree

_places = itertools.count()
"""Numbers the places in programs that call an op. A loop calls the op at one place several times."""


Label: TypeAlias = tuple[tuple[str, ...], int]
"""The path of an op in the model, and the number of the place that calls it.

In a report of ``Errors`` the roles of its tensors follow: input and kernel, or the output gradient."""


class Errors(NamedTuple):
    """What an op reports for ``statistics`` in one pass; its leaves are the arrays of the report."""

    of_roles: Sequence[Number]
    """The ``Numbers`` of the tensor of each role, one row for each of its quantizers."""
    of_kernel: Number | None = None
    """Sums of the kernel, by which the layers of a loop are told apart. Only in a forward pass."""
    call: Number | None = None
    """The number of the call, from the report of its forward pass. Only in a backward pass."""

    @classmethod
    def of(cls, report: Report) -> Errors:
        """Returns the record that an op has reported."""
        *of_roles, last = report.numbers
        _, _, roles = report.label
        is_backward = roles == ("output_grad",)
        return cls(of_roles, call=last) if is_backward else cls(of_roles, last)


def observed(
    plan: Contraction, compute: Callable[..., jax.Array], operands: Operands, states: States, scales: Scales
) -> jax.Array:
    """Returns the product, and reports its tensors to the host, for ``calibrate`` or ``statistics``."""
    observing = mode.value
    at_cotangent: Callable[..., tuple[jax.Array, PyTree]]
    kept: PyTree
    # The mode is part of jit's cache key. Without the path in it, layers with equal plans share one trace.
    with mode(None):
        if observing.calibrates:
            x, w = (_with_amax(plan, role, x, states) for role, x in zip(OPERANDS, operands))
            at_cotangent, kept = _amax_of_cotangent, states
        else:
            label = observing.path, next(_places)
            (x, w), kept = _with_errors(label, plan, dict(zip(OPERANDS, operands)), scales)
            at_cotangent = partial(_errors_of_cotangent, label)
        out = compute((x, w), scales)
        args = plan, scales, kept
        return cast(jax.Array, on_cotangent(at_cotangent, out, scales, args)) if observing.backward else out


def _amax(plan: Contraction, role: str, x: jax.Array) -> jax.Array:
    """Returns the amax of a tensor, or the amaxes of a stack."""
    return plan.amax(role, plan.canonical(role, lax.stop_gradient(x)))


def _with_amax(plan: Contraction, role: str, x: jax.Array, states: States) -> jax.Array:
    """Reports the amax of a tensor for ``calibrate``, if it has delayed scaling; returns the tensor."""
    if role not in states:
        return x
    return report_amax(plan.recipe.delayed[role], x, _amax(plan, role, x), states[role])


def _amax_of_cotangent(g: jax.Array, args: tuple[Contraction, Scales, States]) -> tuple[jax.Array, PyTree]:
    """Reports the amax of a cotangent; returns it with the cotangents of the scales."""
    plan, scales, states = args
    g, amaxes = _with_amax(plan, "output_grad", g, states), dict.fromkeys(scales)
    # ``calibrate`` differentiates the states alone, so their gradient must depend on the report.
    if "output_grad" in scales:
        amaxes["output_grad"] = merge_amax(_amax(plan, "output_grad", g), scales["output_grad"])
    return g, amaxes


def _with_errors(
    label: Label, plan: Contraction, tensors: dict[str, jax.Array], scales: Scales, call: Given = None
) -> tuple[list[jax.Array], jax.Array]:
    """Reports the ``Errors`` of a pass for ``statistics``; returns the tensors and the number of the call.

    ``tensors`` are input and kernel, or the output gradient, by role.
    """
    roles = tuple(role for role in tensors if any(plan.recipe.of_role(role)))

    def numbers(role: str, x: jax.Array, scales: Scales) -> jax.Array:
        x = plan.canonical(role, x)
        first, second = uses = list(zip(plan.recipe.of_role(role), plan.dims[role]))
        if first[0] is not None and first[0] == second[0] and first[0].serves_both:
            uses = uses[:1]
        found = [numbers_of(q, dims, x, scales.get(role)) for q, dims in uses if q is not None]
        # ``nonfinite`` counts elements of the tensor; the other counts are per cast.
        counted = Numbers._fields.index("nonfinite")
        return jnp.stack([found[0], *(each.at[counted].set(0) for each in found[1:])])

    def measured(tensors: dict[str, jax.Array], scales: Scales) -> Errors:
        found = Errors([numbers(role, tensors[role], scales) for role in roles])
        if "kernel" not in tensors:
            return found
        wide = tensors["kernel"].astype(np.float32)
        return found._replace(of_kernel=jnp.stack([jnp.sum(wide), jnp.sum(jnp.abs(wide))]))

    first, *others = tensors.values()
    constants = lax.stop_gradient((tensors, scales))
    found = on_automatic_axes(measured, first)(*constants)._replace(call=call)
    first, number = report(first, (*label, roles), *jax.tree.leaves(found))
    return [first, *others], number


def _errors_of_cotangent(
    label: Label, g: jax.Array, args: tuple[Contraction, Scales, jax.Array]
) -> tuple[jax.Array, PyTree]:
    """Reports the ``Errors`` of a cotangent; returns it with the cotangents of the scales."""
    plan, scales, call = args
    if any(plan.recipe.of_role("output_grad")):  # a wide backward pass has nothing to report
        (g,), _ = _with_errors(label, plan, {"output_grad": g}, scales, call)
    return g, dict.fromkeys(scales)

"""``run`` chooses how a contraction runs: in FP8, frozen, wide, or observed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core.axes import merge_amax, on_automatic_axes
from fp8flax._core.formats import is_wide_float
from fp8flax._core.gemm.gpus import warn_if_emulated
from fp8flax._core.measuring import Numbers, numbers_of
from fp8flax._core.names import FORWARD, KEPT_WIDE, ROLES
from fp8flax._core.observe import is_calibrating, mode, report, report_amax
from fp8flax._core.ops.contract import (
    STATELESS,
    Contraction,
    Operand,
    Scales,
    States,
    contract,
    quantized_once,
)
from fp8flax._core.qdq import in_qdq_with_scale, out_qdq_with_scale
from fp8flax._core.qtensor import STATIC, Dims, QTensor
from fp8flax._core.quantize import as_float_array, inf_to_nan, on_cotangent, straight_through
from fp8flax._core.recipes import CustomRecipe
from fp8flax._core.state.state import step_scales


def check_operands(lhs: Any, rhs: Any, preferred_element_type: Any) -> tuple[jax.Array, Any, Any]:
    """Returns the operands as arrays, and the wide kernel, or the type of the one that ``rhs`` stores.

    Raises ``TypeError`` if a dtype is not a wide float.
    """
    if preferred_element_type is not None and not is_wide_float(preferred_element_type):
        raise TypeError(
            "preferred_element_type must be None, bfloat16, float16, float32 or float64; got "
            f"{preferred_element_type!r}."
        )
    lhs = as_float_array(lhs, "lhs")
    if isinstance(rhs, QTensor):
        return lhs, rhs, jax.ShapeDtypeStruct(rhs.shape, lhs.dtype)
    rhs = as_float_array(rhs, "rhs")
    return lhs, rhs, rhs


def traced(f: Callable[..., jax.Array], *operands: Any) -> tuple[Any, dict[str, Any]]:
    """Traces a function of ``lax``, which raises its own errors.

    Returns the type of the result, and the parameters of the primitive: the arguments in full.
    """
    program = jax.make_jaxpr(f)(*operands)
    return program.out_avals[0], program.eqns[-1].params


def run(
    plan: Contraction,
    lhs: jax.Array,
    rhs: jax.Array | QTensor,
    *,
    states: States = STATELESS,
    input_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns the result of a contraction, in the ambient ``mode``.

    Args:
        plan, lhs: the contraction and its input.
        rhs: the kernel, a wide float; or the kernel of a frozen model, from ``packed_kernel``.
        states: scaling states of the roles that have delayed scaling.
        input_scale: the delayed scale of the input of a frozen kernel. Gradients then stay wide.
    """
    recipe, is_qdq = plan.recipe, isinstance(plan, FakeQuantized)

    def on_axes(f: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``partial(f, plan)``; JAX handles explicit axes if it differentiates the product."""
        return partial(f if is_qdq else on_automatic_axes(f, lhs, plan.out_sharding), plan)

    wide = on_axes(type(plan).wide)
    if not any(recipe.quantizers):
        with jax.named_scope(KEPT_WIDE):
            return wide(lhs, rhs)
    if isinstance(rhs, QTensor):
        warn_if_emulated(recipe.forward)
        return on_axes(_frozen)(lhs, rhs, {} if input_scale is None else {"input": input_scale})
    if not (is_qdq or is_calibrating()):
        warn_if_emulated(recipe.forward, recipe.dgrad, recipe.wgrad)
    scales = {}
    if states:
        found = step_scales([recipe.delayed[role] for role in states], list(states.values()))
        scales = dict(zip(states, found))
    compute = on_axes(_run_qdq if is_qdq else contract)
    if mode.value is None:
        return compute((lhs, rhs), scales)
    if is_calibrating():
        compute = lambda operands, scales: wide(*operands)  # noqa: E731
    return _observed(plan, compute, (lhs, rhs), states, scales)


# Quantize-dequantize.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FakeQuantized(Contraction):
    """A product in quantize-dequantize form: ``in_qdq`` of both operands, the product, and ``out_qdq``.

    JAX differentiates the product, any number of times. Each tensor has one scale, so it does not matter
    which dimensions are contracted.
    """

    multiply: Callable[[jax.Array, jax.Array], jax.Array] = dataclasses.field(metadata=STATIC)
    """The product of wide operands."""

    @classmethod
    def of(cls, multiply: Any, lhs: jax.Array, rhs: jax.Array, recipe: CustomRecipe) -> FakeQuantized:
        """Returns the plan; ``multiply(lhs, rhs)`` computes the product of wide operands."""
        out = jax.eval_shape(multiply, lhs, rhs)  # lax raises its own errors
        x, w = Operand.of(lhs), Operand.of(rhs)
        return cls(recipe=recipe, lhs=x, rhs=w, out_dtype=out.dtype, multiply=multiply)

    @property
    def dims(self) -> dict[str, tuple[Dims, ...]]:
        return dict.fromkeys(ROLES, (Dims(0, ()), Dims(0, ())))

    def wide(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return self.multiply(lhs, rhs)


def _run_qdq(plan: Contraction, operands: tuple[jax.Array, jax.Array], scales: Scales) -> jax.Array:
    """Returns the result of a ``FakeQuantized`` contraction."""
    lhs, rhs = (
        in_qdq_with_scale(plan.recipe.delayed[role], x, scales[role])
        if role in scales
        else _and_back(plan, role, x)
        for role, x in zip(("input", "kernel"), operands)
    )
    out = plan.wide(lhs, rhs)
    if "output_grad" in scales:
        return out_qdq_with_scale(plan.recipe.delayed["output_grad"], out, scales["output_grad"])
    return on_cotangent(lambda g, _: (_and_back(plan, "output_grad", inf_to_nan(g)), ()), out, ())


def _and_back(plan: Contraction, role: str, x: jax.Array) -> jax.Array:
    """Returns a tensor quantized by a stateless quantizer and dequantized; ``x`` if the recipe has none."""
    (quantizer, _), (dims, _) = plan.recipe.of_role(role), plan.dims[role]
    if quantizer is None:
        return x
    return straight_through(lambda x: quantizer.quantize(x, dims).dequantize(x.dtype), x)


# Frozen.


# With straight-through quantization q, the derivative of q(x) . q(w) in the direction dx is dx . q(w).
# Tangents and cotangents have no scales, so they stay wide. Codes are not differentiated.
@jax.custom_jvp
@jax.jit
def _frozen(plan: Any, lhs: jax.Array, kernel: QTensor, scales: Scales) -> jax.Array:
    """Returns the forward product of an input and the kernel of a frozen model."""
    x, w = quantized_once(plan, "input", lhs, scales), plan.restored(kernel)
    with jax.named_scope(FORWARD):
        return plan.original("output_grad", plan.product(FORWARD, is_stored=True)(x, w))


@_frozen.defjvp
def _frozen_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the result of ``_frozen`` and its tangent."""
    (plan, _, kernel, _), (_, dx, *_) = primals, tangents
    w = plan.original("kernel", plan.restored(kernel).dequantize(plan.rhs.dtype))
    with jax.named_scope(KEPT_WIDE):
        return _frozen(*primals), plan.wide(dx, w)


# Observing.


_places = itertools.count()
"""Numbers the places in programs that call an op. A loop calls the op at one place several times."""

Tensors = dict[str, jax.Array]
"""Input and kernel, or the output gradient, by role."""


def _observed(plan: Contraction, compute: Any, operands: Any, states: States, scales: Scales) -> jax.Array:
    """Returns the product, and reports its tensors to the host, for ``calibrate`` or ``statistics``."""
    observing = mode.value
    look: Any = _with_amax if observing.calibrates else partial(_with_errors, observing.path, next(_places))

    def look_at_cotangent(g: jax.Array, args: Any) -> Any:
        plan, _, scales, _ = args
        (g,), _ = look({"output_grad": g}, *args)
        # ``calibrate`` differentiates the states alone, so their gradient must depend on the report.
        amaxes = dict.fromkeys(scales)
        if observing.calibrates and "output_grad" in scales:
            amaxes["output_grad"] = merge_amax(_amax(plan, "output_grad", g), scales["output_grad"])
        return g, (None, None, amaxes, None)

    # The mode is part of jit's cache key. Without the path in it, layers with equal plans share one trace.
    with mode(None):
        (x, w), call = look(dict(zip(("input", "kernel"), operands)), plan, states, scales, None)
        out: jax.Array = compute((x, w), scales)
        args = plan, states, scales, call
        return on_cotangent(look_at_cotangent, out, args) if observing.backward else out


def _amax(plan: Contraction, role: str, x: jax.Array) -> jax.Array:
    """Returns the amax of a tensor, or the amaxes of a stack."""
    return plan.amax(role, plan.canonical(role, lax.stop_gradient(x)))


def _with_amax(tensors: Tensors, plan: Contraction, states: States, *_: Any) -> Any:
    """Returns the tensors and None, and reports the amax of each tensor with delayed scaling."""
    seen = tensors | {
        role: report_amax(plan.recipe.delayed[role], x, _amax(plan, role, x), states[role])
        for role, x in tensors.items()
        if role in states
    }
    return seen.values(), None


def _with_errors(path: tuple[str, ...], place: int, tensors: Tensors, *args: Any) -> Any:
    """Returns the tensors and the number of the call, and reports ``Numbers`` for ``statistics``.

    The label of the report is ``(path, place, roles)``. It has the numbers of the tensor of each role, one
    row for each of its quantizers. The last array of a forward pass are sums of the kernel, which differ if
    kernels differ. That of a backward pass is the number of its call.
    """
    plan, _, scales, call = lax.stop_gradient(args)
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

    def measured(tensors: Tensors, scales: Scales) -> list[jax.Array]:
        found = [numbers(role, tensors[role], scales) for role in roles]
        if "kernel" in tensors:
            wide = tensors["kernel"].astype(np.float32)
            found.append(jnp.stack([jnp.sum(wide), jnp.sum(jnp.abs(wide))]))
        return found

    first, *others = tensors.values()
    found = on_automatic_axes(measured, first)(lax.stop_gradient(tensors), scales)
    first, number = report(first, (path, place, roles), *found, *([] if call is None else [call]))
    return [first, *others], number

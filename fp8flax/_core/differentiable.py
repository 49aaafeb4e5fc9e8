"""The one ``custom_vjp`` of contractions: residuals, next states, calibrating, frozen kernels, all forms.

A contraction is a *plan*: its products, and how each operand enters them. Plans differ in nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8flax._compat.max_dtype import is_max_dtype
from fp8flax._core.amax import amaxes_of_parts, delayed_amax, largest_of
from fp8flax._core.formats import is_wide_float
from fp8flax._core.gemm.lowering import lowered, rows_of
from fp8flax._core.gemm.reference import reference_pair
from fp8flax._core.gemm.request import CastPair
from fp8flax._core.jax_rules import (
    manual_axes,
    refuse_unchecked_axes,
    reverse_mode_only,
    sum_to_axes,
    traced_once,
)
from fp8flax._core.measuring import Numbers, measuring, merged, merged_calls, numbers_of, tell
from fp8flax._core.names import (
    DGRAD,
    FORWARD,
    KEPT_WIDE,
    KERNEL_FORWARD_NAME,
    OUTPUT_NAME,
    RESIDUAL_NAMES,
    WGRAD,
)
from fp8flax._core.once import once
from fp8flax._core.qdq import in_qdq_as, out_qdq_as
from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.quantize import as_float_array, inf_to_nan
from fp8flax._core.quantizers import Quantizer, quantized, serves, straight_through
from fp8flax._core.recipes import CustomRecipe, GemmRecipe
from fp8flax._core.state.state import (
    ScalingState,
    calibrated_state,
    check_state,
    delayed_config,
    next_state,
    report_calibrated,
    scale_of,
    state_to_keep,
)

_INPUT_NAME, _KERNEL_NAME, _SCALING_NAME = RESIDUAL_NAMES

Extra = tuple[jax.Array, ...]
"""What a contraction takes beside its operands, and is not differentiated."""

FORMS = ("direct", "qdq")
"""How an FP8 contraction is written down for the compiler."""

calibrating = jax.make_user_context(False)
"""Whether contractions run in the operands' wide dtypes, and only the next scaling states are made.

True to make them as gradients of the states; a function to tell it those of inputs and kernels."""


class States(NamedTuple):
    """The scaling states of one contraction; None for a tensor without delayed scaling."""

    input: ScalingState | None = None
    kernel: ScalingState | None = None
    output_grad: ScalingState | None = None


STATELESS = States()


class Operand(NamedTuple):
    """What a plan must know of an operand (hashable)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    """On a mesh with explicit axes, else None."""
    axes: frozenset[str]
    """The manual axes of ``shard_map`` over which it varies."""

    @classmethod
    def of(cls, x: jax.Array) -> Operand:
        """Returns that of an array."""
        return cls(x.shape, x.dtype, explicit_sharding(x), manual_axes(x))


def explicit_sharding(x: Any) -> Any:
    """Returns the sharding of an array on a mesh with explicit axes, else None."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


class Use(NamedTuple):
    """How a tensor enters one of its two products."""

    role: str
    quantizer: Quantizer | None
    view: View


class Uses(NamedTuple):
    """Both, in the order in which a training step multiplies."""

    first: Use
    second: Use


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A contraction: its three products, and how to view each tensor in the two of them that it enters.

    Everything that it must know statically (hashable). A tensor goes by its role: ``input``, ``kernel`` or
    ``output_grad``.
    """

    recipe: CustomRecipe
    lhs: Operand
    rhs: Operand
    out_dtype: np.dtype
    out_sharding: Any = None
    precision: Any = None
    """Of products that do not run in FP8."""
    dequantized: bool = False
    """Whether all products are computed in the operands' wide dtypes, as a reference."""
    is_packed: bool = False
    """Whether the kernel comes as codes, which lie in memory as the kernel did."""

    stacked: ClassVar[tuple[str, ...]] = ()
    """Roles whose tensors are stacked along their first axis, each with scales of its own."""
    has_fake_quantized: ClassVar[bool] = True
    """Whether the quantize-dequantize form is made of ``in_qdq`` and ``out_qdq``, with delayed scaling."""
    wide_scope: ClassVar[str] = KEPT_WIDE
    """The scope of products of values that stay wide, as of tangents."""
    is_automatic: ClassVar[Any] = False
    """Whether axes of the mesh that are explicit are left to XLA inside of the contraction."""

    @property
    def views(self) -> dict[str, tuple[View, View]]:
        """How each tensor is seen by the first and by the second product that it enters."""
        raise NotImplementedError

    def uses(self, role: str) -> Uses:
        """Returns how a tensor enters its two products."""
        both = zip(self.recipe.of_role(role), self.views[role])
        return Uses(*(Use(role, quantizer, view) for quantizer, view in both))

    def forward(self, lhs: Any, rhs: Any, extra: Extra) -> jax.Array:
        """Returns the result, of quantized operands or wide ones."""
        raise NotImplementedError

    def dgrad(self, g: Any, rhs: Any, like: jax.Array, extra: Extra) -> jax.Array:
        """Returns the input's cotangent; ``like`` has the shape of the input, and is sharded as it is."""
        raise NotImplementedError

    def wgrad(self, lhs: Any, g: Any, like: jax.Array, extra: Extra) -> jax.Array:
        """Returns the kernel's cotangent; ``like`` has the shape of the kernel."""
        raise NotImplementedError

    def wide(self, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
        """Returns the contraction of wide operands, as JAX computes it."""
        raise NotImplementedError

    def fake_quantized(self, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
        """Returns the contraction of operands that went through FP8, where ``has_fake_quantized``."""
        return self.wide(lhs, rhs, extra)

    def prepared(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        """Returns a tensor as it is quantized."""
        del role, extra
        return x

    def amax(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        """Returns the ``delayed_amax`` of a prepared tensor, one for each of those that are stacked."""
        del extra
        return jax.vmap(delayed_amax)(x) if role in self.stacked else delayed_amax(x)

    def amaxes(
        self, role: str, x: jax.Array, extra: Extra, codes: Any = (), as_cast: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Returns numbers, along a last axis, of which the largest is the ``amax`` of a prepared tensor.

        They are computed together with the codes, a tree of arrays, which are returned, too; ``as_cast`` as
        of ``amaxes_of_parts``.
        """
        if role in self.stacked or explicit_sharding(x) is not None:
            amax, codes = lax.optimization_barrier((self.amax(role, x, extra), codes))
            return amax[..., None], codes
        return amaxes_of_parts(x, None, codes, as_cast=as_cast, is_parameter=role == "kernel")

    def warn(self, *recipes: GemmRecipe) -> None:
        """Warns where the device at hand has no units for these products."""

    def each(self, role: str, f: Callable[..., Any], *args: Any) -> Any:
        """Calls ``f`` for each of the tensors that are stacked, else once."""
        return jax.vmap(f)(*args) if role in self.stacked else f(*args)


def _quantized_for(plan: Plan, use: Use, x: jax.Array, scale: jax.Array | None) -> Any:
    """Returns a tensor as one of its products takes it."""
    quantize = once(lambda x, scale: quantized(use.quantizer, x, use.view, scale))
    return plan.each(use.role, quantize, x, scale)


def _pair_of(plan: Plan, role: str, x: jax.Array) -> CastPair:
    """Returns the request to quantize a tensor for both of its products."""
    first, second = plan.uses(role)
    stack = x.shape[0] if role in plan.stacked else 1
    is_grad = role == "output_grad"
    return CastPair(first.quantizer, first.view, second.quantizer, second.view, is_grad, stack)


def _serves_both(plan: Plan, role: str, x: jax.Array) -> bool:
    """Returns whether the codes for one product serve the other, and no GPU kernel makes both at once."""
    pair = _pair_of(plan, role, x)
    return serves(pair.first, pair.second, pair.view) and not rows_of(pair, x, None)


def _transposed(plan: Plan, role: str, operand: Any) -> Any:
    """Returns an operand that serves both products as the other one takes it."""
    if not isinstance(operand, QTensor):
        return operand
    return plan.each(role, operand.quantizer.transpose, operand)


def _quantized_for_both(plan: Plan, role: str, x: jax.Array, scale: jax.Array | None) -> tuple[Any, Any]:
    """Returns a tensor as both of its products take it. In a cotangent an Inf becomes a NaN."""
    pair = _pair_of(plan, role, x)
    if _serves_both(plan, role, x):
        as_cast = inf_to_nan(x) if pair.inf_is_nan else x
        first = _quantized_for(plan, plan.uses(role).first, as_cast, scale)
        return first, _transposed(plan, role, first)
    return plan.each(role, once(partial(lowered, pair, reference_pair)), x, scale)


def quantized_with_amax(
    plan: Plan, role: str, x: jax.Array, scale: jax.Array | None, extra: Extra
) -> tuple[Any, Any, jax.Array | None]:
    """Returns a tensor for its two products, and its amaxes where it has delayed scaling.

    Of a cotangent the Infs become NaN, for which the amax is the same.
    """
    first, second = _quantized_for_both(plan, role, x, scale)
    # Together, so that XLA reads the wide tensor once for all, and does not cast it a second time where
    # a GEMM wants it transposed. (For kernels that saves nothing, and a policy that recomputes the
    # quantized kernel would take the amax along.)
    codes = [q.codes if isinstance(q, QTensor) else None for q in (first, second)]
    is_shared = codes[0] is codes[1]
    codes = codes[:1] if is_shared else codes
    if scale is None:
        amaxes, codes = None, lax.optimization_barrier(codes)
    else:
        as_cast = inf_to_nan(x) if role == "output_grad" else x
        amaxes, codes = plan.amaxes(role, x, extra, codes, as_cast)
    first, second = (
        dataclasses.replace(q, codes=c) if isinstance(q, QTensor) else q
        for q, c in zip((first, second), codes * 2 if is_shared else codes)
    )
    return first, second, amaxes


def _kept(plan: Plan, role: str, name: str, operand: Any, scale: jax.Array | None) -> Any:
    """Returns an operand of the second product to keep for the backward pass, under a name for policies."""
    if not isinstance(operand, QTensor):
        # A wide kernel is an argument, and there anyway.
        return checkpoint_name(operand, name) if role == "input" else operand
    trim = partial(operand.quantizer.trim, view=plan.uses(role).second.view)
    bits = plan.each(role, trim, operand).as_bits()
    if scale is None or not operand.quantizer.needs_state:  # a delayed scale has its name
        scale = checkpoint_name(bits.scale, _SCALING_NAME)
    return QTensor(checkpoint_name(bits.codes, name), scale, operand.quantizer)


def restored(plan: Plan, role: str, kept: Any) -> Any:
    """Returns the operand that ``_kept`` was given."""
    if not isinstance(kept, QTensor):
        return kept
    fill = partial(kept.quantizer.fill, view=plan.uses(role).second.view)
    return plan.each(role, fill, kept.from_bits())


def _kept_sharding(plan: Plan, role: str, operand: Operand) -> Any:
    """Returns the sharding of an operand as ``_kept`` returns it."""
    _, quantizer, view = plan.uses(role).second
    if operand.sharding is None or quantizer is None:  # None: not on the mesh
        return operand.sharding
    return quantizer.shardings(operand.sharding, view)


def on_automatic_axes(plan: Plan, f: Callable[..., Any], out_shardings: Any, *args: Any) -> Any:
    """Calls ``f(plan, *args)``, with explicit axes left to XLA where the plan asks for that.

    None stands for a replicated result.
    """
    if not plan.is_automatic:
        return f(plan, *args)
    mesh = plan.lhs.sharding.mesh
    explicit = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)
    lhs, rhs = plan.lhs._replace(sharding=None), plan.rhs._replace(sharding=None)
    inner = partial(f, dataclasses.replace(plan, lhs=lhs, rhs=rhs))
    whole = NamedSharding(mesh, PartitionSpec())
    out_shardings = jax.tree.map(
        lambda s: whole if s is None else s, out_shardings, is_leaf=lambda s: s is None
    )
    return jax.sharding.auto_axes(inner, axes=explicit, out_sharding=out_shardings)(*args)


def scales_of(plan: Plan, states: States) -> dict[str, jax.Array]:
    """Returns the scale of each role with delayed scaling."""
    return {
        role: scale_of(delayed_config(quantizer), getattr(states, role))
        for role, quantizer in plan.recipe.delayed.items()
    }


class _Residuals(NamedTuple):
    """What the backward pass needs: operands in FP8, scalars, and the states, which are arguments."""

    lhs: Any
    """The input as wgrad takes it: a ``QTensor`` of bits; wide if wgrad is in high precision."""
    rhs: Any
    """Likewise the kernel as dgrad takes it."""
    extra: Extra
    scales: dict[str, jax.Array]
    """The scale of each role that has delayed scaling."""
    amaxes: dict[str, jax.Array]
    """Those of the input and of the kernel, where they have delayed scaling; see ``Plan.amaxes``."""
    states: States
    """Those that have no digest."""


# Derivation. A contraction is linear in each of its operands. With straight-through quantization their
# cotangents are its two transposes, of quantized values, where q scales as the recipe of that product says:
# for a matmul dlhs = q(g) . q(rhs) and drhs = q(lhs) . q(g). The cotangents of the scaling states are their
# next values (see qdq).
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@traced_once
def differentiable(plan: Plan, lhs: jax.Array, rhs: jax.Array, extra: Extra, states: States) -> jax.Array:
    """Returns the contraction in FP8; the "gradients" of the states are their next values."""
    scales = scales_of(plan, states)
    return on_automatic_axes(plan, _primal, plan.out_sharding, lhs, rhs, extra, scales, None)


def _primal(
    plan: Plan, lhs: jax.Array, rhs: jax.Array, extra: Extra, scales: dict[str, jax.Array], kernel: Any
) -> jax.Array:
    """Returns the contraction, of a kernel that is quantized here if it does not come so."""
    lhs = plan.prepared("input", lhs, extra)
    q_lhs = _quantized_for(plan, plan.uses("input").first, lhs, scales.get("input"))
    if kernel is None:
        rhs = plan.prepared("kernel", rhs, extra)
        q_rhs = _quantized_for(plan, plan.uses("kernel").first, rhs, scales.get("kernel"))
    else:
        q_rhs = kernel.quantizer.unpack(kernel, plan.uses("kernel").first.view)
    with jax.named_scope(FORWARD):
        return plan.forward(q_lhs, q_rhs, extra)


@traced_once
def _differentiable_fwd(
    plan: Plan, lhs: jax.Array, rhs: jax.Array, extra: Extra, states: States
) -> tuple[jax.Array, _Residuals]:
    scales = named_scaling(scales_of(plan, states))
    kept_shardings = _kept_sharding(plan, "input", plan.lhs), _kept_sharding(plan, "kernel", plan.rhs)
    out_shardings = (plan.out_sharding, *kept_shardings, None)
    out, lhs_kept, rhs_kept, amaxes = on_automatic_axes(
        plan, _forward, out_shardings, lhs, rhs, extra, scales
    )
    kept_states = States(*map(state_to_keep, states))
    return out, _Residuals(lhs_kept, rhs_kept, extra, scales, amaxes, kept_states)


class Entering(NamedTuple):
    """A tensor that is quantized, as the forward product takes it."""

    first: Any
    kept: Any
    """For its second product, in the backward pass."""
    amaxes: jax.Array | None
    """Where it has delayed scaling."""


def input_of(plan: Plan, lhs: jax.Array, scale: jax.Array | None, extra: Extra = ()) -> Entering:
    """Returns the input, quantized."""
    lhs = plan.prepared("input", lhs, extra)
    first, second, amaxes = quantized_with_amax(plan, "input", lhs, scale, extra)
    kept = _kept(plan, "input", _INPUT_NAME, second, scale)
    # Where a tensor's codes serve both products, from the residuals: a product that is computed again then
    # starts from what a policy kept.
    if _serves_both(plan, "input", lhs):
        first = _transposed(plan, "input", restored(plan, "input", kept))
    return Entering(first, kept, named_scaling(amaxes))


def kernel_of(plan: Plan, rhs: jax.Array, scale: jax.Array | None, extra: Extra = ()) -> Entering:
    """Returns the kernel, quantized."""
    rhs = plan.prepared("kernel", rhs, extra)
    first, second = _quantized_for_both(plan, "kernel", rhs, scale)
    amaxes = None if scale is None else plan.amaxes("kernel", rhs, extra)[0]
    kept = _kept(plan, "kernel", _KERNEL_NAME, second, scale)
    if _serves_both(plan, "kernel", rhs):
        first = _transposed(plan, "kernel", restored(plan, "kernel", kept))
    elif isinstance(first, QTensor):
        bits = jax.tree.map(partial(checkpoint_name, name=KERNEL_FORWARD_NAME), first.as_bits())
        first = bits.from_bits()
    return Entering(first, kept, named_scaling(amaxes))


def named_scaling(numbers: Any) -> Any:
    """Returns scales or amaxes under the name that policies know them by."""
    return jax.tree.map(partial(checkpoint_name, name=_SCALING_NAME), numbers)


def _forward(
    plan: Plan, lhs: jax.Array, rhs: jax.Array, extra: Extra, scales: dict[str, jax.Array]
) -> tuple[jax.Array, Any, Any, dict[str, jax.Array]]:
    """Returns the result, both operands to keep, and their amaxes where they have delayed scaling."""
    entering = {
        "input": input_of(plan, lhs, scales.get("input"), extra),
        "kernel": kernel_of(plan, rhs, scales.get("kernel"), extra),
    }
    with jax.named_scope(FORWARD):
        out = plan.forward(entering["input"].first, entering["kernel"].first, extra)
    amaxes = {role: one.amaxes for role, one in entering.items() if one.amaxes is not None}
    return checkpoint_name(out, OUTPUT_NAME), entering["input"].kept, entering["kernel"].kept, amaxes


@traced_once
def _differentiable_bwd(
    plan: Plan, residuals: _Residuals, g: jax.Array
) -> tuple[jax.Array, jax.Array, None, States]:
    lhs_kept, rhs_kept, extra, scales, amaxes, states = residuals
    out_shardings = (plan.lhs.sharding, plan.rhs.sharding, None)
    *grads, g_amaxes = on_automatic_axes(
        plan, _backward, out_shardings, lhs_kept, rhs_kept, extra, scales, g
    )
    if g_amaxes is not None:
        amaxes = {**amaxes, "output_grad": g_amaxes}
    amax = dict(zip(amaxes, largest_of(list(amaxes.values()))))
    new = {role: next_state(amax[role], scales[role], getattr(states, role)) for role in scales}
    for i, operand in enumerate((plan.lhs, plan.rhs)):
        # Inside shard_map an operand that is the same everywhere gets the sum of all cotangents.
        grads[i] = sum_to_axes(grads[i], operand.axes).astype(operand.dtype)
        if operand.sharding is not None:  # scales per row or column may have brought one of their own
            grads[i] = jax.sharding.reshard(grads[i], operand.sharding)
    return grads[0], grads[1], None, States(**new)


def _backward(
    plan: Plan, lhs_kept: Any, rhs_kept: Any, extra: Extra, scales: dict[str, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns the two gradients, and the amaxes of ``g`` where it has delayed scaling."""
    g = plan.prepared("output_grad", g, extra)
    g_first, g_second, g_amaxes = quantized_with_amax(
        plan, "output_grad", g, scales.get("output_grad"), extra
    )
    like_lhs, like_rhs = (
        kept.codes if isinstance(kept, QTensor) else kept for kept in (lhs_kept, rhs_kept)
    )
    with jax.named_scope(DGRAD):
        lhs_grad = plan.dgrad(g_first, restored(plan, "kernel", rhs_kept), like_lhs, extra)
    with jax.named_scope(WGRAD):
        rhs_grad = plan.wgrad(restored(plan, "input", lhs_kept), g_second, like_rhs, extra)
    return lhs_grad, rhs_grad, g_amaxes


differentiable.defvjp(_differentiable_fwd, _differentiable_bwd)


class _Fixed(NamedTuple):
    """What does not change from call to call of a frozen contraction."""

    scales: dict[str, jax.Array]
    kernel: QTensor | None
    """Packed; None where it is quantized at each call."""


# Derivation. With straight-through quantization the derivative of q(x) . q(w) in the direction (dx, dw) is
# dx . q(w) + q(x) . dw. There is no scale for tangents, nor for cotangents: both stay wide.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
@traced_once
def _frozen(plan: Plan, lhs: jax.Array, rhs: jax.Array, extra: Extra, fixed: _Fixed) -> jax.Array:
    return on_automatic_axes(plan, _primal, plan.out_sharding, lhs, rhs, extra, *fixed)


def _along_lhs(plan: Plan, tangent: jax.Array, rhs: jax.Array, extra: Extra, fixed: _Fixed) -> jax.Array:
    _, quantizer, view = plan.uses("kernel").first
    if fixed.kernel is not None:
        unpacked = fixed.kernel.quantizer.unpack(fixed.kernel, view)
        return plan.wide(tangent, unpacked.dequantize(view, plan.rhs.dtype), extra)
    quantize = partial(straight_through, quantizer, view)
    scale = fixed.scales.get("kernel")
    return plan.wide(tangent, plan.each("kernel", quantize, rhs, scale), extra)


def _along_rhs(plan: Plan, tangent: jax.Array, lhs: jax.Array, extra: Extra, fixed: _Fixed) -> jax.Array:
    lhs = plan.prepared("input", lhs, extra)
    view, scale = plan.uses("input").first.view, fixed.scales.get("input")
    return plan.wide(straight_through(plan.recipe.forward.lhs, view, lhs, scale), tangent, extra)


def _frozen_jvp(plan: Plan, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs, extra, fixed), (lhs_dot, rhs_dot, *_) = primals, tangents
    with jax.named_scope(plan.wide_scope):
        terms = [
            on_automatic_axes(plan, along, plan.out_sharding, tangent, other, extra, fixed)
            for along, tangent, other in ((_along_lhs, lhs_dot, rhs), (_along_rhs, rhs_dot, lhs))
            if not isinstance(tangent, SymbolicZero)
        ]
    out = _frozen(plan, lhs, rhs, extra, fixed)
    return out, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(out)


_frozen.defjvp(_frozen_jvp, symbolic_zeros=True)


# Derivation. The operand and its cotangent pass as they are. The cotangent of the state is the state after
# a step whose tensor has this amax, with the scale that follows from it. The forward rule calls the
# identity again: a model that differentiates itself consumes the first call, calibrating needs the next.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _observed(config: Any, x: jax.Array, amax: jax.Array, state: ScalingState) -> jax.Array:
    del config, amax, state
    return x


_observed.defvjp(
    lambda config, x, amax, state: (_observed(config, x, amax, state), (amax, state)),
    lambda config, residuals, g: (g, None, calibrated_state(config, *residuals)),
)


# Derivation. Likewise, of the cotangent's amax.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_observed_grad(plan: Plan, out: jax.Array, extra: Extra, state: ScalingState) -> jax.Array:
    del plan, extra, state
    return out


def _observed_grad_bwd(plan: Plan, residuals: Any, g: jax.Array) -> Any:
    extra, state = residuals
    amax = plan.amax("output_grad", plan.prepared("output_grad", g, extra), extra)
    return g, None, calibrated_state(delayed_config(plan.recipe.delayed["output_grad"]), amax, state)


_with_observed_grad.defvjp(
    lambda plan, out, extra, state: (_with_observed_grad(plan, out, extra, state), (extra, state)),
    _observed_grad_bwd,
)


def _numbers_of_role(role: str, plan: Plan, x: jax.Array, extra: Extra, scale: jax.Array | None) -> Numbers:
    """Returns what is left of a tensor by both of its quantizers; at least one is not None."""
    x, scale = lax.stop_gradient((x, scale))
    x = plan.prepared(role, x, extra)
    first, second = plan.uses(role)
    uses = (first,) if serves(first.quantizer, second.quantizer, first.view) else (first, second)
    found = []
    for _, quantizer, view in uses:
        if quantizer is not None:
            numbers = plan.each(role, partial(numbers_of, quantizer, view), x, scale)
            found.append(merged(numbers) if role in plan.stacked else numbers)
    return merged_calls(found)._replace(nonfinite=found[0].nonfinite)


def _told(
    plan: Plan, path: tuple[str, ...], role: str, x: jax.Array, extra: Extra, scale: jax.Array | None
) -> jax.Array:
    """Returns a tensor, and tells what is left of it."""
    if not any(plan.recipe.of_role(role)):
        return x
    numbers = on_automatic_axes(plan, partial(_numbers_of_role, role), None, x, extra, scale)
    return tell(path, role, x, numbers)


# Derivation. An identity, whose cotangent passes as it is, and is told of.
@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_told_grad(
    plan: Plan, path: tuple[str, ...], out: jax.Array, extra: Extra, scale: jax.Array | None
) -> jax.Array:
    del plan, path, extra, scale
    return out


_with_told_grad.defvjp(
    lambda plan, path, out, extra, scale: (out, (extra, scale)),
    lambda plan, path, residuals, g: (_told(plan, path, "output_grad", g, *residuals), None, None),
)


def _measured(
    compute: Callable[..., jax.Array],
    plan: Plan,
    lhs: jax.Array,
    rhs: jax.Array,
    extra: Extra,
    states: States,
) -> jax.Array:
    """Returns the contraction, and tells what is left of its tensors."""
    path, scales = measuring.value, scales_of(plan, states)
    with measuring(None):  # under which all layers that are alike are traced once
        lhs = _told(plan, path, "input", lhs, extra, scales.get("input"))
        rhs = _told(plan, path, "kernel", rhs, extra, scales.get("kernel"))
        out = compute(plan, lhs, rhs, extra, states)
        return _with_told_grad(plan, path, out, extra, scales.get("output_grad"))


def _calibrated(plan: Plan, lhs: jax.Array, rhs: jax.Array, extra: Extra, states: States) -> jax.Array:
    """Returns the contraction as JAX computes it, from which only the next scaling states are taken."""
    report, delayed = calibrating.value, plan.recipe.delayed
    operands = {"input": lhs, "kernel": rhs}
    for role, x in operands.items():
        if role not in delayed:
            continue
        config, state = delayed_config(delayed[role]), getattr(states, role)
        amax = plan.amax(role, plan.prepared(role, lax.stop_gradient(x), extra), extra)
        if callable(report):
            report_calibrated(report, config, amax, state)
        else:
            operands[role] = _observed(config, x, amax, state)
    out = plan.wide(operands["input"], operands["kernel"], extra)
    if callable(report) or "output_grad" not in delayed:
        return out
    return _with_observed_grad(plan, out, extra, states.output_grad)


def _fake_quantized(plan: Plan, lhs: jax.Array, rhs: jax.Array, extra: Extra, states: States) -> jax.Array:
    """Returns the quantize-dequantize form of delayed scaling, which can be differentiated twice."""
    configs = {role: delayed_config(quantizer) for role, quantizer in plan.recipe.delayed.items()}
    assert states.input is not None
    assert states.kernel is not None
    assert states.output_grad is not None
    lhs = in_qdq_as(configs["input"], lhs, states.input)
    rhs = in_qdq_as(configs["kernel"], rhs, states.kernel)
    return out_qdq_as(configs["output_grad"], plan.fake_quantized(lhs, rhs, extra), states.output_grad)


def check_operands(lhs: Any, rhs: Any, preferred_element_type: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the operands as arrays, or raises ``TypeError`` where a dtype is not a wide float."""
    if preferred_element_type is not None and not is_wide_float(preferred_element_type):
        raise TypeError(
            "preferred_element_type must be None, bfloat16, float16, float32 or float64; got "
            f"{preferred_element_type!r}."
        )
    return as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")


def _checked_states(plan: Plan, states: States) -> States:
    """Returns the states that some product uses, or raises where one cannot be state."""
    if any(map(is_max_dtype, jax.tree.leaves(states, is_leaf=is_max_dtype))):
        refuse_unchecked_axes()
    checked = {}
    for role in plan.recipe.delayed:
        scale, amax_history = getattr(states, role)
        stacked = plan.rhs.shape[:1] if role in plan.stacked else ()
        checked[role] = check_state(scale, amax_history, stacked)
    return States(**checked)


def contract(
    plan: Plan,
    lhs: jax.Array,
    rhs: jax.Array,
    *extra: jax.Array,
    states: States = STATELESS,
    is_frozen: bool = False,
    kernel: QTensor | None = None,
    input_scale: jax.Array | None = None,
) -> jax.Array:
    """Returns the contraction of a plan, in the form and the mode that are asked for.

    Args:
        plan: what is contracted.
        lhs: the input, a wide float.
        rhs: the kernel, a wide float.
        *extra: what the plan takes beside them.
        states: scaling states of the roles that have delayed scaling.
        is_frozen: whether the states stay as they are, and derivatives are those of the wide contraction.
        kernel: the packed kernel of a frozen contraction, instead of ``rhs``, whose values are not read.
        input_scale: the input's scale beside it, where that is delayed.
    """
    if not any(plan.recipe.quantizers):
        with jax.named_scope(KEPT_WIDE):
            return plan.wide(lhs, rhs, extra)
    if kernel is not None:
        plan.warn(plan.recipe.forward)
        plan = dataclasses.replace(plan, is_packed=True)
        fixed = _Fixed({} if input_scale is None else {"input": input_scale}, kernel)
        return _frozen(plan, lhs, lax.stop_gradient(rhs), extra, fixed)
    states = _checked_states(plan, states)
    if is_frozen:
        plan.warn(plan.recipe.forward)
        return _frozen(plan, lhs, rhs, extra, _Fixed(scales_of(plan, states), None))
    if not callable(calibrating.value):
        lhs, rhs = reverse_mode_only(lhs), reverse_mode_only(rhs)
    if calibrating.value:
        return _calibrated(plan, lhs, rhs, extra, states)
    is_delayed = all(
        quantizer is not None and quantizer.needs_state for quantizer in plan.recipe.quantizers
    )
    compute: Callable[..., jax.Array] = differentiable
    if plan.dequantized and plan.has_fake_quantized and is_delayed:
        compute = _fake_quantized
    else:
        plan.warn(plan.recipe.forward, plan.recipe.dgrad, plan.recipe.wgrad)
    if measuring.value is not None:
        return _measured(compute, plan, lhs, rhs, extra, states)
    return compute(plan, lhs, rhs, extra, states)

"""A contraction as a plan: its three products, and how each tensor is quantized for the two that it enters.

A tensor goes by its role: ``input``, ``kernel`` or ``output_grad``. Contractions differ in their products
(``dot_general``, ``conv``, ``ragged_dot``), and in nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8flax._core.amax import amaxes_of_parts, delayed_amax
from fp8flax._core.formats import is_wide_float
from fp8flax._core.gemm.lowering import lowered, rows_of
from fp8flax._core.gemm.reference import reference_pair
from fp8flax._core.gemm.request import CastPair
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
from fp8flax._core.plans.engine import named_scaling
from fp8flax._core.plans.plan import Extra, Operand, Plan, Scales, explicit_sharding
from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.quantize import as_float_array, inf_to_nan
from fp8flax._core.quantizers import Quantizer, quantized, serves
from fp8flax._core.recipes import CustomRecipe, GemmRecipe
from fp8flax._core.state.state import DelayedConfig, ScalingState, delayed_config

_INPUT_NAME, _KERNEL_NAME, _SCALING_NAME = RESIDUAL_NAMES


class States(NamedTuple):
    """The scaling states of one contraction; None for a tensor without delayed scaling."""

    input: ScalingState | None = None
    kernel: ScalingState | None = None
    output_grad: ScalingState | None = None


STATELESS = States()


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
class Contraction(Plan):
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

    def product(self, lhs: Any, rhs: Any, extra: Extra) -> jax.Array:
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

    # What the engine asks for.

    @property
    def operands(self) -> tuple[Operand, ...]:
        return self.lhs, self.rhs

    @property
    def configs(self) -> Mapping[str, DelayedConfig]:
        return {role: delayed_config(quantizer) for role, quantizer in self.recipe.delayed.items()}

    def primal(self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales) -> jax.Array:
        return on_automatic_axes(self, product_of_wide, self.out_sharding, *operands, extra, scales, None)

    def forward(
        self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        kept = _kept_sharding(self, "input", self.lhs), _kept_sharding(self, "kernel", self.rhs)
        shardings = (self.out_sharding, kept, None)
        return on_automatic_axes(self, _forward, shardings, *operands, extra, scales)

    def backward(
        self, residuals: Any, extra: Extra, scales: Scales, g: jax.Array
    ) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
        shardings = ((self.lhs.sharding, self.rhs.sharding), None)
        return on_automatic_axes(self, _backward, shardings, residuals, extra, scales, g)


def _quantized_for(plan: Contraction, use: Use, x: jax.Array, scale: jax.Array | None) -> Any:
    """Returns a tensor as one of its products takes it."""
    quantize = once(lambda x, scale: quantized(use.quantizer, x, use.view, scale))
    return plan.each(use.role, quantize, x, scale)


def _pair_of(plan: Contraction, role: str, x: jax.Array) -> CastPair:
    """Returns the request to quantize a tensor for both of its products."""
    first, second = plan.uses(role)
    stack = x.shape[0] if role in plan.stacked else 1
    is_grad = role == "output_grad"
    return CastPair(first.quantizer, first.view, second.quantizer, second.view, is_grad, stack)


def _serves_both(plan: Contraction, role: str, x: jax.Array) -> bool:
    """Returns whether the codes for one product serve the other, and no GPU kernel makes both at once."""
    pair = _pair_of(plan, role, x)
    return serves(pair.first, pair.second, pair.view) and not rows_of(pair, x, None)


def _transposed(plan: Contraction, role: str, operand: Any) -> Any:
    """Returns an operand that serves both products as the other one takes it."""
    if not isinstance(operand, QTensor):
        return operand
    return plan.each(role, operand.quantizer.transpose, operand)


def _quantized_for_both(
    plan: Contraction, role: str, x: jax.Array, scale: jax.Array | None
) -> tuple[Any, Any]:
    """Returns a tensor as both of its products take it. In a cotangent an Inf becomes a NaN."""
    pair = _pair_of(plan, role, x)
    if _serves_both(plan, role, x):
        as_cast = inf_to_nan(x) if pair.inf_is_nan else x
        first = _quantized_for(plan, plan.uses(role).first, as_cast, scale)
        return first, _transposed(plan, role, first)
    return plan.each(role, once(partial(lowered, pair, reference_pair)), x, scale)


def quantized_with_amax(
    plan: Contraction, role: str, x: jax.Array, scale: jax.Array | None, extra: Extra
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


def _kept(plan: Contraction, role: str, name: str, operand: Any, scale: jax.Array | None) -> Any:
    """Returns an operand of the second product to keep for the backward pass, under a name for policies."""
    if not isinstance(operand, QTensor):
        # A wide kernel is an argument, and there anyway.
        return checkpoint_name(operand, name) if role == "input" else operand
    trim = partial(operand.quantizer.trim, view=plan.uses(role).second.view)
    bits = plan.each(role, trim, operand).as_bits()
    if scale is None or not operand.quantizer.needs_state:  # a delayed scale has its name
        scale = checkpoint_name(bits.scale, _SCALING_NAME)
    return QTensor(checkpoint_name(bits.codes, name), scale, operand.quantizer)


def restored(plan: Contraction, role: str, kept: Any) -> Any:
    """Returns the operand that ``_kept`` was given."""
    if not isinstance(kept, QTensor):
        return kept
    fill = partial(kept.quantizer.fill, view=plan.uses(role).second.view)
    return plan.each(role, fill, kept.from_bits())


def _kept_sharding(plan: Contraction, role: str, operand: Operand) -> Any:
    """Returns the sharding of an operand as ``_kept`` returns it."""
    _, quantizer, view = plan.uses(role).second
    if operand.sharding is None or quantizer is None:  # None: not on the mesh
        return operand.sharding
    return quantizer.shardings(operand.sharding, view)


def on_automatic_axes(plan: Contraction, f: Callable[..., Any], out_shardings: Any, *args: Any) -> Any:
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


class Entering(NamedTuple):
    """A tensor that is quantized, as the forward product takes it."""

    first: Any
    kept: Any
    """For its second product, in the backward pass."""
    amaxes: jax.Array | None
    """Where it has delayed scaling."""


def input_of(plan: Contraction, lhs: jax.Array, scale: jax.Array | None, extra: Extra = ()) -> Entering:
    """Returns the input, quantized."""
    lhs = plan.prepared("input", lhs, extra)
    first, second, amaxes = quantized_with_amax(plan, "input", lhs, scale, extra)
    kept = _kept(plan, "input", _INPUT_NAME, second, scale)
    # Where a tensor's codes serve both products, from the residuals: a product that is computed again then
    # starts from what a policy kept.
    if _serves_both(plan, "input", lhs):
        first = _transposed(plan, "input", restored(plan, "input", kept))
    return Entering(first, kept, named_scaling(amaxes))


def kernel_of(plan: Contraction, rhs: jax.Array, scale: jax.Array | None, extra: Extra = ()) -> Entering:
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


def product_of_wide(
    plan: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    extra: Extra,
    scales: dict[str, jax.Array],
    kernel: Any,
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
        return plan.product(q_lhs, q_rhs, extra)


def _forward(
    plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, scales: Scales
) -> tuple[jax.Array, tuple[Any, Any], dict[str, jax.Array]]:
    """Returns the result, both operands to keep, and their amaxes if they have delayed scaling."""
    entering = {
        "input": input_of(plan, lhs, scales.get("input"), extra),
        "kernel": kernel_of(plan, rhs, scales.get("kernel"), extra),
    }
    with jax.named_scope(FORWARD):
        out = plan.product(entering["input"].first, entering["kernel"].first, extra)
    amaxes = {role: one.amaxes for role, one in entering.items() if one.amaxes is not None}
    kept = entering["input"].kept, entering["kernel"].kept
    return checkpoint_name(out, OUTPUT_NAME), kept, amaxes


def _backward(
    plan: Contraction, operands: tuple[Any, Any], extra: Extra, scales: Scales, g: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    """Returns the two gradients, and the amaxes of ``g`` if it has delayed scaling."""
    lhs_kept, rhs_kept = operands
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
    return (lhs_grad, rhs_grad), {} if g_amaxes is None else {"output_grad": g_amaxes}


def check_operands(lhs: Any, rhs: Any, preferred_element_type: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the operands as arrays, or raises ``TypeError`` where a dtype is not a wide float."""
    if preferred_element_type is not None and not is_wide_float(preferred_element_type):
        raise TypeError(
            "preferred_element_type must be None, bfloat16, float16, float32 or float64; got "
            f"{preferred_element_type!r}."
        )
    return as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")

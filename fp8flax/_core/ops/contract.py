"""The FP8 contraction and its gradients, a ``custom_vjp``.

A contraction multiplies an input ``x`` by a kernel ``w``. In the backward pass the output gradient ``g``
is multiplied by the kernel (dgrad, the gradient of the input) and by the input (wgrad, the gradient of the
kernel). ``q`` stands for quantizing, which counts as the identity in derivatives (straight-through)::

    forward   y  = q(x)  · q(w)
    dgrad     dx = q(g)  · q(w)'
    wgrad     dw = q(x)' · q(g)

Each of the three tensors, named by its role (``input``, ``kernel``, ``output_grad``), enters two of the
products. It is quantized once if the same codes serve both, otherwise once for each. Between the passes the
op keeps codes and scales, not the wide tensors.

With delayed scaling the scales come in from outside; ``state.state`` describes them and their cotangents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp8flax._compat.provenance import before_cast
from fp8flax._core import names
from fp8flax._core.axes import manual_axes, merge_amax
from fp8flax._core.formats import is_wide_float
from fp8flax._core.gemm.gemm import AnyTensor, Gemm
from fp8flax._core.gemm.gpus import compute_capability
from fp8flax._core.names import DGRAD, FORWARD, OPERANDS, ROLES, WGRAD
from fp8flax._core.ops.canonical import Layout
from fp8flax._core.qtensor import STATIC, Dims, Given, QTensor
from fp8flax._core.quantizers import quantize_for_both
from fp8flax._core.recipes import CustomRecipe, Recipe
from fp8flax._core.scaling import delayed_amax
from fp8flax._core.state.state import ScalingState, named_scaling
from fp8flax._core.types import Accumulation

_INPUT_NAME, _KERNEL_NAME, _ = names.RESIDUAL_NAMES

Scales = dict[str, jax.Array]
"""A float32 scale, or an amax, of each tensor with delayed scaling, by role."""

States = Mapping[str, ScalingState]
"""The scaling state of each tensor with delayed scaling, by role."""

STATELESS: States = {}

Operands: TypeAlias = tuple[jax.Array, jax.Array]
"""The input and the kernel of an op."""

Traced: TypeAlias = tuple[jax.core.ShapedArray, dict[str, Any]]
"""The type of the result of a function of ``lax``, and the parameters of its primitive."""


def traced(fn: Callable[..., jax.Array], operands: tuple[Any, ...], *args: Any, **kwargs: Any) -> Traced:
    """Traces a function of ``lax``, which raises its own errors, and writes its arguments in full."""
    program = jax.make_jaxpr(lambda *operands: fn(*operands, *args, **kwargs))(*operands)
    return program.out_avals[0], program.eqns[-1].params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """The plan of an op: the description of a contraction, and its products.

    A plan is a tree to JAX: its leaves are the arrays that the op takes beside its operands, such as the
    group sizes of a ragged dot. Methods take tensors by their role.
    """

    recipe: CustomRecipe = dataclasses.field(metadata=STATIC)
    lhs: jax.core.ShapedArray = dataclasses.field(metadata=STATIC)
    rhs: jax.core.ShapedArray = dataclasses.field(metadata=STATIC)
    out: jax.core.ShapedArray = dataclasses.field(metadata=STATIC)
    """The types of the operands and of the result, as ``jax.typeof`` returns them."""
    precision: lax.PrecisionLike = dataclasses.field(default=None, metadata=STATIC)
    """The precision that the caller asks for, as ``lax`` writes it."""
    key: jax.Array | None = None
    """The random key of this call for stochastic rounding, a leaf of the tree; None if there is none."""
    master: jax.Array | None = None
    """The float32 kernel that the layer cast to the kernel of the call, a leaf; None if unknown.

    Our GPU kernel for scales per block reads it in the place of the cast kernel."""

    @classmethod
    def of(
        cls, operands: Operands, found: Traced, recipe: Recipe, precision: Any = None, **fields: Any
    ) -> Self:
        """Returns the plan of operands, or of their shapes and dtypes; ``fields`` are the other fields."""
        out, params = found
        if not is_wide_float(out.dtype):
            raise TypeError(
                "preferred_element_type must be None, bfloat16, float16, float32 or float64; got "
                f"{out.dtype}."
            )
        precision = None if precision is None else params["precision"]
        x, w = map(jax.typeof, operands)
        plan = cls(lhs=x, rhs=w, out=out, recipe=recipe.gemms, precision=precision, **fields)
        quantizer, _ = plan.recipe.of_role("kernel")
        if not (compute_capability() and w.dtype.itemsize == 2 and quantizer and quantizer.scale_columns):
            return plan
        master = before_cast(operands[1])
        is_float32 = master is not None and master.dtype == jnp.float32
        return dataclasses.replace(plan, master=master) if is_float32 else plan

    @property
    def function(self) -> Callable[..., jax.Array]:
        """Returns the function that computes such a contraction in FP8, called as ``contract``."""
        return contract

    @property
    def layouts(self) -> dict[str, Layout]:
        """Returns the layout of each tensor, by its role."""
        raise NotImplementedError

    @cached_property
    def dims(self) -> dict[str, tuple[Dims, ...]]:
        """Returns what the first and the second product of each tensor contract, by its role."""
        return {role: layout.dims for role, layout in self.layouts.items()}

    def canonical(self, role: str, x: jax.Array) -> jax.Array:
        """Returns a tensor as it is quantized and multiplied."""
        return self.layouts[role].to(x)

    def original(self, role: str, x: jax.Array) -> jax.Array:
        """Returns a tensor in its own shape. The result of the contraction has the role ``output_grad``."""
        return self.layouts[role].back(x)

    def product(self, name: str, is_stored: bool = False) -> Callable[[AnyTensor, AnyTensor], jax.Array]:
        """Returns one of the three products, a function of two canonical operands.

        ``FORWARD`` multiplies input and kernel, ``DGRAD`` output gradient and kernel, ``WGRAD`` input and
        output gradient. ``is_stored`` is whether the kernel is that of a frozen model.
        """
        raise NotImplementedError

    def wide(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Returns the product of wide operands without FP8, as JAX computes it."""
        raise NotImplementedError

    def amax(self, role: str, x: jax.Array) -> jax.Array:
        """Returns the ``delayed_amax`` of a canonical tensor; for a stack, one for each of its elements."""
        return jax.vmap(delayed_amax)(x) if self.dims[role][0].is_stack else delayed_amax(x)

    def gemm(self, name: str) -> Gemm:
        """Returns one of the three GEMMs: what it contracts, its dtypes, and how it accumulates."""
        x, w, y = self.lhs.dtype, self.rhs.dtype, self.out.dtype
        recipe, (of_x, of_w, of_g) = self.recipe, (self.dims[role] for role in ROLES)
        part, dims, dtypes = {
            FORWARD: (recipe.forward, (of_x[0], of_w[0]), (x, w, y)),
            DGRAD: (recipe.dgrad, (of_g[0], of_w[1]), (y, w, x)),
            WGRAD: (recipe.wgrad, (of_x[1], of_g[1]), (x, y, w)),
        }[name]
        accumulation = part.accumulation if self.precision is None else _accumulation_of(self.precision)
        return Gemm(*dims, *dtypes, accumulation, self.precision, has_barrier=name == FORWARD)


def _accumulation_of(precision: lax.PrecisionLike) -> Accumulation:
    """Returns the accumulation that a precision stands for; raises ``TypeError`` if there is none."""
    if not isinstance(precision, tuple):
        raise TypeError(
            "precision of an FP8 matmul must be None (the recipe's accumulation), a lax.Precision, its "
            f"name, or a pair of them; got {precision!r}. For more control set accumulation in the "
            "recipe, for instance DelayedScaling(accumulation=('exact', 'exact', 'exact'))."
        )
    return "fast" if set(precision) == {lax.Precision.DEFAULT} else "exact"


# The work is jitted, so that JAX traces it once for all equal layers.
@jax.custom_vjp
@jax.jit
def contract(plan: Contraction, operands: Operands, scales: Scales) -> jax.Array:
    """Returns the product of the operands; the "gradients" of the scales are the amaxes of this step."""
    x, w = (quantized_once(plan, role, x, scales) for role, x in zip(OPERANDS, operands))
    with jax.named_scope(FORWARD):
        return plan.original("output_grad", plan.product(FORWARD)(x, w))


class _Residuals(NamedTuple):
    """What the forward pass keeps for the backward pass."""

    plan: Contraction
    kept: tuple[AnyTensor, AnyTensor]
    """Input and kernel, quantized for their products in the backward pass, see ``_operand``; or wide."""
    scales: Scales
    amaxes: Scales
    """The amaxes of input and kernel."""


def _contract_fwd(plan: Contraction, operands: Operands, scales: Scales) -> tuple[jax.Array, _Residuals]:
    """Runs the forward pass; returns the result and the residuals."""
    out, (x, w), amaxes = _forward(plan, *operands, scales)
    # A wide operand is kept as it is. (A wide kernel needs no name: it stays in memory anyway.)
    x = checkpoint_name(operands[0], _INPUT_NAME) if x is None else x
    plan = dataclasses.replace(plan, master=None)
    return out, _Residuals(plan, (x, operands[1] if w is None else w), scales, amaxes)


@jax.jit
def _forward(
    plan: Contraction, lhs: jax.Array, rhs: jax.Array, scales: Scales
) -> tuple[jax.Array, tuple[QTensor | None, QTensor | None], Scales]:
    """Returns the result, the residuals of input and kernel (None if wide), and the amaxes by role."""
    x, kept_x, x_amax = _operand(plan, "input", lhs, scales)
    w, kept_w, w_amax = _operand(plan, "kernel", rhs, scales)
    with jax.named_scope(FORWARD):
        out = plan.original("output_grad", plan.product(FORWARD)(x, w))
    return checkpoint_name(out, names.OUTPUT_NAME), (kept_x, kept_w), {**x_amax, **w_amax}


@jax.jit
def _contract_bwd(residuals: _Residuals, g: jax.Array) -> tuple[None, Operands, Scales]:
    """Runs the backward pass; returns the cotangents of the plan (None), the operands and the scales."""
    plan, kept, scales, amaxes = residuals
    x, w = (
        x.from_bits() if isinstance(x, QTensor) else plan.canonical(role, x)
        for role, x in zip(OPERANDS, kept)
    )
    g1, g2, amax_of_g = quantized_for_both(plan, "output_grad", g, scales)
    with jax.named_scope(DGRAD):
        dx = plan.original("input", plan.product(DGRAD)(g1, w))
    with jax.named_scope(WGRAD):
        dw = plan.original("kernel", plan.product(WGRAD)(x, g2))
    amaxes = {**amaxes, **amax_of_g}
    # The amax of a step has only the batch and manual axes of its scale: it is merged over all others.
    amaxes_of_step = {role: merge_amax(amaxes[role], scale) for role, scale in scales.items()}
    return None, (_as_operand(dx, plan.lhs), _as_operand(dw, plan.rhs)), amaxes_of_step


contract.defvjp(_contract_fwd, _contract_bwd)


def _as_operand(grad: jax.Array, operand: jax.core.ShapedArray) -> jax.Array:
    """Returns a cotangent with the dtype and the manual axes of its operand, as JAX requires."""
    # Inside shard_map, the cotangent of a replicated operand is the sum of the cotangents of all devices.
    excess = tuple(sorted(manual_axes(grad) - operand.manual_axis_type.varying))
    return (lax.psum(grad, excess) if excess else grad).astype(operand.dtype)


# Quantizing. Barriers are for XLA. Policies of ``jax.checkpoint`` save arrays by their names.
#
#   barrier around                      without it, XLA
#   A  a kernel's codes for dgrad, and  makes the codes beside AdamW, which overwrites the kernel, so it
#      its scale of the forward GEMM    copies the kernel; with it, the forward GEMM waits for the codes
#   B  codes and amax of another        reads the wide tensor once for each, and casts it once more for a
#      tensor                           GEMM that takes it transposed
#   name                                with it, a policy can save
#   RESIDUAL_NAMES                      codes, scales and amaxes, and not the wide tensors
#   KERNEL_FORWARD_NAME                 other codes of the kernel, once for all microbatches
#   OUTPUT_NAME                         the result, which JAX's policies for dots do not see


def quantized_once(plan: Contraction, role: str, x: jax.Array, scales: Scales) -> AnyTensor:
    """Returns a tensor quantized for its first product alone; unchanged if the recipe keeps it wide."""
    quantizer, dims = plan.recipe.of_role(role)[0], plan.dims[role]
    keys = _key(plan, role, 0), None
    return quantize_for_both((quantizer, None), dims, plan.canonical(role, x), scales.get(role), keys)[0]


def quantized_for_both(
    plan: Contraction, role: str, x: jax.Array, scales: Scales
) -> tuple[AnyTensor, AnyTensor, Scales]:
    """Returns a tensor quantized for both of its products, and its amax, if delayed, by role."""
    x = plan.canonical(role, x)
    (one, other), dims = plan.recipe.of_role(role), plan.dims[role]
    scale, keys = scales.get(role), [_key(plan, role, index) for index in (0, 1)]
    is_gradient = role == "output_grad"
    master = None
    if role == "kernel" and plan.master is not None:
        master = plan.canonical(role, plan.master)
    first, second = quantize_for_both((one, other), dims, x, scale, keys, master, is_gradient=is_gradient)
    amax = {role: plan.amax(role, x)} if role in scales else {}
    if one is not None and one.shares_pass(other):
        if role == "kernel" and not one.block:
            first, second = _codes_before_forward(first, second)
    elif role != "kernel":
        # For a kernel one pass for codes and amax saves no time, and a policy that recomputes the kernel's
        # codes would have to recompute its amax.
        first, second, amax = _codes_with_amax(first, second, amax)
    return first, second, amax


def _codes_before_forward(first: AnyTensor, second: AnyTensor) -> tuple[QTensor, QTensor]:
    """Returns a kernel for its products behind barrier A: the first waits for the codes of the second."""
    assert isinstance(first, QTensor)
    assert isinstance(second, QTensor)
    codes, scale = lax.optimization_barrier((second.codes, first.scale))
    return dataclasses.replace(first, scale=scale), dataclasses.replace(second, codes=codes)


def _codes_with_amax(
    first: AnyTensor, second: AnyTensor, amax: Scales
) -> tuple[AnyTensor, AnyTensor, Scales]:
    """Returns a tensor for its two products, and its amax, behind barrier B. One object twice stays one."""
    operands = [first] if first is second else [first, second]
    quantized = [x for x in operands if isinstance(x, QTensor)]
    codes, amax = lax.optimization_barrier(([x.codes for x in quantized], amax))
    behind = {id(x): dataclasses.replace(x, codes=own) for x, own in zip(quantized, codes)}
    return behind.get(id(first), first), behind.get(id(second), second), amax


def _key(plan: Contraction, role: str, index: int) -> Given:
    """Returns the random key of a tensor for its first (0) or second (1) product; None without a key."""
    quantizer = plan.recipe.of_role(role)[index]
    if plan.key is None or quantizer is None or not quantizer.stochastic_rounding:
        return None
    return jax.random.fold_in(plan.key, 2 * ROLES.index(role) + index)


def _operand(
    plan: Contraction, role: str, x: jax.Array, scales: Scales
) -> tuple[AnyTensor, QTensor | None, Scales]:
    """Quantizes an input or kernel.

    Returns the operand of the forward product, the residual for the product in the backward pass (None if
    that operand is wide), and the amax by role. The residual is bits, under names for ``jax.checkpoint``.
    """
    first, second, amax = quantized_for_both(plan, role, x, scales)
    kept = None
    if isinstance(second, QTensor):
        bits, name = second.as_bits(), _INPUT_NAME if role == "input" else _KERNEL_NAME
        kept = dataclasses.replace(named_scaling(bits), codes=checkpoint_name(bits.codes, name))
    if first is second and kept is not None:
        # Under a checkpoint policy that saves the residual, a recomputed forward product then starts from
        # the saved codes.
        first = kept.from_bits()
    elif role == "kernel" and isinstance(first, QTensor):
        as_named = partial(checkpoint_name, name=names.KERNEL_FORWARD_NAME)
        first = jax.tree.map(as_named, first.as_bits()).from_bits()
    return first, kept, named_scaling(amax)

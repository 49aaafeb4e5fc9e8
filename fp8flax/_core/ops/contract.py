"""The FP8 contraction and its gradients: the ``custom_vjp`` of the direct form. Read this first.

A contraction multiplies an input ``x`` by a kernel ``w``. In the backward pass the output gradient ``g``
is multiplied by the kernel (dgrad, the gradient of the input) and by the input (wgrad, the gradient of the
kernel). ``q`` stands for quantizing, which counts as the identity in derivatives (straight-through)::

    forward   y  = q(x)  · q(w)
    dgrad     dx = q(g)  · q(w)'
    wgrad     dw = q(x)' · q(g)

Each of the three tensors, named by its role (``input``, ``kernel``, ``output_grad``), enters two of the
products. It is quantized once if the same codes serve both, otherwise once for each. Between the passes the
op keeps codes and scales, not the wide tensors.

With delayed scaling the scales of the step come in from outside. The op returns the amax of each tensor in
this step where a derivative would return the cotangent of the scale (see ``state.state``).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8flax._compat.varying import manual_axes
from fp8flax._core.amax import delayed_amax
from fp8flax._core.axes import merge_amax, sum_to_axes
from fp8flax._core.gemm.casts import Cast, quantize_blocks
from fp8flax._core.gemm.gemm import Gemm
from fp8flax._core.gemm.gpus import compute_capability
from fp8flax._core.names import (
    DGRAD,
    FORWARD,
    KERNEL_FORWARD_NAME,
    OUTPUT_NAME,
    RESIDUAL_NAMES,
    WGRAD,
)
from fp8flax._core.no_derivative import no_derivative
from fp8flax._core.ops.canonical import DimensionNumbers
from fp8flax._core.qtensor import Dims, QTensor
from fp8flax._core.quantize import inf_to_nan
from fp8flax._core.quantizers import BlockQuantizer, quantized
from fp8flax._core.recipes import CustomRecipe, GemmRecipe
from fp8flax._core.state.state import DelayedConfig, ScalingState, delayed_config, named_scaling

_INPUT_NAME, _KERNEL_NAME, _SCALING_NAME = RESIDUAL_NAMES

Extra = tuple[jax.Array, ...]
"""Arrays beside the operands that are not differentiated, such as the group sizes of a ragged dot."""

Scales = dict[str, jax.Array]
"""The float32 scale of each tensor with delayed scaling, by role."""


class States(NamedTuple):
    """The scaling states of one contraction, by role; None for a tensor without delayed scaling."""

    input: ScalingState | None = None
    kernel: ScalingState | None = None
    output_grad: ScalingState | None = None


STATELESS = States()


class Operand(NamedTuple):
    """Static description of an operand of an op (hashable)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    """The sharding of an array on a mesh with explicit axes; None for all other arrays."""
    axes: frozenset[str]
    """The manual axes of ``shard_map`` over which the operand varies."""

    @classmethod
    def of(cls, x: jax.Array) -> Operand:
        """Returns the operand description of ``x``."""
        return cls(x.shape, x.dtype, explicit_sharding(x), manual_axes(x))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """The static description of a contraction (hashable), and its products.

    Ops with other products have other subclasses. Methods take tensors by their role. A tensor is
    multiplied in its canonical form, which ``canonical`` makes.
    """

    recipe: CustomRecipe
    lhs: Operand
    rhs: Operand
    out_dtype: np.dtype
    out_sharding: Any = None
    precision: Any = None
    """The precision of products that do not run in FP8."""
    is_stored: bool = False
    """Whether the kernel comes as the FP8 codes of a frozen model."""

    @property
    def is_automatic(self) -> bool:
        """Returns whether the explicit axes of a mesh become automatic inside of the contraction.

        XLA then chooses the shardings inside.
        """
        return False

    @property
    def dims(self) -> dict[str, tuple[Dims, Dims]]:
        """Returns what the first and the second product of each tensor contract, by its role."""
        raise NotImplementedError

    def canonical(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        """Returns a tensor in the form in which it is quantized and multiplied."""
        raise NotImplementedError

    def original(self, role: str, x: jax.Array) -> jax.Array:
        """Returns an operand or its cotangent, or the result, in its own shape from the canonical one."""
        raise NotImplementedError

    def canonical_sharding(self, role: str) -> Any:
        """Returns the sharding of an operand in canonical form, on explicit mesh axes; otherwise None."""
        raise NotImplementedError

    def product(self, name: str, a: Any, b: Any, extra: Extra) -> jax.Array:
        """Returns one of the three products.

        Args:
            name: ``FORWARD`` for input and kernel, ``DGRAD`` for output gradient and kernel, ``WGRAD`` for
                input and output gradient.
            a: the left operand in canonical form: a ``QTensor``, or an array that stays wide.
            b: the right operand.
            extra: the further arrays of the op.
        """
        raise NotImplementedError

    def wide(self, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
        """Returns the product of wide operands without FP8, as JAX computes it."""
        raise NotImplementedError

    def stored(self, kernel: QTensor) -> QTensor:
        """Returns a canonical kernel as a frozen model stores it."""
        raise NotImplementedError

    def restored(self, kernel: QTensor) -> QTensor:
        """Returns a stored kernel in canonical form."""
        raise NotImplementedError

    def amax(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        """Returns the ``delayed_amax`` of a canonical tensor; for a stack, one for each of its elements."""
        del extra
        amax = jax.vmap(delayed_amax) if self.dims[role][0].is_stack else delayed_amax
        result: jax.Array = amax(x)
        return result

    @property
    def configs(self) -> dict[str, DelayedConfig]:
        """Returns the options of each tensor with delayed scaling, by role."""
        return {role: delayed_config(quantizer) for role, quantizer in self.recipe.delayed.items()}

    def warn(self, *recipes: GemmRecipe) -> None:
        """Warns if the device has no FP8 units for products with these recipes; by default does nothing."""

    def gemm(self, name: str, dims: DimensionNumbers) -> Gemm:
        """Returns one of the three GEMMs: its dtypes, and how it accumulates."""
        x, w, y = self.lhs.dtype, self.rhs.dtype, self.out_dtype
        recipe = self.recipe
        part, lhs, rhs, out = {
            FORWARD: (recipe.forward, x, w, y),
            DGRAD: (recipe.dgrad, y, w, x),
            WGRAD: (recipe.wgrad, x, y, w),
        }[name]
        return Gemm(dims, lhs, rhs, out, part.accumulation, self.precision, has_barrier=name == FORWARD)


# The derivatives of the operands are straight-through: a contraction is linear in each operand, and
# quantizing counts as the identity. The cotangents of the scales are not derivatives, but amaxes. The work
# is jitted, so that JAX traces it once for all equal layers.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
@partial(jax.jit, static_argnums=0)
def contract(
    plan: Contraction, operands: tuple[jax.Array, jax.Array], extra: Extra, scales: Scales
) -> jax.Array:
    """Returns the result of a contraction; the "gradients" of the scales are the amaxes of this step.

    Args:
        plan: the contraction.
        operands: input and kernel, which get gradients.
        extra: further arrays, which get no gradients.
        scales: the scale of each tensor with delayed scaling, from ``state.step_scales``.
    """
    return on_automatic_axes(plan, quantized_product, plan.out_sharding)(*operands, extra, scales, None)


def quantized_product(
    plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, scales: Scales, stored: Any
) -> jax.Array:
    """Quantizes wide operands and returns the forward product, without residuals.

    Args:
        plan: the contraction.
        lhs: the input.
        rhs: the kernel; not read if ``stored`` is given.
        extra: the further arrays of the op.
        scales: the delayed scales, by role.
        stored: the kernel as a canonical ``QTensor``; None to quantize ``rhs``.
    """
    x = quantized_once(plan, "input", lhs, extra, scales)
    w = quantized_once(plan, "kernel", rhs, extra, scales) if stored is None else stored
    with jax.named_scope(FORWARD):
        return plan.original("output", plan.product(FORWARD, x, w, extra))


class _Residuals(NamedTuple):
    """What the forward pass keeps for the backward pass."""

    kept: tuple[Any, Any]
    """Input and kernel, quantized for their products in the backward pass, see ``_named``; or wide."""
    extra: Extra
    scales: Scales
    amaxes: dict[str, jax.Array]
    """The amaxes of input and kernel."""


def _contract_fwd(
    plan: Contraction, operands: tuple[jax.Array, jax.Array], extra: Extra, scales: Scales
) -> tuple[jax.Array, _Residuals]:
    """Runs the forward pass; returns the result and the residuals."""
    out, kept, amaxes = _forward(plan, *operands, extra, scales)
    # A wide operand is kept as it is. (A wide kernel needs no name: it stays in memory anyway.)
    x, w = kept
    x = checkpoint_name(operands[0], _INPUT_NAME) if x is None else x
    return out, _Residuals((x, operands[1] if w is None else w), extra, scales, amaxes)


@partial(jax.jit, static_argnums=0)
def _forward(plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, scales: Scales) -> Any:
    """Returns the result, the residuals of input and kernel (None if wide), and the amaxes by role."""

    def forward(plan: Contraction, lhs: Any, rhs: Any, extra: Extra, scales: Scales) -> Any:
        x, kept_x, x_amax = _operand(plan, "input", lhs, extra, scales)
        w, kept_w, w_amax = _operand(plan, "kernel", rhs, extra, scales)
        with jax.named_scope(FORWARD):
            out = plan.original("output", plan.product(FORWARD, x, w, extra))
        return checkpoint_name(out, OUTPUT_NAME), (kept_x, kept_w), {**x_amax, **w_amax}

    kept_shardings = _kept_sharding(plan, "input"), _kept_sharding(plan, "kernel")
    shardings = plan.out_sharding, kept_shardings, None  # None: amaxes are replicated
    return on_automatic_axes(plan, forward, shardings)(lhs, rhs, extra, scales)


@partial(jax.jit, static_argnums=0)
def _contract_bwd(plan: Contraction, residuals: _Residuals, g: jax.Array) -> Any:
    """Runs the backward pass; returns the cotangents of operands, extra (None) and scales."""
    kept, extra, scales, amaxes = residuals
    shardings = (plan.lhs.sharding, plan.rhs.sharding), None
    grads, amax_of_g = on_automatic_axes(plan, _backward, shardings)(kept, extra, scales, g)
    amaxes = {**amaxes, **amax_of_g}
    # The amax of a step has only the batch and manual axes of its scale: it is merged over all others.
    amaxes_of_step = {role: merge_amax(amaxes[role], scale) for role, scale in scales.items()}
    return tuple(map(_as_operand, grads, (plan.lhs, plan.rhs))), None, amaxes_of_step


def _backward(plan: Contraction, kept: tuple[Any, Any], extra: Extra, scales: Scales, g: jax.Array) -> Any:
    """Returns the gradients of input and kernel, and the amax of ``g`` by role."""
    x, w = (
        _restored(plan, role, x, scales) if isinstance(x, QTensor) else plan.canonical(role, x, extra)
        for role, x in zip(("input", "kernel"), kept)
    )
    g = plan.canonical("output_grad", g, extra)
    g1, g2, amax = _quantized_for_both(plan, "output_grad", g, extra, scales)
    with jax.named_scope(DGRAD):
        dx = plan.original("input", plan.product(DGRAD, g1, w, extra))
    with jax.named_scope(WGRAD):
        dw = plan.original("kernel", plan.product(WGRAD, x, g2, extra))
    return (dx, dw), amax


contract.defvjp(_contract_fwd, _contract_bwd)


def _as_operand(grad: jax.Array, operand: Operand) -> jax.Array:
    """Returns a cotangent with the dtype, manual axes and sharding of its operand, as JAX requires."""
    # Inside shard_map, the cotangent of a replicated operand is the sum of the cotangents of all devices.
    grad = sum_to_axes(grad, operand.axes).astype(operand.dtype)
    if operand.sharding is not None:  # scales per row or column may have changed the sharding
        grad = jax.sharding.reshard(grad, operand.sharding)
    return grad


# Quantizing.


def quantized_once(plan: Contraction, role: str, x: jax.Array, extra: Extra, scales: Scales) -> Any:
    """Returns a tensor quantized for its first product alone; unchanged if the recipe keeps it wide."""
    quantizer, _ = plan.recipe.of_role(role)
    return _cast(quantizer, plan.canonical(role, x, extra), plan.dims[role][0], scales.get(role))


def _cast(quantizer: Any, x: jax.Array, dims: Dims, scale: jax.Array | None) -> Any:
    """Quantizes a canonical tensor; JAX cannot differentiate this a second time."""
    return no_derivative(lambda x, scale: quantized(quantizer, x, dims, scale))(x, scale)


def _operand(plan: Contraction, role: str, x: jax.Array, extra: Extra, scales: Scales) -> Any:
    """Quantizes an input or kernel.

    Returns the operand of the forward product, the residual for the product in the backward pass (None if
    that operand is wide), and the amax by role.
    """
    first, second, amax = _quantized_for_both(plan, role, plan.canonical(role, x, extra), extra, scales)
    is_shared = first is second
    kept = _named(role, second) if isinstance(second, QTensor) else None
    if is_shared and kept is not None:
        # Under a checkpoint policy that saves the residual, a recomputed forward product then starts from
        # the saved codes.
        first = _restored(plan, role, kept, scales)
    elif role == "kernel" and isinstance(first, QTensor):
        name = partial(checkpoint_name, name=KERNEL_FORWARD_NAME)
        first = jax.tree.map(name, first.as_bits()).from_bits()
    return first, kept, named_scaling(amax)


def _quantized_for_both(
    plan: Contraction, role: str, x: jax.Array, extra: Extra, scales: Scales
) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Returns a canonical tensor quantized for its first and for its second product, and its amax by role.

    There is no amax without delayed scaling. In an output gradient an Inf becomes a NaN. In other tensors
    an Inf saturates.
    """
    (one, other), (dims, other_dims), scale = plan.recipe.of_role(role), plan.dims[role], scales.get(role)
    if isinstance(one, BlockQuantizer) and one == other:
        cast = Cast(one, dims, other_dims, inf_is_nan=role == "output_grad")
        first, second = no_derivative(partial(quantize_blocks, cast))(x)
        # A GPU makes the codes of square blocks in the order of each product.
        return first, first if one.serves_both and not compute_capability() else second, {}
    x = inf_to_nan(x) if role == "output_grad" else x
    first = second = _cast(one, x, dims, scale)
    if one != other or (one is not None and not one.serves_both):
        second = _cast(other, x, other_dims, scale)
    amax = {} if scale is None else {role: plan.amax(role, x, extra)}
    if role == "kernel":
        # For a kernel one pass for codes and amax saves no time, and a policy that recomputes the kernel's
        # codes would have to recompute its amax.
        return first, second, amax
    # XLA reads the wide tensor once, for codes and amax, and does not cast it again for a GEMM that takes
    # it transposed.
    operands = [first] if first is second else [first, second]
    codes = [x.codes for x in operands if isinstance(x, QTensor)]
    codes, amax = lax.optimization_barrier((codes, amax))
    made = [dataclasses.replace(x, codes=codes.pop(0)) if isinstance(x, QTensor) else x for x in operands]
    return made[0], made[-1], amax


def _named(role: str, operand: QTensor) -> QTensor:
    """Returns an operand as it is kept for the backward pass: bits, under names for ``jax.checkpoint``.

    A delayed scale is left out, because the op keeps it anyway.
    """
    bits, name = operand.as_bits(), _INPUT_NAME if role == "input" else _KERNEL_NAME
    scale: Any = None if operand.quantizer.needs_state else checkpoint_name(bits.scale, _SCALING_NAME)
    return dataclasses.replace(bits, codes=checkpoint_name(bits.codes, name), scale=scale)


def _restored(plan: Contraction, role: str, kept: QTensor, scales: Scales) -> QTensor:
    """Returns the operand from the form in which ``_named`` has stored it."""
    if kept.quantizer.needs_state:
        kept = dataclasses.replace(kept, scale=plan.dims[role][1].as_scale(scales[role]))
    return kept.from_bits()


# Meshes with explicit axes.


def _kept_sharding(plan: Contraction, role: str) -> Any:
    """Returns the sharding of the result of ``_named``; for a ``QTensor`` that of its codes and scale."""
    sharding, (_, quantizer) = plan.canonical_sharding(role), plan.recipe.of_role(role)
    if sharding is None or quantizer is None:
        return None
    replicated: Any = None if quantizer.needs_state else NamedSharding(sharding.mesh, PartitionSpec())
    block = quantizer.block_of(plan.dims[role][1]) if isinstance(quantizer, BlockQuantizer) else ()
    return QTensor(sharding, replicated, quantizer, block)


def explicit_sharding(x: Any) -> Any:
    """Returns the sharding of an array if it lies on a mesh with explicit axes, and None otherwise."""
    sharding = jax.typeof(x).sharding
    return sharding if explicit_axes(sharding.mesh) else None


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """Returns the names of the explicit axes of a mesh."""
    return tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)


def on_automatic_axes(plan: Contraction, f: Any, out_shardings: Any) -> Any:
    """Returns ``f`` for this plan; if the plan ``is_automatic``, it runs without explicit mesh axes.

    The forward pass and the backward pass each call it, because residuals must have explicit axes again: a
    ``lax.scan`` that is differentiated outside of ``jax.jit`` takes no residuals on automatic axes.

    Args:
        plan: the contraction.
        f: a function of the plan and of trees of arrays.
        out_shardings: the shardings of the results, for a plan that ``is_automatic``. None stands for
            replicated results.
    """
    if not plan.is_automatic:
        return partial(f, plan)
    mesh = plan.lhs.sharding.mesh
    lhs, rhs = plan.lhs._replace(sharding=None), plan.rhs._replace(sharding=None)
    inner = partial(f, dataclasses.replace(plan, lhs=lhs, rhs=rhs, out_sharding=None))
    replicated = NamedSharding(mesh, PartitionSpec())
    is_none = lambda s: s is None  # noqa: E731
    out_shardings = jax.tree.map(lambda s: replicated if s is None else s, out_shardings, is_leaf=is_none)
    return jax.sharding.auto_axes(inner, axes=explicit_axes(mesh), out_sharding=out_shardings)

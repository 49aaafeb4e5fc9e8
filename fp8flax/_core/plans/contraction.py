"""The plan of a contraction: its three products (forward, dgrad, wgrad), and how it quantizes operands.

Three tensors are quantized. Each is named by its role, and each enters two of the products::

    input        forward and wgrad
    kernel       forward and dgrad
    output_grad  dgrad and wgrad

This module has all that contractions share. A subclass of ``Contraction`` defines the products
(``dot_general``, ``ragged_dot``), or one wide product in quantize-dequantize form (``conv``).
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

from fp8flax._compat.varying import manual_axes
from fp8flax._core.amax import delayed_amax
from fp8flax._core.formats import is_wide_float
from fp8flax._core.gemm.lowering import lowered, rows_of
from fp8flax._core.gemm.request import CastPair, Gemm, distinct_codes, with_codes
from fp8flax._core.names import (
    DGRAD,
    FORWARD,
    KERNEL_FORWARD_NAME,
    OUTPUT_NAME,
    RESIDUAL_NAMES,
    WGRAD,
)
from fp8flax._core.no_derivative import no_derivative
from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.quantize import as_float_array, inf_to_nan
from fp8flax._core.quantizers import Quantizer, quantized, serves
from fp8flax._core.recipes import CustomRecipe, GemmRecipe
from fp8flax._core.state.state import DelayedConfig, ScalingState, delayed_config, named_scaling

_INPUT_NAME, _KERNEL_NAME, _SCALING_NAME = RESIDUAL_NAMES

Extra = tuple[jax.Array, ...]
"""Arrays beside the operands that are not differentiated, such as the group sizes of a ragged dot."""

Scales = dict[str, jax.Array]
"""The float32 scale of each tensor with delayed scaling, by role."""


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


def explicit_sharding(x: Any) -> Any:
    """Returns the sharding of an array if it lies on a mesh with explicit axes, and None otherwise."""
    sharding = jax.typeof(x).sharding
    return sharding if explicit_axes(sharding.mesh) else None


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """Returns the names of the explicit axes of a mesh."""
    return tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)


class States(NamedTuple):
    """The scaling states of one contraction, by role; None for a tensor without delayed scaling."""

    input: ScalingState | None = None
    kernel: ScalingState | None = None
    output_grad: ScalingState | None = None


STATELESS = States()


class Use(NamedTuple):
    """How a tensor enters one of its two products."""

    role: str
    quantizer: Quantizer | None
    """The quantizer of the tensor for this product; None leaves the tensor wide."""
    view: View
    """The shape of the tensor, and the dimensions that this product contracts."""


class Uses(NamedTuple):
    """The two uses of a tensor: in its first and in its second product of a training step."""

    first: Use
    second: Use


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """A contraction: the static description of its operands, and methods that compute its three products.

    It is hashable. Tensors are named by their role: ``input``, ``kernel`` or ``output_grad``.
    """

    recipe: CustomRecipe
    lhs: Operand
    rhs: Operand
    out_dtype: np.dtype
    out_sharding: Any = None
    precision: Any = None
    """The precision of products that do not run in FP8."""
    is_qdq: bool = False
    """Whether the contraction is ``fake_quantized`` between ``in_qdq`` and ``out_qdq`` (see ``modes``), and
    not the three products."""
    is_packed: bool = False
    """Whether the kernel comes as FP8 codes that a frozen model stores, in the shape of the kernel."""

    stacked: ClassVar[tuple[str, ...]] = ()
    """Roles whose tensor is a stack along its first axis, with separate scales for each element."""

    @property
    def is_automatic(self) -> bool:
        """Whether the explicit axes of a mesh become automatic inside of the contraction.

        XLA then chooses the shardings inside.
        """
        return False

    @property
    def views(self) -> dict[str, tuple[View, View]]:
        """For each role, the view of its tensor in its first and in its second product."""
        raise NotImplementedError

    def uses(self, role: str) -> Uses:
        """Returns the quantizer and the view of a tensor for each of its two products."""
        both = zip(self.recipe.of_role(role), self.views[role])
        return Uses(*(Use(role, quantizer, view) for quantizer, view in both))

    def product(self, lhs: Any, rhs: Any, extra: Extra) -> jax.Array:
        """Returns the forward product. Each operand is a ``QTensor`` or a wide array."""
        raise NotImplementedError

    def dgrad(self, g: Any, rhs: Any, extra: Extra) -> jax.Array:
        """Returns the input's cotangent.

        Args:
            g: the output gradient, a ``QTensor`` or a wide array.
            rhs: the kernel, a ``QTensor`` or a wide array.
            extra: the further arrays of the op.
        """
        raise NotImplementedError

    def wgrad(self, lhs: Any, g: Any, extra: Extra) -> jax.Array:
        """Returns the kernel's cotangent.

        Args:
            lhs: the input, a ``QTensor`` or a wide array.
            g: the output gradient, a ``QTensor`` or a wide array.
            extra: the further arrays of the op.
        """
        raise NotImplementedError

    def wide(self, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
        """Returns the forward product of wide operands without FP8, as JAX computes it.

        An operand may have gone through ``prepared``; the result is the same as without it.
        """
        raise NotImplementedError

    def fake_quantized(self, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
        """Returns the forward product of wide operands that hold FP8 values; called only if ``is_qdq``."""
        raise NotImplementedError

    def prepared(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        """Returns a tensor in the form that is quantized; a subclass may pad it or set rows to zero."""
        del role, extra
        return x

    def amax(self, role: str, x: jax.Array, extra: Extra) -> jax.Array:
        """Returns the ``delayed_amax`` of a prepared tensor; for a stack, one for each of its elements."""
        del extra
        amax: jax.Array = self.each(role, delayed_amax, x)
        return amax

    def warn(self, *recipes: GemmRecipe) -> None:
        """Warns if the device has no FP8 units for products with these recipes; by default does nothing."""

    def each(self, role: str, f: Callable[..., Any], *args: Any) -> Any:
        """Calls ``f`` once; for a role in ``stacked``, once per element of the stack by ``jax.vmap``."""
        return jax.vmap(f)(*args) if role in self.stacked else f(*args)

    def gemm(self, name: str, dims: Any, lhs: Operand, rhs: Operand, out_dtype: np.dtype) -> Gemm:
        """Returns the request for one of the three GEMMs.

        Args:
            name: ``"forward"``, ``"dgrad"`` or ``"wgrad"``.
            dims: the dimension numbers of ``lax.dot_general``.
            lhs: the left operand.
            rhs: the right operand.
            out_dtype: dtype of the result.
        """
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
        return Gemm(
            lhs=View(lhs.shape, lhs_contract, lhs_batch),
            rhs=View(rhs.shape, rhs_contract, rhs_batch),
            lhs_dtype=lhs.dtype,
            rhs_dtype=rhs.dtype,
            out_dtype=out_dtype,
            accumulation=getattr(self.recipe, name).accumulation,
            precision=self.precision,
            is_packed=self.is_packed,
        )

    @property
    def configs(self) -> Mapping[str, DelayedConfig]:
        """The options of each tensor with delayed scaling, by role."""
        return {role: delayed_config(quantizer) for role, quantizer in self.recipe.delayed.items()}


def _quantized_for(plan: Contraction, use: Use, x: jax.Array, scale: jax.Array | None) -> Any:
    """Returns a tensor quantized for one use, as a ``QTensor``; unchanged if the use has no quantizer."""
    quantize = no_derivative(lambda x, scale: quantized(use.quantizer, x, use.view, scale))
    return plan.each(use.role, quantize, x, scale)


def _pair_of(plan: Contraction, role: str, x: jax.Array) -> CastPair:
    """Returns the request to quantize ``x`` for both of its products."""
    first, second = plan.uses(role)
    return CastPair(
        first.quantizer,
        first.view,
        second.quantizer,
        second.view,
        inf_is_nan=role == "output_grad",
        stack=x.shape[0] if role in plan.stacked else 1,
    )


def _serves_both(plan: Contraction, role: str, x: jax.Array) -> bool:
    """Returns whether a tensor is quantized once, and its codes are used in both of its products.

    The codes are not shared if a row of the table in ``lowering`` fits: it quantizes the tensor for both
    products at once.
    """
    pair = _pair_of(plan, role, x)
    return serves(pair.first, pair.second, pair.first_view) and not rows_of(pair, x, None)


def _transposed(plan: Contraction, role: str, operand: Any) -> Any:
    """Returns an operand in the layout of its other product: the same codes, transposed if needed."""
    if not isinstance(operand, QTensor):
        return operand
    return plan.each(role, operand.quantizer.transpose, operand)


def _quantized_for_both(
    plan: Contraction, role: str, x: jax.Array, scale: jax.Array | None, *, has_barrier: bool = False
) -> tuple[Any, Any]:
    """Returns a tensor quantized for its first product, and quantized for its second product.

    In an output gradient an Inf becomes a NaN. In other tensors an Inf saturates.

    Args:
        plan: the contraction.
        role: the role of the tensor.
        x: the prepared tensor.
        scale: the delayed scale; None without delayed scaling.
        has_barrier: see ``CastPair``.
    """
    pair = _pair_of(plan, role, x)._replace(has_barrier=has_barrier)
    first, second = plan.each(role, no_derivative(partial(lowered, pair)), x, scale)
    # ``no_derivative`` returns shared codes as two arrays, which devices would exchange separately.
    return first, _transposed(plan, role, first) if _serves_both(plan, role, x) else second


def quantized_with_amax(
    plan: Contraction, role: str, x: jax.Array, scale: jax.Array | None, extra: Extra
) -> tuple[Any, Any, jax.Array | None]:
    """Returns a tensor quantized for its first and for its second product, and its amax.

    The amax is None without delayed scaling.

    XLA reads the wide tensor once, for codes and amax. It does not cast the tensor again for a GEMM that
    takes it transposed. (``_kernel_of`` computes codes and amax separately: for a kernel one pass saves
    no time, and a policy that recomputes the kernel's codes would have to recompute its amax.)
    """
    if scale is None:
        return *_quantized_for_both(plan, role, x, None, has_barrier=True), None
    pair = _quantized_for_both(plan, role, x, scale)
    as_cast = inf_to_nan(x) if role == "output_grad" else x  # both have the same amax, inf
    amax, codes = lax.optimization_barrier((plan.amax(role, as_cast, extra), distinct_codes(pair)))
    return *with_codes(pair, codes), amax


def _kept(plan: Contraction, role: str, operand: Any, scale: jax.Array | None) -> Any:
    """Returns an operand in the form that is kept for the backward pass.

    A ``QTensor`` is kept without padding, as bits, under a name for policies of ``jax.checkpoint``.

    Args:
        plan: the contraction.
        role: ``"input"`` or ``"kernel"``.
        operand: the operand of the second product, quantized or wide.
        scale: the delayed scale; None without delayed scaling.
    """
    name = _INPUT_NAME if role == "input" else _KERNEL_NAME
    if not isinstance(operand, QTensor):
        # A wide kernel needs no name: it is an argument of the op, and stays in memory anyway.
        return checkpoint_name(operand, name) if role == "input" else operand
    trim = partial(operand.quantizer.trim, view=plan.uses(role).second.view)
    bits = plan.each(role, trim, operand).as_bits()
    if scale is None or not operand.quantizer.needs_state:  # a delayed scale has this name already
        scale = checkpoint_name(bits.scale, _SCALING_NAME)
    return QTensor(checkpoint_name(bits.codes, name), scale, operand.quantizer)


def _restored(plan: Contraction, role: str, kept: Any) -> Any:
    """Returns the operand from the form in which ``_kept`` has stored it."""
    if not isinstance(kept, QTensor):
        return kept
    fill = partial(kept.quantizer.fill, view=plan.uses(role).second.view)
    return plan.each(role, fill, kept.from_bits())


def kept_sharding(plan: Contraction, role: str, operand: Operand) -> Any:
    """Returns the sharding of the result of ``_kept``; for a ``QTensor`` that of its codes and scale."""
    _, quantizer, view = plan.uses(role).second
    if operand.sharding is None or quantizer is None:  # no sharding: not on explicit axes
        return operand.sharding
    return quantizer.shardings(operand.sharding, view)


def on_automatic_axes(plan: Contraction, f: Callable[..., Any], out_shardings: Any) -> Callable[..., Any]:
    """Returns ``f`` for this plan; if the plan ``is_automatic``, it runs without explicit mesh axes.

    The forward pass and the backward pass each call it, because residuals must have explicit axes again: a
    ``lax.scan`` that is differentiated outside of ``jax.jit`` takes no residuals on automatic axes.

    Args:
        plan: the contraction.
        f: a function of the plan and of trees of arrays.
        out_shardings: the shardings of the results, for a plan that ``is_automatic``. None stands for a
            replicated result.

    Returns:
        A function of trees of arrays.
    """
    if not plan.is_automatic:
        return partial(f, plan)
    mesh = plan.lhs.sharding.mesh
    lhs, rhs = plan.lhs._replace(sharding=None), plan.rhs._replace(sharding=None)
    inner = partial(f, dataclasses.replace(plan, lhs=lhs, rhs=rhs))
    replicated = NamedSharding(mesh, PartitionSpec())
    out_shardings = jax.tree.map(
        lambda s: replicated if s is None else s, out_shardings, is_leaf=lambda s: s is None
    )
    run: Callable[..., Any] = jax.sharding.auto_axes(
        inner, axes=explicit_axes(mesh), out_sharding=out_shardings
    )
    return run


class _QuantizedOperand(NamedTuple):
    """An input or a kernel after it was quantized in the forward pass."""

    first: Any
    """The operand of the forward product."""
    kept: Any
    """The residual for the product in the backward pass, see ``_kept``."""
    amax: jax.Array | None
    """The amax; None without delayed scaling."""


def _input_of(
    plan: Contraction, lhs: jax.Array, scale: jax.Array | None, extra: Extra
) -> _QuantizedOperand:
    """Quantizes the input for the forward product and for wgrad."""
    lhs = plan.prepared("input", lhs, extra)
    first, second, amax = quantized_with_amax(plan, "input", lhs, scale, extra)
    kept = _kept(plan, "input", second, scale)
    # If both products share the codes, the forward operand is made from the residual. Under a checkpoint
    # policy that saves the residual, a recomputed forward product then starts from the saved codes.
    if _serves_both(plan, "input", lhs):
        first = _transposed(plan, "input", _restored(plan, "input", kept))
    return _QuantizedOperand(first, kept, named_scaling(amax))


def _kernel_of(
    plan: Contraction, rhs: jax.Array, scale: jax.Array | None, extra: Extra
) -> _QuantizedOperand:
    """Quantizes the kernel for the forward product and for dgrad."""
    rhs = plan.prepared("kernel", rhs, extra)
    first, second = _quantized_for_both(plan, "kernel", rhs, scale)
    amax = None if scale is None else plan.amax("kernel", rhs, extra)
    kept = _kept(plan, "kernel", second, scale)
    if _serves_both(plan, "kernel", rhs):
        first = _transposed(plan, "kernel", _restored(plan, "kernel", kept))
    elif isinstance(first, QTensor):
        bits = jax.tree.map(partial(checkpoint_name, name=KERNEL_FORWARD_NAME), first.as_bits())
        first = bits.from_bits()
    return _QuantizedOperand(first, kept, named_scaling(amax))


def quantized_product(
    plan: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    extra: Extra,
    scales: Scales,
    kernel: Any,
) -> jax.Array:
    """Quantizes wide operands and returns the forward product, without residuals.

    Args:
        plan: the contraction.
        lhs: the wide input.
        rhs: the wide kernel; not read if ``kernel`` is given.
        extra: the further arrays of the op.
        scales: the delayed scales, by role.
        kernel: the kernel as a packed ``QTensor``; None to quantize ``rhs``.
    """
    lhs = plan.prepared("input", lhs, extra)
    q_lhs = _quantized_for(plan, plan.uses("input").first, lhs, scales.get("input"))
    if kernel is None:
        rhs = plan.prepared("kernel", rhs, extra)
        q_rhs = _quantized_for(plan, plan.uses("kernel").first, rhs, scales.get("kernel"))
    else:
        q_rhs = kernel.quantizer.unpack(kernel, plan.uses("kernel").first.view)
        # Codes in another dtype would give the same values, and run wide.
        assert q_rhs.codes.dtype == q_rhs.quantizer.dtype
    with jax.named_scope(FORWARD):
        return plan.product(q_lhs, q_rhs, extra)


def forward(
    plan: Contraction, lhs: jax.Array, rhs: jax.Array, extra: Extra, scales: Scales
) -> tuple[jax.Array, tuple[Any, Any], dict[str, jax.Array]]:
    """Returns the result, the residuals of input and kernel, and the amaxes by role."""
    entering = {
        "input": _input_of(plan, lhs, scales.get("input"), extra),
        "kernel": _kernel_of(plan, rhs, scales.get("kernel"), extra),
    }
    with jax.named_scope(FORWARD):
        out = plan.product(entering["input"].first, entering["kernel"].first, extra)
    amaxes = {role: one.amax for role, one in entering.items() if one.amax is not None}
    kept = entering["input"].kept, entering["kernel"].kept
    return checkpoint_name(out, OUTPUT_NAME), kept, amaxes


def backward(
    plan: Contraction, residuals: tuple[Any, Any], extra: Extra, scales: Scales, g: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], dict[str, jax.Array]]:
    """Returns the gradients of input and kernel, and the amax of ``g`` by role."""
    lhs_kept, rhs_kept = residuals
    g = plan.prepared("output_grad", g, extra)
    g_first, g_second, g_amax = quantized_with_amax(
        plan, "output_grad", g, scales.get("output_grad"), extra
    )
    lhs, rhs = _restored(plan, "input", lhs_kept), _restored(plan, "kernel", rhs_kept)
    with jax.named_scope(DGRAD):
        lhs_grad = plan.dgrad(g_first, rhs, extra)
    with jax.named_scope(WGRAD):
        rhs_grad = plan.wgrad(lhs, g_second, extra)
    return (lhs_grad, rhs_grad), {} if g_amax is None else {"output_grad": g_amax}


def check_operands(lhs: Any, rhs: Any, preferred_element_type: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the operands as arrays; raises ``TypeError`` if a dtype is not a wide float."""
    if preferred_element_type is not None and not is_wide_float(preferred_element_type):
        raise TypeError(
            "preferred_element_type must be None, bfloat16, float16, float32 or float64; got "
            f"{preferred_element_type!r}."
        )
    return as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")

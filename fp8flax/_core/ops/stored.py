"""How a frozen model stores the kernel of a contraction: its FP8 codes and their scales."""

from __future__ import annotations

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fp8flax._core.axes import on_automatic_axes
from fp8flax._core.formats import E2M1
from fp8flax._core.gemm.dispatch import warn_if_emulated
from fp8flax._core.names import FORWARD, KEPT_WIDE
from fp8flax._core.ops.canonical import DimensionNumbers, Layout, Shape
from fp8flax._core.ops.contract import Contraction, Scales, quantized_once
from fp8flax._core.ops.op import Op
from fp8flax._core.qtensor import QTensor, Quantizer
from fp8flax._core.quantize import as_float_array
from fp8flax._core.recipes import CustomRecipe


class StoredContraction(Contraction):
    """A contraction whose kernel a frozen model can store."""

    dimension_numbers: DimensionNumbers
    """What the forward product sums over, and its batch dimensions. Subclasses have it as a field."""

    def stored(self, kernel: jax.Array, scale: jax.Array | None) -> QTensor:
        """Returns a kernel as a frozen model stores it: quantized, with codes in the shape of the kernel.

        The scales are as inference servers read them. In NVFP4 each output feature has scales of its own.
        Only delayed scaling reads ``scale``.
        """
        (quantizer, _), (dims, _) = self.recipe.of_role("kernel"), self.dims["kernel"]
        assert quantizer is not None
        q = quantizer.quantize(self.canonical("kernel", kernel), dims, scale)
        quantizer, scale = quantizer.stored, q.scale
        if quantizer != q.quantizer and dims.free:
            columns = dims.free[-1]
            scale = jnp.repeat(scale, q.block[columns], axis=columns)
            scale = lax.slice_in_dim(scale, 0, q.shape[columns], axis=columns)
        scale = self._stored_scales(quantizer).back(scale) if scale.ndim else scale
        return QTensor(self.original("kernel", q.codes), scale, quantizer, tensor_scale=q.tensor_scale)

    def restored(self, kernel: QTensor) -> QTensor:
        """Returns a stored kernel as the products take it."""
        scale, quantizer = kernel.scale, kernel.quantizer
        # Codes in another dtype would give the same values, and run wide.
        assert kernel.codes.dtype == quantizer.dtype
        scale = self._stored_scales(quantizer).to(scale) if scale.ndim else scale
        block = self.dims["kernel"][0].block(quantizer.block) if quantizer.block else ()
        codes = self.canonical("kernel", kernel.codes)
        return QTensor(codes, scale, quantizer, block, kernel.tensor_scale)

    def _stored_scales(self, quantizer: Quantizer) -> Layout:
        """Returns the layout of several scales of a kernel: its shape is that of the stored scales."""
        kernel, dims = self.layouts["kernel"], self.dims["kernel"][0]
        (depth,) = dims.contract  # the dimensions before it are batch dimensions
        if quantizer.block:
            return _scales_of_blocks(kernel.canonical, depth, dims.block(quantizer.block))
        if quantizer.has_one_scale:
            return _scale_of_kernel(kernel.canonical, depth)
        return _scales_of_slices(kernel, depth, {*self.dimension_numbers[0][1]})


def _scales_of_blocks(sizes: Shape, depth: int, block: Shape) -> Layout:
    """Returns the layout of scales stored as ``(*batch, 1, output blocks, contracted blocks)``."""
    batch = sizes[:depth]
    blocks, *counts = (-(-n // width) for n, width in zip(sizes[depth:], block[depth:]))
    stored = *batch, 1, math.prod(counts), blocks
    return Layout(stored, (*range(depth + 1), depth + 2, depth + 1), (*batch, blocks, *counts))


def _scale_of_kernel(sizes: Shape, depth: int) -> Layout:
    """Returns the layout of a scale for each kernel of a stack, stored as ``(*batch, 1)``."""
    return Layout((*sizes[:depth], 1), (*range(depth + 1),), sizes[:depth] + (1,) * (len(sizes) - depth))


def _scales_of_slices(kernel: Layout, depth: int, contracted: set[int]) -> Layout:
    """Returns the layout of scales stored with the dimensions of the kernel."""
    shape = tuple(1 if i in contracted else size for i, size in enumerate(kernel.shape))
    return Layout(shape, kernel.order, (*kernel.canonical[:depth], 1, *kernel.canonical[depth + 1 :]))


def packed_kernel(plan: StoredContraction, kernel: jax.Array, scale: jax.Array | None) -> QTensor:
    """Returns ``plan.stored(kernel, scale)``, also on a mesh with explicit axes."""
    sharding = jax.typeof(kernel).sharding
    replicated = NamedSharding(sharding.mesh, PartitionSpec())
    quantizer, _ = plan.recipe.of_role("kernel")
    assert quantizer is not None
    of_tensor = replicated if quantizer.dtype == E2M1 else None
    out_sharding = QTensor(sharding, replicated, quantizer.stored, tensor_scale=of_tensor)
    return on_automatic_axes(plan.stored, kernel, out_sharding)(kernel, scale)


def frozen(
    op: type[Op],
    lhs: jax.Array,
    kernel: QTensor,
    *arguments: object,
    recipe: CustomRecipe,
    input_scale: jax.Array | None,
    **keywords: object,
) -> jax.Array:
    """Returns the result of an op that ``stores_kernel``, for a kernel from ``packed_kernel``.

    ``input_scale`` is the delayed scale of the input, if the recipe has one. Gradients stay wide.
    """
    lhs = as_float_array(lhs, "lhs")
    wide = jax.ShapeDtypeStruct(kernel.shape, lhs.dtype)
    plan = cast(StoredContraction, op.plans["direct"](lhs, wide, *arguments, recipe=recipe, **keywords))
    warn_if_emulated(recipe.forward)
    scales = {} if input_scale is None else {"input": input_scale}
    return on_automatic_axes(_frozen, lhs, plan.out.sharding)(plan, lhs, kernel, scales)


# With straight-through quantization q, the derivative of q(x) . q(w) in the direction dx is dx . q(w).
# Tangents and cotangents have no scales, so they stay wide. Codes are not differentiated.
@jax.custom_jvp
@jax.jit
def _frozen(plan: StoredContraction, lhs: jax.Array, kernel: QTensor, scales: Scales) -> jax.Array:
    """Returns the forward product of an input and the kernel of a frozen model."""
    x, w = quantized_once(plan, "input", lhs, scales), plan.restored(kernel)
    with jax.named_scope(FORWARD):
        return plan.original("output_grad", plan.product(FORWARD, is_stored=True)(x, w))


@_frozen.defjvp
def _frozen_jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the result of ``_frozen`` and its tangent."""
    (plan, _, kernel, _), (_, dx, *_) = primals, tangents
    w = plan.original("kernel", plan.restored(kernel).dequantize(plan.rhs.dtype))
    with jax.named_scope(KEPT_WIDE):
        return _frozen(*primals), plan.wide(dx, w)

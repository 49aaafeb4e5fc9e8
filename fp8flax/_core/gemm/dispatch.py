"""Chooses the backends of GEMMs, and how tensors are quantized in blocks of FP8.

On NVIDIA GPUs a product of FP8 codes runs by the first of the ``BACKENDS`` that supports it. ``emulated``
multiplies the same values if none does, and on all other devices. Three choices nest around a GPU kernel,
each made at another time; for scales per block::

    custom_vmap                     traced under jax.vmap?       the batch becomes a dimension of the GEMM
      lax.platform_dependent        lowered for which platform?
        default                                                  in_xla: plain JAX
        cuda: choose_at_lowering    lowered for what devices?
          whole                     one                          the GPU kernel
          in_parts                  several, of jax.jit          on_shards: the GPU kernel on each part
          in_xla                    several, in other ways       plain JAX
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap, sequential_vmap

from fp8flax._compat.choice_at_lowering import choose_at_lowering
from fp8flax._core.gemm import (
    blackwell,
    cublaslt,
    emulated,
    hopper,
    hopper_ahead,
    hopper_experts,
    quantize_blocks_mosaic,
    ragged,
)
from fp8flax._core.gemm import quantize_blocks as block_kernel
from fp8flax._core.gemm.emulated import multiply_wide
from fp8flax._core.gemm.gemm import TILE, AnyTensor, Gemm, GemmSizes, are_positive, scaled, sum_dtype_of
from fp8flax._core.gemm.gpus import (
    NATIVE_FP8,
    Fp8EmulationWarning,
    absent_gpu,
    compute_capability,
    is_hopper,
    new_kernels,
)
from fp8flax._core.gemm.on_shards import NamedDims, on_shards
from fp8flax._core.gemm.quantize_blocks import Cast, Pair
from fp8flax._core.names import BLOCK_GEMM_HOPPER, BLOCK_QUANTIZE, DEQUANTIZED, GROUPED_GEMM, KEPT_WIDE
from fp8flax._core.qtensor import Given, QTensor, Quantizer
from fp8flax._core.quantize import no_derivative

BACKENDS: tuple[ModuleType, ...] = (cublaslt, blackwell, hopper_ahead, hopper)
"""How GPUs multiply codes in FP8, in the order of preference.

Each is a file with two functions. ``supports(lhs, rhs, sizes, capability)`` returns whether a GPU of a
compute capability multiplies codes of two quantizers. ``compute(gemm, a, b)`` returns the product."""

_SCOPES = {hopper: BLOCK_GEMM_HOPPER, hopper_ahead: BLOCK_GEMM_HOPPER, emulated: DEQUANTIZED}
"""The scopes by which the audit recognizes a product on each GPU of a mesh."""


def _fp8_backend(lhs: Quantizer, rhs: Quantizer, sizes: GemmSizes) -> ModuleType | None:
    """Returns the backend that multiplies codes of two quantizers on the GPU of the program, or None."""
    case = lhs, rhs, sizes, compute_capability()
    return next((backend for backend in BACKENDS if backend.supports(*case)), None)


def backend_of(gemm: Gemm, a: QTensor, b: QTensor) -> ModuleType:
    """Returns the backend by which the GPU that JAX compiles for multiplies two operands."""
    return _fp8_backend(a.quantizer, b.quantizer, gemm.sizes(a, b)) or emulated


def warn_if_emulated(*recipes: Any) -> None:
    """Warns, once, if the current device has no FP8 units for GEMMs with one of these ``GemmRecipe``."""
    if absent_gpu() is not None:
        return
    capability, kind = compute_capability(), jax.devices()[0].device_kind
    sizes, pairs = GemmSizes(1, TILE, TILE, TILE), [(x.lhs, x.rhs) for x in recipes if x.lhs and x.rhs]
    if capability < NATIVE_FP8:
        text = (
            f"FP8 matmuls are emulated on {kind}: the values are those of FP8, the speed is not. "
            "fp8flax.audit shows what a GPU would run."
        )
    elif not all(_fp8_backend(*pair, sizes) for pair in pairs):
        text = (
            f"{kind} has no units for these dtypes or block scales: the values are multiplied in a "
            "wider dtype, at its speed. fp8flax.audit shows which. Float8CurrentScaling() runs in FP8."
        )
    else:
        return
    # Python's default filter shows each text once, because it is raised at this line (stacklevel=1).
    warnings.warn(text, Fp8EmulationWarning, stacklevel=1)


# GEMMs.


def multiply(gemm: Gemm, a: AnyTensor, b: AnyTensor) -> jax.Array:
    """Returns ``lax.dot_general`` of the values of two operands, in ``gemm.out_dtype``."""
    if not (isinstance(a, QTensor) and isinstance(b, QTensor)):
        return multiply_wide(KEPT_WIDE, gemm, a, b)
    if bool(a.block) != bool(b.block):
        return multiply_wide(DEQUANTIZED, gemm, a, b)
    if a.block:
        return no_derivative(partial(_with_block_scales, gemm))(a, b)
    # Opaque to the policies of jax.checkpoint: a policy that saves the results of dots would otherwise find
    # the dots of each platform, and keep all of them.
    on_gpu = partial(backend_of(gemm, a, b).compute, gemm)
    other = partial(emulated.compute, gemm, on_gpu=False)
    return no_derivative(partial(lax.platform_dependent, cuda=on_gpu, default=other))(a, b)


def _with_block_scales(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies operands with scales per block.

    Under ``jax.vmap`` the batch becomes a free dimension if only the left operand has it. Otherwise it
    becomes a batch dimension of both operands. So GPU kernels and ``on_shards`` never meet ``jax.vmap``.
    """
    product = custom_vmap(partial(_without_vmap, gemm))

    @product.def_vmap
    def _(size: int, is_batched: tuple[QTensor, QTensor], a: QTensor, b: QTensor) -> tuple[jax.Array, bool]:
        # In a free dimension, each row must have scales of its own.
        is_free = not any(jax.tree.leaves(is_batched[1])) and a.quantizer.block[0] == 1
        place, batched = gemm.lhs.num_batch if is_free else 0, gemm._replace(lhs=gemm.lhs.batched(is_free))
        a = _with_batch(size, is_batched[0], a, place)
        if not is_free:
            batched, b = batched._replace(rhs=gemm.rhs.batched()), _with_batch(size, is_batched[1], b, 0)
        return jnp.moveaxis(_with_block_scales(batched, a, b), place, 0), True

    return product(a, b)


def _with_batch(size: int, is_batched: QTensor, x: QTensor, place: int) -> QTensor:
    """Returns an operand in which a batch of ``jax.vmap`` is the dimension ``place``."""
    # If only a key of stochastic rounding is batched, the scale of the tensor is not.
    x = jax.tree.map(lambda x, has: x if has else jnp.broadcast_to(x, (size, *x.shape)), x, is_batched)
    codes, scale = (jnp.moveaxis(array, 0, place) for array in (x.codes, x.scale))
    of_tensor = x.tensor_scale
    if of_tensor is not None:
        if of_tensor.ndim == 1:  # one scalar for each tensor of the batch
            of_tensor = lax.expand_dims(of_tensor, range(1, codes.ndim))
        of_tensor = jnp.moveaxis(of_tensor, 0, place)
    return QTensor(codes, scale, x.quantizer, (*x.block[:place], 1, *x.block[place:]), of_tensor)


def _without_vmap(gemm: Gemm, a: QTensor, b: QTensor) -> jax.Array:
    """Multiplies operands with scales per block, in the way of the device that the program is for."""
    if a.tensor_scale is not None or b.tensor_scale is not None:
        # The scales of tensors multiply the result. So bfloat16 holds the operands exactly, and parts of an
        # operand on several devices have scales per block alone.
        keeps_dtype = gemm.out_dtype == jnp.bfloat16 and compute_capability()
        sum_dtype = gemm.out_dtype if keeps_dtype else sum_dtype_of(gemm.out_dtype)
        of_blocks = (dataclasses.replace(x, tensor_scale=None) for x in (a, b))
        return scaled(gemm, _without_vmap(gemm._replace(out_dtype=sum_dtype), *of_blocks), a, b)
    in_xla = on_gpu = partial(emulated.compute, gemm)

    def whole(a: QTensor, b: QTensor) -> jax.Array:
        return backend_of(gemm, a, b).compute(gemm, a, b)  # a part may have another backend

    if compute_capability():
        in_parts = on_shards(whole, *named_dims(gemm, a, b), _SCOPES.get(backend_of(gemm, a, b), ""))
        on_gpu = partial(choose_at_lowering, whole, in_parts, in_xla)
    return lax.platform_dependent(a, b, cuda=on_gpu, default=partial(in_xla, on_gpu=False))


def named_dims(gemm: Gemm, a: QTensor, b: QTensor) -> tuple[list[NamedDims], list[NamedDims]]:
    """Returns the names of the dimensions of the operands, and of the result: numbers."""
    batch, of_a = range(gemm.lhs.num_batch), range(a.ndim)
    partners = dict(zip((*batch, *gemm.rhs.contract), (*batch, *gemm.lhs.contract), strict=True))
    of_b = [partners.get(i, a.ndim + i) for i in range(b.ndim)]
    out = *batch, *gemm.lhs.free, *(of_b[i] for i in gemm.rhs.free)
    return [NamedDims(tuple(of_a)), NamedDims(tuple(of_b))], [NamedDims(out)]


# Products of experts.


def multiply_ragged(gemm: Gemm, a: AnyTensor, b: AnyTensor, group_sizes: jax.Array) -> jax.Array:
    """Returns the product of rows in groups of these sizes, one group for each expert.

    If ``b`` holds kernels, each row ``(rows, depth)`` of ``a`` is multiplied by the kernel of its expert,
    with the result ``(rows, columns)``. Rows that belong to no expert become zero. If ``b`` has rows
    ``(rows, columns)``, the outer products of the rows of ``a`` and ``b`` are summed for each expert, with
    the result ``(experts, depth, columns)``.

    The kernels are ``(experts, depth, columns)`` or ``(experts, columns, depth)``, as ``gemm`` says. Its
    ``out_dtype`` is the dtype of the result. Under ``jax.vmap`` the batch runs in a loop.
    """
    run = no_derivative(sequential_vmap(partial(_ragged, gemm)))
    return run(a, b, group_sizes)


def _ragged(gemm: Gemm, a: AnyTensor, b: AnyTensor, group_sizes: jax.Array) -> jax.Array:
    """Multiplies in the way of the device that the program is for."""
    in_tiles = partial(ragged.compute, multiply, gemm)
    if not (
        compute_capability()
        and isinstance(a, QTensor)
        and isinstance(b, QTensor)
        and bool(a.block) == bool(b.block)
        and are_positive((*a.shape, *b.shape))
    ):
        return in_tiles(a, b, group_sizes)
    whole, scope = in_tiles, ""
    if hopper_experts.supports(gemm, a, b, group_sizes.size, compute_capability()):
        whole, scope = partial(hopper_experts.compute, gemm), GROUPED_GEMM

    def of_part(a: QTensor, b: QTensor, group_sizes: jax.Array, rows: jax.Array) -> jax.Array:
        """Multiplies a part of the rows; ``rows`` are their places among all rows."""
        ends = jnp.clip(ragged.ends_of_groups(group_sizes, num_rows) - rows[0], 0, a.shape[0])
        return whole(a, b, jnp.diff(ends, prepend=np.int32(0)))

    def in_parts(a: QTensor, b: QTensor, group_sizes: jax.Array) -> jax.Array:
        # Rows, depth and columns may be split, but not the experts.
        rows, experts = NamedDims(("rows", "columns")), NamedDims((None, "depth", "columns"))
        of_b, result = (rows, experts) if b.ndim == 2 else (experts, rows)
        if b.ndim == 3 and gemm.rhs.contract == (2,):
            of_b = NamedDims((None, "columns", "depth"))
        more = NamedDims((None,)), NamedDims(("rows",), decides=False)
        run = on_shards(of_part, [NamedDims(("rows", "depth")), of_b, *more], [result], scope)
        return run(a, b, group_sizes, lax.iota(np.int32, num_rows))

    num_rows = a.shape[0]
    on_gpu = partial(choose_at_lowering, whole, in_parts, in_tiles)
    return lax.platform_dependent(a, b, group_sizes, cuda=on_gpu, default=in_tiles)


# Quantizing in blocks.


def quantize_in_blocks(cast: Cast, x: jax.Array, master: Given = None) -> Pair:
    """Returns a tensor quantized in blocks for its first GEMM, and for its second GEMM.

    A GPU kernel reads ``master``, if ``x`` was cast from it, so that the cast needs no kernel of its own.
    Under ``jax.vmap`` the batch becomes a batch dimension.
    """
    quantize = custom_vmap(partial(_quantize, cast))

    @quantize.def_vmap
    def _(size: int, is_batched: list[bool], x: jax.Array, master: Given) -> tuple[Pair, Pair]:
        x = x if is_batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        made = quantize_in_blocks(cast._replace(dims=tuple(dims.batched() for dims in cast.dims)), x)
        # The blocks are those of one tensor of the batch.
        first, second = (dataclasses.replace(q, block=q.block[1:]) for q in made)
        return (first, second), jax.tree.map(lambda _: True, (first, second))

    return quantize(x, master)


def _quantize(cast: Cast, x: jax.Array, master: Given) -> Pair:
    """Quantizes in the way of the device that the program is for."""
    quantizer, sizes = cast.quantizer, cast.matrices(x.shape)
    cast = cast._replace(rounded_to=x.dtype)
    in_xla, by_kernel = partial(block_kernel.reference, cast), partial(block_kernel.compute, cast)
    has_rows = quantizer.block[0] in (1, quantizer.block[1])
    if not (compute_capability() and are_positive(sizes) and has_rows):
        return in_xla(x)
    has_kernel = block_kernel.supports(quantizer, sizes, x.dtype, compute_capability())
    if new_kernels.value and is_hopper(compute_capability()):
        by_kernel = partial(by_kernel, kernel=quantize_blocks_mosaic.block_quantize)

    def in_parts(source: jax.Array) -> Pair:
        # XLA alone would gather a tensor that a reshape to blocks cannot split, and could split scales over
        # a part of a mesh axis, which custom_partitioning does not support. Devices exchange one set of
        # codes of a kernel with square blocks, which serves both GEMMs.
        of_part, scope = in_xla, ""
        if has_kernel and not any(size % TILE for size in sizes[1:]):
            of_part, scope = partial(by_kernel, shares_codes=quantizer.serves_both), BLOCK_QUANTIZE
        dims = NamedDims(tuple(range(x.ndim)))
        first, second = on_shards(of_part, [dims], [dims, dims], scope)(source)
        return first, first if quantizer.serves_both else second

    on_gpu = partial(choose_at_lowering, by_kernel if has_kernel else in_xla, in_parts, in_xla)
    source = master if has_kernel and master is not None else x
    return lax.platform_dependent(
        x, source, cuda=lambda _, source: on_gpu(source), default=lambda x, _: in_xla(x)
    )

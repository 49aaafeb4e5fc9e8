"""The rows of the table of ops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._core.ops.calls import ConvCall, DotGeneralCall, EinsumCall, RaggedDotCall
from fp8flax._core.ops.conv import fp8_conv_general_dilated, is_matmul
from fp8flax._core.ops.dot_general import dot_plan, fp8_dot_general
from fp8flax._core.ops.ragged_dot import fp8_ragged_dot
from fp8flax._core.ops.row import GemmSizes, OpRow, Shape, Swapped, add_rows

# Matmuls.


def _dot_sizes(lhs: Shape, rhs: Shape, dimension_numbers: Any, *_: Any) -> GemmSizes:
    (lhs_contract, _), (lhs_batch, _) = dimension_numbers
    batch, k = (math.prod(lhs[i] for i in dims) for dims in (lhs_batch, lhs_contract))
    m, n = (math.prod(shape) // max(1, batch * k) for shape in (lhs, rhs))
    return GemmSizes(batch, m, k, n)


def _dot_swapped(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any, *rest: Any
) -> Swapped:
    del rhs
    if isinstance(precision, tuple):  # one precision for each operand
        precision = precision[::-1]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    num_batch, num_left = len(lhs_batch), lhs.ndim - len(lhs_batch) - len(lhs_contract)

    def restore(out: jax.Array) -> jax.Array:
        axes, split = list(range(out.ndim)), out.ndim - num_left
        return lax.transpose(out, (*axes[:num_batch], *axes[split:], *axes[num_batch:split]))

    return Swapped((((rhs_contract, lhs_contract), (rhs_batch, lhs_batch)), precision, *rest), restore)


def _params(*names: str) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Returns a function that returns these parameters of a primitive."""
    return lambda params: tuple(params[name] for name in names)


def _dot_unsupported(params: Mapping[str, Any]) -> str | None:
    return (
        None
        if params.get("out_sharding") is None
        else "the model gives the sharding of its result (out_sharding)"
    )


DOT_GENERAL = OpRow(
    name="Fp8DotGeneralOp",
    plain=lax.dot_general,
    in_fp8=fp8_dot_general,
    sizes=_dot_sizes,
    call=DotGeneralCall,
    plan=dot_plan,
    has_form=True,
    primitive="dot_general",
    arguments=_params("dimension_numbers", "precision", "preferred_element_type"),
    unsupported=_dot_unsupported,
    swapped=_dot_swapped,
    linen_field="dot_general_cls",
    nnx_field="dot_general",
)

# A converted model meets the ``dot_general`` of an einsum, and not the einsum.
EINSUM = dataclasses.replace(
    DOT_GENERAL,
    name="Fp8Einsum",
    call=EinsumCall,
    primitive=None,
    linen_field=None,
    nnx_field="einsum_op",
)


# Convolutions.


def _conv_sizes(lhs: Shape, rhs: Shape, *arguments: Any) -> GemmSizes:
    # The shape of the result does not depend on the dtype.
    operands = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lhs, rhs))
    out = jax.eval_shape(lambda x, w: lax.conv_general_dilated(x, w, *arguments[:7]), *operands).shape
    dimension_numbers = arguments[4]
    _, kernel, result = lax.conv_dimension_numbers(lhs, rhs, dimension_numbers)
    k = math.prod(rhs[i] for i in kernel[1:])
    return GemmSizes(1, math.prod(out[i] for i in (result[0], *result[2:])), k, rhs[kernel[0]])


CONV = OpRow(
    name="Fp8ConvGeneralDilatedOp",
    plain=lax.conv_general_dilated,
    in_fp8=fp8_conv_general_dilated,
    sizes=_conv_sizes,
    call=ConvCall,
    primitive="conv_general_dilated",
    arguments=_params(
        *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
        *("feature_group_count", "batch_group_count", "precision", "preferred_element_type"),
    ),
    linen_field="conv_general_dilated_cls",
    nnx_field="conv_general_dilated",
    is_matmul=lambda lhs, rhs, *arguments: is_matmul(lhs, rhs, *arguments[:8]),
)


# Mixtures of experts.


def _ragged_unsupported(params: Mapping[str, Any]) -> str | None:
    numbers = params["ragged_dot_dimension_numbers"]
    dims = jax.tree.map(int, numbers.dot_dimension_numbers)
    places = (*numbers.lhs_ragged_dimensions, *numbers.rhs_group_dimensions)
    # Axis 1 of both operands is contracted, and there is no batch.
    is_plain = jax.tree.leaves(dims) == [1, 1] and places == (0, 0) and params.get("group_offset") is None
    return None if is_plain else "it contracts or groups other dimensions than lax.ragged_dot"


RAGGED_DOT = OpRow(
    name="Fp8RaggedDotOp",
    plain=lax.ragged_dot,
    in_fp8=fp8_ragged_dot,
    sizes=lambda lhs, rhs, *_: GemmSizes(math.prod(lhs[:-2]), lhs[-2], *rhs[-2:]),
    call=RaggedDotCall,
    primitive="ragged_dot_general",
    arguments=_params("precision", "preferred_element_type"),
    unsupported=_ragged_unsupported,
    nnx_field="ragged_dot",
    stacked=("kernel",),
)

add_rows(DOT_GENERAL, EINSUM, CONV, RAGGED_DOT)

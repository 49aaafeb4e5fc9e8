"""The table of ops: a row holds all that the rest of the package needs to know about an op.

The Linen ops, the NNX ops, conversion, reports and freezing read the rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._core.ops.calls import Called, ConvCall, DotGeneralCall, EinsumCall, RaggedDotCall
from fp8flax._core.ops.contract import Contraction
from fp8flax._core.ops.conv import fp8_conv_general_dilated, is_matmul
from fp8flax._core.ops.dot_general import dot_plan, fp8_dot_general
from fp8flax._core.ops.ragged_dot import fp8_ragged_dot

Shape = tuple[int, ...]


class GemmSizes(NamedTuple):
    """A contraction as ``batch`` matmuls of (M, K) by (K, N)."""

    batch: int
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        """Multiplications and additions of the forward pass."""
        return 2 * self.batch * self.m * self.k * self.n


Swapped = tuple[tuple[Any, ...], Callable[[jax.Array], jax.Array]]
"""The arguments of an op for its operands in the other order, and a function that restores its result."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpRow:
    """A row of the table of ops.

    An op has two operands, ``lhs`` (the input) and ``rhs`` (the kernel), and further arguments. Functions
    of a row that take ``*arguments`` take these further arguments, in the order of ``plain``.
    """

    name: str
    """The name of the class of the op, in Linen and in NNX."""
    call: type[Called]
    """The signature of the op."""
    plain: Callable[..., jax.Array]
    """``plain(lhs, rhs, *arguments)`` computes the op without FP8."""
    in_fp8: Callable[..., jax.Array]
    """``in_fp8(lhs, rhs, *arguments, states=, recipe=, is_frozen=)`` computes the op in FP8. It also takes
    ``form=`` if the row ``has_form``, and ``stored_kernel=`` and ``input_scale=`` if it has a ``plan``, see
    ``modes.run``."""
    sizes: Callable[..., GemmSizes]
    """``sizes(lhs_shape, rhs_shape, *arguments)`` returns the sizes of the matmuls."""
    plan: Callable[..., Contraction] | None = None
    """``plan(lhs, rhs, *arguments, recipe=)`` returns the plan of the op, for a ``CustomRecipe``. A frozen
    model then stores the FP8 codes of the kernel, and multiplies by them. If None, a frozen model stores
    codes of kernels with delayed scaling only, and dequantizes them."""
    has_form: bool = False
    """Whether the op has the option ``form``, see ``Fp8DotGeneralOp``."""
    primitive: str | None = None
    """The JAX primitive that a converted Linen model computes by this op."""
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]] = lambda params: ()
    """Returns the arguments of the op from the parameters of the primitive."""
    unsupported: Callable[[Mapping[str, Any]], str | None] = lambda params: None
    """Returns why the op cannot compute the primitive with these parameters, or None."""
    swapped: Callable[..., Swapped] | None = None
    """``swapped(lhs, rhs, *arguments)`` returns the op with its operands in the other order; None if the
    left operand cannot be a kernel."""
    linen_field: str | None = None
    """The field of Linen layers that takes the class of the op."""
    nnx_field: str | None = None
    """The field of NNX layers that takes an instance of the op."""
    is_stack: bool = False
    """Whether the kernel stacks matrices, whose states are stacked along a leading dimension."""
    is_matmul: Callable[..., bool] = lambda lhs, rhs, *arguments: True
    """``is_matmul(lhs, rhs, *arguments)`` returns whether GEMMs compute the op."""

    def __reduce__(self) -> Any:
        return _row_named, (self.name,)  # copies and pickles are the row itself


def _params(*names: str) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Returns a function that returns these parameters of a primitive."""
    return lambda params: tuple(params[name] for name in names)


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

    return (((rhs_contract, lhs_contract), (rhs_batch, lhs_batch)), precision, *rest), restore


def _dot_unsupported(params: Mapping[str, Any]) -> str | None:
    is_given = params.get("out_sharding") is not None
    return "the model gives the sharding of its result (out_sharding)" if is_given else None


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
    _, kernel, result = lax.conv_dimension_numbers(lhs, rhs, dimension_numbers=arguments[4])
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
    is_matmul=is_matmul,
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
    is_stack=True,
)

_ROWS = (DOT_GENERAL, EINSUM, CONV, RAGGED_DOT)


def _row_named(name: str) -> OpRow:
    return next(row for row in _ROWS if row.name == name)


def row_of(primitive: Any) -> OpRow | None:
    """Returns the row for a JAX primitive, or None."""
    return next((row for row in _ROWS if row.primitive == primitive.name), None)

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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8flax._core.plans.calls import AnyCall, Called, ConvCall, DotGeneralCall, EinsumCall, RaggedDotCall
from fp8flax._core.plans.contraction import Contraction
from fp8flax._core.plans.conv import fp8_conv_general_dilated, is_matmul
from fp8flax._core.plans.dot_general import dot_plan, fp8_dot_general
from fp8flax._core.plans.plan import explicit_sharding
from fp8flax._core.plans.ragged_dot import fp8_ragged_dot
from fp8flax._core.qtensor import QTensor
from fp8flax._core.quantizers import quantized

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


class Swapped(NamedTuple):
    """An op whose kernel is its left operand, computed with the operands in the other order."""

    arguments: tuple[Any, ...]
    """The arguments of the op for the operands in the other order."""
    restore: Callable[[jax.Array], jax.Array]
    """Returns the result of the op, given the result for the operands in the other order."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class OpRow:
    """A row of the table of ops.

    An op has two operands, ``lhs`` (the input) and ``rhs`` (the kernel), and further arguments. Functions
    of a row that take ``*arguments`` take these further arguments, in the order of ``plain``.

    Attributes:
        name: name of the class of the op, in Linen and in NNX.
        plain: ``plain(lhs, rhs, *arguments)`` computes the op without FP8.
        in_fp8: ``in_fp8(lhs, rhs, *arguments, states=, recipe=, form=, is_frozen=)`` computes the op in
            FP8. If the row has a ``plan``, it also takes ``stored_kernel=`` and ``input_scale=``, see
            ``contract``.
        sizes: ``sizes(lhs_shape, rhs_shape, *arguments)`` returns the ``GemmSizes`` of the op.
        call: the signature of the op.
        plan: ``plan(lhs, rhs, *arguments, recipe=, form=)`` returns the plan of the op. The recipe is in
            parts, a ``CustomRecipe``. A frozen model then stores the FP8 codes of the kernel, and
            multiplies by them. If None, a frozen model stores codes of kernels with delayed scaling only,
            and dequantizes them.
        primitive: name of the JAX primitive, or of the ``jax.jit`` function, that a converted Linen model
            computes by this op; None if a model is not converted to it.
        arguments: ``arguments(params)`` returns the arguments of the op from the parameters of the
            primitive. A ``jax.jit`` function gets its arguments as operands, so it needs none.
        unsupported: ``unsupported(params)`` returns why the op cannot compute this primitive, or None.
        swapped: ``swapped(lhs, rhs, *arguments)`` returns the op with its operands in the other order; None
            if the left operand cannot be a kernel.
        linen_field: the field of Linen layers that takes the class of the op, or None.
        nnx_field: the field of NNX layers that takes an instance of the op, or None.
        kernel_axes: axes of the kernel that an NNX layer contracts, and axes of its batch, for layers that
            NNX conversion finds by ``nnx_field``. None if it finds no layer by the field alone.
        stacked: roles whose state has a leading dimension, the first dimension of the kernel.
        is_matmul: ``is_matmul(lhs, rhs, *arguments)`` returns whether GEMMs compute the op.
    """

    name: str
    plain: Callable[..., jax.Array]
    in_fp8: Callable[..., jax.Array]
    sizes: Callable[..., GemmSizes]
    call: type[Called] = AnyCall
    plan: Callable[..., Contraction] | None = None
    primitive: str | None = None
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]] = lambda params: ()
    unsupported: Callable[[Mapping[str, Any]], str | None] = lambda params: None
    swapped: Callable[..., Swapped] | None = None
    linen_field: str | None = None
    nnx_field: str | None = None
    kernel_axes: tuple[Shape, Shape] | None = None
    stacked: tuple[str, ...] = ()
    is_matmul: Callable[..., bool] = lambda lhs, rhs, *arguments: True

    def __reduce__(self) -> Any:
        return _row_named, (self.name,)  # copies and pickles are the row itself

    def leading(self, kernel: Shape) -> dict[str, Shape]:
        """Returns the leading dimensions of the state, by role, for a kernel of this shape."""
        return dict.fromkeys(self.stacked, kernel[:1])


def packed_kernel(plan: Contraction, kernel: jax.Array, scale: Any) -> QTensor:
    """Returns a kernel as a frozen model stores it: quantized, with codes in the shape of the kernel.

    Args:
        plan: the plan of the op; its recipe must quantize the kernel in the forward product.
        kernel: the kernel, a wide float.
        scale: the scale for delayed scaling; ignored otherwise.

    Raises:
        ValueError: the quantizer packs codes of another shape.
    """
    _, quantizer, view = plan.uses("kernel").first

    def pack(kernel: jax.Array) -> QTensor:
        operand = quantized(quantizer, kernel, view, scale)
        return operand.quantizer.pack(operand, view)

    packed = jax.eval_shape(pack, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype))
    if packed.codes.shape != kernel.shape:
        raise ValueError(
            f"pack of {packed.quantizer!r} must return codes of the kernel's shape {kernel.shape}, to be "
            f"stored in its place; got {packed.codes.shape}. Define pack and unpack."
        )
    sharding = explicit_sharding(kernel)
    if sharding is None or not packed.quantizer.scales_along_contraction:
        return pack(kernel)
    # JAX cannot derive the sharding of a reshape that makes blocks.
    mesh = sharding.mesh
    explicit = tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)
    out_sharding = QTensor(sharding, NamedSharding(mesh, PartitionSpec()), packed.quantizer)
    return jax.sharding.auto_axes(pack, axes=explicit, out_sharding=out_sharding)(kernel)


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
    _, kernel, result = lax.conv_dimension_numbers(lhs, rhs, arguments[4])
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


_OF_THE_PACKAGE = {row.name: row for row in (DOT_GENERAL, EINSUM, CONV, RAGGED_DOT)}
_rows = dict(_OF_THE_PACKAGE)


def rows() -> tuple[OpRow, ...]:
    """Returns all rows of the table."""
    return tuple(_rows.values())


def register(row: OpRow) -> None:
    """Adds a row to the table. It replaces a row of the same name, as when a notebook runs a cell again.

    Raises:
        ValueError: the package itself has an op of this name, or another row has this primitive.
    """
    taken = _OF_THE_PACKAGE.get(row.name)
    for other in _rows.values():
        if other.name != row.name and other.primitive == row.primitive is not None:
            taken = other
    if taken is not None:
        raise ValueError(
            f"The table of ops has the row {taken.name!r} already, for the primitive {taken.primitive!r}; "
            f"got the row {row.name!r} for {row.primitive!r}. Give the new row another name, and a "
            "primitive that no other row has."
        )
    _rows[row.name] = row


def _row_named(name: str) -> OpRow:
    return _rows[name]


def row_of(primitive: Any, params: Mapping[str, Any]) -> OpRow | None:
    """Returns the row for a JAX primitive with these parameters, or None.

    A ``jax.jit`` function is found by its name. The package's own ops are primitives, so a function of a
    user is none of them, although it may be named ``dot_general``.
    """
    is_jit = primitive.name == "jit"
    name = params["name"] if is_jit else primitive.name
    found = (row for row in _rows.values() if row.primitive == name)
    return next((row for row in found if not (is_jit and row.name in _OF_THE_PACKAGE)), None)

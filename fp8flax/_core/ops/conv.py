"""The FP8 convolution.

If the windows do not overlap, the convolution is computed as an FP8 matmul. In all other cases it is
quantize-dequantize around a convolution in a wide dtype.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8flax._core.gemm.gemm import sum_dtype_of
from fp8flax._core.gemm.gpus import Fp8EmulationWarning, is_compiling_ahead
from fp8flax._core.names import CONVOLVED_WIDE, KEPT_WIDE, ROLES
from fp8flax._core.ops.contract import STATELESS, Operand, States
from fp8flax._core.ops.dot_general import fp8_dot_general, hashable_precision
from fp8flax._core.ops.modes import FakeQuantized, check_operands, run
from fp8flax._core.recipes import Recipe
from fp8flax._core.shapes import Float


class _Convolution(NamedTuple):
    """The arguments of ``lax.conv_general_dilated`` other than its operands (hashable)."""

    window_strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...]
    rhs_dilation: tuple[int, ...]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int
    precision: Any

    def __call__(self, lhs: jax.Array, rhs: jax.Array, dtype: Any = None) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, *self, preferred_element_type=dtype)


class _Windows(NamedTuple):
    """The windows of a convolution along one spatial dimension, if they do not overlap.

    The padded dimension is divided into ``number`` pieces of ``step`` elements. Each piece has one window,
    which starts at its first element.
    """

    padding: tuple[int, int]
    """Elements to add before and after; a negative number removes elements."""
    number: int
    """The number of windows."""
    step: int
    """The distance from the start of a window to the start of the next one."""
    size: int
    """The number of elements in a window."""
    dilation: int
    """The distance from one element of a window to the next."""


def _windows(
    conv: _Convolution, lhs_shape: Sequence[int], rhs_shape: Sequence[int], out_shape: Sequence[int]
) -> list[_Windows] | None:
    """Returns the windows along each spatial dimension if they do not overlap, and None otherwise.

    Without overlap the convolution is a matmul of windows and kernel. The result is also None for groups
    and for a dilated input.
    """
    if conv.feature_group_count != 1 or conv.batch_group_count != 1 or set(conv.lhs_dilation) - {1}:
        return None
    lhs_spec, rhs_spec, out_spec = conv.dimension_numbers
    windows = []
    for lhs_dim, rhs_dim, out_dim, stride, dilation, (low, _) in zip(
        lhs_spec[2:], rhs_spec[2:], out_spec[2:], conv.window_strides, conv.rhs_dilation, conv.padding
    ):
        size, number = rhs_shape[rhs_dim], out_shape[out_dim]
        length = (size - 1) * dilation + 1
        step = length if number == 1 else stride  # a single window overlaps nothing
        if size == 0 or length > step:
            return None
        high = number * step - lhs_shape[lhs_dim] - low
        windows.append(_Windows((low, high), number, step, size, dilation))
    return windows


def is_matmul(lhs: Any, rhs: Any, *arguments: Any) -> bool:
    """Returns whether a convolution is computed as a matmul.

    Args:
        lhs: the input, or its shape and dtype.
        rhs: the kernel, or its shape and dtype.
        *arguments: the further arguments of ``lax.conv_general_dilated``, up to ``precision``.
    """
    out = jax.eval_shape(lambda lhs, rhs: lax.conv_general_dilated(lhs, rhs, *arguments), lhs, rhs)
    conv = _as_convolution(lhs, rhs, *arguments)
    return _windows(conv, lhs.shape, rhs.shape, out.shape) is not None


def _reshape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes an array; on explicit axes the first dimension keeps its sharding, others are gathered."""
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x.reshape(shape)
    first = sharding.spec[0] if shape[0] == x.shape[0] else None
    spec = PartitionSpec(first, *(None for _ in shape[1:]))
    x = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(first)))
    return lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def _as_matmul(
    conv: _Convolution, windows: list[_Windows], lhs: jax.Array, rhs: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    """Returns the two operands of the matmul that computes a convolution, and how to permute its result.

    The first operand has a row for each window: ``(batch, windows…, elements of a window)``. The second one
    has a column for each output feature: ``(elements of a window, output features)``. The elements of a
    window are in the order of the kernel: first its spatial dimensions, then the input features.
    """
    lhs_spec, rhs_spec, out_spec = conv.dimension_numbers
    x = lax.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
    if any(w.padding != (0, 0) for w in windows):
        padding = [(0, 0, 0), *((*w.padding, 0) for w in windows), (0, 0, 0)]
        x = lax.pad(x, np.zeros((), x.dtype), padding)
    batch, features = x.shape[0], x.shape[-1]
    x = _reshape(x, (batch, *(n for w in windows for n in (w.number, w.step)), features))
    for i, w in enumerate(windows):
        length = (w.size - 1) * w.dilation + 1
        x = lax.slice_in_dim(x, 0, length, w.dilation, axis=2 + 2 * i)
    spatial = range(len(windows))
    x = lax.transpose(
        x, (0, *(1 + 2 * i for i in spatial), *(2 + 2 * i for i in spatial), 1 + 2 * len(windows))
    )
    num_columns = math.prod(w.size for w in windows) * features
    x = _reshape(x, (batch, *(w.number for w in windows), num_columns))
    kernel = lax.transpose(rhs, (*rhs_spec[2:], rhs_spec[1], rhs_spec[0]))
    kernel = _reshape(kernel, (num_columns, kernel.shape[-1]))
    permutation = np.argsort((out_spec[0], *out_spec[2:], out_spec[1]))
    return x, kernel, tuple(map(int, permutation))


def _convolved(conv: _Convolution, out_dtype: Any, scope: str, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """Returns the convolution of wide operands that hold FP8 values; ``scope`` tells an audit why."""
    # Without the barrier XLA would turn a convolution of float32 values into one of FP8 codes by cuDNN.
    # If cuDNN has no FP8 convolution for these sizes, the program would fail (openxla/xla#40021).
    lhs, rhs = lax.optimization_barrier((lhs, rhs))
    dtype = out_dtype
    if dtype != lhs.dtype:  # JAX would cast the output gradient to the dtype of the operands
        dtype = sum_dtype_of(dtype, lhs.dtype)
    with jax.named_scope(scope):
        return conv(lhs.astype(dtype), rhs.astype(dtype), dtype).astype(out_dtype)


def _warn() -> None:
    """Warns that a convolution that is not a matmul has FP8 values, but not the speed of FP8."""
    if not is_compiling_ahead():  # an audit compiles for another device than the current one
        warnings.warn(
            "FP8 convolutions that are not matmuls run in the dtype of their operands, on every "
            "device: the values are those of FP8, the speed is not. fp8flax.audit shows which.",
            Fp8EmulationWarning,
            stacklevel=1,
        )


def _check_recipe(recipe: Recipe, conv: _Convolution) -> None:
    """Raises ``ValueError`` if a convolution that is not a matmul cannot scale its tensors by a recipe.

    Each tensor is cast once, so it takes one quantizer, with one scale.
    """
    gemms = recipe.gemms
    has_one_scale = all(quantizer is None or quantizer.has_one_scale for quantizer in gemms.quantizers)
    if not has_one_scale or any(first != second for first, second in map(gemms.of_role, ROLES)):
        raise ValueError(
            "A convolution whose windows overlap, or with groups or a dilated input, is not a matmul, and "
            "takes one scale per tensor, the same in all products: DelayedScaling() or "
            f"Float8CurrentScaling(). Got the recipe {recipe!r}, with "
            f"window_strides={conv.window_strides}, rhs_dilation={conv.rhs_dilation}, "
            f"lhs_dilation={conv.lhs_dilation}, feature_group_count={conv.feature_group_count} and "
            f"batch_group_count={conv.batch_group_count}. Give this layer a recipe of its own, or leave "
            "FP8 out of it."
        )


def _as_convolution(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    precision: Any,
) -> _Convolution:
    """Returns the arguments of a convolution with defaults filled in; ``lax`` must have checked them."""
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    specs = [tuple(map(int, spec)) for spec in numbers]
    num_spatial = len(specs[0]) - 2
    ones = (1,) * num_spatial
    rhs_dilation = ones if rhs_dilation is None else rhs_dilation
    pairs = padding
    if isinstance(pairs, str):
        pairs = lax.padtype_to_pads(
            [lhs.shape[i] for i in specs[0][2:]],
            [
                (rhs.shape[i] - 1) * dilation + 1 if rhs.shape[i] else 0
                for i, dilation in zip(specs[1][2:], rhs_dilation)
            ],
            window_strides,
            pairs,
        )
    return _Convolution(
        tuple(map(int, window_strides)),
        tuple((int(low), int(high)) for low, high in pairs),
        ones if lhs_dilation is None else tuple(map(int, lhs_dilation)),
        tuple(map(int, rhs_dilation)),
        lax.ConvDimensionNumbers(*specs),
        int(feature_group_count),
        int(batch_group_count),
        hashable_precision(precision),
    )


def fp8_conv_general_dilated(
    lhs: Float[jax.Array, "*input"],
    rhs: Float[jax.Array, "*kernel"],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    states: States = STATELESS,
    recipe: Recipe,
    is_frozen: bool = False,
) -> Float[jax.Array, "*output"]:
    """Convolves in FP8: ``lhs`` as the input, ``rhs`` as the kernel, and the cotangent on the way back.

    The convolution is ``fp8_dot_general`` of windows and kernel if its windows do not overlap (1×1 kernels,
    patches, a window that covers all of the input), it has no groups, and its input is not dilated. The
    amax of the input is then the amax of all windows.

    In all other cases it is quantize-dequantize: the operands are cast to FP8 and back, JAX convolves them
    in their dtype, and the cotangent is cast to FP8 and back, on every device. XLA has no gradients of FP8
    convolutions, and its forward FP8 convolution fails if cuDNN has none for the given sizes. The operands
    stay wide for the backward pass, and JAX can differentiate the convolution any number of times.

    The arguments up to ``preferred_element_type`` and the result are those of ``ConvCall``, the errors
    those of ``Fp8ConvGeneralDilatedOp``, the other arguments those of ``fp8_dot_general``.
    """
    lhs, rhs = check_operands(lhs, rhs, preferred_element_type)
    arguments = (
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
    )
    # lax raises its own errors if an argument is wrong, and determines the shape and dtype of the result.
    out = jax.eval_shape(
        lambda lhs, rhs: lax.conv_general_dilated(lhs, rhs, *arguments, preferred_element_type), lhs, rhs
    )
    conv = _as_convolution(lhs, rhs, *arguments)
    windows = _windows(conv, lhs.shape, rhs.shape, out.shape)
    if windows is not None:
        x, w, permutation = _as_matmul(conv, windows, lhs, rhs)
        y = fp8_dot_general(
            x,
            w,
            (((x.ndim - 1,), (0,)), ((), ())),
            precision,
            preferred_element_type,
            states=states,
            recipe=recipe,
            is_frozen=is_frozen,
        )
        return lax.transpose(y, permutation)
    _check_recipe(recipe, conv)
    scope = KEPT_WIDE if None in recipe.gemms.quantizers else CONVOLVED_WIDE
    plan = FakeQuantized(
        recipe=recipe.gemms,
        lhs=Operand.of(lhs)._replace(sharding=None),
        rhs=Operand.of(rhs)._replace(sharding=None),
        out_dtype=out.dtype,
        multiply=partial(_convolved, conv, out.dtype, scope),
        on_warn=_warn,
    )
    return run(plan, lhs, rhs, states=states, is_frozen=is_frozen)

"""The FP8 convolution: an FP8 matmul, or quantize-dequantize around a convolution in a wide dtype."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.flax_names import FakeQuantized
from fp8flax._core.gemm.gemm import GemmSizes, sum_dtype_of
from fp8flax._core.gemm.gpus import Fp8EmulationWarning, absent_gpu
from fp8flax._core.names import CONVOLVED_WIDE, KEPT_WIDE, ROLES
from fp8flax._core.ops.canonical import Shape
from fp8flax._core.ops.contract import Traced, traced
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.op import Op, Plans
from fp8flax._core.recipes import Recipe
from fp8flax._core.shapes import Float
from fp8flax._core.types import OutSharding


def _in_windows(lhs: jax.Array, rhs: jax.Array, found: Traced) -> jax.Array | None:
    """Returns the input of a convolution in windows; None if they overlap, for groups, or a dilated input.

    Each spatial dimension is padded, and divided into ``number`` pieces of ``step`` elements. A piece has
    one window, which starts at its first element and reaches over ``length`` elements. It reads every
    element whose distance from the first is a multiple of ``dilation``. In the result ``(batch, *spatial,
    features)`` each spatial dimension is two: the windows, and the elements of a window. The convolution is
    then a matmul of the result and the kernel.
    """
    out, params = found
    groups = params["feature_group_count"], params["batch_group_count"]
    lhs_spec, rhs_spec, out_spec = params["dimension_numbers"]
    sizes, numbers = [rhs.shape[i] for i in rhs_spec[2:]], [out.shape[i] for i in out_spec[2:]]
    strides, dilations = params["window_strides"], params["rhs_dilation"]
    lengths = [(size - 1) * dilation + 1 for size, dilation in zip(sizes, dilations)]
    # A single window overlaps nothing.
    steps = [n if number == 1 else stride for n, number, stride in zip(lengths, numbers, strides)]
    overlap = any(size == 0 or n > step for size, n, step in zip(sizes, lengths, steps))
    if overlap or groups != (1, 1) or set(params["lhs_dilation"]) - {1}:
        return None
    x = lax.transpose(lhs, (lhs_spec[0], *lhs_spec[2:], lhs_spec[1]))
    padding = [
        (low, number * step - size - low, 0)
        for (low, _), number, step, size in zip(params["padding"], numbers, steps, x.shape[1:])
    ]
    x = lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *padding, (0, 0, 0)])
    for i, (number, step, length, dilation) in enumerate(zip(numbers, steps, lengths, dilations)):
        axis = 1 + 2 * i
        x = x.reshape((*x.shape[:axis], number, step, *x.shape[axis + 1 :]))
        x = lax.slice_in_dim(x, 0, length, dilation, axis=axis + 1)
    return x


def _wide_plan(lhs: jax.Array, rhs: jax.Array, *arguments: Any, recipe: Recipe) -> FakeQuantized:
    """Returns the plan of a convolution that is not a matmul.

    It is quantize-dequantize around a convolution of JAX: XLA has no gradients of FP8 convolutions, and its
    forward FP8 convolution fails if cuDNN has none for the given sizes.
    """
    gemms = recipe.gemms
    has_one_scale = all(quantizer is None or quantizer.has_one_scale for quantizer in gemms.quantizers)
    if not has_one_scale or any(first != second for first, second in map(gemms.of_role, ROLES)):
        raise ValueError(
            "A convolution whose windows overlap, or with groups or a dilated input, is not a matmul. "
            "It takes one scale per tensor, the same in all products: DelayedScaling() or "
            f"Float8CurrentScaling(); got the recipe {recipe!r}. Give this layer a recipe of its own, "
            "or leave FP8 out of it."
        )
    if any(gemms.quantizers) and absent_gpu() is None:
        warnings.warn(
            "FP8 convolutions that are not matmuls run in the dtype of their operands, on every "
            "device: the values are those of FP8, the speed is not. fp8flax.audit shows which.",
            Fp8EmulationWarning,
            stacklevel=1,
        )
    out, params = found = traced(lax.conv_general_dilated, (lhs, rhs), *arguments)

    def multiply(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        # Without the barrier XLA would turn a convolution of float32 values into one of FP8 codes by cuDNN.
        # If cuDNN has no FP8 convolution for these sizes, the program would fail (openxla/xla#40021).
        lhs, rhs = lax.optimization_barrier((lhs, rhs))
        dtype = out.dtype
        if dtype != lhs.dtype:  # JAX would cast the output gradient to the dtype of the operands
            dtype = sum_dtype_of(dtype, lhs.dtype)
        wide = params | {"preferred_element_type": dtype}
        with jax.named_scope(KEPT_WIDE if None in gemms.quantizers else CONVOLVED_WIDE):
            y = lax.conv_general_dilated(lhs.astype(dtype), rhs.astype(dtype), **wide)
            return y.astype(out.dtype)

    return FakeQuantized.of((lhs, rhs), found, recipe, multiply=multiply)


class Conv(Op):
    """``lax.conv_general_dilated``."""

    name = "Fp8ConvGeneralDilatedOp"
    plain = staticmethod(lax.conv_general_dilated)
    plans: ClassVar[Plans] = {"direct": _wide_plan}
    primitive = "conv_general_dilated"
    params = (
        *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
        *("feature_group_count", "batch_group_count", "precision", "preferred_element_type"),
    )
    nnx_field = "conv_general_dilated"

    def __call__(
        self: Any,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: lax.ConvGeneralDilatedDimensionNumbers = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: OutSharding = None,
    ) -> Float[jax.Array, "*output"]:
        """Convolves the operands in FP8, as ``lax.conv_general_dilated`` does in their own dtypes.

        The arguments are those of ``lax.conv_general_dilated``. ``lhs`` is the input, in bfloat16, float16,
        float32 or float64, and ``rhs`` is the kernel, in the dtype of ``lhs``.

        Args:
            precision: for a matmul as in ``Fp8DotGeneralOp``; otherwise the precision of all three
                convolutions.
            out_sharding: how to shard the result on a mesh with explicit axes, as in ``Fp8DotGeneralOp``.
        """
        out: jax.Array = self._run(
            *(lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers),
            *(feature_group_count, batch_group_count, precision, preferred_element_type),
        )
        return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)

    @classmethod
    def in_fp8(cls, lhs: jax.Array, rhs: jax.Array, *arguments: Any, **options: Any) -> jax.Array:
        found = traced(lax.conv_general_dilated, (lhs, rhs), *arguments)
        if (x := _in_windows(lhs, rhs, found)) is None:
            return super().in_fp8(lhs, rhs, *arguments, **options)
        _, rhs_spec, out_spec = found[1]["dimension_numbers"]
        # The elements of a window are in the order of the kernel: spatial dimensions, then features.
        contract = (*range(2, x.ndim - 1, 2), x.ndim - 1), (*rhs_spec[2:], rhs_spec[1])
        *_, precision, out_dtype = arguments
        y = DotGeneral.in_fp8(x, rhs, (contract, ((), ())), precision, out_dtype, **options)
        return lax.transpose(y, np.argsort((out_spec[0], *out_spec[2:], out_spec[1])).tolist())

    @staticmethod
    def sizes(lhs: Shape, rhs: Shape, *arguments: Any) -> GemmSizes:
        *convolution, _, _ = arguments  # without precision and dtype, of which the shape does not depend
        *_, dims, _, _ = convolution  # the last two are the counts of groups
        operands = (jax.ShapeDtypeStruct(shape, np.float32) for shape in (lhs, rhs))
        out = jax.eval_shape(lambda x, w: lax.conv_general_dilated(x, w, *convolution), *operands).shape
        _, kernel, result = lax.conv_dimension_numbers(lhs, rhs, dimension_numbers=dims)
        k = math.prod(rhs[i] for i in kernel[1:])
        return GemmSizes(1, math.prod(out[i] for i in (result[0], *result[2:])), k, rhs[kernel[0]])

    @staticmethod
    def is_matmul(lhs: jax.Array, rhs: jax.Array, *arguments: object) -> bool:
        found = traced(lax.conv_general_dilated, (lhs, rhs), *arguments)
        return jax.eval_shape(partial(_in_windows, found=found), lhs, rhs) is not None

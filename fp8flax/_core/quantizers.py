"""The quantizers: each turns one operand of one GEMM into FP8 codes and scales, and back."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.formats import OCP_DTYPES, as_fp8_dtype, fp8_max
from fp8flax._core.options import check_bool, check_choice, check_int
from fp8flax._core.qtensor import Dims, QTensor, dequantized
from fp8flax._core.quantize import quantize, saturated, straight_through
from fp8flax._core.scaling import compute_scale, finite_amax, power_of_two, scale_exponent
from fp8flax._core.shapes import Float

MX_COLUMNS = 32
"""Columns that share a scale where hardware multiplies block-scaled operands."""

_FLOAT32 = np.finfo(np.float32)


class Quantizer:
    """Base class of the three quantizers. A quantizer turns one operand of one GEMM into codes and scales.

    Attributes:
        dtype: FP8 dtype of the codes.
        needs_state: whether scales come from past steps, which the layer keeps as its scaling state.
        scales_along_contraction: whether the scale changes along the contraction, so that it must be
            applied inside the GEMM and not to its result.
        has_one_scale: whether a tensor has one scale, regardless of the contracted dimensions.
        serves_both: whether the codes for one GEMM of a tensor also serve its other GEMM, which contracts
            other dimensions. Otherwise the wide tensor is quantized twice.
        scale_columns: number of contracted elements that share a float32 scale; None for other scales.
    """

    dtype: Any
    # ``Any``, where a subclass defines a property.
    needs_state: ClassVar[bool] = False
    scales_along_contraction: ClassVar[bool] = False
    has_one_scale: ClassVar[Any] = False
    scale_columns: ClassVar[Any] = None

    def __post_init__(self) -> None:
        # A NumPy dtype, so that equal quantizers compare and hash equal.
        object.__setattr__(self, "dtype", as_fp8_dtype(self.dtype, "dtype"))

    @property
    def serves_both(self) -> bool:
        """Returns whether the codes for one GEMM of a tensor also serve its other GEMM."""
        return bool(self.has_one_scale)

    def quantize(self, x: Float[jax.Array, "*dims"], dims: Dims, scale: Any = None) -> QTensor:
        """Quantizes an operand for one GEMM.

        NaN stays NaN, and an Inf saturates. Both are ignored by the scales of current and block scaling.

        Args:
            x: the wide operand.
            dims: which of its dimensions the GEMM contracts.
            scale: the float32 scale of this step, if ``needs_state``: one element, or one per stacked
                tensor.

        Returns:
            The codes with their scales.
        """
        raise NotImplementedError

    def dequantize(self, q: QTensor, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
        """Returns codes times scales.

        Codes and scales are multiplied in float32, or in float64 if ``dtype`` is float64. The product is
        then rounded once to ``dtype``.
        """
        values = wide_codes(q, dtype)
        return (values * q.scale.astype(values.dtype)).astype(dtype)


def wide_codes(q: QTensor, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
    """Returns the FP8 codes cast to float32, or to float64 if ``dtype`` is float64."""
    # Without the barrier XLA removes a cast to FP8 and back on GPUs, and the values would not be rounded.
    codes = lax.optimization_barrier(q.codes)
    return codes.astype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedQuantizer(Quantizer):
    """Quantizer with one scale per tensor, taken from the amaxes of past steps.

    The layer keeps the scale and the history as its scaling state. The other fields are those of
    ``DelayedScaling``.

    Attributes:
        dtype: FP8 dtype of the codes.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value out of range.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.DelayedQuantizer(dtype=jnp.float8_e4m3fn, amax_history_len=16).dtype
        dtype(float8_e4m3fn)

    Source: Micikevicius et al., 2022, arXiv:2209.05433; Transformer Engine, ``DelayedScaling``.
    """

    dtype: Any
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    use_power_2_scales: bool = False

    needs_state: ClassVar[bool] = True
    has_one_scale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # Python ints, because integers of NumPy would take part in the promotion of dtypes.
        object.__setattr__(self, "margin", check_int("margin", self.margin, 0, 16))
        length = check_int("amax_history_len", self.amax_history_len, 1)
        object.__setattr__(self, "amax_history_len", length)
        check_choice("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        check_bool("use_power_2_scales", self.use_power_2_scales)

    def quantize(self, x: Float[jax.Array, "*dims"], dims: Dims, scale: Any = None) -> QTensor:
        assert scale is not None
        scale = dims.as_scale(scale)
        return QTensor(quantize(x, self.dtype, scale), scale, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentQuantizer(Quantizer):
    """Quantizer with scales from the tensor itself: one per tensor, or one per slice.

    Attributes:
        dtype: FP8 dtype of the codes.
        granularity: ``"tensorwise"`` for one scale; ``"axiswise"`` for one per row of the left operand, or
            per column of the right operand. Each scale then covers all contracted elements.
        use_power_2_scales: whether scales are rounded up to powers of two.
        amax_epsilon: lower bound of the amax; a smaller amax counts as this value.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``granularity`` is not one of the two words, or ``amax_epsilon`` is neither 0 nor a
            normal, positive float32.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise").use_power_2_scales
        False

    Source: Transformer Engine, ``Float8CurrentScaling`` and ``QParams.amax_epsilon``; torchao, "axiswise".
    """

    dtype: Any
    granularity: str = "tensorwise"
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("granularity", self.granularity, ("tensorwise", "axiswise"))
        check_bool("use_power_2_scales", self.use_power_2_scales)
        epsilon = self.amax_epsilon
        if not (epsilon == 0 or float(_FLOAT32.tiny) <= epsilon <= float(_FLOAT32.max)):
            raise ValueError(f"amax_epsilon must be 0 or a normal, positive float32; got {epsilon}.")

    @property
    def has_one_scale(self) -> bool:
        return self.granularity == "tensorwise"

    def quantize(self, x: Float[jax.Array, "*dims"], dims: Dims, scale: Any = None) -> QTensor:
        del scale
        axes: tuple[int, ...] | None = dims.contract
        if self.has_one_scale:
            axes = tuple(range(dims.num_batch, x.ndim)) if dims.is_stack else None
        amax = finite_amax(x, axes)
        if self.amax_epsilon:
            amax = jnp.maximum(amax, np.float32(self.amax_epsilon))
        if self.use_power_2_scales:
            new_scale = power_of_two(scale_exponent(amax, fp8_max(self.dtype), "up"))
        else:
            new_scale = compute_scale(amax, 1.0, fp8_max(self.dtype))
        return QTensor(quantize(x, self.dtype, new_scale), new_scale, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockQuantizer(Quantizer):
    """Quantizer with one scale per block of the tensor, seen as a matrix.

    The rows of the matrix are the free dimensions of the operand; its columns are the contracted
    dimensions, flattened in their order. The last block of a row or column may be partial.

    Attributes:
        dtype: FP8 dtype of the codes.
        block: ``(rows, columns)`` of a block, such as ``(1, 32)``, ``(1, 128)`` or ``(128, 128)``; the
            columns run along the contraction.
        scale: ``"e8m0"`` for a power of two in one byte, ``"power_of_two"`` for a power of two in float32,
            or ``"float32"`` for an exact float32 scale. A power of two is 2**-126 or more.
        scale_rounding: rounding of powers of two: ``"up"``, so that nothing saturates, or ``"floor"``, the
            rule of the MX specification (``"e8m0"`` only), by which the largest values of a block may
            saturate.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has another value than those above.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=(1, 128), scale="float32").block
        (1, 128)

    Source: OCP Microscaling Formats (MX) Specification v1.0; DeepSeek-AI, "DeepSeek-V3 Technical Report",
    2024, arXiv:2412.19437, section 3.3.2.
    """

    dtype: Any
    block: tuple[int, int] = (1, 32)
    scale: str = "e8m0"
    scale_rounding: str = "up"

    scales_along_contraction: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in OCP_DTYPES:
            raise ValueError(
                "dtype of a BlockQuantizer must be float8_e4m3fn or float8_e5m2, which block scales are "
                f"defined for; got {self.dtype}. For FNUZ formats use DelayedScaling or "
                "Float8CurrentScaling."
            )
        if not (isinstance(self.block, tuple) and len(self.block) == 2):
            raise TypeError(f"block must be a pair (rows, columns) such as (1, 32); got {self.block!r}.")
        block = tuple(check_int(f"block[{i}]", size, 1) for i, size in enumerate(self.block))
        object.__setattr__(self, "block", block)
        check_choice("scale", self.scale, ("e8m0", "power_of_two", "float32"))
        check_choice("scale_rounding", self.scale_rounding, ("up", "floor"))
        if self.scale_rounding == "floor" and self.scale != "e8m0":
            raise ValueError(
                f"scale_rounding='floor' requires scale='e8m0'; got scale={self.scale!r}. Use "
                "scale='e8m0', or leave scale_rounding out."
            )

    @property
    def is_exact_in_bfloat16(self) -> bool:
        """Returns whether bfloat16 holds the product of any code and its scale: a power of two."""
        return self.scale != "float32"

    @property
    def scale_columns(self) -> int | None:
        return None if self.scale == "e8m0" else self.block[1]

    @property
    def serves_both(self) -> bool:
        return self.block[0] == self.block[1]

    def block_of(self, dims: Dims) -> tuple[int, ...]:
        """Returns the number of elements per block along each dimension of a tensor.

        The columns of a block run along the last contracted dimension, its rows along the last free one. If
        several dimensions are contracted, or free with blocks of several rows, the last of them must be a
        multiple of the block, which ``canonical`` takes care of.
        """
        block = [1] * dims.ndim
        for places, size in ((dims.free, self.block[0]), (dims.contract, self.block[1])):
            if places:
                block[places[-1]] = size
        return tuple(block)

    def quantize(self, x: Float[jax.Array, "*dims"], dims: Dims, scale: Any = None) -> QTensor:
        del scale
        block = self.block_of(dims)
        blocks, within = _split(x, block)
        limit = fp8_max(self.dtype)
        amax = finite_amax(blocks, within)
        if self.scale == "float32":
            new_scale = compute_scale(amax, 1.0, limit)
            codes = quantize(blocks, self.dtype, new_scale)
        else:
            # E8M0 has the scale 2**-127, too, but XLA may flush subnormal numbers to zero.
            exponent = jnp.maximum(scale_exponent(amax, limit, self.scale_rounding), np.int32(-126))
            new_scale = power_of_two(exponent)
            codes = saturated(blocks.astype(jnp.float32) * power_of_two(-exponent), self.dtype)
            if self.scale == "e8m0":
                new_scale = new_scale.astype(jnp.float8_e8m0fnu)  # exact
        return QTensor(_joined(codes, x.shape, block), lax.squeeze(new_scale, within), self, block)

    def dequantize(self, q: QTensor, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
        blocks, within = _split(wide_codes(q, dtype), q.block)
        values = blocks * lax.expand_dims(q.scale, within).astype(blocks.dtype)
        return _joined(values, q.shape, q.block).astype(dtype)


def _split(x: jax.Array, block: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits each dimension into ``(blocks, elements of a block)``, after zeros fill up the last block.

    Also returns the dimensions of the elements. A dimension with blocks of one element is not split.
    """
    padding = [(0, -size % width, 0) for size, width in zip(x.shape, block)]
    filled = lax.pad(x, jnp.zeros((), x.dtype), padding)
    shape: list[int] = []
    within = []
    for size, width in zip(filled.shape, block):
        shape.append(size // width)
        if width > 1:
            within.append(len(shape))
            shape.append(width)
    return filled.reshape(shape), tuple(within)


def _joined(blocks: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    """Returns the array of this shape that ``_split`` has split."""
    filled = [-(-size // width) * width for size, width in zip(shape, block)]
    return lax.slice(blocks.reshape(filled), [0] * len(shape), shape)


def quantized(quantizer: Quantizer | None, x: Float[jax.Array, "*dims"], dims: Dims, scale: Any) -> Any:
    """Quantizes ``x`` for one GEMM and returns the ``QTensor``; returns ``x`` if the quantizer is None."""
    return x if quantizer is None else quantizer.quantize(x, dims, scale)


def quantized_and_back(
    quantizer: Quantizer | None, x: Float[jax.Array, "*dims"], dims: Dims, scale: Any
) -> Float[jax.Array, "*dims"]:
    """Returns ``dequantized(quantized(…))``; the derivative is that of the identity."""
    return straight_through(
        lambda x, scale: dequantized(quantized(quantizer, x, dims, scale), x.dtype), x, scale
    )

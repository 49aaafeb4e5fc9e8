"""The quantizers: each turns an operand of a GEMM into FP8 codes and scales. A tensor has two GEMMs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp8flax._core import nvfp4
from fp8flax._core.formats import E2M1, OCP_DTYPES, fp8_max
from fp8flax._core.gemm.dispatch import quantize_in_blocks
from fp8flax._core.gemm.quantize_blocks import Cast
from fp8flax._core.options import check_bool, check_choice, check_int
from fp8flax._core.qtensor import Dims, Given, QTensor, Quantizer, join_blocks, split_blocks
from fp8flax._core.quantize import (
    inf_to_nan,
    no_derivative,
    over_power_of_two,
    quantize,
    quotient,
    saturated,
)
from fp8flax._core.scaling import Rounding, amax_to_scale, finite_amax

AmaxAlgorithm: TypeAlias = Literal["max", "most_recent"]
Granularity: TypeAlias = Literal["tensorwise", "axiswise"]
BlockScale: TypeAlias = Literal["e8m0", "power_of_two", "float32"]

_FLOAT32 = np.finfo(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedQuantizer(Quantizer):
    """Quantizer with one scale per tensor, taken from the amaxes of past steps.

    The layer keeps the scale and the history as its scaling state. The fields and their errors are those of
    ``DelayedScaling``, but for ``dtype``, the FP8 dtype of the codes.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.DelayedQuantizer(dtype=jnp.float8_e4m3fn, amax_history_len=16).dtype
        dtype(float8_e4m3fn)

    Source: Micikevicius et al., 2022, arXiv:2209.05433; Transformer Engine, ``DelayedScaling``.
    """

    dtype: Any
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    use_power_2_scales: bool = False

    has_one_scale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        # Python ints, because integers of NumPy would take part in the promotion of dtypes.
        object.__setattr__(self, "margin", check_int("margin", self.margin, 0, 16))
        length = check_int("amax_history_len", self.amax_history_len, 1)
        object.__setattr__(self, "amax_history_len", length)
        check_choice("amax_compute_algo", self.amax_compute_algo, get_args(AmaxAlgorithm))

    def quantize(self, x: jax.Array, dims: Dims, scale: Given = None, key: Given = None) -> QTensor:
        assert scale is not None
        scale = scale.reshape((-1, *(1,) * (dims.ndim - 1)) if dims.is_stack else ())
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
        ValueError: ``granularity`` is another word, or ``amax_epsilon`` neither 0 nor a normal, positive
            float32.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.CurrentQuantizer(dtype=jnp.float8_e4m3fn, granularity="axiswise").use_power_2_scales
        False

    Source: Transformer Engine, ``Float8CurrentScaling`` and ``QParams.amax_epsilon``; torchao, "axiswise".
    """

    dtype: Any
    granularity: Granularity = "tensorwise"
    use_power_2_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("granularity", self.granularity, get_args(Granularity))
        epsilon = self.amax_epsilon
        if not (epsilon == 0 or float(_FLOAT32.tiny) <= epsilon <= float(_FLOAT32.max)):
            raise ValueError(f"amax_epsilon must be 0 or a normal, positive float32; got {epsilon}.")

    @property
    def has_one_scale(self) -> bool:
        return self.granularity == "tensorwise"

    def quantize(self, x: jax.Array, dims: Dims, scale: Given = None, key: Given = None) -> QTensor:
        return self._with_scale(x, self._scale_of(x, dims))

    def shares_pass(self, other: Quantizer | None) -> bool:
        return isinstance(other, CurrentQuantizer) and not (self == other and self.serves_both)

    def in_one_pass(
        self, other: Any, dims: Sequence[Dims], inf_is_nan: bool, x: jax.Array
    ) -> tuple[QTensor, QTensor]:
        x = inf_to_nan(x) if inf_is_nan else x
        # If both scales are there before the first cast, XLA makes both codes, one of them transposed, in
        # one pass over the tensor.
        scales = self._scale_of(x, dims[0]), other._scale_of(x, dims[1])
        first, second = lax.optimization_barrier(scales)
        return self._with_scale(x, first), other._with_scale(x, second)

    def _scale_of(self, x: jax.Array, dims: Dims) -> jax.Array:
        """Returns the scale of an operand of one GEMM, or its scales."""
        axes: tuple[int, ...] | None = dims.contract
        if self.has_one_scale:
            axes = tuple(range(dims.num_batch, x.ndim)) if dims.is_stack else None
        amax = finite_amax(x, axes)
        if self.amax_epsilon:
            amax = jnp.maximum(amax, np.float32(self.amax_epsilon))
        return amax_to_scale(amax, fp8_max(self.dtype), self.rounding)

    def _with_scale(self, x: jax.Array, scale: jax.Array) -> QTensor:
        return QTensor(quantize(x, self.dtype, scale), scale, self)


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
    scale: BlockScale = "e8m0"
    scale_rounding: Rounding = "up"

    scale_dtype: ClassVar[Any] = jnp.float8_e8m0fnu
    unit_columns: ClassVar[int] = 32

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
        check_choice("scale", self.scale, get_args(BlockScale))
        check_choice("scale_rounding", self.scale_rounding, get_args(Rounding))
        if self.scale_rounding == "floor" and self.scale != "e8m0":
            raise ValueError(
                f"scale_rounding='floor' requires scale='e8m0'; got scale={self.scale!r}. Use "
                "scale='e8m0', or leave scale_rounding out."
            )

    @property
    def rounding(self) -> Rounding | None:
        return None if self.scale == "float32" else self.scale_rounding

    @property
    def scale_columns(self) -> int | None:
        return None if self.scale == "e8m0" else self.block[1]

    @property
    def serves_both(self) -> bool:
        return self.block[0] == self.block[1]

    def quantize(self, x: jax.Array, dims: Dims, scale: Given = None, key: Given = None) -> QTensor:
        block = dims.block(self.block)
        blocks, within = split_blocks(x, block)
        scale = amax_to_scale(finite_amax(blocks, within), fp8_max(self.dtype), self.rounding)
        divide = over_power_of_two if self.rounding else quotient
        values = divide(blocks.astype(jnp.float32), scale)
        if self.scale == "e8m0":
            # By its bits, because XLA cannot send E8M0 numbers between GPUs.
            exponent = lax.bitcast_convert_type(scale, jnp.int32) >> np.int32(23)
            scale = lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
        codes = join_blocks(saturated(values, self.dtype), x.shape, block)
        return QTensor(codes, lax.squeeze(scale, within), self, block)

    def shares_pass(self, other: Quantizer | None) -> bool:
        return self == other

    def in_one_pass(
        self, other: Any, dims: Sequence[Dims], inf_is_nan: bool, x: jax.Array
    ) -> tuple[QTensor, QTensor]:
        return quantize_in_blocks(Cast(self, tuple(dims), inf_is_nan), x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4Quantizer(Quantizer):
    """Quantizer to NVFP4: 4-bit codes, a scale in e4m3 per block, and a float32 scale per tensor.

    ``x ≈ code * block_scale * tensor_scale``, with codes in e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their
    negatives. Block scales are rounded to the nearest: in half of the blocks of Gaussian data the largest
    value saturates, by at most 6 %. A NaN or an Inf makes the scale of its block NaN.

    Attributes:
        block: ``(1, 16)``, or ``(16, 16)`` for codes that serve both GEMMs of a tensor; the columns run
            along the contraction.
        rotation: whether a randomized Hadamard transform comes first: each 16 contracted values are
            multiplied by a Hadamard matrix with fixed signs, so that an outlier spreads. With both
            operands of a GEMM transformed, the product stays the same.
        stochastic_rounding: whether values are rounded up or down at random, so that the result is right on
            average. It needs random numbers, see ``fp8flax.NVFP4BlockScaling``.

    Raises:
        TypeError: ``rotation`` or ``stochastic_rounding`` is not a bool.
        ValueError: ``block`` is another pair, or blocks of 16 rows are rotated.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.NVFP4Quantizer(block=(16, 16)).dtype
        dtype(float4_e2m1fn)

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, arXiv:2509.25149; Transformer
    Engine, ``NVFP4BlockScaling``.
    """

    block: tuple[int, int] = (1, 16)
    rotation: bool = False
    stochastic_rounding: bool = False
    four_over_six: bool = False

    dtype: ClassVar[Any] = E2M1  # type: ignore[misc]
    scale_dtype: ClassVar[Any] = jnp.float8_e4m3fn
    unit_columns: ClassVar[int] = nvfp4.GROUP
    is_exact_in_bfloat16: ClassVar[bool] = True
    inf_gives_nan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bool("rotation", self.rotation)
        check_bool("stochastic_rounding", self.stochastic_rounding)
        if self.block not in ((1, 16), (16, 16)) or (self.rotation and self.block[0] > 1):
            raise ValueError(
                "block of an NVFP4Quantizer must be (1, 16), or (16, 16) without rotation; got "
                f"block={self.block!r}, rotation={self.rotation}."
            )

    @property
    def serves_both(self) -> bool:
        return self.block[0] > 1 and not self.stochastic_rounding

    def quantize(self, x: jax.Array, dims: Dims, scale: Given = None, key: Given = None) -> QTensor:
        block = dims.block(self.block)
        axis = dims.contract[-1] if self.rotation and dims.contract else None
        x = x if axis is None else nvfp4.filled(x, axis)
        bits = nvfp4.random_bits(key, x) if self.stochastic_rounding else None
        codes, block_scale, tensor_scale = nvfp4.quantized(
            x, block, axis, bits, four_over_six=self.four_over_six
        )
        return QTensor(codes, block_scale, self, block, tensor_scale)

    @property
    def stored(self) -> Quantizer:
        return dataclasses.replace(self, block=(1, nvfp4.GROUP))

    def why_not_stored(self, depth: int) -> str | None:
        if self.rotation or self.stochastic_rounding:
            return "its recipe rotates it, or rounds it at random"
        if depth % nvfp4.GROUP:
            return f"NVFP4 is stored in groups of {nvfp4.GROUP} values, and its matmul sums over {depth}"
        return None


def quantize_for_both(
    quantizers: tuple[Quantizer | None, Quantizer | None],
    dims: Sequence[Dims],
    x: jax.Array,
    scale: Given = None,
    keys: Sequence[Given] = (None, None),
    *,
    is_gradient: bool = False,
) -> tuple[QTensor | jax.Array, QTensor | jax.Array]:
    """Returns a tensor quantized for its two GEMMs: one object twice, if the same codes serve both.

    ``quantizers``, ``dims`` and ``keys`` are those of each GEMM. Without a quantizer the tensor stays wide.
    In a gradient an Inf becomes a NaN.
    """
    one, other = quantizers
    if one is not None and one.shares_pass(other):
        return no_derivative(partial(one.in_one_pass, other, dims, is_gradient))(x)
    if is_gradient and not all(quantizer and quantizer.inf_gives_nan for quantizer in quantizers):
        x = inf_to_nan(x)

    def quantized(index: int) -> QTensor | jax.Array:
        quantizer, of_gemm = quantizers[index], dims[index]
        run = lambda x, scale, key: quantizer.quantize(x, of_gemm, scale, key) if quantizer else x  # noqa: E731
        return no_derivative(run)(x, scale, keys[index])

    first = quantized(0)
    return first, first if one == other and (one is None or one.serves_both) else quantized(1)

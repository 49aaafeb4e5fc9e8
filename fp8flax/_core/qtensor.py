"""A quantized tensor, the dimensions along which a product sums it, and its blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from fp8flax._core.formats import as_fp8_dtype
from fp8flax._core.options import check_bool
from fp8flax._core.scaling import Rounding
from fp8flax._core.shapes import Float, Shaped, UInt8


class Dims(NamedTuple):
    """Which dimensions of a tensor a product sums over and batches (hashable).

    All others are free. The batch dimensions are the first ones.
    """

    ndim: int
    """The number of dimensions of the tensor."""
    contract: tuple[int, ...]
    num_batch: int = 0
    is_stack: bool = False
    """Whether the batch dimensions stack separate tensors, such as the kernels of experts: each tensor then
    has scales of its own."""

    @property
    def free(self) -> tuple[int, ...]:
        """Returns the free dimensions, in order."""
        return tuple(i for i in range(self.num_batch, self.ndim) if i not in self.contract)

    @property
    def in_order(self) -> tuple[int, ...]:
        """Returns all dimensions: batch, free, contracted."""
        return (*range(self.num_batch), *self.free, *self.contract)

    def matrices(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns the sizes of a tensor as a stack of matrices: batch, free and contracted elements."""
        batch = tuple(range(self.num_batch))
        number, rows, columns = (
            math.prod(shape[i] for i in places) for places in (batch, self.free, self.contract)
        )
        return number, rows, columns

    def block(self, rows_and_columns: tuple[int, int]) -> tuple[int, ...]:
        """Returns the number of elements along each dimension of a block that shares a scale.

        The columns of a block run along the last contracted dimension, its rows along the last free one. A
        block does not reach over several dimensions, which ``canonical`` takes care of.
        """
        block = [1] * self.ndim
        for places, size in zip((self.free, self.contract), rows_and_columns):
            if places:
                block[places[-1]] = size
        return tuple(block)

    def batched(self, is_free: bool = False) -> Dims:
        """Returns the dimensions after ``jax.vmap`` adds a batch dimension, or the first free dimension."""
        contract = tuple(i + 1 for i in self.contract)
        return Dims(self.ndim + 1, contract, self.num_batch + (not is_free), self.is_stack)


Given: TypeAlias = jax.Array | None
"""The scale or the random key of a call; None if its quantizer needs none."""


class Quantizer:
    """Turns one operand of one GEMM into codes and scales; base class of those in ``quantizers``."""

    dtype: Any
    """The dtype of the codes, FP8 or e2m1: of NumPy, so that equal quantizers compare and hash equal."""
    block: Any = None
    """With scales per block the ``(rows, columns)`` of a block, see ``BlockQuantizer``; None otherwise."""
    use_power_2_scales: bool = False
    """Whether scales are rounded up to powers of two."""
    stochastic_rounding: bool = False
    """Whether values are rounded up or down at random, by a random key."""
    scale_dtype: ClassVar[Any] = None
    """The dtype of scales of one byte."""
    unit_columns: ClassVar[int]
    """The columns that share a scale where Blackwell multiplies operands with scales per block."""
    inf_gives_nan: ClassVar[bool] = False
    """Whether an Inf gives a NaN. Other quantizers saturate it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_fp8_dtype(self.dtype, "dtype"))
        check_bool("use_power_2_scales", self.use_power_2_scales)

    @property
    def rounding(self) -> Rounding | None:
        """Returns how scales become powers of two; None if they do not."""
        return "up" if self.use_power_2_scales else None

    @property
    def is_exact_in_bfloat16(self) -> bool:
        """Returns whether bfloat16 holds the product of any code and the scale of its block."""
        return self.rounding is not None

    @property
    def scale_columns(self) -> int | None:
        """Returns the number of contracted elements that share a float32 scale; None for other scales."""
        return None

    @property
    def has_one_scale(self) -> bool:
        """Returns whether a tensor has one scale, regardless of the contracted dimensions."""
        return False

    @property
    def serves_both(self) -> bool:
        """Returns whether the codes for one GEMM of a tensor also serve its other GEMM."""
        return self.has_one_scale

    @property
    def stored(self) -> Quantizer:
        """Returns the quantizer of a stored kernel: that of the same values, with a scale per row."""
        return self

    def shares_pass(self, other: Quantizer | None) -> bool:
        """Returns whether ``in_one_pass`` makes the codes of a tensor for this and another quantizer."""
        return False

    def in_one_pass(
        self, other: Any, dims: Sequence[Dims], inf_is_nan: bool, x: jax.Array, master: Given
    ) -> tuple[QTensor, QTensor]:
        """Quantizes a tensor for both of its GEMMs in one pass, for the second one by ``other``.

        ``master`` is the float32 array that ``x`` was cast from, or None.
        """
        raise NotImplementedError

    def why_not_stored(self, depth: int) -> str | None:
        """Returns why a kernel that sums over ``depth`` values cannot be stored; None if it can be."""
        return None

    def quantize(self, x: jax.Array, dims: Dims, scale: Given = None, key: Given = None) -> QTensor:
        """Quantizes an operand for one GEMM, which contracts some of its dimensions.

        NaN stays NaN, and an Inf saturates. Both are ignored by the scales of current and block scaling,
        but make a block of NVFP4 NaN.
        ``scale`` is the float32 scale of this step, for delayed scaling: one element, or one per stacked
        tensor. ``key`` is a key of ``jax.random``, for stochastic rounding.
        """
        raise NotImplementedError


STATIC = {"static": True}
"""The metadata of a field that belongs to the structure of a tree, and is not a leaf."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QTensor:
    """Quantized tensor: FP8 or FP4 codes, scales, and the quantizer that made them (``x ≈ codes * scale``).

    ``==`` compares identities, as for other objects that hold arrays. Compare codes and scales instead.

    Attributes:
        codes: codes in ``quantizer.dtype``, or as bits (``as_bits``), of the shape of the tensor. A rotated
            tensor of NVFP4 is padded to whole groups of 16 along the contraction.
        scale: positive, or NaN, in float32 or of one byte. It broadcasts to the codes: a scalar, or one
            dimension for each dimension of the tensor, of its size, or of size 1 where all elements share a
            scale. With scales per block, its sizes are the numbers of blocks; the last may be partial.
        quantizer: the quantizer that made the codes and the scales.
        block: with scales per block, the number of elements per block along each dimension; else empty. It
            is also empty in the stored kernel of a frozen model, whose scales have another layout.
        tensor_scale: in NVFP4, the float32 scale that multiplies the scales of all blocks: a scalar, or one
            dimension for each dimension of the tensor. None otherwise.
    """

    codes: Float[jax.Array, "*dims"] | UInt8[jax.Array, "*dims"]
    scale: Shaped[jax.Array, "*scale"]
    quantizer: Quantizer = dataclasses.field(metadata=STATIC)
    block: tuple[int, ...] = dataclasses.field(default=(), metadata=STATIC)
    tensor_scale: jax.Array | None = None

    def __repr__(self) -> str:
        """Returns the fields, with dtypes and shapes in the place of arrays."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        texts = {n: f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else x for n, x in fields.items()}
        return f"QTensor({', '.join(f'{name}={text}' for name, text in texts.items())})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the tensor."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions of the tensor."""
        return self.codes.ndim

    def dequantize(self, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
        """Returns codes times scales, multiplied in float32 or float64 and rounded once to ``dtype``."""
        wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
        # Without the barrier XLA removes a cast to FP8 and back on GPUs, and nothing is rounded.
        codes = lax.optimization_barrier(self.codes)
        if self.block:
            blocks, within = split_blocks(codes.astype(wide), self.block)
            values = blocks * lax.expand_dims(self.scale, within).astype(wide)
            values = join_blocks(values, self.shape, self.block)
        else:
            values = codes.astype(wide) * self.scale.astype(wide)
        if self.tensor_scale is not None:
            values = values * self.tensor_scale.astype(wide)
        return values.astype(dtype)

    def as_bits(self) -> QTensor:
        """Returns the same tensor with its codes, and scales of one byte, as uint8; 4-bit codes as uint4.

        ``jax.checkpoint`` passes every float that it saves through ``lax.reduce_precision``, which does not
        know e4m3fn: 448 would become NaN, and subnormals would become zero.
        """
        return dataclasses.replace(self, codes=_bits(self.codes), scale=_bits(self.scale))

    def from_bits(self) -> QTensor:
        """Returns the tensor that ``as_bits`` was called on."""
        scale = self.scale
        if scale.dtype == jnp.uint8:
            scale = lax.bitcast_convert_type(scale, self.quantizer.scale_dtype)
        codes = lax.bitcast_convert_type(self.codes, self.quantizer.dtype)
        return dataclasses.replace(self, codes=codes, scale=scale)


def _bits(x: jax.Array) -> jax.Array:
    """Returns an array of a narrow dtype as uint8 or uint4; returns an array of a wider dtype unchanged."""
    if x.dtype == jnp.float4_e2m1fn:
        return lax.bitcast_convert_type(x, jnp.uint4)
    return lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 else x


def dequantized(operand: QTensor | jax.Array, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
    """Returns an operand in a wide dtype, whether it was quantized or not."""
    return operand.dequantize(dtype) if isinstance(operand, QTensor) else operand.astype(dtype)


# Blocks.


def round_up(size: int, multiple: int) -> int:
    """Rounds a size up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


def padded(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Pads an array with zeros at the end of each dimension, to these sizes."""
    padding = [(0, size - have, 0) for size, have in zip(sizes, x.shape, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), padding)


def split_blocks(x: jax.Array, block: tuple[int, ...]) -> tuple[jax.Array, tuple[int, ...]]:
    """Splits each dimension into ``(blocks, elements of a block)``, after zeros fill up the last block.

    Also returns the dimensions of the elements. A dimension with blocks of one element is not split.
    """
    filled = padded(x, [*map(round_up, x.shape, block)])
    shape: list[int] = []
    within = []
    for size, width in zip(filled.shape, block):
        shape.append(size // width)
        if width > 1:
            within.append(len(shape))
            shape.append(width)
    return filled.reshape(shape), tuple(within)


def join_blocks(blocks: jax.Array, shape: tuple[int, ...], block: tuple[int, ...]) -> jax.Array:
    """Returns the array of this shape that ``split_blocks`` has split."""
    filled = blocks.reshape([*map(round_up, shape, block)])
    return lax.slice(filled, [0] * len(shape), shape)

"""The quantizers: each turns one operand of one GEMM into FP8 codes and scales, and back."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8flax._core.formats import as_fp8_dtype, fp8_max
from fp8flax._core.options import check_bool, check_choice, check_epsilon, check_int
from fp8flax._core.qtensor import QTensor, View
from fp8flax._core.quantize import quantize, saturated, straight_through
from fp8flax._core.scaling import (
    current_scale,
    e8m0_factors,
    e8m0_scale,
    finite_amax,
    power_of_two,
    scale_exponent,
)
from fp8flax._core.shapes import Float, Float32, Shaped

AMAX_ALGORITHMS = ("max", "most_recent")
GRANULARITIES = ("tensorwise", "axiswise")
ROUNDINGS = ("up", "floor")
_BLOCK_SCALES = ("e8m0", "power_of_two", "float32")
_MARGIN_LIMIT = "More would push the data below the smallest FP8 values."

MX_COLUMNS = 32
"""Columns that share a scale where hardware multiplies block-scaled operands."""


def _set_dtype(quantizer: Any) -> None:
    """Replaces the field ``dtype`` by a NumPy dtype, so that equal quantizers compare and hash equal."""
    object.__setattr__(quantizer, "dtype", as_fp8_dtype(quantizer.dtype, "dtype"))


class Quantizer:
    """Base class of the three quantizers. A quantizer turns one operand of one GEMM into codes and scales.

    The methods here are those of scales per tensor or per slice. Their codes have the shape of the operand.
    Their scale is a scalar, or an array of the operand's rank with size 1 in dimensions that share a scale.
    ``BlockQuantizer`` has another layout, so it defines all methods.

    Pairs of methods change the layout of codes and scales, and change it back. ``trim`` and ``fill`` do so
    between the forward and the backward pass, ``pack`` and ``unpack`` for a frozen model. ``spread`` and
    ``flat`` of ``BlockQuantizer`` do so for a GEMM on a mesh.

    Attributes:
        dtype: FP8 dtype of the codes.
        needs_state: whether scales come from past steps, which the layer keeps as its scaling state.
        scales_along_contraction: whether the scale changes along the contraction, so that it must be
            applied inside the GEMM and not to its result. Codes and scales then have the layout ``(batch,
            rows, columns)`` of ``BlockQuantizer``.
        has_one_scale: whether a tensor has one scale, regardless of the contracted dimensions.
        strategy: name of the kernel's scales in compressed-tensors and inference servers (``"tensor"``,
            ``"channel"``, ``"block"``); None if they have no such name.
        scale_columns: number of columns of a row that share a float32 scale; None for other scales.
        has_mx_scales: whether ``BlockQuantizer.mx_scale`` returns scales for the units of Blackwell GPUs.
    """

    dtype: Any
    # ``Any``, where a subclass defines a property.
    needs_state: ClassVar[bool] = False
    scales_along_contraction: ClassVar[bool] = False
    has_one_scale: ClassVar[Any] = False
    strategy: ClassVar[Any] = None
    scale_columns: ClassVar[Any] = None
    has_mx_scales: ClassVar[Any] = False

    def quantize(
        self,
        x: Float[jax.Array, "*dims"],
        view: View,
        delayed_scale: Float32[jax.Array, "*scale"] | None = None,
    ) -> QTensor:
        """Quantizes an operand for one GEMM.

        NaN stays NaN, and an Inf saturates. Both are ignored by the scales of current and block scaling.

        Args:
            x: the wide operand, of shape ``view.shape``.
            view: which dimensions the GEMM contracts.
            delayed_scale: the scale, of one element, if ``needs_state``.

        Returns:
            The codes with their scales.
        """
        raise NotImplementedError

    def dequantize(self, q: QTensor, view: View, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
        """Returns codes times scales in the operand's shape.

        Codes and scales are multiplied in float32, or in float64 if ``dtype`` is float64. The product is
        then rounded once to ``dtype``.
        """
        del view
        values = wide_codes(q, dtype)
        return (values * q.scale.astype(values.dtype)).astype(dtype)

    def serves(self, other: Quantizer | None, view: View) -> bool:
        """Returns whether the codes that this quantizer makes can be used in a second GEMM, too.

        Each tensor enters two GEMMs: the kernel, for example, the forward GEMM and dgrad. The second GEMM
        contracts the dimensions that are the rows in the first one. If the codes cannot be used again, the
        wide tensor is quantized a second time.

        Args:
            other: the quantizer of the tensor in the second GEMM.
            view: the view of the operand in the first GEMM.
        """
        del view
        return self == other and self.has_one_scale

    def transpose(self, q: QTensor) -> QTensor:
        """Returns the operand as the second GEMM reads it; called only if ``serves`` is True."""
        return q

    def trim(self, q: QTensor, view: View) -> QTensor:
        """Returns the operand without the padding of its codes; this is kept for the backward pass."""
        del view
        return q

    def fill(self, q: QTensor, view: View) -> QTensor:
        """Returns the operand with the padding that ``trim`` removed."""
        del view
        return q

    def pack(self, q: QTensor, view: View) -> QTensor:
        """Returns the operand with codes of shape ``view.shape``; a frozen model stores this kernel."""
        del view
        return q

    def unpack(self, q: QTensor, view: View) -> QTensor:
        """Returns the operand that ``pack`` was called with."""
        del view
        return q

    def shardings(self, sharding: NamedSharding, view: View) -> QTensor:
        """Returns the shardings of codes and scales that ``trim`` returned, as a ``QTensor`` of shardings.

        A contraction on explicit mesh axes declares these shardings for its residuals. Codes are sharded as
        the operand, whose shape they have. Scales are replicated.

        Args:
            sharding: the sharding of the wide operand.
            view: the view of the operand.
        """
        del view
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        return QTensor(sharding, whole, self)


def wide_codes(q: QTensor, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
    """Returns the FP8 codes cast to float32, or to float64 if ``dtype`` is float64."""
    # Without the barrier XLA removes a cast to FP8 and back on GPUs, and the values would not be rounded.
    codes = lax.optimization_barrier(q.codes)
    return codes.astype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedQuantizer(Quantizer):
    """Quantizer with one scale per tensor, taken from the amaxes of past steps.

    The layer keeps the scale and the history as its scaling state.

    Attributes:
        dtype: FP8 dtype of the codes.
        margin: headroom in powers of two, 0 to 16.
        amax_history_len: number of past steps in the history, 1 or more.
        amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
        use_power_2_scales: whether the scale is rounded up to a power of two.

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
    strategy: ClassVar[str] = "tensor"

    def __post_init__(self) -> None:
        _set_dtype(self)
        margin = check_int("margin", self.margin, 0, 16, _MARGIN_LIMIT)
        amax_history_len = check_int("amax_history_len", self.amax_history_len, 1)
        check_choice("amax_compute_algo", self.amax_compute_algo, AMAX_ALGORITHMS)
        check_bool("use_power_2_scales", self.use_power_2_scales)
        # Python ints, because integers of NumPy would take part in the promotion of dtypes.
        object.__setattr__(self, "margin", margin)
        object.__setattr__(self, "amax_history_len", amax_history_len)

    def quantize(
        self,
        x: Float[jax.Array, "*dims"],
        view: View,
        delayed_scale: Float32[jax.Array, "*scale"] | None = None,
    ) -> QTensor:
        """Quantizes an operand with the given scale."""
        del view
        assert delayed_scale is not None
        scale = delayed_scale.reshape(())
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
        _set_dtype(self)
        check_choice("granularity", self.granularity, GRANULARITIES)
        check_bool("use_power_2_scales", self.use_power_2_scales)
        check_epsilon("amax_epsilon", self.amax_epsilon)

    @property
    def has_one_scale(self) -> bool:
        """Returns whether there is one scale per tensor instead of one per slice."""
        return self.granularity == "tensorwise"

    @property
    def strategy(self) -> str:
        """Returns the name that inference servers use for the scales; see ``Quantizer``."""
        return "tensor" if self.has_one_scale else "channel"

    def quantize(
        self,
        x: Float[jax.Array, "*dims"],
        view: View,
        delayed_scale: Float32[jax.Array, "*scale"] | None = None,
    ) -> QTensor:
        """Quantizes an operand with scales computed from the finite amax of ``x``, or of each slice."""
        del delayed_scale
        amax = finite_amax(x, None if self.has_one_scale else view.contract)
        if self.amax_epsilon:
            amax = jnp.maximum(amax, np.float32(self.amax_epsilon))
        scale = current_scale(amax, fp8_max(self.dtype), power_2=self.use_power_2_scales)
        return QTensor(quantize(x, self.dtype, scale), scale, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockQuantizer(Quantizer):
    """Quantizer with one scale per block of the tensor, seen as a matrix.

    The rows of the matrix are the free dimensions of the operand; its columns are the contracted
    dimensions, flattened in their order. Sizes that are not multiples of the block are filled up with zeros
    at the end.

    Attributes:
        dtype: FP8 dtype of the codes.
        block: ``(rows, columns)`` of a block, such as ``(1, 32)``, ``(1, 128)`` or ``(128, 128)``; the
            columns run along the contraction.
        scale: ``"e8m0"`` for a power of two in one byte, ``"power_of_two"`` for a power of two in float32,
            or ``"float32"`` for an exact float32 scale.
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
        _set_dtype(self)
        if not (isinstance(self.block, tuple) and len(self.block) == 2):
            raise TypeError(f"block must be a pair (rows, columns) such as (1, 32); got {self.block!r}.")
        rows, columns = (
            check_int(f"block[{i}] ({name})", self.block[i], 1)
            for i, name in enumerate(("rows", "columns"))
        )
        object.__setattr__(self, "block", (rows, columns))
        check_choice("scale", self.scale, _BLOCK_SCALES)
        check_choice("scale_rounding", self.scale_rounding, ROUNDINGS)
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
    def strategy(self) -> str | None:
        """Returns the name that inference servers use for the scales; see ``Quantizer``."""
        return "block" if self.block == (128, 128) else None

    @property
    def scale_columns(self) -> int | None:
        """Returns the number of columns of a block, or None for E8M0 scales."""
        return None if self.scale == "e8m0" else self.block[1]

    @property
    def has_mx_scales(self) -> bool:
        """Returns whether scales are powers of two, and the width of a block is a multiple of 32."""
        return self.is_exact_in_bfloat16 and self.block[1] % MX_COLUMNS == 0

    def quantize(
        self,
        x: Float[jax.Array, "*dims"],
        view: View,
        delayed_scale: Float32[jax.Array, "*scale"] | None = None,
    ) -> QTensor:
        """Quantizes an operand with scales computed from the finite amax of each block."""
        del delayed_scale
        padded = self._filled(view.to_matrix(x), view)
        blocks = self._blocks(padded, view)
        limit = fp8_max(self.dtype)
        amax = finite_amax(blocks, (2, 4))
        if self.scale == "float32":
            scale = current_scale(amax, limit)
            codes = quantize(blocks, self.dtype, scale)
        else:
            lowest = -127 if self.scale == "e8m0" else -126
            exponent = scale_exponent(amax, limit, self.scale_rounding)
            # Multiplied by 1 / scale, which is exact: the scale 2**-127 is subnormal, its inverse is not.
            inverse = power_of_two(-jnp.maximum(exponent, np.int32(lowest)))
            codes = saturated(blocks.astype(jnp.float32) * inverse, self.dtype)
            scale = e8m0_scale(exponent) if self.scale == "e8m0" else power_of_two(exponent)
        return QTensor(codes.reshape(padded.shape), scale.reshape(self._scale_shape(view)), self)

    def dequantize(self, q: QTensor, view: View, dtype: DTypeLike) -> Float[jax.Array, "*dims"]:
        """Returns codes times scales in the operand's shape, without the padding of its last blocks."""
        values = wide_codes(q, dtype)
        blocks = self._blocks(values, view)
        is_e8m0 = q.scale.dtype == jnp.float8_e8m0fnu
        factors = e8m0_factors(q.scale) if is_e8m0 else (q.scale,)
        for factor in factors:
            blocks = blocks * factor.astype(blocks.dtype)[:, :, None, :, None]
        return view.from_matrix(self._cut(blocks.reshape(values.shape), view)).astype(dtype)

    def serves(self, other: Quantizer | None, view: View) -> bool:
        """Returns whether the blocks are square and both GEMMs flatten the dimensions in the same order."""
        # The second GEMM sees these dimensions as its rows, which ``View`` flattens in ascending order.
        is_square = self.block[0] == self.block[1]
        return self == other and is_square and list(view.contract) == sorted(view.contract)

    def transpose(self, q: QTensor) -> QTensor:
        """Swaps rows and columns of codes and scales."""
        return QTensor(jnp.swapaxes(q.codes, 1, 2), jnp.swapaxes(q.scale, 1, 2), self)

    def spread(self, q: QTensor, view: View) -> QTensor:
        """Returns codes ``(batch, *rows, *columns)``, and scales of the same dimensions.

        XLA can then split each of these dimensions over devices. It can split a matrix whose rows are
        ``(batch, sequence)`` by batch only. Rows or columns
        stay flat if a block reaches over several of their dimensions.
        """
        (rows, columns), (height, width) = self._spread_sizes(view), self.block
        filled = (*rows[:-1], rows[-1] * height), (*columns[:-1], columns[-1] * width)
        codes = q.codes.reshape(q.codes.shape[0], *filled[0], *filled[1])
        return dataclasses.replace(q, codes=codes, scale=q.scale.reshape(q.scale.shape[0], *rows, *columns))

    def ranks(self, view: View) -> tuple[int, int]:
        """Returns how many dimensions rows and columns have after ``spread``."""
        rows, columns = self._spread_sizes(view)
        return len(rows), len(columns)

    def flat(self, q: QTensor, view: View) -> QTensor:
        """Returns the matrix that ``spread`` was called with."""
        filled = (num * size for num, size in zip(self._num_blocks(view), self.block))
        codes = q.codes.reshape(q.codes.shape[0], *filled)
        return dataclasses.replace(q, codes=codes, scale=q.scale.reshape(self._scale_shape(view)))

    def trim(self, q: QTensor, view: View) -> QTensor:
        """Returns codes without padding, in all dimensions of the operand, and the scales of ``spread``.

        The batch dimensions are flattened.
        """
        sizes = (view.sizes(dims) or (1,) for dims in (view.free, view.contract))
        codes = self._cut(q.codes, view).reshape(view.matrix_shape[0], *itertools.chain(*sizes))
        return dataclasses.replace(self.spread(q, view), codes=codes)

    def fill(self, q: QTensor, view: View) -> QTensor:
        """Returns the matrix, with zeros that fill up its last blocks and change no amax and no sum."""
        codes = self._filled(q.codes.reshape(view.matrix_shape), view)
        return dataclasses.replace(q, codes=codes, scale=q.scale.reshape(self._scale_shape(view)))

    def pack(self, q: QTensor, view: View) -> QTensor:
        """Returns the codes in the operand's own shape, with the scales per block unchanged."""
        return dataclasses.replace(q, codes=view.from_matrix(self._cut(q.codes, view)))

    def unpack(self, q: QTensor, view: View) -> QTensor:
        """Returns the matrix with its last blocks filled up."""
        return self.fill(dataclasses.replace(q, codes=view.to_matrix(q.codes)), view)

    def shardings(self, sharding: NamedSharding, view: View) -> QTensor:
        """Returns the shardings of codes and scales; the scales are replicated.

        The batch dimensions are flattened. They are sharded as the first of them, and replicated if another
        one of them is sharded.
        """
        names = [sharding.spec[i] for i in view.batch]
        spec = [names[0] if names and not any(names[1:]) else None]
        for dims in (view.free, view.contract):
            spec += [sharding.spec[i] for i in dims] or [None]
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        return QTensor(NamedSharding(sharding.mesh, PartitionSpec(*spec)), whole, self)

    def mx_scale(self, q: QTensor) -> Shaped[jax.Array, "batch rows blocks"]:
        """Returns E8M0 scales, one per 32 columns of each row; the scales of larger blocks are repeated."""
        height, width = self.block
        if q.scale.dtype == jnp.float8_e8m0fnu:
            bits = lax.bitcast_convert_type(q.scale, jnp.uint8)
        else:  # the exponent field of a float32 power of two is its E8M0 code
            bits = (lax.bitcast_convert_type(q.scale, jnp.int32) >> np.int32(23)).astype(jnp.uint8)
        bits = jnp.repeat(jnp.repeat(bits, height, axis=1), width // MX_COLUMNS, axis=2)
        return lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu)

    def block_scale(
        self, q: QTensor, rows: int
    ) -> Float32[jax.Array, "batch block_rows block_columns"] | None:
        """Returns float32 scales, one per block of ``rows`` rows; the scales of taller blocks are repeated.

        Returns None if the scales are E8M0, or if the height of a block is not a multiple of ``rows``.
        """
        if self.scale_columns is None or self.block[0] % rows:
            return None
        return jnp.repeat(q.scale, self.block[0] // rows, axis=1)

    def _num_blocks(self, view: View) -> tuple[int, int]:
        """Returns how many blocks the matrix has down and across; the last ones may be partial."""
        _, rows, columns = view.matrix_shape
        height, width = self.block
        return -(-rows // height), -(-columns // width)

    def _scale_shape(self, view: View) -> tuple[int, int, int]:
        """Returns the shape of the scales, ``(batch, block rows, block columns)``."""
        return (view.matrix_shape[0], *self._num_blocks(view))

    def _spread_sizes(self, view: View) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the sizes of the row dimensions and of the column dimensions of a padded matrix.

        The last size of each is counted in blocks. The dimensions are those that the matrix flattens, such
        as ``(batch, sequence)``. If a block reaches over several of them, they count as a single dimension.
        """
        sizes = []
        for dims, block, num in zip((view.free, view.contract), self.block, self._num_blocks(view)):
            *outer, last = view.sizes(dims) or (1,)
            is_split = not outer or (isinstance(last, int) and last % block == 0)
            sizes.append((*outer, -(-last // block)) if is_split else (num,))
        return sizes[0], sizes[1]

    def _blocks(self, matrix: jax.Array, view: View) -> jax.Array:
        """Reshapes a padded matrix to ``(batch, block rows, height, block columns, width)``."""
        (num_rows, num_columns), (height, width) = self._num_blocks(view), self.block
        return matrix.reshape(matrix.shape[0], num_rows, height, num_columns, width)

    def _filled(self, matrix: jax.Array, view: View) -> jax.Array:
        """Pads ``(batch, rows, columns)`` at the end with zeros, to whole blocks."""
        _, rows, columns = view.matrix_shape
        (num_rows, num_columns), (height, width) = self._num_blocks(view), self.block
        padding = ((0, 0, 0), (0, num_rows * height - rows, 0), (0, num_columns * width - columns, 0))
        return lax.pad(matrix, jnp.zeros((), matrix.dtype), padding)

    def _cut(self, matrix: jax.Array, view: View) -> jax.Array:
        """Removes the padding that ``_filled`` added."""
        _, rows, columns = view.matrix_shape
        return matrix[:, :rows, :columns]


def quantized(
    quantizer: Quantizer | None, x: Float[jax.Array, "*dims"], view: View, delayed_scale: Any = None
) -> Any:
    """Quantizes ``x`` for one GEMM and returns the ``QTensor``; returns ``x`` if the quantizer is None."""
    return x if quantizer is None else quantizer.quantize(x, view, delayed_scale)


def serves(first: Quantizer | None, second: Quantizer | None, view: View) -> bool:
    """Returns whether one quantized tensor can be used in both of its GEMMs; see ``Quantizer.serves``.

    A quantizer of None leaves the tensor wide. Then both quantizers must be None.
    """
    return second is None if first is None else first.serves(second, view)


def quantized_and_back(
    quantizer: Quantizer | None,
    view: View,
    x: Float[jax.Array, "*dims"],
    delayed_scale: Float32[jax.Array, "*scale"] | None,
) -> Float[jax.Array, "*dims"]:
    """Quantizes ``x`` and dequantizes it again; the derivative is that of the identity.

    Returns ``x`` unchanged if the quantizer is None.
    """
    if quantizer is None:
        return x

    def round_trip(x: jax.Array, delayed_scale: Any) -> jax.Array:
        return quantized(quantizer, x, view, delayed_scale).dequantize(view, x.dtype)

    return straight_through(round_trip, x, delayed_scale)

"""Recipes: frozen, validated descriptions of how each GEMM's tensors are scaled; the ambient recipe."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import operator
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from fp8flax._formats import Format, as_fp8_dtype

_AMAX_ALGORITHMS = ("max", "most_recent")
_ACCUMULATIONS = ("fast", "exact", "default")
_GRANULARITIES = ("tensorwise", "axiswise")
_ROUNDINGS = ("up", "floor")
_BLOCK_SCALES = ("e8m0", "power_of_two", "float32")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {choices}; got {value!r}.")


def _check_int(name: str, value: Any, smallest: int, largest: int | None = None, why: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {value!r} of type {type(value).__name__}.")
    if value < smallest:
        raise ValueError(f"{name} must be {smallest} or more; got {value}.")
    if largest is not None and value > largest:
        raise ValueError(f"{name} must be {largest} or less; got {value}. {why}")


def _check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {value!r} of type {type(value).__name__}.")


def _check_format(value: Any) -> None:
    if not isinstance(value, Format):
        raise TypeError(
            f"fp8_format must be a member of fp8flax.Format ({', '.join(Format.__members__)}); "
            f"got {value!r}."
        )


def _check_ocp_format(value: Any, recipe: str) -> None:
    _check_format(value)
    if value.name.endswith("_FNUZ"):
        raise ValueError(
            f"fp8_format of {recipe} must be E4M3, E5M2 or HYBRID, which block scales are defined for; "
            f"got {value.name}. For FNUZ formats use DelayedScaling or Float8CurrentScaling."
        )


def _set_dtype(quantizer: Any) -> None:
    """Stores the dtype in one form, so that equal quantizers compare and hash equal."""
    object.__setattr__(quantizer, "dtype", as_fp8_dtype(quantizer.dtype, "dtype"))


_MARGIN_LIMIT = "More would push the data below the smallest FP8 values."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accumulation:
    """How the FP8 units of an NVIDIA GPU add up the products, for each of the three GEMMs.

    * ``"fast"``: in the tensor core's own accumulators, which keep about 14 bits on Hopper;
    * ``"exact"``: partial sums are promoted to float32 as the contraction goes on (Transformer Engine's
      *split accumulator*);
    * ``"default"``: nothing is asked for, so XLA may use a kernel of its own that needs no transposed
      copies of the operands, and accumulates as that kernel does.

    The first two ask for cublasLt, which takes sizes that are multiples of 16; a GEMM with another size
    runs as ``"default"``, and so does e5m2 times e5m2, which cublasLt does not know. Where FP8 is emulated,
    and where scales are per block, everything accumulates in float32.

    Attributes:
        forward: for the forward GEMM.
        dgrad: for the GEMM of the input's cotangent.
        wgrad: for the GEMM of the kernel's cotangent.

    Raises:
        ValueError: a field is none of the three words.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.DelayedScaling(accumulation=fp8.Accumulation(forward="exact")).accumulation.dgrad
        'exact'

    Source: Transformer Engine, ``MMParams.use_split_accumulator`` and its defaults.
    """

    forward: str = "fast"
    dgrad: str = "exact"
    wgrad: str = "exact"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_choice(field.name, getattr(self, field.name), _ACCUMULATIONS)


def _check_accumulation(value: Any) -> None:
    if not isinstance(value, Accumulation):
        raise TypeError(
            f"accumulation must be an fp8flax.Accumulation(forward=…, dgrad=…, wgrad=…); got {value!r}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedQuantizer:
    """One scale per tensor, from the amaxes of past steps, which the layer keeps as its scaling state.

    Attributes:
        dtype: FP8 dtype of the codes.
        margin: headroom in powers of two, 0 to 16.
        amax_history_len: number of past steps that are remembered, 1 or more.
        amax_compute_algo: ``"max"`` of the history (bounded, see ``DelayedScaling``), or its
            ``"most_recent"`` entry.
        use_power_2_scales: whether the scale is rounded up to a power of two.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value out of range.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.DelayedQuantizer(dtype=fp8.float8_e4m3fn, amax_history_len=16).dtype
        dtype(float8_e4m3fn)

    Source: Micikevicius et al., 2022, arXiv:2209.05433; Transformer Engine, ``DelayedScaling``.
    """

    dtype: Any
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    use_power_2_scales: bool = False

    def __post_init__(self) -> None:
        _set_dtype(self)
        _check_int("margin", self.margin, 0, 16, _MARGIN_LIMIT)
        _check_int("amax_history_len", self.amax_history_len, 1)
        _check_choice("amax_compute_algo", self.amax_compute_algo, _AMAX_ALGORITHMS)
        _check_bool("use_power_2_scales", self.use_power_2_scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentQuantizer:
    """Scales from the tensor itself: one, or one per slice along the contraction.

    Attributes:
        dtype: FP8 dtype of the codes.
        granularity: ``"tensorwise"`` for one scale; ``"axiswise"`` for one per row of the left operand, or
            column of the right one, along the contraction.
        use_power_2_scales: whether scales are rounded up to powers of two.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``granularity`` is none of the two words.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.CurrentQuantizer(dtype=fp8.float8_e4m3fn, granularity="axiswise").use_power_2_scales
        False

    Source: Transformer Engine, ``Float8CurrentScaling``; torchao, ``rowwise`` scaling.
    """

    dtype: Any
    granularity: str = "tensorwise"
    use_power_2_scales: bool = False

    def __post_init__(self) -> None:
        _set_dtype(self)
        _check_choice("granularity", self.granularity, _GRANULARITIES)
        _check_bool("use_power_2_scales", self.use_power_2_scales)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockQuantizer:
    """One scale per block of the tensor itself, the operand seen as a matrix.

    The free dimensions of the operand are its rows; the contracted ones, flattened in their order, its
    columns. Sizes that the block does not divide are filled up with zeros at the end.

    Attributes:
        dtype: FP8 dtype of the codes.
        block: ``(rows, columns)`` of a block, such as ``(1, 32)``, ``(1, 128)`` or ``(128, 128)``; the
            columns run along the contraction.
        scale: ``"e8m0"``, one byte per scale, a power of two; or float32 scales, either a
            ``"power_of_two"`` or exact (``"float32"``).
        scale_rounding: of powers of two: ``"up"``, so that nothing saturates, or ``"floor"``, the rule of
            the MX specification (``"e8m0"`` only), where the largest values of a block may saturate.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has another value than those above.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.BlockQuantizer(dtype=fp8.float8_e4m3fn, block=(1, 128), scale="float32").block
        (1, 128)

    Source: OCP Microscaling Formats (MX) Specification v1.0; DeepSeek-AI, "DeepSeek-V3 Technical Report",
    2024, arXiv:2412.19437, section 3.3.2.
    """

    dtype: Any
    block: tuple[int, int] = (1, 32)
    scale: str = "e8m0"
    scale_rounding: str = "up"

    def __post_init__(self) -> None:
        _set_dtype(self)
        if not (isinstance(self.block, tuple) and len(self.block) == 2):
            raise TypeError(f"block must be a pair (rows, columns) such as (1, 32); got {self.block!r}.")
        _check_int("block[0] (rows)", self.block[0], 1)
        _check_int("block[1] (columns)", self.block[1], 1)
        _check_choice("scale", self.scale, _BLOCK_SCALES)
        _check_choice("scale_rounding", self.scale_rounding, _ROUNDINGS)
        if self.scale_rounding == "floor" and self.scale != "e8m0":
            raise ValueError(
                f"scale_rounding 'floor' is that of E8M0 scales; got scale={self.scale!r}. Use "
                "scale='e8m0', or leave scale_rounding out."
            )


Quantizer = DelayedQuantizer | CurrentQuantizer | BlockQuantizer
"""How one operand of one GEMM becomes FP8."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRecipe:
    """How the two operands of one GEMM are quantized; ``None`` leaves an operand as it is.

    A GEMM with an operand that stays wide runs in the wider dtype, the other operand being dequantized:
    no unit multiplies FP8 by bfloat16.

    Attributes:
        lhs: of the left operand: the input forward and in wgrad, the output gradient in dgrad.
        rhs: of the right operand: the kernel forward and in dgrad, the output gradient in wgrad.
        accumulation: see ``Accumulation``; for scales per tensor or slice.

    Raises:
        TypeError: an operand's field is neither a quantizer nor None.
        ValueError: ``accumulation`` is none of the three words.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.GemmRecipe().lhs is None  # a GEMM in the dtype of its operands
        True

    Source: none.
    """

    lhs: Quantizer | None = None
    rhs: Quantizer | None = None
    accumulation: str = "exact"

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Quantizer):
                raise TypeError(
                    f"{name} must be a DelayedQuantizer, a CurrentQuantizer, a BlockQuantizer or None "
                    f"(stay wide); got {value!r}."
                )
        _check_choice("accumulation", self.accumulation, _ACCUMULATIONS)


class Recipe:
    """What an FP8 op takes as ``recipe``: the base of all recipe classes.

    A class of your own is a frozen dataclass with the property ``gemms``, which returns the recipe in the
    parts that a ``CustomRecipe`` is made of. What is compiled for a recipe goes on as it is when the recipe
    changes, so a recipe that can be changed is refused: one that is no frozen dataclass, has a field that
    cannot be hashed, such as a list, or whose class adds attributes without being such a dataclass itself.

    Example:
        >>> import dataclasses, fp8flax as fp8
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class WideBackward(fp8.Recipe):
        ...     block: tuple[int, int] = (1, 32)
        ...
        ...     @property
        ...     def gemms(self):
        ...         quantizer = fp8.BlockQuantizer(dtype=fp8.float8_e4m3fn, block=self.block)
        ...         return fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=quantizer, rhs=quantizer))
        >>> fp8.Fp8DotGeneralOp(recipe=WideBackward()).recipe.block
        (1, 32)

    Source: none.
    """

    @property
    def gemms(self) -> CustomRecipe:
        """The recipe as a ``CustomRecipe``: one ``GemmRecipe`` for each of the three GEMMs."""
        raise NotImplementedError(f"{type(self).__name__} must define the property gemms: a CustomRecipe.")


def _gemms(
    accumulation: Accumulation,
    forward: tuple[Quantizer | None, Quantizer | None],
    dgrad: tuple[Quantizer | None, Quantizer | None],
    wgrad: tuple[Quantizer | None, Quantizer | None],
) -> CustomRecipe:
    pairs = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
    return CustomRecipe(
        **{
            name: GemmRecipe(lhs=lhs, rhs=rhs, accumulation=getattr(accumulation, name))
            for name, (lhs, rhs) in pairs.items()
        }
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomRecipe(Recipe):
    """A recipe of your own: any quantizer for either operand of each GEMM.

    The easy way is to start from the parts of another recipe, its ``gemms``.

    Attributes:
        forward: input times kernel.
        dgrad: output gradient times kernel; the gradient of the input.
        wgrad: input times output gradient; the gradient of the kernel.

    Raises:
        TypeError: a field is not a ``GemmRecipe``.
        ValueError: a tensor has two different delayed quantizers; there is one scaling state for each.

    Example:
        >>> import dataclasses, fp8flax as fp8
        >>> recipe = dataclasses.replace(fp8.MXFP8BlockScaling().gemms, wgrad=fp8.GemmRecipe())
        >>> recipe.wgrad.lhs is None  # wgrad stays in the dtype of the layer
        True

    Source: none.
    """

    forward: GemmRecipe = GemmRecipe()
    dgrad: GemmRecipe = GemmRecipe()
    wgrad: GemmRecipe = GemmRecipe()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, GemmRecipe):
                hint = "; take it from its gemms" if isinstance(value, Recipe) else ""
                raise TypeError(f"{field.name} must be a GemmRecipe(lhs=…, rhs=…); got {value!r}{hint}.")
        for role, uses in self._uses().items():
            delayed = dict.fromkeys(q for q in uses.values() if isinstance(q, DelayedQuantizer))
            if len(delayed) > 1:
                raise ValueError(
                    f"{' and '.join(uses)} quantize the {role} by two different DelayedQuantizers, and "
                    f"there is one scaling state for it; make them equal: {list(delayed)}."
                )

    @property
    def gemms(self) -> CustomRecipe:
        """The recipe itself."""
        return self

    def _uses(self) -> dict[str, dict[str, Quantizer | None]]:
        return {
            "input": {"forward.lhs": self.forward.lhs, "wgrad.lhs": self.wgrad.lhs},
            "kernel": {"forward.rhs": self.forward.rhs, "dgrad.rhs": self.dgrad.rhs},
            "output_grad": {"dgrad.lhs": self.dgrad.lhs, "wgrad.rhs": self.wgrad.rhs},
        }

    @property
    def delayed(self) -> dict[str, DelayedQuantizer]:
        """For each role that needs scaling state (``input``, ``kernel``, ``output_grad``) its quantizer."""
        return {
            role: quantizer
            for role, uses in self._uses().items()
            for quantizer in uses.values()
            if isinstance(quantizer, DelayedQuantizer)
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """Scales from the amaxes of past steps, one per tensor.

    The scale of a step is ``max(amax_history) * 2**margin / fp8_max``; the step's own amax then enters
    the history. No pass over the tensor is needed before it is cast.

    In Flax and Transformer Engine one outlier flushes all other data to zero for as long as the history
    remembers it. Here the maximum counts for no more than 448 times the second largest of the 16 newest
    amaxes in e4m3fn (480 times in e4m3fnuz, more than 1e7 times in e5m2): ordinary data then keep the
    precision of FP8 down to 1/64 of their amax, and what is above the bound saturates. Up to the bound
    the scale is that of Flax, bit for bit. The history always is, so checkpoints pass both ways, and a run
    that an outlier has spoilt recovers when it goes on here.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        margin: headroom in powers of two between the amax and the largest FP8 value, 0 to 16.
        amax_history_len: number of past steps that are remembered, 1 or more.
        amax_compute_algo: ``"max"`` of the history (bounded, see above), or its ``"most_recent"`` entry.
        use_power_2_scales: whether scales are rounded up to powers of two.
        accumulation: how each of the three GEMMs accumulates on a GPU.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value out of range.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.DelayedScaling(amax_history_len=16).margin
        0

    Source: Transformer Engine, ``DelayedScaling``; Micikevicius et al., 2022, arXiv:2209.05433.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    use_power_2_scales: bool = False
    accumulation: Accumulation = Accumulation()

    def __post_init__(self) -> None:
        _check_format(self.fp8_format)
        _check_accumulation(self.accumulation)
        self._quantizer(self.fp8_format.forward_dtype)  # checks the other fields

    def _quantizer(self, dtype: np.dtype) -> DelayedQuantizer:
        return DelayedQuantizer(
            dtype=dtype,
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            use_power_2_scales=self.use_power_2_scales,
        )

    @property
    def gemms(self) -> CustomRecipe:
        """The recipe in parts."""
        x = self._quantizer(self.fp8_format.forward_dtype)
        g = self._quantizer(self.fp8_format.backward_dtype)
        return _gemms(self.accumulation, (x, x), (g, x), (x, g))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """Scales from the tensors themselves, one per tensor or one per slice along the contraction.

    Nothing is remembered from step to step, so there is no state; the price is a pass over each tensor for
    its amax before it is cast. With one scale per slice the input and the output gradient are quantized
    once for each of their two GEMMs, from the wide tensor, and so is the kernel.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        granularity: ``"tensorwise"``, or ``"axiswise"``: one scale per row of the left operand and column
            of the right one, so that an outlier spoils its own row only (torchao's "rowwise").
        use_power_2_scales: whether scales are rounded up to powers of two.
        high_precision_wgrad: whether the gradient of the kernel is computed in the dtype of the layer
            (torchao's "gw_hp"). The input is then kept for the backward pass as it is.
        accumulation: how each of the three GEMMs accumulates on a GPU.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value out of range.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.Float8CurrentScaling(granularity="axiswise", high_precision_wgrad=True).gemms.wgrad.lhs

    Source: Transformer Engine, ``Float8CurrentScaling``; torchao, ``rowwise`` and ``rowwise_with_gw_hp``.
    """

    fp8_format: Format = Format.HYBRID
    granularity: str = "tensorwise"
    use_power_2_scales: bool = False
    high_precision_wgrad: bool = False
    accumulation: Accumulation = Accumulation()

    def __post_init__(self) -> None:
        _check_format(self.fp8_format)
        _check_bool("high_precision_wgrad", self.high_precision_wgrad)
        _check_accumulation(self.accumulation)
        self._quantizer(self.fp8_format.forward_dtype)  # checks the other fields

    def _quantizer(self, dtype: np.dtype) -> CurrentQuantizer:
        return CurrentQuantizer(
            dtype=dtype, granularity=self.granularity, use_power_2_scales=self.use_power_2_scales
        )

    @property
    def gemms(self) -> CustomRecipe:
        """The recipe in parts."""
        x = self._quantizer(self.fp8_format.forward_dtype)
        g = self._quantizer(self.fp8_format.backward_dtype)
        wgrad = (None, None) if self.high_precision_wgrad else (x, g)
        return _gemms(self.accumulation, (x, x), (g, x), wgrad)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: each 32 values along the contraction share a scale, a power of two in one byte (E8M0).

    There is no state. Every tensor is quantized once for each of its two GEMMs, from the wide tensor.
    Blackwell multiplies MXFP8 in hardware; on a Hopper GPU, which has no unit for it, the same FP8 values
    are multiplied in bfloat16, which holds them exactly.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass. (Blackwell does not multiply e5m2 by e5m2.)
        scale_rounding: ``"up"``, so that no value saturates, as in Transformer Engine; or ``"floor"``, the
            rule of the MX specification, where values above 7/8 of the next power of two do (in e4m3).

    Raises:
        TypeError: ``fp8_format`` is not a ``Format``.
        ValueError: ``scale_rounding`` is none of the two words, or ``fp8_format`` is a FNUZ one.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.MXFP8BlockScaling().gemms.forward.lhs.block
        (1, 32)

    Source: OCP Microscaling Formats (MX) Specification v1.0; Transformer Engine, ``MXFP8BlockScaling``.
    """

    fp8_format: Format = Format.E4M3
    scale_rounding: str = "up"

    def __post_init__(self) -> None:
        _check_ocp_format(self.fp8_format, type(self).__name__)
        _check_choice("scale_rounding", self.scale_rounding, _ROUNDINGS)

    @property
    def gemms(self) -> CustomRecipe:
        """The recipe in parts."""
        x, g = (
            BlockQuantizer(dtype=dtype, block=(1, 32), scale="e8m0", scale_rounding=self.scale_rounding)
            for dtype in (self.fp8_format.forward_dtype, self.fp8_format.backward_dtype)
        )
        return _gemms(_IN_FLOAT32, (x, x), (g, x), (x, g))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """DeepSeek-V3's recipe: a scale per 1×128 values of inputs and gradients, per 128×128 of the kernel.

    There is no state. Inputs and output gradients are quantized once for each of their two GEMMs, from
    the wide tensor; a kernel's blocks are the same for both of its GEMMs. The scales differ along the
    contraction, so they are applied inside it.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        use_f32_scales: float32 scales, which use all of the FP8 range; otherwise powers of two, which every
            device multiplies faster.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: ``fp8_format`` is a FNUZ one.

    Example:
        >>> import fp8flax as fp8
        >>> forward = fp8.Float8BlockScaling().gemms.forward
        >>> forward.lhs.block, forward.rhs.block
        ((1, 128), (128, 128))

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, arXiv:2412.19437, section 3.3.2; Transformer
    Engine, ``Float8BlockScaling``.
    """

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False

    def __post_init__(self) -> None:
        _check_ocp_format(self.fp8_format, type(self).__name__)
        _check_bool("use_f32_scales", self.use_f32_scales)

    @property
    def gemms(self) -> CustomRecipe:
        """The recipe in parts."""
        scale = "float32" if self.use_f32_scales else "power_of_two"
        x = BlockQuantizer(dtype=self.fp8_format.forward_dtype, block=(1, 128), scale=scale)
        w = dataclasses.replace(x, block=(128, 128))
        g = dataclasses.replace(x, dtype=self.fp8_format.backward_dtype)
        return _gemms(_IN_FLOAT32, (x, w), (g, w), (x, g))


_IN_FLOAT32 = Accumulation(forward="exact")

_OFF = "off"

_jit_key = jax.make_user_context(None)
"""The ambient recipe in jit's key: a ``_Key``, or None in a thread that never entered ``autocast``."""


# A user context belongs to the thread, and nothing tells us when one task of a thread gives way to another.
# So the thread's is a key that looks into a context variable whenever jit compares it with the key of a
# function that it has compiled. Once a cache may have stored a key, for which it is hashed, or an op traced
# under it, the key is fixed, and the thread goes on with a new one. (Python takes an object to equal itself
# without asking, so a key that is never fixed would match whatever it was stored with.)
#
# jit's table breaks if another thread changes it while two keys are compared, and any line of Python may
# let another thread run. So the comparison is put together from functions that are written in C.


class _Entry:
    """A ``with`` statement of ``autocast`` that has been entered, on that which was entered before it."""

    __slots__ = ("below", "compare", "is_open", "value")

    __call__ = property(operator.attrgetter("compare"))
    """Says whether a key is that of the recipe."""

    def __init__(self, value: Any, below: _Entry | None) -> None:
        self.value, self.below, self.is_open = value, below, True
        self.compare: Any = functools.partial(operator.eq, _token(value))

    def __iter__(self) -> Iterator[_Entry]:
        """Yields it and all below."""
        entry: _Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.below

    def lay_on(self, below: _Entry | None) -> None:
        self.below = below
        if not self.is_open:
            self.compare = below

    def close(self) -> None:
        """Lets what is below hold in all contexts that are in it."""
        self.is_open = False
        self.lay_on(self.below)


def _innermost(entry: _Entry) -> _Entry:
    return next(e for e in entry if e.is_open)


_tokens: dict[Any, object] = {None: None}


def _token(value: Any) -> object:
    """Returns an object of its own for each recipe, which C code compares; None for none."""
    return _tokens.setdefault(value, object())


_NOWHERE = _Entry(None, None)
"""Below all others, and always open."""


class _Thread(threading.local):
    """The context variable of one thread, the innermost ``_Entry``; other threads see no such variable."""

    var: contextvars.ContextVar[_Entry] | None = None
    get = staticmethod(
        functools.partial(operator.itemgetter(0), [functools.partial(operator.is_, object())])
    )
    """What they see: a comparison that is never true."""


class _Key:
    __slots__ = ("compare", "thread", "token")

    __eq__ = property(operator.methodcaller("compare"))
    """``compare`` returns the function that is called with the other key."""

    def __init__(self, thread: _Thread) -> None:
        self.thread, self.token = thread, _token(None)
        self.compare = functools.partial(operator.methodcaller("get"), thread)

    def fix(self) -> None:
        if _jit_key.value is self:
            self.token = _token(_ambient())
            self.compare = functools.partial(
                operator.itemgetter(0), [functools.partial(operator.eq, self.token)]
            )
            _jit_key(_Key(self.thread)).__enter__()  # to stay

    def __hash__(self) -> int:
        self.fix()
        return hash(self.token)


def _context_variable() -> contextvars.ContextVar[_Entry] | None:
    """Returns that of the thread; None if the thread never entered ``autocast``."""
    key = _jit_key.value
    return None if key is None else key.thread.var


def _ambient() -> Any:
    """Returns the recipe of ops that were given none, ``_OFF``, or None where nothing was said."""
    var = _context_variable()
    return None if var is None else _innermost(var.get()).value


def _fix_key() -> None:
    """Fixes the key that a function is being traced under, if one is."""
    if _jit_key.value is not None:
        _jit_key.value.fix()


class _Autocast(contextlib.ContextDecorator):
    def __init__(self, value: Any) -> None:
        self._value = value
        self._entries: list[_Entry] = []

    def __call__(self, func: Any) -> Any:
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_of_kind(func) for is_of_kind in kinds):
            raise TypeError(
                f"autocast as a decorator takes functions that compute before they return; got {func!r}, a "
                "generator or coroutine function, whose body runs later. Write the with statement in it."
            )
        return super().__call__(func)

    def __enter__(self) -> None:
        var = _context_variable()
        if var is None:
            thread, var = _Thread(), contextvars.ContextVar("autocast", default=_NOWHERE)
            thread.var, thread.get = var, var.get
            _jit_key(_Key(thread)).__enter__()  # to stay
        _fix_key()
        entry = _Entry(self._value, _innermost(var.get()))
        self._entries.append(entry)
        var.set(entry)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _fix_key()
        var = _context_variable()
        here = [] if var is None else list(var.get())
        mine = [entry for entry in here if entry in self._entries]
        entry = mine[0] if mine else self._entries[-1]
        self._entries.remove(entry)
        # Tasks that were started under it go on with it, in their copies of the context. But a generator
        # may be closed in another context than that it was entered in, where it is to end too.
        if not mine or kind is GeneratorExit:
            entry.close()
        if var is not None and mine:
            if entry is here[0]:
                var.set(here[1])
            else:
                here[here.index(entry) - 1].lay_on(entry.below)


def autocast(enabled: bool = True, recipe: Recipe | None = None) -> contextlib.AbstractContextManager[None]:
    """Sets the recipe of the FP8 ops that were given none, for the code under it.

    The innermost one counts. The recipe is part of what ``jax.jit`` remembers a function by: a jitted
    function that is called under another recipe is traced again. The backward pass uses the recipe that
    the forward pass ran under, wherever it runs. Use it in a ``with`` statement, any number of times, or as
    a decorator of a function.

    It holds for the thread that it is entered in, not for threads that are started under it (nor in
    ``asyncio.to_thread``): enter it there. Each asyncio task computes with its own; a task starts with that
    of the code that creates it, and keeps it. A generator shares the context of its caller, as context
    variables do: while it is suspended under ``autocast``, the caller is under it too, until the generator
    leaves it or is closed; in whatever order that happens, nothing of it stays.

    A recipe with scaling state (``DelayedScaling``) needs that state in the variables, so ``init`` the
    model under the recipe, or use ``fp8flax.add_fp8_state`` there.

    Args:
        enabled: False turns FP8 off: every FP8 op, also one with a recipe of its own, then multiplies in
            the dtype of its operands and leaves its state alone.
        recipe: for ops whose ``recipe`` is None; None for their default, ``DelayedScaling()``.

    Raises:
        TypeError: ``enabled`` is not a bool; ``recipe`` is neither a frozen recipe nor None; or what is
            decorated is a generator or coroutine function.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> with fp8.autocast(recipe=fp8.MXFP8BlockScaling()):
        ...     list(layer.init(jax.random.key(0), jnp.ones((2, 4))))
        ['params']

    Source: Transformer Engine, ``autocast``.
    """
    _check_bool("enabled", enabled)
    gemms = None if recipe is None else check_recipe(recipe)
    return _Autocast(gemms if enabled else _OFF)


def _why_it_can_change(recipe: Recipe) -> str | None:
    """Returns how a recipe could be changed in place; None if it is frozen."""
    cls = type(recipe)
    params = getattr(cls, "__dataclass_params__", None)
    if params is None:
        return "is no dataclass"
    if not params.frozen:
        return "is not frozen"
    fields = [field.name for field in dataclasses.fields(recipe)]  # type: ignore[arg-type]
    for base in cls.__mro__:
        if "__dataclass_params__" in vars(base):
            break
        # A dataclass freezes nothing but its fields for a subclass that is not one itself.
        cached = [
            name for name, value in vars(base).items() if isinstance(value, functools.cached_property)
        ]
        added = [name for name, of in inspect.get_annotations(base).items() if "ClassVar" not in str(of)]
        added += [name for name in getattr(recipe, "__dict__", ()) if name not in (*fields, *cached)]
        if added:
            return f"adds {', '.join(dict.fromkeys(added))} to the frozen dataclass that it is derived from"
    for name in fields:
        value = getattr(recipe, name)
        try:
            hash(value)
        except TypeError:
            return f"has a field {name} that cannot be hashed, {value!r} (make a list a tuple)"
    try:
        hash(recipe)
    except TypeError:
        return "cannot be hashed"
    return None


def check_recipe(recipe: Any) -> CustomRecipe:
    """Returns the recipe in parts, or raises ``TypeError`` where it is not a recipe, or not frozen."""
    if not isinstance(recipe, Recipe):
        raise TypeError(
            "recipe must be an instance of a recipe class such as fp8flax.DelayedScaling(); got "
            f"{recipe!r}. To give a layer an op with options, use dot_general_cls="
            "functools.partial(fp8flax.Fp8DotGeneralOp, recipe=fp8flax.DelayedScaling(...))."
        )
    gemms = recipe.gemms
    if not isinstance(gemms, CustomRecipe):
        raise TypeError(
            f"gemms of the recipe {recipe!r} must be an fp8flax.CustomRecipe; got {gemms!r}. If that is a "
            "recipe itself, return its gemms."
        )
    why = _why_it_can_change(recipe)
    if why is not None:
        raise TypeError(
            f"recipe must be frozen, since functions are compiled for it as it is; got {recipe!r}, whose "
            f"class {type(recipe).__name__} {why}. Make the class @dataclasses.dataclass(frozen=True, "
            "kw_only=True), with its attributes as fields that can be hashed."
        )
    return gemms


def recipe_in_use(own: Recipe | None, default: Recipe) -> Recipe | None:
    """Returns the recipe of an op: its own, else the ambient one, else its default; None if FP8 is off."""
    _fix_key()
    ambient = _ambient()
    if ambient is _OFF:
        return None
    if own is not None:
        return own
    return default if ambient is None else ambient

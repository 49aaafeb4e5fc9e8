"""Recipes: frozen, validated descriptions of how the operands of each GEMM are quantized and scaled."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from typing import Any

import numpy as np

from fp8flax._core.formats import Format
from fp8flax._core.options import check_bool, check_choice
from fp8flax._core.quantizers import (
    ROUNDINGS,
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    Quantizer,
)

_ACCUMULATIONS = ("fast", "exact", "default")
"""The valid values of ``GemmRecipe.accumulation``, which explains them."""


def _check_format(value: Any) -> None:
    """Raises ``TypeError`` if ``fp8_format`` of a recipe is not a ``Format``."""
    if not isinstance(value, Format):
        raise TypeError(
            f"fp8_format must be a member of fp8flax.Format ({', '.join(Format.__members__)}); "
            f"got {value!r}."
        )


def _check_ocp_format(value: Any, recipe: str) -> None:
    """Raises an error if ``fp8_format`` of a recipe with block scales is not one of the OCP formats."""
    _check_format(value)
    if value.name.endswith("_FNUZ"):
        raise ValueError(
            f"fp8_format of {recipe} must be E4M3, E5M2 or HYBRID, which block scales are defined for; "
            f"got {value.name}. For FNUZ formats use DelayedScaling or Float8CurrentScaling."
        )


_FAST_FORWARD = ("fast", "exact", "exact")
"""The default accumulation in forward, dgrad and wgrad, as in Transformer Engine."""

_IN_FLOAT32 = ("exact", "exact", "exact")
"""The accumulation of recipes with block scales: all three GEMMs accumulate in float32."""


def _check_accumulation(value: Any) -> None:
    """Raises an error if ``accumulation`` of a recipe is not a tuple of three of the valid words."""
    if not (isinstance(value, tuple) and len(value) == 3):
        raise TypeError(
            f"accumulation must be a tuple of three words, for forward, dgrad and wgrad; got {value!r}."
        )
    for word in value:
        check_choice("accumulation", word, _ACCUMULATIONS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmRecipe:
    """Quantizers of the two operands of one GEMM; ``None`` leaves an operand wide.

    A GEMM with a wide operand runs in the wider dtype, because no unit multiplies FP8 by bfloat16. Its
    other operand is then dequantized.

    ``accumulation`` says how the FP8 units of an NVIDIA GPU add up the products:

    * ``"fast"``: in the tensor core's own accumulators, which keep about 14 bits on Hopper.
    * ``"exact"``: partial sums are promoted to float32 during the contraction (Transformer Engine's *split
      accumulator*).
    * ``"default"``: no request. XLA may use a GPU kernel of its own, which needs no transposed copies of
      the operands, and accumulates as that GPU kernel does.

    ``"fast"`` and ``"exact"`` ask for cublasLt, which takes sizes that are multiples of 16. These GEMMs run
    as ``"default"`` instead:

    * a GEMM with a size that is not a multiple of 16
    * e5m2 times e5m2, which cublasLt does not have
    * on Hopper, ``"fast"`` GEMMs of a frozen kernel and up to 256 rows, as in decoding, because the
      transposed copy of the kernel would take longer

    Everything accumulates in float32 if FP8 is emulated, and if scales are per block.

    Attributes:
        lhs: quantizer of the left operand: the input in forward and wgrad, the output gradient in dgrad.
        rhs: quantizer of the right operand: the kernel in forward and dgrad, the output gradient in wgrad.
        accumulation: one of these three words; it has an effect for scales per tensor or slice.

    Raises:
        TypeError: ``lhs`` or ``rhs`` is neither a quantizer nor None.
        ValueError: ``accumulation`` is not one of the three words.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.GemmRecipe().lhs is None  # a GEMM in the dtype of its operands
        True

    Source: Transformer Engine, ``MMParams.use_split_accumulator`` and its defaults.
    """

    lhs: Quantizer | None = None
    rhs: Quantizer | None = None
    accumulation: str = "exact"

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Quantizer):
                raise TypeError(
                    f"{name} must be a DelayedQuantizer, a CurrentQuantizer, a BlockQuantizer, another "
                    f"fp8flax.Quantizer or None (stay wide); got {value!r}."
                )
        check_choice("accumulation", self.accumulation, _ACCUMULATIONS)


class Recipe:
    """Base class of all recipes, which say how an FP8 op scales its tensors.

    To write a recipe of your own, derive a frozen dataclass with the property ``gemms``, which returns a
    ``CustomRecipe``. Functions are compiled for a recipe as it is, so a recipe that can change raises
    ``TypeError``. A recipe can change if its class is not a frozen dataclass, has a field that cannot be
    hashed (such as a list), or adds attributes without being a frozen dataclass itself.

    Example:
        >>> import dataclasses, jax.numpy as jnp, fp8flax as fp8
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class WideBackward(fp8.Recipe):
        ...     block: tuple[int, int] = (1, 32)
        ...
        ...     @property
        ...     def gemms(self):
        ...         quantizer = fp8.BlockQuantizer(dtype=jnp.float8_e4m3fn, block=self.block)
        ...         return fp8.CustomRecipe(forward=fp8.GemmRecipe(lhs=quantizer, rhs=quantizer))
        >>> fp8.Fp8DotGeneralOp(recipe=WideBackward()).recipe.block
        (1, 32)
    """

    @property
    def gemms(self) -> CustomRecipe:
        """Returns the recipe as a ``CustomRecipe``: one ``GemmRecipe`` for each of the three GEMMs."""
        raise NotImplementedError(f"{type(self).__name__} must define the property gemms: a CustomRecipe.")


def _custom_recipe(
    accumulation: tuple[str, str, str],
    forward: tuple[Quantizer | None, Quantizer | None],
    dgrad: tuple[Quantizer | None, Quantizer | None],
    wgrad: tuple[Quantizer | None, Quantizer | None],
) -> CustomRecipe:
    """Returns a ``CustomRecipe`` from the quantizers ``(lhs, rhs)`` of each of the three GEMMs."""
    pairs = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
    return CustomRecipe(
        **{
            name: GemmRecipe(lhs=lhs, rhs=rhs, accumulation=word)
            for (name, (lhs, rhs)), word in zip(pairs.items(), accumulation)
        }
    )


_USES = {
    "input": ("forward.lhs", "wgrad.lhs"),
    "kernel": ("forward.rhs", "dgrad.rhs"),
    "output_grad": ("dgrad.lhs", "wgrad.rhs"),
}
"""For each role of a tensor, where the tensor enters its two GEMMs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomRecipe(Recipe):
    """Recipe of your own, with any quantizer for each operand of each GEMM.

    Start from the parts of another recipe, its ``gemms``, and replace some.

    Attributes:
        forward: input times kernel.
        dgrad: output gradient times kernel; the gradient of the input.
        wgrad: input times output gradient; the gradient of the kernel.

    Raises:
        TypeError: a field is not a ``GemmRecipe``.
        ValueError: a tensor has two different delayed quantizers, although it has one scaling state.

    Example:
        >>> import dataclasses, fp8flax as fp8
        >>> recipe = dataclasses.replace(fp8.MXFP8BlockScaling().gemms, wgrad=fp8.GemmRecipe())
        >>> recipe.wgrad.lhs is None  # wgrad stays in the dtype of the layer
        True
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
        for role, (first, second) in _USES.items():
            delayed = dict.fromkeys(self._delayed_of(role))
            if len(delayed) > 1:
                raise ValueError(
                    f"{first} and {second} quantize the {role} by two different DelayedQuantizers, but the "
                    f"{role} has only one scaling state. Make them equal; got {list(delayed)}."
                )

    @property
    def gemms(self) -> CustomRecipe:
        """Returns the recipe itself."""
        return self

    def of_role(self, role: str) -> tuple[Quantizer | None, Quantizer | None]:
        """Returns the two quantizers of a tensor, one for each of the two GEMMs that it is an operand of.

        Args:
            role: the role of the tensor, ``"input"``, ``"kernel"`` or ``"output_grad"``.
        """
        quantizers: tuple[Quantizer | None, Quantizer | None] = operator.attrgetter(*_USES[role])(self)
        return quantizers

    @property
    def quantizers(self) -> tuple[Quantizer | None, ...]:
        """Returns the quantizers of all six operands, GEMM by GEMM."""
        return tuple(q for gemm in (self.forward, self.dgrad, self.wgrad) for q in (gemm.lhs, gemm.rhs))

    @property
    def delayed(self) -> dict[str, DelayedQuantizer]:
        """Returns the quantizers with delayed scaling, by role (``input``, ``kernel``, ``output_grad``)."""
        return {role: delayed[0] for role in _USES if (delayed := self._delayed_of(role))}

    def _delayed_of(self, role: str) -> list[DelayedQuantizer]:
        """Returns the delayed quantizers of a tensor. In a valid recipe they are equal."""
        return [q for q in self.of_role(role) if q is not None and q.needs_state]  # type: ignore[misc]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """Recipe with one scale per tensor, taken from the amaxes of past steps.

    The scale of a step is ``max(amax_history) * 2**margin / fp8_max``; then the step's own amax enters the
    history. The tensor needs no extra pass before it is cast.

    In Flax and Transformer Engine one outlier flushes all other data to zero for as long as it stays in the
    history. Here the maximum is limited. In e4m3fn, the limit is 448 times the second largest of the 16
    newest amaxes. The factor is 480 in e4m3fnuz, and more than 1e7 in e5m2. Ordinary data then keep the
    precision of FP8 down to 1/64 of their amax (with ``margin=0``), and values above the limit saturate.

    Below the limit the scale equals that of Flax, bit for bit. For finite data the history equals that of
    Flax, so each library loads the other's checkpoints. A run that an outlier has spoilt recovers when it
    continues here.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        margin: headroom in powers of two between the amax and the largest FP8 value, 0 to 16.
        amax_history_len: number of past steps in the history, 1 or more.
        amax_compute_algo: ``"max"`` of the history (bounded, see above), or its ``"most_recent"`` entry.
        use_power_2_scales: whether scales are rounded up to powers of two.
        accumulation: how the forward, dgrad and wgrad GEMM accumulate on a GPU: three of the words that
            ``GemmRecipe`` explains.

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
    accumulation: tuple[str, str, str] = _FAST_FORWARD

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
        """Returns the recipe in parts, with the same delayed quantizers in each GEMM."""
        x = self._quantizer(self.fp8_format.forward_dtype)
        g = self._quantizer(self.fp8_format.backward_dtype)
        return _custom_recipe(self.accumulation, (x, x), (g, x), (x, g))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """Recipe with scales from the current tensors, one per tensor or one per slice.

    There is no scaling state. Each tensor needs an extra pass for its amax before it is cast. With one
    scale per slice, inputs, kernels and output gradients are quantized once for each of their two GEMMs,
    from the wide tensor.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        granularity: ``"tensorwise"``, or ``"axiswise"`` for one scale per row of the left operand and per
            column of the right one. An outlier then spoils its own row only.
        use_power_2_scales: whether scales are rounded up to powers of two.
        high_precision_wgrad: whether the gradient of the kernel is computed in the dtype of the layer. The
            input is then kept unquantized for the backward pass.
        accumulation: how the forward, dgrad and wgrad GEMM accumulate on a GPU: three of the words that
            ``GemmRecipe`` explains.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value out of range.

    Example:
        >>> import fp8flax as fp8
        >>> recipe = fp8.Float8CurrentScaling(granularity="axiswise", high_precision_wgrad=True)
        >>> recipe.gemms.wgrad.lhs is None  # the wgrad GEMM stays wide
        True

    Source: Transformer Engine, ``Float8CurrentScaling``, which has neither ``granularity`` nor
    ``high_precision_wgrad``. (For torchao's recipes see ``torchao_recipe``.)
    """

    fp8_format: Format = Format.HYBRID
    granularity: str = "tensorwise"
    use_power_2_scales: bool = False
    high_precision_wgrad: bool = False
    accumulation: tuple[str, str, str] = _FAST_FORWARD

    def __post_init__(self) -> None:
        _check_format(self.fp8_format)
        check_bool("high_precision_wgrad", self.high_precision_wgrad)
        _check_accumulation(self.accumulation)
        self._quantizer(self.fp8_format.forward_dtype)  # checks the other fields

    def _quantizer(self, dtype: np.dtype) -> CurrentQuantizer:
        return CurrentQuantizer(
            dtype=dtype, granularity=self.granularity, use_power_2_scales=self.use_power_2_scales
        )

    @property
    def gemms(self) -> CustomRecipe:
        """Returns the recipe in parts, with current quantizers in each GEMM."""
        x = self._quantizer(self.fp8_format.forward_dtype)
        g = self._quantizer(self.fp8_format.backward_dtype)
        wgrad = (None, None) if self.high_precision_wgrad else (x, g)
        return _custom_recipe(self.accumulation, (x, x), (g, x), wgrad)


_TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def torchao_recipe(name: str) -> CustomRecipe:
    """Returns one of torchao's three recipes for float8 training, by torchao's name.

    All three recipes take scales from the current tensors, count an amax below 1e-12 as 1e-12, and
    accumulate fast in the forward GEMM only.

    * ``"tensorwise"``: one float32 scale per tensor; e4m3, with e5m2 for the output gradient.
    * ``"rowwise"``: one scale per row of the left operand and per column of the right one, along the
      contraction of each GEMM, rounded up to a power of two. (torchao's scale is the reciprocal, rounded
      down.) All tensors are e4m3, also gradients.
    * ``"rowwise_with_gw_hp"``: forward as ``"rowwise"``. In dgrad the kernel has one scale, also a power of
      two. wgrad is computed in the dtype of the layer.

    Codes and scales are torchao's, bit for bit, with three exceptions:

    * A float32 value that lies exactly between two codes can be rounded the other way in ``"tensorwise"``,
      because torchao multiplies by the reciprocal.
    * In float32 torchao computes powers of two from a rounded logarithm. There the largest value may
      saturate if the amax is a few units in the last place above a power of two times 448.
    * A NaN or an Inf has the effect that it has under every recipe of this package.

    Args:
        name: ``"tensorwise"``, ``"rowwise"`` or ``"rowwise_with_gw_hp"``.

    Returns:
        A ``CustomRecipe``.

    Raises:
        ValueError: ``name`` is not one of the three names.

    Example:
        >>> import fp8flax as fp8
        >>> dgrad = fp8.torchao_recipe("rowwise_with_gw_hp").dgrad
        >>> dgrad.lhs.dtype, dgrad.lhs.granularity, dgrad.rhs.granularity
        (dtype(float8_e4m3fn), 'axiswise', 'tensorwise')

    Source: torchao, ``Float8LinearConfig.from_recipe_name`` and ``amax_to_scale``.
    """
    check_choice("name", name, _TORCHAO_RECIPES)
    x = CurrentQuantizer(dtype=Format.E4M3.forward_dtype, amax_epsilon=1e-12)
    if name == "tensorwise":
        g = dataclasses.replace(x, dtype=Format.E5M2.backward_dtype)
        return _custom_recipe(_FAST_FORWARD, (x, x), (g, x), (x, g))
    w = dataclasses.replace(x, use_power_2_scales=True)
    row = dataclasses.replace(w, granularity="axiswise")
    if name == "rowwise":
        return _custom_recipe(_FAST_FORWARD, (row, row), (row, row), (row, row))
    return _custom_recipe(_FAST_FORWARD, (row, row), (row, w), (None, None))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8 recipe: 32 values along the contraction share a scale, a power of two in one byte (E8M0).

    There is no scaling state. Every tensor is quantized once for each of its two GEMMs, from the wide
    tensor. Blackwell multiplies MXFP8 in hardware. A Hopper GPU has no unit for it: the same FP8 values are
    multiplied in bfloat16, which holds them exactly.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass. (Blackwell does not multiply e5m2 by e5m2.)
        scale_rounding: ``"up"``, so that no value saturates, as in Transformer Engine; or ``"floor"``, the
            rule of the MX specification. With ``"floor"``, in e4m3, a block's values saturate above 7/8 of
            the first power of two that is larger than its amax.

    Raises:
        TypeError: ``fp8_format`` is not a ``Format``.
        ValueError: ``scale_rounding`` is not one of the two words, or ``fp8_format`` is a FNUZ one.

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
        check_choice("scale_rounding", self.scale_rounding, ROUNDINGS)

    @property
    def gemms(self) -> CustomRecipe:
        """Returns the recipe in parts, with 1×32 blocks in each GEMM."""
        x, g = (
            BlockQuantizer(dtype=dtype, block=(1, 32), scale="e8m0", scale_rounding=self.scale_rounding)
            for dtype in (self.fp8_format.forward_dtype, self.fp8_format.backward_dtype)
        )
        return _custom_recipe(_IN_FLOAT32, (x, x), (g, x), (x, g))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """DeepSeek-V3's recipe: a scale per 1×128 values of inputs and gradients, per 128×128 of the kernel.

    There is no scaling state. Inputs and output gradients are quantized once for each of their two GEMMs,
    from the wide tensor. A kernel has the same blocks in both of its GEMMs and is quantized once. A kernel
    that is contracted over several dimensions, in another order than it stores them, is quantized twice.
    The scales differ along the contraction, so they are applied inside the GEMM.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        use_f32_scales: whether scales are float32, which use the full range of FP8. Otherwise they are
            powers of two.

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
        check_bool("use_f32_scales", self.use_f32_scales)

    @property
    def gemms(self) -> CustomRecipe:
        """Returns the recipe in parts, with blocks of 128 columns in each GEMM."""
        scale = "float32" if self.use_f32_scales else "power_of_two"
        x = BlockQuantizer(dtype=self.fp8_format.forward_dtype, block=(1, 128), scale=scale)
        w = dataclasses.replace(x, block=(128, 128))
        g = dataclasses.replace(x, dtype=self.fp8_format.backward_dtype)
        return _custom_recipe(_IN_FLOAT32, (x, w), (g, w), (x, g))


def _why_it_can_change(part: Any) -> str | None:
    """Returns why a recipe or a quantizer could be changed in place; None if it is frozen.

    The result is the end of an error message, such as "is not frozen".
    """
    cls = type(part)
    params = getattr(cls, "__dataclass_params__", None)
    if params is None:
        return "is not a dataclass"
    if not params.frozen:
        return "is not frozen"
    fields = [field.name for field in dataclasses.fields(part)]
    # ``cached_property`` stores its value among the attributes, which changes nothing.
    cached = [
        name
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, functools.cached_property)
    ]
    for base in cls.__mro__:
        if "__dataclass_params__" in vars(base):
            break
        # A frozen dataclass freezes its own fields only. A subclass that is not a dataclass can have more
        # attributes, which can be changed, and which equality and hash do not compare.
        added = [
            name for name, kind in inspect.get_annotations(base).items() if "ClassVar" not in str(kind)
        ]
        added += [name for name in getattr(part, "__dict__", ()) if name not in (*fields, *cached)]
        if added:
            return f"adds {', '.join(dict.fromkeys(added))} to the frozen dataclass that it is derived from"
    for name in fields:
        value = getattr(part, name)
        try:
            hash(value)
        except TypeError:
            return f"has a field {name} that cannot be hashed, {value!r} (make a list a tuple)"
    try:
        hash(part)
    except TypeError:
        return "cannot be hashed"
    return None


def check_recipe(recipe: Any) -> CustomRecipe:
    """Returns a recipe as a ``CustomRecipe``; raises ``TypeError`` if it is not a recipe, or not frozen."""
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
    quantizers = (("a quantizer", q) for q in gemms.quantizers if q is not None)
    for name, part in (*quantizers, ("recipe", recipe)):
        if why := _why_it_can_change(part):
            raise TypeError(
                f"{name} must be frozen, because functions are compiled for its current values; got "
                f"{part!r}, whose class {type(part).__name__} {why}. Make the class "
                "@dataclasses.dataclass(frozen=True, kw_only=True), with its attributes as fields that can "
                "be hashed."
            )
    return gemms

"""Recipes: frozen, validated descriptions of how the operands of each GEMM are quantized and scaled."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TypeAlias, get_args

import numpy as np

from fp8flax._core.formats import Format
from fp8flax._core.names import ROLES
from fp8flax._core.options import check_bool, check_choice
from fp8flax._core.qtensor import Quantizer
from fp8flax._core.quantizers import (
    AmaxAlgorithm,
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    Granularity,
    NVFP4Quantizer,
)
from fp8flax._core.scaling import Rounding
from fp8flax._core.types import Accumulation

_Quantizer: TypeAlias = DelayedQuantizer | CurrentQuantizer | BlockQuantizer
QUANTIZERS = (*get_args(_Quantizer), NVFP4Quantizer)

Accumulations: TypeAlias = tuple[Accumulation, Accumulation, Accumulation]
"""The accumulation in forward, dgrad and wgrad."""

_FAST_FORWARD: Accumulations = ("fast", "exact", "exact")
"""The default of Transformer Engine."""


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

    ``"fast"`` and ``"exact"`` ask for cublasLt. Sizes that are not multiples of 16, e5m2 times e5m2, and
    (on Hopper) ``"fast"`` GEMMs of a frozen kernel and up to 256 rows run as ``"default"``. Everything
    accumulates in float32 or wider if FP8 is emulated, and if scales are per block.

    Attributes:
        lhs: quantizer of the left operand: the input in forward and wgrad, the output gradient in dgrad.
        rhs: quantizer of the right operand: the kernel in forward and dgrad, the output gradient in wgrad.
        accumulation: one of these three words; it has an effect for scales per tensor or slice.

    Raises:
        TypeError: ``lhs`` or ``rhs`` is neither a quantizer nor None.
        ValueError: ``accumulation`` is another word, or only one operand has a ``rotation``.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.GemmRecipe().lhs is None  # a GEMM in the dtype of its operands
        True

    Source: Transformer Engine, ``MMParams.use_split_accumulator`` and its defaults.
    """

    lhs: Quantizer | None = None
    rhs: Quantizer | None = None
    accumulation: Accumulation = "exact"

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs"):
            value = getattr(self, name)
            if value is not None and type(value) not in QUANTIZERS:
                raise TypeError(
                    f"{name} must be a DelayedQuantizer, a CurrentQuantizer, a BlockQuantizer, an "
                    f"NVFP4Quantizer or None (stay wide); got {value!r}."
                )
        if getattr(self.lhs, "rotation", False) != getattr(self.rhs, "rotation", False):
            raise ValueError(
                "Both operands of a GEMM must be rotated, or none: otherwise the product would be another "
                f"one. Give both an NVFP4Quantizer with the same rotation; got {self.lhs} and {self.rhs}."
            )
        check_choice("accumulation", self.accumulation, get_args(Accumulation))


class Recipe:
    """Base class of the six recipes, which say how an FP8 op scales its tensors.

    Only ``DelayedScaling``, and a ``CustomRecipe`` with a ``DelayedQuantizer``, have scaling state. With
    one scale per tensor, or per square block, a tensor is quantized once; otherwise once for each of its
    two GEMMs, from the wide tensor.

    To choose the quantizers yourself, use ``CustomRecipe``. Other subclasses are not recipes.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field has a value that its description does not allow.

    Example:
        >>> import fp8flax as fp8
        >>> isinstance(fp8.MXFP8BlockScaling(), fp8.Recipe)
        True
    """

    fp8_format: Format | None = None
    """The dtypes of the forward and the backward pass; None if the recipe has other dtypes."""
    accumulation: Accumulations = ("exact", "exact", "exact")
    """Block scales have no choice: they accumulate in float32."""
    high_precision_wgrad: bool = False

    def __post_init__(self) -> None:
        check_recipe(self)  # computes ``gemms``: the quantizers and GemmRecipe check the fields

    @cached_property
    def gemms(self) -> CustomRecipe:
        """The recipe as a ``CustomRecipe``: one ``GemmRecipe`` for each of the three GEMMs."""
        if not isinstance(self.fp8_format, Format):
            raise TypeError(
                f"fp8_format must be a member of fp8flax.Format ({', '.join(Format.__members__)}); "
                f"got {self.fp8_format!r}."
            )
        x, w = self._quantizers(self.fp8_format.forward_dtype)
        g = dataclasses.replace(x, dtype=self.fp8_format.backward_dtype)
        if not (isinstance(self.accumulation, tuple) and len(self.accumulation) == 3):
            raise TypeError(
                "accumulation must be a tuple of three words, for forward, dgrad and wgrad; got "
                f"{self.accumulation!r}."
            )
        forward, dgrad, wgrad = self.accumulation
        in_fp8 = GemmRecipe(lhs=x, rhs=g, accumulation=wgrad)
        return CustomRecipe(
            forward=GemmRecipe(lhs=x, rhs=w, accumulation=forward),
            dgrad=GemmRecipe(lhs=g, rhs=w, accumulation=dgrad),
            wgrad=GemmRecipe() if self.high_precision_wgrad else in_fp8,
        )

    def _quantizers(self, dtype: np.dtype) -> tuple[_Quantizer, _Quantizer]:
        """Returns the quantizers of input and kernel; an output gradient is quantized like an input."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomRecipe(Recipe):
    """Recipe of your own: a quantizer for each operand of each GEMM.

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
                raise TypeError(f"{field.name} must be a GemmRecipe(lhs=…, rhs=…); got {value!r}.")
        for role in ROLES:
            if len(delayed := self._delayed(role)) > 1:
                raise ValueError(
                    f"The two GEMMs of the {role} quantize it by two different DelayedQuantizers, but the "
                    f"{role} has only one scaling state. Make them equal; got {delayed}."
                )

    @property
    def gemms(self) -> CustomRecipe:
        """Returns the recipe itself."""
        return self

    def of_role(self, role: str) -> tuple[Quantizer | None, Quantizer | None]:
        """Returns the two quantizers of a tensor, one for each of the two GEMMs that it is an operand of.

        The role is ``"input"``, ``"kernel"`` or ``"output_grad"``.
        """
        return {
            "input": (self.forward.lhs, self.wgrad.lhs),
            "kernel": (self.forward.rhs, self.dgrad.rhs),
            "output_grad": (self.dgrad.lhs, self.wgrad.rhs),
        }[role]

    @cached_property
    def quantizers(self) -> tuple[Quantizer | None, ...]:
        """Returns the quantizers of all six operands, GEMM by GEMM."""
        return tuple(q for gemm in (self.forward, self.dgrad, self.wgrad) for q in (gemm.lhs, gemm.rhs))

    @cached_property
    def is_random(self) -> bool:
        """Returns whether a quantizer rounds stochastically, and needs a random key."""
        return any(quantizer and quantizer.stochastic_rounding for quantizer in self.quantizers)

    @cached_property
    def delayed(self) -> dict[str, DelayedQuantizer]:
        """Returns the quantizers with delayed scaling, by role (``input``, ``kernel``, ``output_grad``)."""
        return {role: quantizer for role in ROLES for quantizer in self._delayed(role)}

    def _delayed(self, role: str) -> set[DelayedQuantizer]:
        """Returns the quantizers with delayed scaling of one tensor: in a valid recipe at most one."""
        return {q for q in self.of_role(role) if isinstance(q, DelayedQuantizer)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """Recipe with one scale per tensor, taken from the amaxes of past steps.

    The scale of a step is ``max(amax_history) * 2**margin / fp8_max``; then the step's own amax enters the
    history. The tensor needs no extra pass before it is cast. The scales and the history equal those of
    Flax bit for bit, so each library loads the other's checkpoints.

    A single outlier sets the scale for as long as the history holds it, and ordinary data may then become
    zero in FP8. A shorter history forgets an outlier sooner: ``amax_history_len=16``.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        margin: headroom in powers of two between the amax and the largest FP8 value, 0 to 16.
        amax_history_len: number of past steps in the history, 1 or more.
        amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
        use_power_2_scales: whether scales are rounded up to powers of two.
        accumulation: of forward, dgrad and wgrad on a GPU: three of the words of ``GemmRecipe``.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.DelayedScaling(amax_history_len=16).margin
        0

    Source: Transformer Engine, ``DelayedScaling``; Micikevicius et al., 2022, arXiv:2209.05433.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    use_power_2_scales: bool = False
    accumulation: Accumulations = _FAST_FORWARD

    def _quantizers(self, dtype: np.dtype) -> tuple[_Quantizer, _Quantizer]:
        x = DelayedQuantizer(
            dtype=dtype,
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            use_power_2_scales=self.use_power_2_scales,
        )
        return x, x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """Recipe with scales from the current tensors, one per tensor or one per slice.

    Each tensor needs an extra pass for its amax before it is cast.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        granularity: ``"tensorwise"`` for one scale, or ``"axiswise"`` for one per row of the left operand
            and per column of the right one. Each scale then covers all contracted elements, and an outlier
            spoils its own row only.
        use_power_2_scales: whether scales are rounded up to powers of two.
        high_precision_wgrad: whether the gradient of the kernel is computed in the dtype of the layer. The
            input is then kept unquantized for the backward pass.
        accumulation: of forward, dgrad and wgrad on a GPU: three of the words of ``GemmRecipe``.

    Example:
        >>> import fp8flax as fp8
        >>> recipe = fp8.Float8CurrentScaling(granularity="axiswise", high_precision_wgrad=True)
        >>> recipe.gemms.wgrad.lhs is None  # the wgrad GEMM stays wide
        True

    Source: Transformer Engine, ``Float8CurrentScaling``, which has neither ``granularity`` nor
    ``high_precision_wgrad``.
    """

    fp8_format: Format = Format.HYBRID
    granularity: Granularity = "tensorwise"
    use_power_2_scales: bool = False
    high_precision_wgrad: bool = False
    accumulation: Accumulations = _FAST_FORWARD

    def _quantizers(self, dtype: np.dtype) -> tuple[_Quantizer, _Quantizer]:
        check_bool("high_precision_wgrad", self.high_precision_wgrad)
        granularity, power_2 = self.granularity, self.use_power_2_scales
        x = CurrentQuantizer(dtype=dtype, granularity=granularity, use_power_2_scales=power_2)
        return x, x


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8 recipe: 32 values along the contraction share a scale, a power of two in one byte (E8M0).

    Blackwell multiplies MXFP8 in hardware. A Hopper GPU has no unit for it: the same FP8 values are
    multiplied in bfloat16, which holds them exactly.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass, not FNUZ ones. (Blackwell does not multiply
            e5m2 by e5m2.)
        scale_rounding: ``"up"``, so that no value saturates, as in Transformer Engine; or ``"floor"``, the
            rule of the MX specification. With ``"floor"``, in e4m3, a block's values saturate above 7/8 of
            the first power of two that is larger than its amax.

    Example:
        >>> import fp8flax as fp8
        >>> fp8.MXFP8BlockScaling().gemms.forward.lhs.block
        (1, 32)

    Source: OCP Microscaling Formats (MX) Specification v1.0; Transformer Engine, ``MXFP8BlockScaling``.
    """

    fp8_format: Format = Format.E4M3
    scale_rounding: Rounding = "up"

    def _quantizers(self, dtype: np.dtype) -> tuple[_Quantizer, _Quantizer]:
        x = BlockQuantizer(dtype=dtype, scale_rounding=self.scale_rounding)
        return x, x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """DeepSeek-V3's recipe: a scale per 1×128 values of inputs and gradients, per 128×128 of the kernel.

    The scales differ along the contraction, so they are applied inside the GEMM.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass, not FNUZ ones.
        use_f32_scales: whether scales are float32, which use the full range of FP8. Otherwise they are
            powers of two.

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

    def _quantizers(self, dtype: np.dtype) -> tuple[_Quantizer, _Quantizer]:
        check_bool("use_f32_scales", self.use_f32_scales)
        x = BlockQuantizer(
            dtype=dtype, block=(1, 128), scale="float32" if self.use_f32_scales else "power_of_two"
        )
        return x, dataclasses.replace(x, block=(128, 128))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4 recipe: 4-bit values, an e4m3 scale per 16 of them, and a float32 scale per tensor.

    A kernel has blocks of 16×16 values; inputs and output gradients have blocks of 1×16 along the
    contraction. For the gradient of the kernel a randomized Hadamard transform first spreads their
    outliers. Output gradients are rounded stochastically, because rounding to the nearest would bias small
    gradients.

    Stochastic rounding needs a random key, named ``fp8``, when gradients are computed. In Linen pass it at
    each step, as for dropout: ``model.apply(variables, x, rngs={"fp8": key})``. ``nn.scan`` and ``nn.vmap``
    take it in ``split_rngs={"params": True, "fp8": True}``. In NNX give ``rngs=nnx.Rngs(fp8=seed)`` to each
    op, or to ``quantize_model``. Equal keys give equal gradients. Inside ``jax.shard_map`` each device
    draws its own numbers; with ``check_vma=False`` fold its index into the key.

    Keep embeddings, the last layer, the products of attention, and some of the first and last blocks in a
    wider dtype, as published: ``quantize_model(model, exclude=…)``.

    Attributes:
        disable_rht: whether there is no randomized Hadamard transform.
        disable_stochastic_rounding: whether output gradients are rounded to the nearest. No key is needed.
        disable_2d_quantization: whether kernels, too, have blocks of 1×16, and are quantized twice.

    Example:
        >>> import fp8flax as fp8
        >>> gemms = fp8.NVFP4BlockScaling().gemms
        >>> gemms.wgrad.lhs.rotation, gemms.wgrad.rhs.stochastic_rounding, gemms.dgrad.rhs.block
        (True, True, (16, 16))

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, arXiv:2509.25149; Transformer
    Engine, ``NVFP4BlockScaling``.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False

    @cached_property
    def gemms(self) -> CustomRecipe:
        for field in dataclasses.fields(self):
            check_bool(field.name, getattr(self, field.name))
        x = NVFP4Quantizer()
        w = NVFP4Quantizer(block=(1, 16) if self.disable_2d_quantization else (16, 16))
        g = NVFP4Quantizer(stochastic_rounding=not self.disable_stochastic_rounding)
        xt, gt = (dataclasses.replace(q, rotation=not self.disable_rht) for q in (x, g))
        return CustomRecipe(
            forward=GemmRecipe(lhs=x, rhs=w),
            dgrad=GemmRecipe(lhs=g, rhs=w),
            wgrad=GemmRecipe(lhs=xt, rhs=gt),
        )


_RECIPES = (
    *(DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Float8BlockScaling),
    *(NVFP4BlockScaling, CustomRecipe),
)


def check_recipe(recipe: object) -> CustomRecipe:
    """Returns a recipe as a ``CustomRecipe``; raises ``TypeError`` if its class is not one of the six."""
    # A subclass could add fields that jit's cache key does not compare.
    if not isinstance(recipe, Recipe) or type(recipe) not in _RECIPES:
        raise TypeError(
            "recipe must be an instance of a recipe class such as fp8flax.DelayedScaling(); got "
            f"{recipe!r}. To choose each quantizer yourself, use fp8flax.CustomRecipe."
        )
    return recipe.gemms

"""Recipes: frozen, validated descriptions of how the tensors of a GEMM are scaled."""

from __future__ import annotations

import dataclasses

from fp8flax._formats import Format

_AMAX_ALGORITHMS = ("max", "most_recent")
_ACCUMULATIONS = ("fast", "exact", "default")


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
    everything accumulates in float32.

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
            value = getattr(self, field.name)
            if value not in _ACCUMULATIONS:
                raise ValueError(f"{field.name} must be one of {_ACCUMULATIONS}; got {value!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """Scales from the amaxes of past steps, one per tensor.

    The scale of a step is ``max(amax_history) * 2**margin / fp8_max``; the step's own amax then enters
    the history. No pass over the tensor is needed before it is cast.

    Attributes:
        fp8_format: dtypes of the forward and the backward pass.
        margin: headroom in powers of two between the amax and the largest FP8 value, 0 to 16.
        amax_history_len: number of past steps that are remembered, 1 or more.
        amax_compute_algo: ``"max"`` of the history, or its ``"most_recent"`` entry.
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
    accumulation: Accumulation = Accumulation()

    def __post_init__(self) -> None:
        if not isinstance(self.fp8_format, Format):
            raise TypeError(
                f"fp8_format must be a member of fp8flax.Format ({', '.join(Format.__members__)}); "
                f"got {self.fp8_format!r}."
            )
        for name, smallest, largest in (("margin", 0, 16), ("amax_history_len", 1, None)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an int; got {value!r} of type {type(value).__name__}.")
            if value < smallest:
                raise ValueError(f"{name} must be {smallest} or more; got {value}.")
            if largest is not None and value > largest:
                raise ValueError(
                    f"{name} must be {largest} or less; got {value}. More would push the data below the "
                    "smallest FP8 values."
                )
        if self.amax_compute_algo not in _AMAX_ALGORITHMS:
            raise ValueError(
                f"amax_compute_algo must be one of {_AMAX_ALGORITHMS}; got {self.amax_compute_algo!r}."
            )
        if not isinstance(self.accumulation, Accumulation):
            raise TypeError(
                "accumulation must be an fp8flax.Accumulation(forward=…, dgrad=…, wgrad=…); got "
                f"{self.accumulation!r}."
            )

"""Recipes: frozen, validated descriptions of how the tensors of a GEMM are scaled."""

from __future__ import annotations

import dataclasses

from fp8flax._formats import Format

_AMAX_ALGORITHMS = ("max", "most_recent")


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

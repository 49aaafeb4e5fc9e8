"""Types that many files name."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

PyTree: TypeAlias = Any
"""A tree of arrays, as ``jax.tree`` knows them."""

Role: TypeAlias = Literal["input", "kernel", "output_grad"]
"""The tensors of a contraction that have a scaling state."""

Accumulation: TypeAlias = Literal["fast", "exact", "default"]
"""How FP8 units add up products. The sums of ``"exact"`` are not exact: it is Transformer Engine's split
accumulator, which promotes partial sums to float32."""

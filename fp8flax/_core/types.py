"""Types that many files name."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

PyTree: TypeAlias = Any
"""A tree of arrays, as ``jax.tree`` knows them."""

Role: TypeAlias = Literal["input", "kernel", "output_grad"]
"""The tensors of a contraction that have a scaling state."""

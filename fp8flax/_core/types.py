"""Types that many files name."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from jax.sharding import PartitionSpec, Sharding

PyTree: TypeAlias = Any
"""A tree of arrays, as ``jax.tree`` knows them."""

OutSharding: TypeAlias = Sharding | PartitionSpec | None
"""How to shard a result on a mesh with explicit axes, as ``lax.dot_general`` takes it."""

Role: TypeAlias = Literal["input", "kernel", "output_grad"]
"""The tensors of a contraction that have a scaling state."""

Path: TypeAlias = tuple[str, ...]
"""The names on the way to a module or an array, from the outermost module."""

"""The table of ops, which conversion, reports and freezing read."""

from __future__ import annotations

from typing import Any

from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import Op
from fp8flax._core.ops.ragged_dot import RaggedDot

ROWS: tuple[type[Op], ...] = (DotGeneral, Einsum, Conv, RaggedDot)


def row_of(primitive: Any) -> type[Op] | None:
    """Returns the row for a JAX primitive, or None."""
    return next((row for row in ROWS if row.primitive == primitive.name), None)

"""How Hopper's block-scaled GEMM goes through its tiles: a table by shape, to be measured on a GPU."""

from __future__ import annotations

import math
from typing import NamedTuple


class Schedule(NamedTuple):
    """What does not change the result, but the time that it takes."""

    stages: int
    """How many blocks of both operands are in shared memory or on their way to it, at most."""
    of_columns: bool
    """Whether the result is cut into strips of columns, each walked down, or of rows, each walked right."""
    width: int
    """Of a strip, in tiles of 128: those that are at work at one time share most of what they read."""


GUESS = Schedule(stages=5, of_columns=True, width=8)
"""For all shapes, until some were measured."""


def schedule_of(rows: int, columns: int, depth: int) -> Schedule:
    """Returns the schedule of the shape that was measured and is nearest, in factors of its sizes.

    Args:
        rows: of the result.
        columns: of the result.
        depth: of the contraction.

    Example:
        >>> schedule_of(4096, 7168, 2048).stages >= 3
        True
    """
    sizes = rows, columns, depth

    def distance(measured: tuple[int, int, int]) -> float:
        return sum(abs(math.log2(a / max(1, b))) for a, b in zip(measured, sizes))

    return MEASURED[min(MEASURED, key=distance)] if MEASURED else GUESS


# What follows is written by benchmarks/tune_gemm.py: where it was measured, and the fastest by (M, N, K).
MEASURED_ON: str | None = None
MEASURED: dict[tuple[int, int, int], Schedule] = {}

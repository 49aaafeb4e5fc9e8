"""Writes tables as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, with a rule below the header; no cell is cut off."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    first, *others = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    return [first, "-" * max(map(len, (first, *others))), *others] if others else [first]

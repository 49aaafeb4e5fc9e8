"""Writes tables as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, with a rule below the header; no cell is cut off."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in header:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    # In a notebook rich would also display the table by itself.
    console = Console(file=io.StringIO(), width=10_000, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        console.print(table)
    first, *others = (line.rstrip() for line in capture.get().splitlines())
    return [first, "-" * max(map(len, (first, *others))), *others] if others else [first]

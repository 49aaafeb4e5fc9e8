"""The tables of docs/what_works.md: each cell is written, and later checked, by the test that saw it."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "what_works.md"
COLUMNS = ("delayed", "current", "axiswise", "mxfp8", "block128")


def _table(name):
    """Returns the pattern of a table on the page: between two comments."""
    return re.compile(rf"(<!-- table: {name} -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def read(table, row, column):
    """Returns what the page says in a cell, None where it says nothing."""
    found = _table(table).search(PAGE.read_text(encoding="utf-8"))
    if found is None:
        return None
    lines = [[c.strip() for c in line.strip().strip("|").split("|")] for line in found[2].splitlines()]
    columns = lines[0]
    for line in lines[2:]:
        if line[0] == row and column in columns:
            return line[columns.index(column)]
    return None


def write(cells):
    """Writes what was seen. Two tests of one cell must agree; rows come in the order of the tests."""
    from tests.test_devices import WAYS
    from tests.test_transformations import TRANSFORMATIONS

    order = [*TRANSFORMATIONS, *WAYS]
    tables = {}
    for table, row, column, text in cells:
        before = tables.setdefault(table, {}).setdefault(row, {}).setdefault(column, text)
        if before != text:
            raise AssertionError(f"{row}, {column}: one test saw {before!r}, another {text!r}")
    page = PAGE.read_text(encoding="utf-8")
    for table, rows in tables.items():
        lines = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
        for row in sorted(rows, key=lambda row: order.index(row) if row in order else len(order)):
            lines.append([row, *(rows[row].get(column, "not tested") for column in COLUMNS)])
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        found = _table(table).search(page)
        page = page[: found.start(2)] + text + page[found.end(2) :]
    PAGE.write_text(page, encoding="utf-8")

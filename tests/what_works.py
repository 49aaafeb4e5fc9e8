"""Tables of docs/what_works.md: a test writes each cell, and checks it in later runs."""

import re

from tests import ROOT

PAGE = ROOT / "docs" / "what_works.md"
COLUMNS = ("delayed", "current", "axiswise", "mxfp8", "block128")
EXPLICIT = "explicit axes of a mesh, `out_sharding`"
"""A row of the table of NNX, which a test of the ops fills in."""


def _cells(page):
    """Returns the cells of the page by table, row and column."""
    cells = {}
    for name, text in re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", page, re.DOTALL):
        lines = [[c.strip() for c in line.strip().strip("|").split("|")] for line in text.splitlines()]
        cells[name] = {row: dict(zip(lines[0][1:], texts)) for row, *texts in lines[2:]}
    return cells


def rows(table):
    """Returns the rows of a table, in its order."""
    return list(_cells(PAGE.read_text(encoding="utf-8"))[table])


def read(table, row, column):
    """Returns the text of a cell of the page; None if it is empty."""
    return _cells(PAGE.read_text(encoding="utf-8")).get(table, {}).get(row, {}).get(column)


def write(seen):
    """Writes the cells that tests have seen into the page; two tests of one cell must agree."""

    page = PAGE.read_text(encoding="utf-8")
    cells = _cells(page)
    new = {}
    for table, row, column, text in seen:
        if new.setdefault((table, row, column), text) != text:
            raise AssertionError(
                f"{row}, {column}: one test saw {text!r}, another {new[table, row, column]!r}"
            )
        cells.setdefault(table, {}).setdefault(row, {})[column] = text
    for table, rows in cells.items():
        lines = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
        for row in rows:
            lines.append([row, *(rows[row].get(column, "not tested") for column in COLUMNS)])
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        start = page.index(f"<!-- table: {table} -->\n") + len(f"<!-- table: {table} -->\n")
        page = page[:start] + text + page[page.index("<!-- end -->", start) :]
    PAGE.write_text(page, encoding="utf-8")

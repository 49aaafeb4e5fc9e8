"""Tables of docs/what_works.md: a test writes each cell, and checks it in later runs."""

import re

from tests import ROOT

PAGE = ROOT / "docs" / "what_works.md"
COLUMNS = ("delayed", "current", "axiswise", "mxfp8", "block128")
EXPLICIT = "explicit axes of a mesh, `out_sharding`"
"""A row of the table of NNX, which a test of the ops fills in."""


def _cells(page):
    """Returns the cells by table, row and column; a row has one text for all recipes, or five."""
    cells = {}
    for name, text in re.findall(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", page, re.DOTALL):
        for line in text.splitlines()[2:]:
            row, texts = (cell.strip() for cell in line.strip().strip("|").split("|"))
            of_recipes = texts.split(" / ")
            of_recipes = of_recipes * len(COLUMNS) if len(of_recipes) == 1 else of_recipes
            cells.setdefault(name, {})[row] = dict(zip(COLUMNS, of_recipes, strict=True))
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
        lines = [["", "all recipes"], ["---", "---"]]
        for row, found in rows.items():
            texts = [found.get(column, "not tested") for column in COLUMNS]
            lines.append([row, texts[0] if len(set(texts)) == 1 else " / ".join(texts)])
        text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
        start = page.index(f"<!-- table: {table} -->\n") + len(f"<!-- table: {table} -->\n")
        page = page[:start] + text + page[page.index("<!-- end -->", start) :]
    PAGE.write_text(page, encoding="utf-8")

"""Draws ``docs/images/architecture.svg``: which folders of the package import which.

Run ``python docs/theme/architecture.py`` after a change.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fp8flax"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

CONTENTS = {
    "_core": ("functions of arrays:", "scales, casts, GEMMs"),
    "_compat": ("private parts", "of JAX"),
    "_linen": ("Linen ops and", "their variables"),
    "_audit": ("which matmuls of a compiled", "program run in FP8"),
    "_train": ("scaling state, gradients,", "train state"),
    "_model": ("whole models in FP8", "and the report"),
    "_serve": ("frozen models", "and their files"),
    "nnx": ("the same for", "Flax NNX"),
    "demo": ("a runnable", "example"),
}
"""The folders from left to right within a row, with two lines of text for each."""

WIDTH, HEIGHT, GAP_X, GAP_Y = 200, 74, 40, 42


def imports_of(place: Path) -> Iterator[str]:
    """Yields the folders that a file, or the files of a folder, import.

    An import of the root package counts as the imports of the root package.
    """
    for path in place.rglob("*.py") if place.is_dir() else (place,):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                if name == "fp8flax":
                    yield from imports_of(PACKAGE / "__init__.py")
                elif name.startswith("fp8flax."):
                    yield name.split(".")[1]


def levels_and_arrows() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Returns the row of each folder, and the imports that do not follow from others."""
    direct = {folder: set(imports_of(PACKAGE / folder)) & CONTENTS.keys() - {folder} for folder in CONTENTS}

    def reached(folder: str) -> set[str]:
        return direct[folder].union(*map(reached, direct[folder]))

    arrows = [
        (folder, other)
        for folder in CONTENTS
        for other in sorted(direct[folder])
        if not any(other in reached(between) for between in direct[folder] - {other})
    ]

    def level(folder: str) -> int:
        return max((1 + level(other) for other in direct[folder]), default=0)

    return {folder: level(folder) for folder in CONTENTS}, arrows


def drawn() -> str:
    """Returns the picture as SVG."""
    levels, arrows = levels_and_arrows()
    rows = [
        [folder for folder in CONTENTS if levels[folder] == row] for row in range(1 + max(levels.values()))
    ]
    columns = {folder: column for row in rows for column, folder in enumerate(row)}

    def corner(folder: str) -> tuple[int, int]:
        return 20 + columns[folder] * (WIDTH + GAP_X), 20 + levels[folder] * (HEIGHT + GAP_Y)

    shapes = []
    for folder, other in arrows:
        (x, y), (to_x, to_y) = corner(folder), corner(other)
        middle = WIDTH // 2
        far = levels[folder] > levels[other] + 1
        start = f"M{x + WIDTH} {y + HEIGHT // 2} H{to_x + middle}" if far else f"M{x + middle} {y}"
        line = f'd="{start} L{to_x + middle} {to_y + HEIGHT}" fill="none" stroke="#5a6572"'
        shapes.append(f'<path {line} stroke-width="1.5" marker-end="url(#arrow)"/>')
    for folder, lines in CONTENTS.items():
        x, y = corner(folder)
        middle = x + WIDTH // 2
        size = f'width="{WIDTH}" height="{HEIGHT}"'
        shapes.append(f'<rect x="{x}" y="{y}" {size} rx="4" fill="#f6f7f8" stroke="#1d2733"/>')
        shapes.append(f'<text x="{middle}" y="{y + 23}" font-weight="600">{folder}</text>')
        shapes += [
            f'<text x="{middle}" y="{y + 43 + 18 * i}" font-size="13">{line}</text>'
            for i, line in enumerate(lines)
        ]
    width = 40 + max(map(len, rows)) * (WIDTH + GAP_X) - GAP_X
    height = 40 + len(rows) * (HEIGHT + GAP_Y) - GAP_Y
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="15" text-anchor="middle" fill="#1d2733">'
    )
    arrow = (
        '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#5a6572"/></marker>'
    )
    background = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([head, f"<defs>{arrow}</defs>", background, *shapes, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(drawn())

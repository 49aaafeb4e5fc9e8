"""The code in the README and in the pages under docs runs as shown, and their figures are the results'."""

import json
import re

import pytest

from benchmarks import fidelity, picture
from tests import ROOT
from tests.pages import examples_of, run

FILES = (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
README, IN_CHINESE = "README.md", "README.zh-CN.md"
# test_loops.py, test_moe.py and test_migrating.py run the code of these pages.
ELSEWHERE = ("docs/loops.md", "docs/moe.md", "docs/migrating.md", IN_CHINESE)


WITH_CODE = [page for page, text in PAGES.items() if page not in ELSEWHERE and examples_of(text)]


@pytest.mark.long
@pytest.mark.parametrize("page", WITH_CODE)
def test_examples_run_in_order(page):
    run(examples_of(PAGES[page]), page)


def test_the_chinese_readme_has_the_same_blocks_of_code():
    assert examples_of(PAGES[README]) == examples_of(PAGES[IN_CHINESE])


def result(name):
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def cells_of(page):
    """Returns the cells of each line of each table of a page."""
    lines = [line for line in PAGES[page].splitlines() if line[:1] == "|"]
    return [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in lines]


PREDICTED = {
    row["recipe"]: row for row in result("recipes")["rows"] if (row["gpu"], row["width"]) == ("h200", 4096)
}
ON_H200 = result("gpu")["entries"]
MEASURED = ON_H200["llama"]
DENSE = {name[6:]: rows for name, rows in ON_H200.items() if name.startswith("dense/")}


LOSSES = {row["contender"]: fidelity.mean_of(row) for row in fidelity.compared(result("fidelity")["runs"])}


@pytest.mark.parametrize("page", [README, IN_CHINESE])
def test_first_table_and_picture_of_the_readme(page):
    shown = (ROOT / "docs" / "images" / "step_h200.svg").read_text()
    for cells, name, (label, *_) in zip(cells_of(page)[2:], picture.NAMES, picture.rows()):
        row = MEASURED[name]
        ms, speed = f"{1e3 * row['seconds']['median']:.1f} ms", f"{row['times_bf16']['median']:.2f}"
        _, *others, matmuls, loss = cells
        assert (others, loss) == ([ms, speed], "0" if name == "bf16" else LOSSES[name])
        assert list(map(int, re.findall(r"\d+", matmuls))) == [row["fp8_gemms"], row["gemms"]]
        assert f">{label}<" in shown
        assert f">{ms}   {speed}×<" in shown


@pytest.mark.parametrize("page", [README, IN_CHINESE, "docs/recipes.md", "docs/audit.md"])
def test_speeds_on_an_h200(page):
    for recipe in ("delayed", "current", "block128"):
        assert f"{MEASURED[recipe]['times_bf16']['median']:.2f}" in PAGES[page]


@pytest.mark.parametrize("page", [README, IN_CHINESE])
def test_losses(page):
    for name in ("delayed", "wide-block-0", "flax-direct", "flax-qdq"):
        assert LOSSES[name] in PAGES[page]
    assert re.search(r"\b5\W+(seeds|个随机种子)", PAGES[page])


def test_the_page_on_the_audit_shows_the_results():
    shown = cells_of("docs/audit.md")
    counts = {r["contender"]: r for r in result("dense_h200")["rows"] if r["shape"] == [8192, 4096, 4096]}
    for name in ("bf16", "flax-qdq", "flax-direct", "qwix", "fp8flax", "fp8flax-triton"):
        row = counts[name]
        moved = round((row["gemm_bytes"] + row["other_bytes"]) / 2**20)
        assert any(line[2:] == [str(row["kernels"]), str(moved)] for line in shown), name
    for name, row in MEASURED.items():
        step = [f"{1e3 * row['seconds']['median']:.2f}", f"{row['times_bf16']['median']:.2f}"]
        step.append("" if name == "bf16" else f"{PREDICTED[name]['times_bf16']:.2f}")
        assert any(line[1:] == [*step, f"{row['fp8_gemms']} of {row['gemms']}"] for line in shown), name
    for shape, rows in DENSE.items():
        (line,) = (line for line in shown if line[0] == shape.replace("x", "×") and len(line) == 9)
        assert line[1] == f"{1e6 * rows['bf16']['seconds']['median']:,.0f}"
        order = ("flax-qdq", "flax-direct", "fp8flax", "fp8flax-current", "fp8flax-block128")
        for text, key in zip(line[2:], (*order, "fp8flax-axiswise", "fp8flax-mxfp8")):
            assert text == (f"{rows[key]['times_bf16']['median']:.2f}" if key in rows else "")
    ours = [row["step_ratio_to"] for row in result("step_cpu")["results"] if row["contender"] == "fp8flax"]
    of_flax = [row[other]["median"] for row in ours for other in ("flax-qdq", "flax-direct")]
    for ratios in (of_flax, [row["plain"]["median"] for row in ours]):
        assert f"{min(ratios):.2f} to {max(ratios):.2f}" in PAGES["docs/audit.md"]

"""Figures whose scripts are gone: the pages quote the records, and name the commit that measured them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from benchmarks.common import RESULTS
from tests import ROOT


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("attention", "layers"),
        ("decoding", "models"),
        ("loaders", "pytorch"),
        ("outlier", "recipes_details"),
    ],
)
def test_the_page_names_the_commit(name: str, page: str) -> None:
    (commit,) = re.findall(r"of commit ([0-9a-f]{7})\.", record(name)["record"])
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert f"commit `{commit}`" in text
    assert f"benchmarks/results/{name}.json" in text


def lines(page: str) -> list[list[str]]:
    """Returns the cells of all tables of a page."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"
    ]


def test_decoding() -> None:
    shown = lines("models")
    for row in record("decoding")["rows"]:
        sqnr = "" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"
        start = [row["activations"], row["model"], f"{100 * row['same_tokens']:.1f} %", sqnr]
        (line,) = [cells for cells in shown if cells[:4] == start]
        assert line[-1] == f"{row['variable_bytes'] / 2**20:.1f} MiB"


def test_loaders() -> None:
    shown = lines("pytorch")
    for row in (row for row in record("loaders")["rows"] if "layer_error" in row):
        start = f"`{row['recipe']}`", f"{row['sqnr_db']:.1f} dB", f"{row['nudged_sqnr_db']:.1f} dB"
        version = row["transformers"]
        assert [cells for cells in shown if (cells[0], *cells[3:5]) == start and version in cells[2]]


def test_attention() -> None:
    rows = {(row["recipe"], row["products"], row["kind"]): row for row in record("attention")["rows"]}
    shown = {cells[0]: cells[1:] for cells in lines("layers")}
    delayed, bf16 = rows["delayed", "both", "Gaussian"], rows["bf16", "none", "Gaussian"]
    for name, row in (("`products=True`, delayed scaling", delayed), ("bf16", bf16)):
        assert list(map(float, shown[name])) == pytest.approx([row["out"], row["dq"]], abs=0.6)


def test_outlier() -> None:
    rows = {(row["case"], row["rule"]): row for row in record("outlier")["rows"]}
    shown = {cells[0]: cells[1:] for cells in lines("recipes_details") if len(cells) == 4}
    names = {
        "none": "no outlier",
        "one in the input": "one in the input",
        "in ten steps": "in the input of ten steps",
        "in every 50th step": "in the input of every 50th",
        "one in the output gradient": "one in the gradient",
        "1,000 times larger from half-time": "1000 times larger from half-time",
        "1,000 times smaller from half-time": "1000 times smaller from half-time",
    }
    rules = ("float32", "max of 1024", "max of 16")
    for name, case in names.items():
        losses = [cell.partition(",")[0] for cell in shown[name]]
        assert losses == [f"{rows[case, rule]['loss']:.4f}" for rule in rules]

"""Flax's ops are off the product that their scales mean, ours are not; and the script that measures it."""

import json
import re

import jax
import pytest

from benchmarks import flax_scales
from benchmarks.flax_scales import GEMMS, OPS, measure
from tests import ROOT

SIZES, SEEDS = (32, 48, 64), 3


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_jax):
    """Flax's ops need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def off(name, dtype, gradient=1.0, after=1):
    row = measure(name, dtype, gradient, SIZES, after, SEEDS)
    return [row[gemm]["off"] for gemm in GEMMS]


@pytest.mark.parametrize("after", [1, 3])
def test_ours_multiply_what_they_mean(after):
    assert max(off("fp8flax", "bfloat16", after=after)) <= 0.3
    assert max(off("fp8flax-qdq", "bfloat16", after=after)) <= 0.5


@pytest.mark.parametrize("name", ["flax-direct", "flax-qdq"])
def test_flaxs_ops_do_not(name):
    """If this fails, Flax has changed, and what docs/accuracy.md says of it has to change too."""
    assert min(off(name, "bfloat16")) > 1.0


def test_the_script(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(flax_scales, "CASES", (("bfloat16", 1.0),))
    monkeypatch.setattr(flax_scales, "AFTER", (1,))
    path = tmp_path / "results" / "scales.json"
    flax_scales.main(["--shapes", "32x48x64", "--seeds", "2", "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["machine"].keys() >= {"cpu", "jax", "flax", "fp8flax", "ml_dtypes"}
    assert [row["op"] for row in report["summary"]] == list(OPS)
    assert len(report["rows"]) == len(OPS)
    assert capsys.readouterr().out.count("bfloat16  1.0 ") == len(OPS)


def test_the_page_has_the_figures_that_were_measured():
    report = json.loads((ROOT / "benchmarks" / "results" / "flax_scales.json").read_text())
    page = (ROOT / "docs" / "accuracy.md").read_text()
    shown = re.findall(r"^\| (?:bfloat16|float16)[^|]*\| `.*$", page, re.MULTILINE)
    assert len(shown) == len(report["summary"]) - 2  # ours have one row for both gradients of float16
    rows = [
        row for row in report["summary"] if not (row["op"].startswith("fp8flax") and row["gradient"] < 1)
    ]
    for line, row in zip(shown, rows, strict=True):
        cells = [cell.strip() for cell in line.split("|")[3:6]]
        for cell, gemm in zip(cells, GEMMS, strict=True):
            figures = row[gemm]
            if figures["off"] is None:
                assert cell == "not finite"
            else:
                assert (
                    cell == f"{figures['off']:.2f} ({figures['off, least']:.2f}–{figures['off, most']:.2f})"
                )

"""docs/pytorch.md shows what benchmarks/results/loaders.json holds; where PyTorch is, a folder loads."""

import json
import sys

import jax
import pytest

from benchmarks import loaders
from benchmarks.common import machine
from tests import ROOT

PAGE = (ROOT / "docs" / "pytorch.md").read_text()
REPORT = json.loads(loaders.RESULT.read_text())


@pytest.mark.oldest
def test_result_is_that_of_the_script():
    assert (REPORT["question"], REPORT["method"]) == (loaders.QUESTION, loaders.METHOD)
    assert set(REPORT["machine"]) == set(machine(loaders.PACKAGES, ("gpu", "cores")))
    per_version = {}
    for row in REPORT["rows"]:
        per_version.setdefault(row["transformers"], []).append(row["recipe"])
    assert sorted(version.split(".")[0] for version in per_version) == ["4", "5"]
    assert all(recipes == list(loaders.RECIPES) for recipes in per_version.values())


def test_page_shows_the_result():
    assert loaders.table(REPORT["rows"]) in PAGE
    for row in REPORT["rows"]:
        assert f"PyTorch {row['torch'].partition('+')[0]}" in PAGE
        assert f"compressed-tensors {row['compressed-tensors']}" in PAGE


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of packages that others wrote
def test_loads():
    for package in ("torch", "transformers", "accelerate", "compressed_tensors"):
        pytest.importorskip(package, reason=f"{package} is missing: see benchmarks/loaders.py")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as the model needs
        (row,) = loaders.measure(["axiswise"], [sys.executable])
    assert row["layer_error"] < 1e-6
    assert row["sqnr_to_float32_db"] == pytest.approx(row["frozen_sqnr_to_float32_db"], abs=0.5)
    assert row["sqnr_db"] > row["sqnr_to_float32_db"] + 10

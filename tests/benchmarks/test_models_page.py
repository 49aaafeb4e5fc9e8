"""The page on whole models shows the figures of benchmarks/results/models.json."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import models
from benchmarks.common import RESULTS, question_and_method
from tests import ROOT

PAGE = ROOT / "docs" / "models.md"


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads((RESULTS / "models.json").read_text())


def test_result_is_that_of_the_script(report: dict[str, Any]) -> None:
    assert (report["question"], report["method"]) == question_and_method(models.__doc__)
    assert [row["model"] for row in report["models"]] == list(models.MODELS)


def test_the_page_shows_the_result(report: dict[str, Any]) -> None:
    page = PAGE.read_text()
    assert models.table(report) in page
    shares = {
        (row["model"], left["why"].partition(",")[0]): f"{100 * left['share_of_flops']:.1f} %"
        for row in report["models"]
        for left in row["left"]
    }
    convolution = "a convolution that is not a matmul"
    for model, why in (
        ("ResNet-50", "too small to gain"),
        ("ResNet-50", convolution),
        ("Whisper", convolution),
    ):
        assert f"({shares[model, why]}" in page
    for package in ("jax", "flax", "transformers", "flaxmodels"):
        assert report["machine"][package] in page


def test_frozen_models_have_the_same_bits(report: dict[str, Any]) -> None:
    assert all(row["frozen_is_bitwise_equal"] and row["same_initial_params"] for row in report["models"])

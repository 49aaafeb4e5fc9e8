"""The accuracy benchmark measures what NumPy measures, and its committed result is that of the script."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import accuracy, common
from tests.reference_recipes import as_float64, tensorwise

GEMMS = ("forward", "dgrad", "wgrad")
SMALL = (256, 128, 192)


def test_measure_agrees_with_numpy() -> None:
    (x, w, g), exact = accuracy.data("log-normal", SMALL, 0)
    x, w, g = (
        codes.astype(np.float64) * as_float64(scale)
        for codes, scale in (tensorwise(array, "float8_e4m3fn") for array in (x, w, g))
    )
    expected = {
        gemm: 10 * np.log10(np.sum(wanted**2) / np.sum((got - wanted) ** 2))
        for gemm, wanted, got in zip(GEMMS, exact, (x @ w, g @ w.T, x.T @ g), strict=True)
    }
    assert accuracy.measure("current-e4m3", "log-normal", SMALL, 1) == pytest.approx(expected, abs=0.01)


def test_command(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(accuracy, "RECIPES", {name: accuracy.RECIPES[name] for name in ("bf16", "delayed")})
    path = tmp_path / "new" / "out.json"
    accuracy.main(["--shape", common.text_of(SMALL), "--seeds", "1", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert {(row["recipe"], row["kind"]) for row in rows} == {
        *itertools.product(accuracy.RECIPES, accuracy.KINDS)
    }


def test_committed_result_is_that_of_the_script() -> None:
    committed = json.loads((common.RESULTS / "accuracy.json").read_text())
    rows = committed["rows"]
    assert [(row["kind"], row["recipe"]) for row in rows] == [
        *itertools.product(accuracy.KINDS, accuracy.RECIPES)
    ]
    question, method = common.question_and_method(accuracy.__doc__)
    assert (committed["question"], committed["method"]) == (question, [*method, accuracy.METHOD])
    for gemm in GEMMS:
        of = {row["recipe"]: row[gemm] for row in rows if row["kind"] == "outliers"}
        assert of["block128-f32"] > of["axiswise-e4m3"] > of["current-e4m3"]

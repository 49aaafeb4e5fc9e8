"""The CPU benchmark runs, reports every figure, and the figure that needs no clock is as claimed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "step_cpu.py"
MODELS = ("mlp", "transformer")
DTYPES = ("float32", "bfloat16")
CONTENDERS = ("plain", "flax-qdq", "flax-direct", "fp8flax")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("benchmark")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--rounds", "2", "--out", "out.json"],
        cwd=folder,
        # XLA's optimizations take most of the time here and change no figure that is checked.
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return json.loads((folder / "out.json").read_text()), done.stdout


@pytest.fixture(scope="module")
def rows(run: tuple[dict[str, Any], str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    report, _ = run
    return {(row["model"], row["dtype"], row["contender"]): row for row in report["results"]}


def test_report_names_question_method_and_machine(run: tuple[dict[str, Any], str]) -> None:
    report, printed = run
    assert report["question"] in printed
    assert all(line in printed for line in report["method"])
    assert {
        "cpu",
        "cores",
        "python",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "numpy",
        "ml_dtypes",
        "fp8flax",
    } <= set(report["machine"])
    assert all(f"{name} {value}" in printed for name, value in report["machine"].items())
    assert report["rounds"] == 2


def test_every_contender_has_every_figure(rows: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    assert set(rows) == set(itertools.product(MODELS, DTYPES, CONTENDERS))
    for row in rows.values():
        summaries = [row["trace_seconds"], row["compile_seconds"], row["step_seconds"]]
        assert set(row["step_ratio_to"]) == {"plain", "flax-qdq", "flax-direct"}
        for figure in summaries + list(row["step_ratio_to"].values()):
            assert 0 < figure["min"] <= figure["median"] <= figure["max"]
        assert row["residual_bytes"] > 0
        assert len(row["step_seconds_by_round"]) == 2
        for base, ratio in row["step_ratio_to"].items():
            if base == row["contender"]:
                assert ratio == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_table_has_every_row(run: tuple[dict[str, Any], str]) -> None:
    _, printed = run
    starts = [tuple(line.split()[:3]) for line in printed.splitlines()]
    for row in itertools.product(MODELS, DTYPES, CONTENDERS):
        assert starts.count(row) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_backward_keeps_no_more_than_with_flax_qdq(
    rows: dict[tuple[str, str, str], dict[str, Any]], model: str, dtype: str
) -> None:
    kept = {name: rows[model, dtype, name]["residual_bytes"] for name in CONTENDERS}
    assert kept["fp8flax"] < min(kept["flax-qdq"], kept["flax-direct"])


def test_rejects_zero_rounds(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--rounds", "0"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "--rounds must be 1 or more" in done.stderr

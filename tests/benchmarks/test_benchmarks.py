"""The CPU benchmark runs, reports every figure, and the figure that needs no clock is as claimed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import types
import warnings
from typing import Any

import jax
import pytest

from benchmarks import common, step_cpu
from tests import ROOT
from tests.cases import residual_bytes

MODELS = ("mlp", "transformer")
DTYPES = ("float32", "bfloat16")
CONTENDERS = ("plain", "flax-qdq", "flax-direct", "fp8flax")


SMALL = {"mlp": "2x16x8", "transformer": "1x16x2x8"}
RUN = {
    "mlp": (("bfloat16",), CONTENDERS),
    "transformer": (("float32",), ("plain", "fp8flax")),
}
"""The tests run a part of each model, for time; the arrays for the backward pass are counted for all."""
PROGRAM = """
import json, sys

from benchmarks import step_cpu

models, *arguments, out = sys.argv[1:]
names, all_tasks, all_contenders = vars(step_cpu), step_cpu.TASKS, step_cpu.CONTENDERS
for model, (dtypes, contenders) in json.loads(models).items():
    names["DTYPES"] = tuple(dtypes)
    names["BASELINES"] = tuple(name for name in contenders if name != "fp8flax")
    names["TASKS"] = {model: all_tasks[model]}
    names["CONTENDERS"] = {name: all_contenders[name] for name in contenders}
    step_cpu.main([*arguments, "--json", model + out])
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, dict[str, Any]], str]:
    """The report on each model, and all that was printed."""
    folder = tmp_path_factory.mktemp("benchmark")
    arguments = [json.dumps(RUN), "--rounds", "2"]
    arguments += [word for model, sizes in SMALL.items() for word in (f"--{model}", sizes)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments, ".json"],
        cwd=folder,
        # XLA's optimizations take most of the time here and change no figure that is checked.
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return {model: json.loads((folder / f"{model}.json").read_text()) for model in RUN}, done.stdout


@pytest.fixture(scope="module")
def rows(runs: tuple[dict[str, dict[str, Any]], str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {
        (row["model"], row["dtype"], row["contender"]): row
        for report in runs[0].values()
        for row in report["results"]
    }


def rows_of_run() -> list[tuple[str, str, str]]:
    return [
        (model, *row) for model, (dtypes, names) in RUN.items() for row in itertools.product(dtypes, names)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_report_names_question_method_and_machine(
    runs: tuple[dict[str, dict[str, Any]], str], model: str
) -> None:
    reports, printed = runs
    report = reports[model]
    assert report["question"] in printed
    assert all(line in printed for line in report["method"])
    packages = {"jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "fp8flax"}
    assert {"cpu", "cores", "python", *packages} <= set(report["machine"])
    assert all(f"{name} {value}" in printed for name, value in report["machine"].items())
    assert report["arguments"] == {"rounds": 2, "mlp": [2, 16, 8], "transformer": [1, 16, 2, 8]}


def test_all_that_is_measured_without_this_choice() -> None:
    assert (tuple(step_cpu.DTYPES), tuple(step_cpu.CONTENDERS)) == (DTYPES, CONTENDERS)
    assert tuple(step_cpu.TASKS) == MODELS == tuple(RUN)
    assert set(step_cpu.BASELINES) == {"plain", "flax-qdq", "flax-direct"}


def test_committed_result_is_that_of_the_script() -> None:
    report = json.loads((common.RESULTS / "step_cpu.json").read_text())
    assert (report["question"], report["method"]) == common.question_and_method(step_cpu.__doc__)
    assert report["arguments"] == json.loads(json.dumps(step_cpu.OPTIONS))
    found = [(row["model"], row["dtype"], row["contender"]) for row in report["results"]]
    assert found == [*itertools.product(MODELS, DTYPES, CONTENDERS)]


def test_every_contender_has_every_figure(rows: dict[tuple[str, str, str], dict[str, Any]]) -> None:
    assert set(rows) == set(rows_of_run())
    for row in rows.values():
        assert set(row["step_ratio_to"]) == {*RUN[row["model"]][1]} - {"fp8flax"}
        for figure in (row["step_seconds"], *row["step_ratio_to"].values()):
            assert 0 < figure["min"] <= figure["median"] <= figure["max"]
        assert len(row["step_seconds_by_round"]) == 2
        for base, ratio in row["step_ratio_to"].items():
            if base == row["contender"]:
                assert ratio == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_table_has_every_row(runs: tuple[dict[str, dict[str, Any]], str]) -> None:
    starts = [tuple(line.split()[:3]) for line in runs[1].splitlines()]
    for row in rows_of_run():
        assert starts.count(row) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
def test_backward_keeps_no_more_than_with_flax(model: str, dtype: str) -> None:
    kept = {name: residual_bytes_of(model, dtype, name) for name in CONTENDERS}
    assert kept["fp8flax"] < min(kept["flax-qdq"], kept["flax-direct"])


def residual_bytes_of(model: str, dtype: str, contender: str) -> int:
    """Counted without running anything."""
    sizes = tuple(map(int, SMALL[model].split("x")))
    task = step_cpu.TASKS[model](sizes)
    module = task.make_model(step_cpu.CONTENDERS[contender].dot_general_cls, jax.numpy.dtype(dtype))
    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.filterwarnings("ignore", "The Fp8DotGeneralOp is deprecated", DeprecationWarning)
        variables = jax.eval_shape(module.init, jax.random.key(1), task.inputs)
        state = types.SimpleNamespace(apply_fn=module.apply)
        loss = step_cpu.make_loss(task, state, task.inputs, task.targets)
        return residual_bytes(loss, variables)


def test_rejects_zero_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_cpu.main(["--rounds", "0"])
    assert "argument --rounds: must be 1 or more" in capsys.readouterr().err

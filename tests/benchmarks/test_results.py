"""The committed results are those of the scripts: their question, method, settings and rows."""

import dataclasses
import itertools
import json

import pytest

from benchmarks import accuracy, collectives, common, dense, fidelity, recipes, step_cpu, time_model
from fp8flax._audit.times import Rates
from tests import ROOT

MORE = {accuracy: [accuracy.METHOD], dense: [dense.METHOD]}
ROWS = {
    accuracy: (("kind", "recipe"), [*itertools.product(accuracy.KINDS, accuracy.RECIPES)]),
    collectives: (
        ("layout", "recipe"),
        [*itertools.product(collectives.LAYOUTS, collectives.RECIPES)],
    ),
    dense: (
        ("shape", "contender"),
        [([*s], name) for s, name in itertools.product(dense.OPTIONS["shapes"], dense.CONTENDERS)],
    ),
    recipes: (("gpu", "width", "recipe"), recipes.cases()),
    step_cpu: (
        ("model", "dtype", "contender"),
        [*itertools.product(step_cpu.TASKS, step_cpu.DTYPES, step_cpu.CONTENDERS)],
    ),
    time_model: (
        ("entry", "program"),
        [
            (entry, name)
            for entry, rows in json.loads(time_model.MEASURED.read_text())["entries"].items()
            for name, row in rows.items()
            if "seconds" in row
        ],
    ),
}
NAMES = {accuracy: "accuracy", collectives: "collectives", dense: "dense_h200", recipes: "recipes"}
NAMES |= {step_cpu: "step_cpu", time_model: "time_model"}


def result(name):
    return json.loads((common.RESULTS / f"{name}.json").read_text())


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize("script", ROWS, ids=lambda script: script.__name__)
def test_committed_result_is_that_of_the_script(script):
    report, (keys, expected) = result(NAMES[script]), ROWS[script]
    question, method = common.question_and_method(script.__doc__)
    assert (report["question"], report["method"]) == (question, [*method, *MORE.get(script, [])])
    assert report.get("arguments", {}) == json.loads(json.dumps(getattr(script, "OPTIONS", {})))
    rows = report.get("rows") or report["results"]
    assert [tuple(row[key] for key in keys) for row in rows] == expected


def test_losses_are_those_of_the_method_and_of_the_page():
    report = result("fidelity")
    assert report["question"] == fidelity.QUESTION
    assert set(fidelity.METHOD) <= set(report["method"])
    assert fidelity.table(report["runs"]) in page("accuracy")
    assert fidelity.table_of_wide(report["runs"]) in page("accuracy")


def test_pages_show_the_committed_results():
    sent = collectives.beside_bf16(result("collectives"), "step")
    assert common.markdown(collectives.COLUMNS, sent) in page("clusters")
    assert accuracy.table(result("accuracy")) in page("accuracy")
    for target in recipes.GPUS:
        assert recipes.table(result("recipes"), target) in page("recipes")
    assert recipes.memory_table(result("recipes")) in page("recipes")


def test_the_time_model_is_the_one_that_was_fitted_and_fits():
    report = result("time_model")
    # Near the best numbers the errors hardly change.
    assert dataclasses.asdict(Rates()) == pytest.approx(report["fitted"], rel=0.02)
    for row in report["rows"]:
        if row["program"] != time_model.NOT_FITTED:
            dequantizes = "qdq" in row["program"] or "mxfp8" in row["program"]
            assert abs(row["predicted"]) < (0.1 if dequantizes else 0.06), row


@pytest.mark.long
@pytest.mark.usefixtures("gpu", "promotion_of_users")
@pytest.mark.parametrize("program", ["bf16", "flax-qdq", "fp8flax", "fp8flax-axiswise", "fp8flax-block128"])
def test_the_programs_are_still_those_of_the_time_model(program):
    entry = "dense/8192x4096x4096"
    (row,) = [r for r in result("time_model")["rows"] if (r["entry"], r["program"]) == (entry, program)]
    seconds = time_model.audit(entry, program).predicted_seconds["total"]
    assert 1e3 * seconds == pytest.approx(row["ms"] * (1 + row["predicted"]), rel=0.01)

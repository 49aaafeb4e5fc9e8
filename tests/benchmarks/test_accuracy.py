"""The accuracy benchmark measures what it says, and the recipes differ as they should."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import accuracy, common
from tests.reference_recipes import as_float64, tensorwise

RECIPES = (
    "bf16",
    "delayed",
    "current",
    "current-e4m3",
    "current-e4m3-pow2",
    "axiswise",
    "axiswise-e4m3",
    "axiswise-e4m3-pow2",
    "axiswise-hp-wgrad",
    "mxfp8",
    "mxfp8-floor",
    "block128",
    "block128-f32",
)
KINDS = ("Gaussian", "outliers", "log-normal")
GEMMS = ("forward", "dgrad", "wgrad")
SIZES = (512, 512, 512)
"""So long that a slice has more than one outlier now and then, and a block hardly ever."""
SMALL = (256, 128, 192)

# Rounding to 3 and 2 bits of mantissa leaves about 31.5 and 25.5 dB of a Gaussian tensor; a product has the
# noise of both of its operands.
E4M3, E5M2 = 31.5, 25.5


def product(*operands: float) -> float:
    return -10 * math.log10(sum(10 ** (-operand / 10) for operand in operands))


@pytest.fixture(scope="module")
def sqnr() -> Callable[[str, str], dict[str, float]]:
    """Measures each recipe on each kind of data once."""
    return functools.cache(lambda name, kind: accuracy.measure(name, kind, SIZES, 1))


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return json.loads((common.RESULTS / "accuracy.json").read_text())


@pytest.mark.parametrize("gemm", GEMMS)
def test_finer_float32_scales_are_more_accurate_on_outliers(sqnr: Any, gemm: str) -> None:
    block, axis, tensor = (
        sqnr(name, "outliers")[gemm] for name in ("block128-f32", "axiswise-e4m3", "current-e4m3")
    )
    assert block > axis + 0.1
    assert axis > tensor + 1.0


@pytest.mark.parametrize("gemm", GEMMS)
def test_finer_powers_of_two_make_no_difference_on_outliers(sqnr: Any, gemm: str) -> None:
    """They only move the exponent, and e4m3 holds these outliers and all that has power beside them."""
    tensor = sqnr("current-e4m3-pow2", "outliers")[gemm]
    for name in ("axiswise-e4m3-pow2", "mxfp8", "block128"):
        assert sqnr(name, "outliers")[gemm] == pytest.approx(tensor, abs=0.02)
    assert sqnr("axiswise-e4m3", "outliers")[gemm] > tensor + 1.0


@pytest.mark.parametrize("gemm", GEMMS)
def test_axiswise_is_more_accurate_than_tensorwise_in_hybrid_too(sqnr: Any, gemm: str) -> None:
    assert sqnr("axiswise", "outliers")[gemm] > sqnr("current", "outliers")[gemm] + 1.0


@pytest.mark.parametrize("kind", ["outliers", "log-normal"])
def test_delayed_scaling_with_true_amaxes_is_current_scaling(sqnr: Any, kind: str) -> None:
    current = sqnr("current", kind)
    assert sqnr("delayed", kind) == pytest.approx(current, abs=0.01)


def test_high_precision_wgrad(sqnr: Any) -> None:
    high, axis = sqnr("axiswise-hp-wgrad", "outliers"), sqnr("axiswise", "outliers")
    assert high["wgrad"] > 110  # float32
    assert axis["wgrad"] < 40
    assert {**high, "wgrad": 0} == {**axis, "wgrad": 0}


def expected_on_gaussian(name: str) -> tuple[float, float, float]:
    e4m3, hybrid = product(E4M3, E4M3), product(E4M3, E5M2)
    if name == "bf16":
        one = E4M3 + 4 * 20 * math.log10(2)  # e4m3 with 4 more bits of mantissa; the result is rounded, too
        return (product(one, one, one),) * 3
    if name == "axiswise-hp-wgrad":
        return e4m3, hybrid, 130.0
    if name == "mxfp8-floor":
        return (e4m3 - 1,) * 3  # the largest values of the blocks saturate
    in_hybrid = name in ("delayed", "current", "axiswise")
    return (e4m3, hybrid, hybrid) if in_hybrid else (e4m3,) * 3


@pytest.mark.parametrize("name", RECIPES)
def test_error_on_gaussian_data_is_that_of_the_format(sqnr: Any, name: str) -> None:
    for gemm, expected in zip(GEMMS, expected_on_gaussian(name), strict=True):
        tolerance = 10.0 if expected > 100 else 0.5
        assert sqnr(name, "Gaussian")[gemm] == pytest.approx(expected, abs=tolerance)


def test_floor_costs_accuracy(sqnr: Any) -> None:
    for gemm in GEMMS:
        assert sqnr("mxfp8-floor", "Gaussian")[gemm] < sqnr("mxfp8", "Gaussian")[gemm] - 0.5


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


def test_measure_averages_the_power_over_the_seeds(monkeypatch: Any) -> None:
    exact = [accuracy.data("log-normal", SMALL, seed)[1] for seed in range(2)]
    factors = iter((1.0, 1.1))
    pairs = iter(exact)

    def results(*args: Any) -> list[Any]:
        factor = next(factors)
        return [factor * array for array in next(pairs)]

    monkeypatch.setattr(accuracy, "results", results)
    measured = accuracy.measure("bf16", "log-normal", SMALL, 2)
    for i, gemm in enumerate(GEMMS):
        first, second = (np.sum(arrays[i] ** 2) for arrays in exact)
        assert measured[gemm] == pytest.approx(10 * np.log10((first + second) / (0.01 * second)))


def test_data_is_of_its_kind() -> None:
    M, K, N = SIZES
    drawn = {kind: accuracy.data(kind, SIZES, 0)[0] for kind in accuracy.KINDS}
    assert all([array.shape for array in arrays] == [(M, K), (K, N), (M, N)] for arrays in drawn.values())
    assert all(array.dtype == np.float32 for arrays in drawn.values() for array in arrays)
    for x, w, g in drawn.values():
        assert np.std(w) == pytest.approx(K**-0.5, rel=0.01)
        assert np.array_equal(w, drawn["Gaussian"][1])
        assert not np.array_equal(x, g)
    for i in (0, 2):
        assert np.std(drawn["Gaussian"][i]) == pytest.approx(1, rel=0.01)
        # A Gaussian value is above 6 once in 5e8, 100 times one in 95 % of cases.
        share = np.mean(np.abs(drawn["outliers"][i]) > 6)
        assert share == pytest.approx(0.95e-3, rel=0.3)
        logs = np.log(np.abs(drawn["log-normal"][i]) / 1e-4)
        assert (np.mean(logs), np.std(logs)) == pytest.approx((0, 2), abs=0.02)
        assert np.mean(drawn["log-normal"][i] > 0) == pytest.approx(0.5, abs=0.01)


def test_command(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    names = ("bf16", "current-e4m3")
    monkeypatch.setattr(accuracy, "RECIPES", {name: accuracy.RECIPES[name] for name in names})
    path = tmp_path / "new" / "out.json"
    accuracy.main(["--shape", common.text_of(SMALL), "--seeds", "1", "--json", str(path)])
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert report["question"] in printed
    assert all(line in printed for line in report["method"])
    assert all(f"{name} {value}" in printed for name, value in report["machine"].items())
    assert report["arguments"] == {"shape": list(SMALL), "seeds": 1}
    rows = {(row["recipe"], row["kind"]): row for row in report["rows"]}
    assert set(rows) == set(itertools.product(names, KINDS))
    lines = [line.split() for line in printed.splitlines()]
    for name in names:
        cells = [f"{rows[name, kind][gemm]:.2f}" for kind in KINDS for gemm in GEMMS]
        assert lines.count([name, *cells]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "argument --seeds: must be 1 or more"),
        (["--shape", "8x8"], "argument --shape: a shape is 3 sizes, such as 8x16x8; got '8x8'"),
        (["--shape", "8x0x8"], "argument --shape: a shape is 3 sizes"),
    ],
)
def test_rejects(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        accuracy.main(arguments)
    assert message in capsys.readouterr().err


def test_committed_result_is_that_of_the_script(committed: dict[str, Any]) -> None:
    assert tuple(accuracy.RECIPES) == RECIPES
    assert tuple(accuracy.KINDS) == KINDS
    assert [(row["kind"], row["recipe"]) for row in committed["rows"]] == [
        *itertools.product(KINDS, RECIPES)
    ]
    question, method = common.question_and_method(accuracy.__doc__)
    assert (committed["question"], committed["method"]) == (question, [*method, accuracy.METHOD])
    assert committed["arguments"] == json.loads(json.dumps(accuracy.OPTIONS))
    assert set(committed["machine"]) == set(common.machine())
    for row, gemm in itertools.product(committed["rows"], GEMMS):
        assert row[gemm] == round(row[gemm], 2)


@pytest.mark.parametrize("gemm", GEMMS)
def test_committed_order_on_outliers(committed: dict[str, Any], gemm: str) -> None:
    rows = {row["recipe"]: row[gemm] for row in committed["rows"] if row["kind"] == "outliers"}
    assert rows["block128-f32"] > rows["axiswise-e4m3"] > rows["current-e4m3"]

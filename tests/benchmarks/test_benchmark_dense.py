"""The Dense benchmark reports every row, and counts what XLA compiles for a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fp8flax
from benchmarks import common, dense
from fp8flax._audit.compiling import find_target
from tests import ROOT

HAS_QWIX = importlib.util.find_spec("qwix") is not None
CONTENDERS = (
    "bf16",
    "flax-qdq",
    "flax-direct",
    "qwix",
    "qwix-channel",
    "fp8flax",
    "fp8flax-triton",
    "fp8flax-qdq",
    "fp8flax-current",
    "fp8flax-axiswise",
    "fp8flax-mxfp8",
    "fp8flax-block128",
)
MEASURED = [name for name in CONTENDERS if HAS_QWIX or not name.startswith("qwix")]
SHAPE = (32, 32, 32)


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_jax: None) -> Iterator[None]:
    """Flax's ops and Qwix need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def keep(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves out the other contenders."""
    monkeypatch.setattr(dense, "CONTENDERS", {name: dense.CONTENDERS[name] for name in names})


@pytest.fixture(scope="module")
def gpu() -> None:
    """Skips where the compiler for GPUs is not installed."""
    try:
        find_target("h200")
    except ImportError as error:
        pytest.skip(str(error))


def run(path: Path, *names: str) -> dict[str, Any]:
    """Counts on the CPU, which needs no plugin; returns the report."""
    with pytest.MonkeyPatch.context() as patch:
        keep(patch, *names)
        dense.main(["--target", "local", "--shapes", common.text_of(SHAPE), "--json", str(path)])
    return json.loads(path.read_text())


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("bf16", "fp8flax")
    report = run(tmp_path / "new" / "out.json", *names)
    printed = capsys.readouterr().out
    assert report["question"] in printed
    assert all(line in printed for line in report["method"])
    assert {"cpu", "cores", "gpu", "python", "jax", "jaxlib", "flax", "qwix"} <= set(report["machine"])
    assert (report["machine"]["qwix"] is not None) == HAS_QWIX
    assert all(f"{name} {value}" in printed for name, value in report["machine"].items())
    assert report["arguments"] == {"target": "local", "shapes": [list(SHAPE)]}
    assert str(ROOT) not in json.dumps(report)
    assert [row["contender"] for row in report["rows"]] == [*names]
    for row in report["rows"]:
        assert row["shape"] == list(SHAPE)
        assert (row["fp8_gemms"], row["gemms"]) == (0, 3)
        assert row["gemm_bytes"] > 0
        assert row["kernels"] >= 3
        assert row["backends"]
    starts = [tuple(line.split()[:2]) for line in printed.splitlines()]
    assert [starts.count((common.text_of(SHAPE), name)) for name in names] == [1, 1]


def test_committed_result_is_that_of_the_script() -> None:
    report = json.loads((common.RESULTS / "dense_h200.json").read_text())
    question, method = common.question_and_method(dense.__doc__)
    assert (report["question"], report["method"]) == (question, [*method, dense.METHOD])
    assert report["arguments"] == json.loads(json.dumps(dense.OPTIONS))
    assert tuple(dense.CONTENDERS) == CONTENDERS
    found = [(tuple(row["shape"]), row["contender"]) for row in report["rows"]]
    assert found == [*itertools.product(dense.OPTIONS["shapes"], CONTENDERS)]


def test_qwix_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "qwix", None)
    rows = {row["contender"]: row for row in run(tmp_path / "out.json", "bf16", "qwix")["rows"]}
    assert rows["qwix"]["not_measured"] == "qwix is not installed"
    assert "gemms" in rows["bf16"]
    assert "not measured: qwix is not installed" in capsys.readouterr().out


def test_counts_without_the_compiler_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Compiling needs jax-cuda13-plugin.\nmore")

    keep(monkeypatch, "bf16", "fp8flax")
    monkeypatch.setattr(fp8flax, "audit", refuse)
    rows = dense.measure("h200", [SHAPE])["rows"]
    assert [row["not_measured"] for row in rows] == ["Compiling needs jax-cuda13-plugin."] * 2


@pytest.mark.parametrize("name", MEASURED)
def test_counts_for_a_gpu(gpu: None, name: str) -> None:
    shape = (64, 32, 128)
    elements = 64 * 32 + 32 * 128 + 64 * 128
    with common.quiet():
        row = dense.count(name, shape, "h200")
    in_fp8 = name != "bf16" and not name.endswith(("qdq", "mxfp8"))
    assert row["gemms"] == 3
    if jax.__version_info__ >= (0, 10) or not name.startswith("flax"):  # XLA found some of Flax's before
        assert row["fp8_gemms"] + row["maybe_fp8_gemms"] == (3 if in_fp8 else 0)
        assert row["maybe_fp8_gemms"] == 0 or row["backends"] == ["Triton"]
    if name.startswith("fp8flax") and not name.endswith("qdq"):
        others = {
            "fp8flax-triton": "Triton",
            "fp8flax-mxfp8": "Triton",
            "fp8flax-block128": "Pallas",
        }
        assert row["backends"] == [others.get(name, "cublasLt")]
    if name == "bf16":
        assert (row["gemm_bytes"], row["other_bytes"]) == (6 * elements, 0)
    if name == "fp8flax-triton":
        np.testing.assert_allclose(row["gemm_bytes"], 4 * elements, rtol=0.01)


def test_interleaved_rotates_after_warm_up() -> None:
    order: list[str] = []
    seconds = common.interleaved({name: lambda name=name: order.append(name) for name in "abc"}, 2)
    assert "".join(order) == "abcbcacababc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2, "c": 2}


def test_reasons_name_no_folders() -> None:
    error = RuntimeError("cannot open /home/someone/lib.so of jax/jaxlib\nmore")
    assert common.reason_of(error) == "RuntimeError: cannot open lib.so of jax/jaxlib"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "8x8"], "argument --shapes: a shape is 3 sizes"),
        (["--shapes", "8x16x8", "8x0x8"], "argument --shapes: a shape is 3 sizes"),
    ],
)
def test_rejects(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dense.main(arguments)
    assert message in capsys.readouterr().err

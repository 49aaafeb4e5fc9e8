"""The Dense benchmark reports every row, and counts what XLA compiles for a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import common, dense
from fp8flax._audit.compiling import find_target
from tests.cases import cells

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
IN_CI = ("bf16", "fp8flax", "fp8flax-block128")
SHAPE = (32, 32, 32)


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_jax: None) -> Iterator[None]:
    """Flax's ops and Qwix need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.long
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts on the CPU, which needs no plugin."""
    names = ("bf16", "fp8flax")
    monkeypatch.setattr(dense, "CONTENDERS", {name: dense.CONTENDERS[name] for name in names})
    path = tmp_path / "new" / "out.json"
    dense.main(["--target", "local", "--shapes", common.text_of(SHAPE), "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["contender"] for row in rows] == [*names]
    assert [(row["fp8_gemms"], row["gemms"]) for row in rows] == [(0, 3)] * 2
    assert all(row["gemm_bytes"] > 0 and row["kernels"] >= 3 and row["backends"] for row in rows)


@pytest.fixture(scope="module")
def gpu() -> None:
    """Skips where the compiler for GPUs is not installed."""
    try:
        find_target("h200")
    except ImportError as error:
        pytest.skip(str(error))


def test_committed_result_is_that_of_the_script() -> None:
    report = json.loads((common.RESULTS / "dense_h200.json").read_text())
    question, method = common.question_and_method(dense.__doc__)
    assert (report["question"], report["method"]) == (question, [*method, dense.METHOD])
    assert report["arguments"] == json.loads(json.dumps(dense.OPTIONS))
    assert tuple(dense.CONTENDERS) == CONTENDERS
    found = [(tuple(row["shape"]), row["contender"]) for row in report["rows"]]
    assert found == [*itertools.product(dense.OPTIONS["shapes"], CONTENDERS)]


@pytest.mark.parametrize("name", cells(MEASURED, repeated=[n for n in MEASURED if n not in IN_CI]))
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

"""The Dense benchmark reports every row, and what it runs on GPUs is what it says."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import sys
import types
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
RUN = ("bf16", "qwix", "fp8flax")
"""What the tests run, for time; all are compiled for a GPU, each in a test of its own."""
MEASURED = [name for name in CONTENDERS if HAS_QWIX or not name.startswith("qwix")]
SHAPE = (32, 32, 32)
CPU_SHAPE = (16, 32, 16)


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_jax: None) -> Iterator[None]:
    """Flax's ops and Qwix need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def little_optimization() -> Iterator[None]:
    """Compiles for the CPU in less time; no figure that is checked there depends on it."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def keep(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves out the other contenders."""
    entrants = dense.contenders()
    monkeypatch.setattr(dense, "contenders", lambda: {name: entrants[name] for name in names})


@pytest.fixture(scope="module")
def gpu() -> None:
    """Skips where the compiler for GPUs is not installed."""
    try:
        find_target("h200")
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Runs all parts with some contenders; the counts are those of the CPU, which needs no plugin."""
    path = tmp_path_factory.mktemp("benchmark") / "new" / "out.json"
    arguments = ["--target", "local", "--shapes", common.text_of(SHAPE), "--rounds", "2"]
    arguments += ["--cpu-shape", common.text_of(CPU_SHAPE), "--json", str(path)]
    with (
        pytest.MonkeyPatch.context() as patch,
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        little_optimization(),
    ):
        patch.setattr(dense, "COMPILATIONS", 1)
        keep(patch, *RUN)
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *a, sep=" ", **_: lines.append(sep.join(map(str, a))))
        dense.main(arguments)
    return json.loads(path.read_text()), "\n".join(lines)


def rows_of(report: dict[str, Any], part: str) -> dict[tuple[tuple[int, ...], str], dict[str, Any]]:
    return {(tuple(row["shape"]), row["contender"]): row for row in report["rows"] if row["part"] == part}


def test_report_names_question_method_machine_and_arguments(run: tuple[dict[str, Any], str]) -> None:
    report, printed = run
    assert report["question"] in printed
    assert all(line in printed for line in report["method"])
    method = "\n".join(report["method"])
    assert all(formula in method for formula in ("S = MK + KN + MN", "6S", "4S", "6MKN", "2MKN"))
    assert {"cpu", "cores", "gpu", "python", "jax", "jaxlib", "flax", "qwix"} <= set(report["machine"])
    assert (report["machine"]["qwix"] is not None) == HAS_QWIX
    assert all(f"{name} {value}" in printed for name, value in report["machine"].items())
    assert report["arguments"] == {
        "target": "local",
        "shapes": [list(SHAPE)],
        "cpu_shape": list(CPU_SHAPE),
        "rounds": 2,
        "part": "all",
    }
    assert str(ROOT) not in json.dumps(report)


def test_every_part_has_every_row(run: tuple[dict[str, Any], str]) -> None:
    report, printed = run
    assert tuple(dense.contenders()) == CONTENDERS
    assert set(rows_of(report, "counts")) == set(itertools.product([SHAPE], RUN))
    assert set(rows_of(report, "cpu")) == set(itertools.product([CPU_SHAPE], RUN))
    assert set(rows_of(report, "gpu")) == set(itertools.product([SHAPE], (*RUN, "ceiling", "torch")))
    starts = [tuple(line.split()[:2]) for line in printed.splitlines()]
    for shape, name in itertools.product((SHAPE, CPU_SHAPE), RUN):
        assert starts.count(("x".join(map(str, shape)), name)) == 1


def test_counts_on_a_cpu(run: tuple[dict[str, Any], str]) -> None:
    rows = rows_of(run[0], "counts")
    for name in {*RUN} & {*MEASURED}:
        row = rows[SHAPE, name]
        assert (row["fp8_gemms"], row["gemms"]) == (0, 3)
        assert row["gemm_bytes"] > 0
        assert row["kernels"] >= 3
        assert row["backends"]


def test_cpu_times_are_ratios_of_one_run(run: tuple[dict[str, Any], str]) -> None:
    rows = rows_of(run[0], "cpu")
    for name, figure in itertools.product({*RUN} & {*MEASURED}, ("trace", "compile", "step")):
        row = rows[CPU_SHAPE, name]
        for summary in (row[f"{figure}_seconds"], row[f"{figure}_ratio_to_bf16"]):
            assert 0 < summary["min"] <= summary["median"] <= summary["max"]
        if name == "bf16":
            assert row[f"{figure}_ratio_to_bf16"] == {"median": 1.0, "min": 1.0, "max": 1.0}


@pytest.mark.skipif(jax.devices()[0].platform == "gpu", reason="there is a GPU")
def test_gpu_rows_without_a_gpu(run: tuple[dict[str, Any], str]) -> None:
    report, printed = run
    reasons = {row["not_measured"] for row in rows_of(report, "gpu").values()}
    assert reasons == {"JAX's first device is a CPU, not a GPU"}
    assert "not measured: JAX's first device is a CPU" in printed


def test_qwix_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(monkeypatch, "bf16", "qwix")
    monkeypatch.setitem(sys.modules, "qwix", None)
    path = tmp_path / "out.json"
    dense.main(["--target", "local", "--part", "counts", "--shapes", "16x16x16", "--json", str(path)])
    rows = rows_of(json.loads(path.read_text()), "counts")
    assert rows[(16, 16, 16), "qwix"]["not_measured"] == "qwix is not installed"
    assert "gemms" in rows[(16, 16, 16), "bf16"]
    assert "not measured: qwix is not installed" in capsys.readouterr().out


def test_counts_without_the_compiler_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Compiling needs jax-cuda13-plugin.\nmore")

    keep(monkeypatch, "bf16", "fp8flax")
    monkeypatch.setattr(fp8flax, "audit", refuse)
    rows = dense.counts([SHAPE], "h200")
    assert [row["not_measured"] for row in rows] == ["Compiling needs jax-cuda13-plugin."] * 2
    expected = "all of part counts: not measured: Compiling needs jax-cuda13-plugin."
    assert dense.table("counts", rows) == expected


@pytest.mark.parametrize("name", MEASURED)
def test_counts_for_a_gpu(gpu: None, name: str) -> None:
    shape = (64, 32, 128)
    with common.quiet():
        row = dense.count(name, dense.contenders()[name], shape, "h200")
    # In small tiles of XLA's own, Hopper multiplies in float16, as scales per 32 columns are.
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
        assert (row["gemm_bytes"], row["other_bytes"]) == (6 * dense.elements(shape), 0)
    if name == "fp8flax-triton":
        np.testing.assert_allclose(row["gemm_bytes"], 4 * dense.elements(shape), rtol=0.01)


def test_loop_of_the_ceiling_keeps_every_step(gpu: None) -> None:
    preset = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
    carry = jax.eval_shape(lambda: dense.initial_ceiling((64, 32, 128)))
    report = fp8flax.audit(dense.repeated_ceiling(preset, 10), carry)
    assert [(gemm.backend, gemm.trip_count) for gemm in report.gemms] == [("cublasLt", 10)]
    assert report.gemms[0].is_fp8


def test_steps_hand_on_the_scaling_state() -> None:
    queued: list[float] = []
    with common.quiet(), little_optimization():
        layer, args = dense.arguments(dense.contenders()["fp8flax"], (16, 32, 16))
        step = jax.jit(dense.make_step(layer))
        run = dense.threaded(step, args, 2, queued)
        results = [run(), run()][1]
    assert len(queued) == 2
    histories = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(results[1])
        if "amax_history" in jax.tree_util.keystr(path)
    ]
    assert len(histories) == 3
    for history in histories:
        assert (np.asarray(history) > 0).sum() == 4


def test_timing_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU in the place of the GPU."""
    names = ("bf16", "fp8flax")
    keep(monkeypatch, *names)
    with common.quiet(), little_optimization():
        device = jax.devices("cpu")[0]
        rows = {row["contender"]: row for row in dense.on_device((16, 32, 16), 2, device, 2)}
    assert list(rows) == [*names, "ceiling", "torch"]
    for name in (*names, "ceiling"):
        row = rows[name]
        assert row["tflops"]["median"] > 0
        flops = (2 if name == "ceiling" else 6) * 16 * 32 * 16
        np.testing.assert_allclose(row["tflops"]["max"], 1e-12 * flops / row["step_seconds"]["min"])
        assert (row["step_ratio_to_bf16"] is None) == (name == "ceiling")
        assert row["share_of_ceiling"]["median"] > 0
        assert (row["queued_seconds"] is None) == (name == "ceiling")
    assert rows["ceiling"]["share_of_ceiling"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert "not_measured" in rows["torch"] or rows["torch"]["step_ratio_to_bf16"] is None
    text = dense.table("gpu", list(rows.values()))
    assert "of ceiling" in text
    assert len(text.splitlines()) == 1 + len(rows)


class _Device:
    """Says how much memory it gave out at most, as a GPU does."""

    def __init__(self, *peaks: int) -> None:
        self.peaks = iter(peaks)

    def memory_stats(self) -> dict[str, int]:
        return {"peak_bytes_in_use": next(self.peaks)}


def test_peaks_hide_smaller_ones() -> None:
    shapes = [(16, 16, 16)] * 3
    with common.quiet():
        assert dense.peaks("bf16", shapes, _Device(10, 10, 30)) == [10, None, 30]


def test_peaks_of_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], **kwargs: Any) -> Any:
        commands.append(command)
        return dense.subprocess.CompletedProcess(command, 0, "noise\n[5, null]\n", "")

    monkeypatch.setattr(dense.subprocess, "run", run)
    assert dense.peaks_of_fresh_process("fp8flax", [(32, 32, 32), (16, 16, 16)]) == {
        (16, 16, 16): 5,
        (32, 32, 32): None,
    }
    assert commands[0][3:] == ["--peaks-of", "fp8flax", "--shapes", "16x16x16", "32x32x32"]


def test_gpu_rows_hold_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_device(shape: tuple[int, ...], *args: Any) -> list[dict[str, Any]]:
        rows = [
            {"shape": list(shape), "contender": name, "peak_bytes": None} for name in ("bf16", "ceiling")
        ]
        return [*rows, dense.not_measured("gpu", shape, "fp8flax", "out of memory")]

    keep(monkeypatch, "bf16", "fp8flax")
    monkeypatch.setattr(dense, "on_device", on_device)
    monkeypatch.setattr(dense, "peaks_of_fresh_process", lambda name, shapes: dict.fromkeys(shapes, 7))
    monkeypatch.setattr(dense.jax, "devices", lambda: [types.SimpleNamespace(platform="gpu")])
    rows = dense.on_gpu([SHAPE, CPU_SHAPE], 2)
    assert [row.get("peak_bytes") for row in rows] == [7, None, None] * 2
    assert rows[2]["not_measured"] == "out of memory"


def test_command_of_that_process(capsys: pytest.CaptureFixture[str]) -> None:
    dense.main(["--peaks-of", "fp8flax", "--shapes", "16x16x16"])
    peaks = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(peaks) == 1


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
        (["--rounds", "0"], "--rounds must be 1 or more"),
        (["--shapes", "8x8"], "a shape is written MxKxN"),
        (["--cpu-shape", "8x0x8"], "a shape is written MxKxN"),
        (["--target", "tpu"], "invalid choice"),
    ],
)
def test_rejects(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dense.main(arguments)
    assert message in capsys.readouterr().err

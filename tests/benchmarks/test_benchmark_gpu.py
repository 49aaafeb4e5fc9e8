"""The benchmark for a GPU loses nothing that it measured, goes on after a kill, runs in small on CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import common, dense, gpu, gpu_entries, gpu_programs
from benchmarks.gpu_entries import Entry
from fp8flax._audit.compiling import find_target

MACHINE = {"gpu": None, **dict.fromkeys(gpu.VERSIONS, "1")}
SMALL = {entry.name: entry for entry in gpu_entries.entries(is_small=True)}
IN_CI = ("gemm/16x16x16",)
"""The others are measured with --all-cells."""


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_jax: None) -> Iterator[None]:
    """Flax's layers in bfloat16 need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def store(tmp_path: Path) -> gpu.Store:
    return gpu.Store(tmp_path / "results" / "out.json", MACHINE, "a machine")


def entry(name: str, measure: Any = None, expected: float = 1) -> Entry:
    rows = {"rows": {"program": {"seconds": {"median": 1e-6}}}}
    return Entry(name, dict, measure or (lambda at: rows), expected)


def statuses(store: gpu.Store) -> dict[str, str]:
    return {name: e["status"] for name, e in store.entries.items()}


def run(monkeypatch: pytest.MonkeyPatch, store: gpu.Store, every: list[Entry], *arguments: str) -> int:
    """Runs the command with these entries, on the machine of the store."""
    monkeypatch.setattr(gpu, "entries", lambda is_small: every)
    monkeypatch.setattr(gpu.common, "machine", lambda *args: {**MACHINE, "gpu": "a machine"})
    return gpu.main(["--json", str(store.path), *arguments])


# The file.


@pytest.mark.long
def test_results_of_other_versions_stay_apart(store: gpu.Store) -> None:
    other = gpu.Store(store.path, {**MACHINE, "jax": "2"}, "NVIDIA H200")
    gpu.measure(entry("a"), store)
    gpu.measure(entry("a", lambda at: {"rows": {}}), other)
    runs = json.loads(store.path.read_text())["runs"]
    assert list(runs) == [store.key, other.key]
    assert other.key.startswith("NVIDIA H200, jax 2, jaxlib 1")
    assert [len(run["entries"]["a"]["result"]["rows"]) for run in runs.values()] == [1, 0]


def test_file_is_replaced_as_a_whole(store: gpu.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", {"status": "done"})
    before = store.path.read_text()
    monkeypatch.setattr(gpu.os, "replace", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.put("b", {"status": "done"})
    assert store.path.read_text() == before


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"runs": {"a": {}}}'])
def test_a_file_that_is_not_ours(store: gpu.Store, text: str) -> None:
    store.path.parent.mkdir()
    store.path.write_text(text)
    with pytest.raises(SystemExit, match=r"out\.json holds no results of this benchmark"):
        store.put("a", {})
    assert store.path.read_text() == text


def fail(at: gpu_programs.At) -> Any:
    raise ValueError("this /long/path/lib.so\nmore")


def test_an_entry_that_fails_leaves_its_message(store: gpu.Store) -> None:
    for one in (entry("a"), entry("b", fail), entry("c")):
        gpu.measure(one, store)
    assert statuses(store) == {"a": "done", "b": "failed", "c": "done"}
    assert store.entries["b"]["error"] == "ValueError: this lib.so"


def test_a_program_that_fails_leaves_the_others() -> None:
    def refused() -> gpu_programs.Program:
        raise RuntimeError("XLA refuses")

    x = jax.ShapeDtypeStruct((4,), np.float32)
    programs = {"bad": refused, "good": lambda: gpu_programs.looped(lambda x: x + 1, x, 2)}
    rows = gpu_programs.measure_timed(programs, "good", lambda program: None)["rows"]
    assert rows["bad"] == {"not_measured": "RuntimeError: XLA refuses"}
    assert rows["good"]["times_base"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    with pytest.raises(common.NotMeasuredError, match="RuntimeError: XLA refuses"):
        gpu_programs.measure_timed({"bad": refused}, None, lambda program: None)


# A run, and the next.


def test_what_is_done_is_not_measured_again(store: gpu.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def measuring(name: str) -> Entry:
        return entry(name, lambda at: order.append(name) or {"rows": {}})

    store.put("a", {"status": "failed", "error": "before"})
    store.put("b", {"status": "done", "result": {"rows": {}}})
    every = [measuring(name) for name in "abc"]
    assert run(monkeypatch, store, every) == 0
    assert order == ["c", "a"]  # what failed before comes last
    assert run(monkeypatch, store, every) == 0
    assert run(monkeypatch, store, every, "--only", "b", "--redo") == 0
    assert order == ["c", "a", "b"]


def test_the_program_that_ended_a_process_is_left_out(store: gpu.Store) -> None:
    def measure(at: gpu_programs.At) -> Any:
        rows: dict[str, Any] = {}
        for name in ("good", "bad", "worse"):
            try:
                at(name)
                rows[name] = {}
            except common.NotMeasuredError as error:
                rows[name] = {"not_measured": str(error)}
        return {"rows": rows}

    def again(**running: Any) -> list[Any]:
        """Measures anew after a process that left this behind."""
        store.put("a", {"status": "running", **running})
        gpu.measure(entry("a", measure), store)
        return [*store.entries["a"]["result"]["rows"].values()]

    ended = {"not_measured": "the process that measured it ended twice"}
    assert again(at="bad") == [{}, {}, {}]  # it may have been killed
    assert store.entries["a"]["ended"] == {"bad": 1}
    assert again(at="bad", ended={"bad": 1}) == [{}, ended, {}]
    assert again(at="worse", ended={"bad": 2}) == [{}, ended, {}]
    assert again(at="worse", ended={"bad": 2, "worse": 1}) == [{}, ended, ended]


def test_the_time_is_kept(
    store: gpu.Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [entry("a", expected=4), entry("b", expected=50), entry("c", fail, expected=4)]
    assert run(monkeypatch, store, every, "--budget", "10") == 1
    assert statuses(store) == {"a": "done", "c": "failed"}
    printed = capsys.readouterr().out
    assert "Not yet measured; run again to go on: b." in printed
    assert "Failed, with the reason in the file: c." in printed


@pytest.mark.long
def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", "--json", str(path)]
    command += ["--only", "gemm", "values-experts"]

    def seen() -> dict[str, Any]:
        runs = json.loads(path.read_text())["runs"] if path.exists() else {}
        return next(iter(runs.values()))["entries"] if runs else {}

    process = subprocess.Popen(command, cwd=gpu.ROOT, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while seen().get("gemm/16x16x16", {}).get("status") != "done":
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.kill()
    process.wait()
    before = seen()
    assert before.get("values-experts/block128", {}).get("status") != "done"
    assert subprocess.run(command, cwd=gpu.ROOT, stdout=subprocess.DEVNULL).returncode == 0
    assert {e["status"] for e in seen().values()} == {"done"}
    assert len(seen()) == 3
    assert seen()["gemm/16x16x16"] == before["gemm/16x16x16"]


# The command.


@pytest.mark.skipif(jax.devices()[0].platform == "gpu", reason="there is a GPU")
def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert gpu.main(["--json", str(path)]) == 2
    assert "JAX's first device is a CPU, not a GPU" in capsys.readouterr().err
    assert not path.exists()


def test_rejects_a_name_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="No entry is called 'val'. There are values, gemm,"):
        gpu.main(["--small", "--json", str(tmp_path / "out.json"), "--only", "val"])


def test_table_shows_what_was_predicted_beside_what_was_measured() -> None:
    row = {"seconds": {"median": 2e-6}, "times_base": {"median": 1.5}, "predicted_seconds": 4e-6}
    seen = {
        "dense/x": {"status": "done", "result": {"rows": {"fp8flax": {**row, "states_that_differ": 3}}}},
        "gemm/x": {"status": "failed", "error": "refused"},
    }
    ahead = {"dense/x": {"result": {"rows": {"fp8flax": {"predicted_seconds": 5e-6}}}}}
    first, second = gpu.rows_of(seen, ahead)
    cells = {name: cell(first) for name, cell in gpu.COLUMNS.items()}
    assert {name: text for name, text in cells.items() if text} == {
        "entry": "dense/x",
        "program": "fp8flax",
        "remark": "3 elements of states differ",
        "us": "2.0",
        "times base": "1.50",
        "predicted us": "4.0",
        "ahead us": "5.0",
    }
    assert gpu.COLUMNS["remark"](second) == "refused"


def test_the_prediction_on_the_page_is_that_of_the_result() -> None:
    page = (gpu.ROOT / "docs" / "serving.md").read_text()
    entry = gpu.predictions(common.RESULTS / "h200_ahead.json")["decode/batch-32"]
    rows = entry["result"]["rows"]
    shown = [
        f"{1e3 * rows[name]['predicted_seconds']:.2f} ms" for name in ("fp8", "fp8-weight-only", "bf16")
    ]
    assert f"| {' | '.join(shown)} |" in page


# The entries.


def check_small(entries: dict[str, Any]) -> None:
    for name, e in entries.items():
        assert e["status"] == "done", (name, e)
        for program, row in e["result"]["rows"].items():
            assert "predicted_seconds" not in row  # of a GPU
            if program.startswith("qwix") and "not_measured" in row:
                continue
            assert "not_read" not in row, row["not_read"]
            assert row["kernels"] > 0
            assert not any(gemm["backend"] == "cublasLt" for gemm in row["gemms"])
            if name.startswith("values"):
                assert row["states_that_differ"] == 0
                assert all(row[gemm] < 1e-6 for gemm in common.GEMMS)
            else:
                assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]


def measure_small(store: gpu.Store, names: Any) -> None:
    for name in names:
        gpu.measure(SMALL[name], store)
    check_small(store.entries)
    text = common.text_table(gpu.COLUMNS, gpu.rows_of(store.entries, {}), 4)
    assert all(name in text for name in names)


@pytest.mark.oldest
def test_small(store: gpu.Store) -> None:
    measure_small(store, IN_CI)
    rows = store.entries["gemm/16x16x16"]["result"]["rows"]
    assert rows["bf16"]["times_base"]["median"] == 1.0
    for row in rows.values():
        assert row["tflops"]["max"] == pytest.approx(2e-12 * 16**3 / row["seconds"]["min"])
        assert len(row["gemms"]) == 1


@pytest.mark.usefixtures("_all_cells")
def test_small_of_everything_else(store: gpu.Store) -> None:
    measure_small(store, [name for name in SMALL if name not in IN_CI])


def test_values_are_compared_with_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes something else is seen."""
    compile_here = gpu_programs.compiled_here

    def wrong(program: gpu_programs.Program) -> Any:
        compiled = compile_here(program)

        class Wrong:
            as_text, memory_analysis = compiled.as_text, compiled.memory_analysis

            def __call__(self, *args: Any) -> Any:
                out, variables, dx = compiled(*args)
                changed = {**variables, common.OWG: jax.tree.map(lambda x: x * 2, variables[common.OWG])}
                return 1.01 * out, changed, dx

        return Wrong()

    monkeypatch.setattr(gpu_programs, "compiled_here", wrong)
    (row,) = SMALL["values/delayed"].measure(lambda program: None)["rows"].values()
    assert row["forward"] == pytest.approx(0.01, rel=0.3)
    assert row["states_that_differ"] > 0


def test_every_shape_and_contender_is_an_entry() -> None:
    entries = {entry.name: entry for entry in gpu_entries.entries()}
    assert len(entries) == len(gpu_entries.entries())
    te = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))
    shapes = (*dense.OPTIONS["shapes"], *((15872, k, n) for k, n in te))
    assert {f"dense/{common.text_of(shape)}" for shape in shapes} <= set(entries)
    assert set(entries["dense/8192x4096x4096"].programs()) == set(dense.CONTENDERS)
    assert set(entries["model/bytes-800m"].programs()) == {"bf16", "delayed", "current"}
    assert {name.partition("/")[0] for name in entries} == {name.partition("/")[0] for name in SMALL}


def read_ahead(program: gpu_programs.Program) -> common.Row:
    compiled = gpu_programs.compiled_ahead(program)
    return gpu_programs.reading(compiled, program.steps, find_target("h200"))


@pytest.mark.usefixtures("gpu")
def test_a_loop_for_a_gpu_repeats_the_whole_step() -> None:
    program = gpu_entries.gemm_programs((4096, 4096, 4096))["fp8-fast"]()
    row = read_ahead(program)
    (gemm,) = row["gemms"]
    assert (gemm["backend"], gemm["accumulation"], gemm["times"]) == ("cublasLt", "fast", 1.0)
    assert row["fp8_flops_share"] == 1.0
    assert row["bytes"] == pytest.approx(program.bytes, rel=0.01)


@pytest.mark.usefixtures("_all_cells", "gpu")
@pytest.mark.parametrize("name", ["bf16", "fp8flax"])
def test_a_dense_layer_for_a_gpu_repeats_the_whole_step(name: str) -> None:
    shape = (2048, 2048, 2048)
    row = read_ahead(gpu_entries.dense_programs(shape, (name,))[name]())
    with common.quiet():
        alone = dense.count(name, shape, "h200")
    assert [gemm["times"] for gemm in row["gemms"]] == [1.0] * 3
    assert alone["kernels"] < row["kernels"] < alone["kernels"] + 8  # copies, and the loop's counter
    assert row["bytes"] == pytest.approx(alone["gemm_bytes"] + alone["other_bytes"], rel=0.01)


@pytest.mark.usefixtures("_all_cells", "gpu")
def test_a_training_step_for_a_gpu_fits() -> None:
    """Three train states are there at the same time, and the temporaries of one step."""
    row = read_ahead(gpu_entries.model_programs(gpu_entries.WIDE)["delayed"]())
    assert row["program_bytes"] < 0.5 * 139 * 2**30
    assert row["fp8_flops_share"] > 0.8

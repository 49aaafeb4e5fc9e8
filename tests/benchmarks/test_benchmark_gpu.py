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
import pytest

from benchmarks import common, dense, gpu, gpu_entries, gpu_programs
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

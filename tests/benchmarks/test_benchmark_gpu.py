"""The benchmark for a GPU runs in small on CPUs, and its predictions are those of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks import common, gpu, gpu_entries, gpu_programs
from fp8flax._audit.compiling import find_target
from tests.cases import cells

MACHINE = {"gpu": None, **dict.fromkeys(gpu.VERSIONS, "1")}
SMALL = {entry.name: entry for entry in gpu_entries.entries(is_small=True)}


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_jax: None) -> Iterator[None]:
    """Flax's layers in bfloat16 need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def store(tmp_path: Path) -> gpu.Store:
    return gpu.Store(tmp_path / "results" / "out.json", MACHINE, "a machine")


def test_the_prediction_on_the_page_is_that_of_the_result() -> None:
    page = (gpu.ROOT / "docs" / "serving.md").read_text()
    entry = gpu.predictions(common.RESULTS / "h200_ahead.json")["decode/batch-32"]
    rows = entry["result"]["rows"]
    shown = [
        f"{1e3 * rows[name]['predicted_seconds']:.2f} ms" for name in ("fp8", "fp8-weight-only", "bf16")
    ]
    assert f"| {' | '.join(shown)} |" in page


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


@pytest.mark.newest
@pytest.mark.parametrize("name", cells(SMALL, repeated=[name for name in SMALL if name != "gemm/16x16x16"]))
def test_small(name: str, store: gpu.Store) -> None:
    gpu.measure(SMALL[name], store)
    check_small(store.entries)
    assert name in common.text_table(gpu.COLUMNS, gpu.rows_of(store.entries, {}), 4)


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

"""The benchmark for a GPU loses nothing that it measured, goes on after a kill, runs in small on CPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fp8flax as fp8
from benchmarks import common, dense, gpu, gpu_entries
from benchmarks.gpu_entries import FULL, SMALL, Entry
from fp8flax._audit.compiling import find_target
from tests import reference_recipes

MACHINE = {"gpu": None, **dict.fromkeys(gpu.VERSIONS, "1")}
SMALL_ENTRIES = {entry.name: entry for entry in gpu_entries.entries(SMALL)}
# One of each kind; the others are measured with --all-cells.
IN_CI = ("values/delayed", "gaps/graphs")


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_jax: None) -> Iterator[None]:
    """Flax's layers in bfloat16 need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def store(tmp_path: Path) -> gpu.Store:
    return gpu.Store(tmp_path / "results" / "out.json", "a machine", MACHINE)


def entry(name: str, **options: Any) -> Entry:
    return Entry(**{"name": name, "measure": lambda progress: {"figure": name}, "expected": 1, **options})


def statuses(store: gpu.Store) -> dict[str, str]:
    return {name: e["status"] for name, e in store.entries.items()}


# What is written.


def test_results_of_other_versions_stay_apart(store: gpu.Store) -> None:
    other = gpu.Store(store.path, gpu.key_of({**MACHINE, "gpu": "NVIDIA H200", "jax": "2"}), MACHINE)
    gpu.measure(entry("a"), store)
    gpu.measure(entry("a", measure=lambda _: {"figure": 2}), other)
    runs = json.loads(store.path.read_text())["runs"]
    assert list(runs) == ["a machine", other.key]
    assert other.key.startswith("NVIDIA H200, jax 2, jaxlib 1")
    assert [run["entries"]["a"]["result"]["figure"] for run in runs.values()] == ["a", 2]
    assert len(store.entries["a"]["source"]) == 12


def test_file_is_replaced_as_a_whole(store: gpu.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", {"status": "done"})
    before = store.path.read_text()
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(gpu.os, name, lambda *a: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                store.put("b", {"status": "done"})
        assert store.path.read_text() == before
        assert [path.name for path in store.path.parent.iterdir()] == ["out.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"rows": []}', '{"runs": {"a": {}}}'])
def test_a_file_that_is_not_ours(store: gpu.Store, text: str) -> None:
    store.path.parent.mkdir()
    store.path.write_text(text)
    with pytest.raises(SystemExit, match=r"out\.json holds no results of this benchmark"):
        store.put("a", {})
    assert store.path.read_text() == text


def test_an_entry_that_fails_leaves_its_message(store: gpu.Store) -> None:
    def fail(progress: gpu_entries.Progress) -> Any:
        raise ValueError("this /long/path/lib.so\nmore")

    for one in (entry("a"), entry("b", measure=fail), entry("c")):
        gpu.measure(one, store)
    assert statuses(store) == {"a": "done", "b": "failed", "c": "done"}
    assert store.entries["b"]["error"] == "ValueError: this lib.so"


def test_a_program_that_fails_leaves_the_others() -> None:
    def refused() -> gpu_entries.Timed:
        raise RuntimeError("XLA refuses")

    x = jax.ShapeDtypeStruct((4,), np.float32)
    loops = {"bad": refused, "good": lambda: gpu_entries.looped(lambda x: x + 1, x, 2)}
    rows = gpu_entries.measure_timed(SMALL, loops, "good", gpu_entries.Progress())["rows"]
    assert rows["bad"] == {"not_measured": "RuntimeError: XLA refuses"}
    assert rows["good"]["times_base"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    with pytest.raises(common.NotMeasuredError, match="RuntimeError: XLA refuses"):
        gpu_entries.measure_timed(SMALL, {"bad": refused}, None, gpu_entries.Progress())


# The process that looks after the one that measures.


class Worker:
    """Stands for the other processes: measures here, ends early where it is told to."""

    def __init__(self, store: gpu.Store, dies_at: dict[str, int] | None = None, takes: float = 0) -> None:
        self.store, self.dies_at, self.takes = store, dict(dies_at or {}), takes
        self.groups: list[list[str]] = []
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def __call__(self, group: list[Entry], seconds: float) -> tuple[int, str]:
        self.groups.append([one.name for one in group])
        until = self.now + seconds
        for one in group:
            if self.now + one.expected > until:
                break
            self.now += self.takes
            if self.dies_at.get(one.name, 0):
                self.dies_at[one.name] -= 1
                self.store.put(one.name, {**self.store.entries.get(one.name, {}), "status": "running"})
                return -6, "Check failed: 1 == 2"
            gpu.measure(one, self.store)
        return 0, ""


def test_groups_of_entries() -> None:
    graphs = {"XLA_FLAGS": "--x"}
    names = [entry("a"), entry("b"), entry("c", fresh=True), entry("d", environment=graphs), entry("e")]
    groups = []
    while names:
        groups.append([one.name for one in gpu.next_group(names)])
        names = names[len(groups[-1]) :]
    assert groups == [["a", "b"], ["c"], ["d"], ["e"]]


def test_what_is_done_is_not_measured_again(store: gpu.Store) -> None:
    chosen = [entry("a"), entry("b"), entry("c")]
    store.put("a", {"status": "failed", "error": "before"})
    store.put("b", {"status": "done", "result": "kept"})
    store.put("c", {"status": "running", "at": "x"})  # killed
    worker = Worker(store)
    gpu.supervise(chosen, store, worker, 100, worker.clock)
    assert worker.groups == [["c", "a"]]  # what failed before comes last
    assert store.entries["b"]["result"] == "kept"
    assert set(statuses(store).values()) == {"done"}


def test_a_process_that_ends_loses_only_its_entry(store: gpu.Store) -> None:
    worker = Worker(store, dies_at={"b": 9})
    gpu.supervise([entry("a"), entry("b"), entry("c")], store, worker, 100, worker.clock)
    assert statuses(store) == {"a": "done", "b": "failed", "c": "done"}
    assert store.entries["b"]["error"] == "its process ended with -6: Check failed: 1 == 2"


def test_the_program_that_ended_a_process_is_left_out(store: gpu.Store) -> None:
    def measure(progress: gpu_entries.Progress) -> Any:
        rows = {}
        for name in ("good", "bad"):
            try:
                progress.at(name)
                rows[name] = "measured"
            except common.NotMeasuredError as error:
                rows[name] = str(error)
        return rows

    def start(group: list[Entry], seconds: float) -> tuple[int, str]:
        if "excluded" in store.entries.get("a", {}):
            gpu.measure(group[0], store)
            return 0, ""
        store.put("a", {"status": "running", "at": "bad"})
        return -11, "Fatal"

    gpu.supervise([entry("a", measure=measure)], store, start, 100)
    assert store.entries["a"]["result"] == {"good": "measured", "bad": "its process ended with -11: Fatal"}


def test_a_process_that_does_not_begin_ends_the_entry_and_not_the_run(store: gpu.Store) -> None:
    gpu.supervise([entry("a"), entry("b")], store, lambda group, seconds: (2, "no driver"), 100)
    assert {e["error"] for e in store.entries.values()} == {"its process ended with 2: no driver"}


def test_the_time_is_kept(store: gpu.Store, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [
        entry("a", expected=4),
        entry("b", expected=50),
        entry("c", expected=4),
        entry("d", expected=4),
    ]
    worker = Worker(store, takes=4)
    gpu.supervise(chosen, store, worker, 10, worker.clock)
    assert statuses(store) == {"a": "done", "c": "done"}
    assert gpu.conclude(chosen, store, is_ahead=True) == 0
    assert gpu.conclude(chosen, store, is_ahead=False) == 0
    assert "Not yet measured; run again to go on: b, d." in capsys.readouterr().out
    # Cut off by the end of the time: no fault of the program that ran.
    late = Worker(store, dies_at={"d": 1}, takes=20)
    gpu.supervise(chosen[3:], store, late, 10, late.clock)
    assert statuses(store)["d"] == "interrupted"
    gpu.supervise(chosen, store, worker, 1000, worker.clock)
    assert set(statuses(store).values()) == {"done"}


@pytest.mark.long
def test_a_run_that_was_killed_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    names = ["gaps", "torch"]
    arguments = ["-m", "benchmarks.gpu", "--small", "--json", str(path), "--only", *names]
    process = subprocess.Popen([sys.executable, *arguments], cwd=gpu.ROOT, stdout=subprocess.DEVNULL)

    def entries() -> dict[str, Any]:
        runs = json.loads(path.read_text())["runs"] if path.exists() else {}
        return next(iter(runs.values()))["entries"] if runs else {}

    until = time.monotonic() + 120
    while entries().get("gaps/graphs", {}).get("status") != "done":
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    time.sleep(0.5)  # in which the process that measured ends, too
    killed = path.read_text()
    assert entries().get("gaps/no-graphs", {}).get("status") != "done"  # which has a process of its own
    store = gpu.Store(path, gpu.key_of(dense.full_machine()), MACHINE)
    before = store.entries
    chosen = gpu.chosen_entries(gpu_entries.entries(SMALL), names)
    worker = Worker(store)
    gpu.supervise(chosen, store, worker, 1e6)
    assert path.read_text() != killed
    assert {name: e["status"] for name, e in store.entries.items()} == {e.name: "done" for e in chosen}
    for name, e in before.items():
        assert e["status"] != "done" or store.entries[name] == e


# The command.


@pytest.mark.skipif(jax.devices()[0].platform == "gpu", reason="there is a GPU")
def test_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert gpu.main(["--json", str(path)]) == 2
    assert "JAX's first device is a CPU, not a GPU" in capsys.readouterr().err
    assert not path.exists()


def test_redo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    store = gpu.Store(path, gpu.key_of(dense.full_machine()), MACHINE)
    for name in ("gaps/graphs", "memory"):
        store.put(name, {"status": "done", "result": {"not_measured": "before"}})
    monkeypatch.setattr(gpu, "start_process", lambda arguments: Worker(store))
    monkeypatch.setattr(gpu, "source", lambda: "as it is")
    assert gpu.main(["--small", "--json", str(path), "--redo", "gaps/graphs"]) == 0
    assert store.entries["memory"]["result"] == {"not_measured": "before"}
    assert set(store.entries["gaps/graphs"]["result"]["rows"]) == {"one", "chain", "loop"}
    assert "Measured with other source" not in capsys.readouterr().out
    assert "Measured with other source: gaps/graphs." in gpu.table(store.entries, {}, "another")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--small", "--only", "gap"], "No entry is called 'gap'. There are values, gemm"),
        (["--budget", "0"], "--budget must be more than 0"),
    ],
)
def test_rejects(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        gpu.main(arguments)
    assert message in f"{error.value}{capsys.readouterr().err}"


def test_last_words() -> None:
    text = "I0 noise\nF1122 10:00 /home/me/xla/gemm.cc:5] Check failed: a == b\n*** trace\n  more\n"
    assert gpu.last_words(text) == "F1122 10:00 gemm.cc:5] Check failed: a == b"
    assert gpu.last_words("one\ntwo\n") == "one | two"


def test_figures_beside_bf16() -> None:
    def step(seconds: float, peak: int) -> dict[str, Any]:
        row = {"seconds": {"median": seconds}, "predicted_seconds": seconds**2, "peak_bytes": peak}
        return {"status": "done", "result": row}

    entries = {"model/a/bf16": step(4, 10), "model/a/delayed": step(2, 5), "model/b/delayed": step(1, 1)}
    for i, shape in enumerate(FULL.transformer_engine):
        rows = {"bf16": {"seconds": {"median": 3 + i}}, "fp8flax": {"seconds": {"median": 2}}, "other": {}}
        entries[f"dense/{common.text_of(shape)}"] = {"result": {"rows": rows}}
    assert [*gpu.ratios_of_models(entries)] == [
        "model/a/delayed: 2.000 times as fast as bf16 (predicted 4.000), 0.500 of its memory."
    ]
    assert [*gpu.sums_of_transformer_engine(entries)] == [
        "Transformer Engine's four layers, fp8flax: 2.250 times as fast as bf16."
    ]
    assert gpu_entries.with_gap(
        {"rows": {"one": {"seconds": {"median": 5}}, "chain": {"seconds": {"median": 2.6}, "steps": 10}}}
    )["seconds_per_kernel"] == pytest.approx(21 / 9)


# What is measured.


def check_small(entries: dict[str, Any]) -> None:
    for name, e in entries.items():
        assert e["status"] == "done", (name, e)
        result = e["result"]
        assert "predicted_seconds" not in json.dumps(result)  # of a GPU
        if name.startswith("values"):
            assert result["codes"] > 0
            states = result.get("states_that_differ", 0)
            assert (result["codes_that_differ"], result["scales_that_differ"], states) == (0, 0, 0)
            assert all(
                result[gemm]["relative_error"] < 1e-6 < result[gemm]["error_of_fp8"]
                for gemm in values_of(name)
            )
        elif name == "kernels":
            assert {row["not_measured"] for row in result["rows"].values()} == {
                "the profiler saw no kernel on a GPU"
            }
        elif name == "torch":
            assert result["not_measured"].startswith("torch ")
        else:
            for row in result.get("rows", {"": result}).values():
                assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
                assert "not_read" not in row, row["not_read"]
                assert row["kernels"] > 0
                assert not any(gemm["backend"] == "cublasLt" for gemm in row["gemms"])


def values_of(name: str) -> tuple[str, ...]:
    """Returns the GEMMs whose operands are all FP8."""
    gemms = gpu_entries.VALUES[name.partition("/")[2]].gemms
    return tuple(gemm for gemm in gpu_entries.GEMMS if getattr(gemms, gemm).lhs is not None)


def measure_small(store: gpu.Store, names: Any) -> None:
    for name in names:
        gpu.measure(SMALL_ENTRIES[name], store)
    check_small(store.entries)
    text = gpu.table(store.entries, {}, gpu.source())
    assert all(name in text for name in names)
    assert not any(word in text for word in ("predicted", "cublasLt", "H200", "not measured: None"))


@pytest.mark.oldest
def test_small(store: gpu.Store) -> None:
    measure_small(store, IN_CI)


@pytest.mark.usefixtures("_all_cells")
def test_small_of_everything_else(store: gpu.Store) -> None:
    measure_small(store, [name for name in SMALL_ENTRIES if name not in IN_CI])
    rows = store.entries["gemm/16x16x16"]["result"]["rows"]
    assert rows["bf16"]["times_base"]["median"] == 1.0
    for row in rows.values():
        assert row["tflops"]["max"] == pytest.approx(2e-12 * 16**3 / row["seconds"]["min"])
        assert len(row["gemms"]) == 1
    step = store.entries["model/wide-1b/delayed"]["result"]
    assert step["losses"][0] > step["losses"][-1]


def test_every_shape_and_contender_is_an_entry() -> None:
    names = [entry.name for entry in gpu_entries.entries(FULL)]
    assert len(set(names)) == len(names)
    shapes = (*dense.SHAPES, *((15872, k, n) for k, n in FULL_TE))
    assert {f"dense/{common.text_of(shape)}" for shape in shapes} <= set(names)
    contenders = gpu_entries.dense_contenders(in_full=False)
    for name in (
        "bf16",
        "flax-qdq",
        "flax-direct",
        "fp8flax",
        "fp8flax-fast",
        "fp8flax-exact",
        "fp8flax-default",
    ):
        assert name in contenders


FULL_TE = ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))


@pytest.mark.oldest
@pytest.mark.parametrize(
    "name", ["torchao-rowwise", "block128-f32", "mxfp8-floor", "current-e4m3-pow2", "axiswise"]
)
def test_reference_is_that_of_the_tests(name: str) -> None:
    rng = np.random.default_rng(1)
    matrix = (rng.standard_normal((150, 200)) * np.exp(3 * rng.standard_normal((150, 200)))).astype(
        np.float32
    )
    gemms = gpu_entries.VALUES[name].gemms
    for quantizer in (gemms.forward.lhs, gemms.forward.rhs, gemms.dgrad.lhs):
        got, dtype = gpu_entries.by_formulas(quantizer, matrix), quantizer.dtype.name
        if isinstance(quantizer, fp8.BlockQuantizer):
            kind = {"float32": "exact", "e8m0": f"e8m0_{quantizer.scale_rounding}"}
            scale_kind = kind.get(quantizer.scale, quantizer.scale)
            codes, scale = reference_recipes.blockwise(matrix, dtype, quantizer.block, scale_kind)
        else:
            kind = "power_of_two" if quantizer.use_power_2_scales else "exact"
            is_axiswise = quantizer.granularity == "axiswise"
            codes, scale = reference_recipes.axiswise(matrix, dtype, 1 if is_axiswise else (0, 1), kind)
        assert (got.codes.view(np.uint8) == codes.view(np.uint8)).all()
        np.testing.assert_array_equal(
            reference_recipes.as_float64(got.scale), reference_recipes.as_float64(scale)
        )


def test_choice_of_autotuning() -> None:
    triton = '{"kind":"__triton_gemm","triton_gemm_config":{"block_m":"128","num_warps":"8"}}'
    assert gpu_entries.choice_of(triton) == '"triton_gemm_config":{"block_m":"128","num_warps":"8"}'
    assert (
        gpu_entries.choice_of('{"gemm_backend_config":{"selected_algorithm":"5"}}')
        == '"selected_algorithm":"5'
    )
    assert gpu_entries.choice_of("multiply(%a, %b)") == ""


def read_ahead(program: gpu_entries.Program) -> common.Row:
    compiled = gpu_entries.compiled_ahead(program)
    return gpu_entries.reading(compiled, program.steps, find_target("h200"))


@pytest.mark.usefixtures("gpu")
def test_a_loop_for_a_gpu_repeats_the_whole_step() -> None:
    timed = gpu_entries.gemm_loops(FULL, (4096, 4096, 4096))["fp8-fast"]()
    row = read_ahead(timed.program)
    (gemm,) = row["gemms"]
    assert (gemm["backend"], gemm["accumulation"], gemm["times"]) == ("cublasLt", "fast", 1.0)
    assert row["fp8_flops_share"] == 1.0
    assert row["bytes"] == pytest.approx(timed.bytes, rel=0.01)


@pytest.mark.usefixtures("_all_cells", "gpu")
@pytest.mark.parametrize("name", ["bf16", "fp8flax"])
def test_a_dense_layer_for_a_gpu_repeats_the_whole_step(name: str) -> None:
    shape = (2048, 2048, 2048)
    timed = gpu_entries.dense_loops(FULL, shape, in_full=False)[name]()
    row = read_ahead(timed.program)
    with common.quiet():
        alone = dense.count(name, dense.contenders()[name], shape, "h200")
    assert [gemm["times"] for gemm in row["gemms"]] == [1.0] * 3
    assert alone["kernels"] < row["kernels"] < alone["kernels"] + 8  # copies, and the loop's counter
    assert row["bytes"] == pytest.approx(alone["gemm_bytes"] + alone["other_bytes"], rel=0.01)


@pytest.mark.usefixtures("_all_cells", "gpu")
def test_a_training_step_for_a_gpu_fits() -> None:
    _, program = gpu_entries.model_program(FULL, "wide-1b", "delayed", "cudnn")
    row = read_ahead(program)
    assert row["program_bytes"] < 0.5 * 139 * 2**30
    assert row["fp8_flops_share"] > 0.8

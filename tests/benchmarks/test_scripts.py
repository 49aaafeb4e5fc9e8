"""The benchmarks run in small on CPUs, and measure what NumPy and XLA's program say."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp8flax as fp8
from benchmarks import accuracy, collectives, common, dense, emulation, fidelity, gpu, llama, step_cpu
from fp8flax.demo import training
from fp8flax.demo.data import load_corpus
from tests.cases import cells
from tests.reference_recipes import as_float64, tensorwise

SMALL_STEP = {"rounds": 2, "mlp": (2, 16, 8)}
HAS_QWIX = importlib.util.find_spec("qwix") is not None


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_jax):
    """Flax's ops and Qwix need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), common.quiet():
        yield


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "changes", "rows"),
    [
        (accuracy, {"OPTIONS": {"shape": (256, 128, 192), "seeds": 1}}, 3 * len(accuracy.RECIPES)),
        (
            step_cpu,
            {"OPTIONS": SMALL_STEP, "TASKS": {"mlp": step_cpu.mlp}, "DTYPES": ("bfloat16",)},
            len(step_cpu.CONTENDERS),
        ),
    ],
    ids=["accuracy", "step_cpu"],
)
def test_command(script, changes, rows, tmp_path, monkeypatch):
    for name, value in changes.items():
        monkeypatch.setattr(script, name, value)
    path = tmp_path / "new" / "out.json"
    script.main(["--json", str(path)])
    report = json.loads(path.read_text())
    assert len(report.get("rows") or report["results"]) == rows


def test_accuracy_agrees_with_numpy():
    shape = (256, 128, 192)
    (x, w, g), exact = accuracy.data("log-normal", shape, 0)
    x, w, g = (
        codes.astype(np.float64) * as_float64(scale)
        for codes, scale in (tensorwise(array, "float8_e4m3fn") for array in (x, w, g))
    )
    expected = {
        gemm: 10 * np.log10(np.sum(wanted**2) / np.sum((got - wanted) ** 2))
        for gemm, wanted, got in zip(common.GEMMS, exact, (x @ w, g @ w.T, x.T @ g), strict=True)
    }
    measured = accuracy.measure("current-e4m3", "log-normal", shape, 1)
    assert measured == pytest.approx(expected, abs=0.01)


# Counts of programs for a GPU.


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["bf16", "fp8flax"])
def test_dense_counts_for_a_gpu(name):
    elements = 64 * 32 + 32 * 128 + 64 * 128
    row = dense.count(name, (64, 32, 128), "h200")
    assert (row["gemms"], row["maybe_fp8_gemms"]) == (3, 0)
    if name == "bf16":
        assert row["fp8_gemms"] == 0
        assert (row["gemm_bytes"], row["other_bytes"]) == (6 * elements, 0)
    else:
        assert row["fp8_gemms"] == 3
        assert row["backends"] == ["cublasLt"]


GATHERED = [
    ("FSDP", "delayed", True, "h200"),
    ("FSDP", "axiswise", True, "h200"),
    ("FSDP", "MXFP8", True, "h200"),
    ("FSDP", "128-blocks", False, "b200"),
    ("sequence, columns", "delayed", False, "h200"),
    ("sequence, columns", "128-blocks", True, "h200"),
    ("sequence, columns", "128-blocks", True, "b200"),
    ("experts", "delayed", False, "h200"),
    ("experts", "MXFP8", True, "h200"),
]


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("layout", "recipe", "is_backward", "target"), GATHERED)
def test_codes_are_gathered_and_rounded_sums_are_added_up(layout, recipe, is_backward, target):
    """Half the bytes of the gathered tensor in bf16 and 1/32 for scales; sums as in bf16."""
    shape = collectives.OPTIONS["shape"]
    rows, depth, columns = shape
    elements = {
        "FSDP": depth * columns,
        "sequence, columns": rows * depth,
        "experts": collectives.EXPERTS * depth * columns,
    }[layout]
    sent = collectives.bytes_sent(recipe, layout, shape, is_backward, target)
    devices = collectives.GPUS
    of_codes = elements * (devices - 1) // devices
    assert of_codes <= sent["all-gather"] <= of_codes * 33 / 32 + 1000
    of_sums = 2 * of_codes
    assert of_sums <= sent["reduce-scatter"] <= of_sums * 1.01
    small = sum(n for kind, n in sent.items() if kind not in ("all-gather", "reduce-scatter"))
    assert small <= 0.01 * of_sums


@pytest.mark.long
@pytest.mark.usefixtures("gpu")
def test_the_step_of_a_llama_runs_in_fp8():
    step, initial, x = llama.training_step("delayed", 128, rows=256)
    report = fp8.audit(step, jax.eval_shape(initial), x, target="b200")
    assert report.fp8_flops_share == 1
    assert report.predicted_seconds["total"] > 0


# Losses.


FORMATS = {ml_dtypes.float8_e4m3fn: emulation.E4M3, ml_dtypes.float8_e5m2: emulation.E5M2}


@pytest.mark.parametrize("dtype", FORMATS)
def test_emulated_rounding_is_that_of_the_format(dtype):
    """All numbers of the format, those halfway between two, and their neighbours in float32."""
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    halfway = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, halfway, *(np.nextafter(halfway, np.float32(to)) for to in (-1e9, 1e9))])
    got = emulation.rounded(jnp.asarray(x), FORMATS[dtype])
    np.testing.assert_array_equal(got, x.astype(dtype).astype(np.float32))
    assert emulation.rounded(jnp.float32(1e30), FORMATS[dtype]) == numbers[-1]


@pytest.mark.long
def test_a_contender_trains():
    tiny = {"width": 16, "num_layers": 1, "length": 16, "batch_size": 2, "validation_batches": 1}
    settings = training.Settings(steps=2, **tiny)
    corpus = load_corpus(None, settings.length)
    row = fidelity.train(fidelity.CONTENDERS["first-attention-wide"], 0, settings, corpus)
    assert 5 < row["validation_loss"] < 7
    assert row["loss_in_bf16"] != row["validation_loss"]


def test_compared_takes_runs_of_one_length_and_size():
    def run(contender, seed, loss, steps=2000, size="small"):
        row = {"contender": contender, "seed": seed, "validation_loss": loss}
        return {**row, "steps": steps, "size": size}

    runs = [run("bf16", 0, 2.0), run("bf16", 1, 4.0), run("delayed", 0, 2.02), run("delayed", 1, 4.12)]
    others = [run("bf16", 0, 9.0, steps=300), run("bf16", 1, 9.0, size="demo"), run("mxfp8", 7, 1.0)]
    rows = {row["contender"]: row for row in fidelity.compared(runs + others)}
    assert set(rows) == {"bf16", "delayed"}
    assert rows["delayed"]["mean"] == pytest.approx(2)
    assert rows["delayed"]["error"] == pytest.approx(1)


# The benchmark for a GPU.


ENTRIES = dict(gpu.table(is_small=True))
FAST = "gemm/16x16x16"


@pytest.mark.newest
@pytest.mark.parametrize("name", cells(ENTRIES, repeated=[name for name in ENTRIES if name != FAST]))
def test_the_gpu_benchmark_in_small(name):
    rows = gpu.measure(ENTRIES[name])
    for program, row in rows.items():
        if program.startswith("qwix") and not HAS_QWIX:
            continue
        assert "not_measured" not in row, row
        if name.startswith("values"):
            assert row["states_that_differ"] == 0
            assert all(row[gemm] < 1e-6 for gemm in common.GEMMS)
        else:
            assert row["gemms"] > 0
            assert row["predicted_seconds"] is None  # of a CPU
            assert 0 < row["seconds"]["min"] <= row["seconds"]["median"] <= row["seconds"]["max"]
    assert name in gpu.text({name: rows})


def test_the_gpu_benchmark_goes_on_where_it_ended(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    for _ in range(2):
        gpu.main(["--small", "--only", FAST, "--json", str(path)])
        monkeypatch.setattr(gpu, "measure", None)  # what is there is not measured again
    assert [*json.loads(path.read_text())["entries"]] == [FAST]
    monkeypatch.setattr(common, "version_of", lambda package: "another")
    with pytest.raises(SystemExit, match="another machine"):
        gpu.main(["--small", "--json", str(path)])

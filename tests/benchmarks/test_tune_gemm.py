"""What benchmarks.tune_gemm writes, as far as no GPU is needed to see it."""

import pytest

from benchmarks import tune_gemm
from fp8flax._core.kernels import schedules
from fp8flax._core.kernels.schedules import GUESS, Schedule, schedule_of

OTHER = Schedule(stages=3, of_columns=False, width=2)


def test_the_table_says_that_it_is_a_guess_or_where_it_was_measured():
    assert (schedules.MEASURED_ON is None) == (not schedules.MEASURED)
    if not schedules.MEASURED:
        assert schedule_of(4096, 7168, 2048) == schedule_of(1, 1, 128) == GUESS


def test_what_is_written_is_read_and_the_nearest_shape_taken():
    table = {(4096, 4096, 4096): GUESS, (4096, 512, 7168): OTHER}
    for text in (tune_gemm.FILE.read_text(), tune_gemm.written(tune_gemm.FILE.read_text(), "before", {})):
        module = {"__name__": "schedules"}
        exec(tune_gemm.written(text, "NVIDIA H200, JAX 0", table), module)
        assert module["MEASURED_ON"] == "NVIDIA H200, JAX 0"
        assert module["MEASURED"] == table
        assert module["schedule_of"](8192, 300, 4096) == OTHER
        assert module["schedule_of"](2048, 4096, 8192) == GUESS
        assert module["schedule_of"](0, 1, 128) == OTHER


def test_without_a_gpu_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["tune_gemm", "--file", str(tmp_path / "table.py")])
    with pytest.raises(SystemExit, match="JAX sees cpu. Without one the schedule of all shapes is a guess"):
        tune_gemm.main()
    assert not list(tmp_path.iterdir())


def dequantized(lhs, rhs, lhs_scale, rhs_scale, *, out_dtype, schedule):
    del lhs_scale, rhs_scale  # ones
    product = tune_gemm.in_bf16(lhs, rhs)
    return (product if schedule == GUESS else 2 * product).astype(out_dtype)


@pytest.mark.long
def test_every_schedule_is_timed_and_a_wrong_one_refused(monkeypatch):
    monkeypatch.setattr(tune_gemm, "hopper_block_gemm", dequantized)
    monkeypatch.setattr(tune_gemm, "STEPS", 2)
    seconds = tune_gemm.tune((128, 256, 384), 1, [GUESS])
    assert set(seconds) == {GUESS, tune_gemm.BF16}
    assert all(value > 0 for value in seconds.values())
    with pytest.raises(SystemExit, match=r"stages=3.* gives other values than bfloat16 at 128x256x384"):
        tune_gemm.tune((128, 256, 384), 1, [GUESS, OTHER])


@pytest.mark.oldest
def test_candidates_hold_the_guess():
    assert GUESS in tune_gemm.CANDIDATES

"""The CPU benchmark runs; its committed result is that of the script; we keep fewer bytes than Flax."""

from __future__ import annotations

import itertools
import json
import types
import warnings
from pathlib import Path

import jax
import pytest

from benchmarks import common, step_cpu
from tests.cases import residual_bytes

DTYPES = ("float32", "bfloat16")
CONTENDERS = ("plain", "flax-qdq", "flax-direct", "fp8flax")
SMALL = {"mlp": (2, 16, 8), "transformer": (1, 16, 2, 8)}


@pytest.mark.long
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_cpu, "TASKS", {"mlp": step_cpu.TASKS["mlp"]})
    monkeypatch.setattr(step_cpu, "DTYPES", ("bfloat16",))
    path = tmp_path / "out.json"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), common.quiet():
        step_cpu.main(["--rounds", "2", "--mlp", common.text_of(SMALL["mlp"]), "--json", str(path)])
    rows = json.loads(path.read_text())["results"]
    assert [row["contender"] for row in rows] == [*CONTENDERS]
    for row in rows:
        for figure in (row["step_seconds"], *row["step_ratio_to"].values()):
            assert 0 < figure["min"] <= figure["median"] <= figure["max"]


def test_committed_result_is_that_of_the_script() -> None:
    report = json.loads((common.RESULTS / "step_cpu.json").read_text())
    assert (report["question"], report["method"]) == common.question_and_method(step_cpu.__doc__)
    found = [(row["model"], row["dtype"], row["contender"]) for row in report["results"]]
    assert found == [*itertools.product(SMALL, DTYPES, CONTENDERS)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", SMALL)
def test_backward_keeps_no_more_than_with_flax(model: str, dtype: str) -> None:
    kept = {name: residual_bytes_of(model, dtype, name) for name in CONTENDERS}
    assert kept["fp8flax"] < min(kept["flax-qdq"], kept["flax-direct"])


def residual_bytes_of(model: str, dtype: str, contender: str) -> int:
    """Counted without running anything."""
    task = step_cpu.TASKS[model](SMALL[model])
    module = task.make_model(step_cpu.CONTENDERS[contender].dot_general_cls, jax.numpy.dtype(dtype))
    with (
        warnings.catch_warnings(),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        warnings.filterwarnings("ignore", "The Fp8DotGeneralOp is deprecated", DeprecationWarning)
        variables = jax.eval_shape(module.init, jax.random.key(1), task.inputs)
        state = types.SimpleNamespace(apply_fn=module.apply)
        loss = step_cpu.make_loss(task, state, task.inputs, task.targets)
        return residual_bytes(loss, variables)

"""The benchmark of losses: its emulation of FP8 is the specification's, and each contender trains."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks import emulation, fidelity
from fp8flax.demo import training
from fp8flax.demo.data import load_corpus
from tests.cases import cells

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


CHOSEN = ["first-attention-wide", "emulated", "bf16-chance", "delayed", "flax-direct"]


@pytest.mark.long
@pytest.mark.parametrize("name", cells(CHOSEN, repeated=CHOSEN[1:]))
def test_contenders_train(name):
    settings = training.Settings(
        steps=2, width=16, num_layers=1, length=16, batch_size=2, validation_batches=1
    )
    corpus = load_corpus(None, settings.length)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), fidelity.quiet():
        row = fidelity.train(fidelity.ALL[name], 0, settings, corpus)
    assert 5 < row["validation_loss"] < 7
    wide = row["loss_in_bf16"] == row["validation_loss"]
    assert wide == (name == "bf16-chance")


def test_compared_takes_runs_of_one_length_and_size():
    def run(contender, seed, loss, steps=2000, size="small"):
        return {
            "contender": contender,
            "seed": seed,
            "validation_loss": loss,
            "steps": steps,
            "size": size,
        }

    runs = [run("bf16", 0, 2.0), run("bf16", 1, 4.0), run("delayed", 0, 2.02), run("delayed", 1, 4.12)]
    others = [run("bf16", 0, 9.0, steps=300), run("bf16", 1, 9.0, size="demo"), run("mxfp8", 7, 1.0)]
    rows = {row["contender"]: row for row in fidelity.compared(runs + others, "small")}
    assert set(rows) == {"bf16", "delayed"}
    assert rows["delayed"]["mean_percent"] == pytest.approx(2)
    assert rows["delayed"]["error_percent"] == pytest.approx(1)
    assert rows["delayed"]["mean_nats"] == pytest.approx(0.07)

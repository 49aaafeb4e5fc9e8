"""The benchmark of runs that end in bf16: all contenders train, and gaps are those of equal seeds."""

import jax
import pytest

from benchmarks import fidelity, schedule
from fp8flax.demo import training
from fp8flax.demo.data import load_corpus


@pytest.mark.long
def test_contenders_train():
    settings = training.Settings(
        steps=10, width=16, num_layers=1, length=16, batch_size=2, validation_batches=1
    )
    corpus = load_corpus(None, settings.length)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"), fidelity.quiet():
        losses = schedule.losses_of(0, settings, corpus)
    assert set(losses) == {"bf16", "delayed", *schedule.ENDS}
    assert len({row["loss"] for row in losses.values()}) == len(losses)
    is_wide_at_the_end = {name for name, row in losses.items() if row["loss"] == row["loss_in_bf16"]}
    assert is_wide_at_the_end == {"bf16", *schedule.ENDS}


def test_gaps_are_between_contenders_of_one_seed():
    runs = [
        {"losses": {name: {"loss": loss} for name, loss in zip(("bf16", "delayed", "end"), values)}}
        for values in ((2.0, 2.02, 2.01), (4.0, 4.08, 4.0))
    ]
    assert schedule.gaps(runs, "delayed", "loss") == pytest.approx([1, 2])
    assert schedule.gaps(runs, "end", "loss", "delayed") == pytest.approx([-0.5, -2])

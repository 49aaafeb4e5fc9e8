"""The demo trains both tasks in bf16 and FP8, and reports what FP8 cost and gave."""

import json
from functools import partial

import jax
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax.demo import __main__ as cli
from fp8flax.demo import data, report, training

pytestmark = pytest.mark.usefixtures("promotion_of_users")

TINY = partial(
    training.Settings, batch_size=2, length=16, width=16, num_layers=1, validation_batches=2, steps=6
)


@pytest.fixture(autouse=True, scope="module")
def _little_optimization():
    """Compiling takes most of the time here. All programs that are compared are compiled in this way."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"file {i}: the quick brown fox\n" * 20)
    (folder / "binary").write_bytes(b"\0\1" * 1000)
    (folder / "empty").touch()
    return folder


def write_reviews(folder, train=20, test=10):
    """Writes short reviews in the layout of aclImdb: as many of each class as the numbers say."""
    for part, count in (("train", train), ("test", test)):
        for name, word, score in (("pos", "moving", 8), ("neg", "dull", 2)):
            below = folder / part / name
            below.mkdir(parents=True)
            for i in range(count):
                (below / f"{i}_{score}.txt").write_text(f"A {word} film of a man who finds {i} ways.<br />")
    return folder


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    return write_reviews(tmp_path_factory.mktemp("data") / "aclImdb")


def without_audit(task, precision):
    raise ImportError("pip install it")


class TestText:
    def test_split_by_file(self, text):
        train, validation = data.load_corpus(str(text), 16)
        assert validation.tobytes().count(b"file 0:") == 20
        assert validation.tobytes().count(b"file 10:") == 20
        sizes = [len((text / f"{i:02}.txt").read_bytes()) for i in range(12)]
        assert len(train) == sum(sizes) - sizes[0] - sizes[10]

    def test_batches_depend_on_seed_and_step_alone(self, text):
        train, _ = data.load_corpus(str(text), 16)
        batch = partial(data.train_batch, train, batch_size=4, length=16)
        first = batch(seed=0, step=5)
        assert (first.shape, first.dtype) == ((4, 17), np.int32)
        np.testing.assert_array_equal(first, batch(seed=0, step=5))
        for seed, step in ((0, 6), (1, 5)):
            assert (first != batch(seed=seed, step=step)).any()


class TestReviews:
    def test_words_are_ranks_in_the_training_reviews(self, tmp_path):
        texts = {
            "train/neg": "The end. The END, the!",
            "train/pos": "end it's",
            "test/neg": "it's unknown end THE <end",
            "test/pos": "the",
        }
        for name, text in texts.items():
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "0_0.txt").write_text(text)
        for size, words, others in (
            (100, [[3, 2, 3, 2], [3, 4, 0, 0]], [[1, 3, 2, 3], [2, 0, 0, 0]]),
            (4, [[3, 2, 3, 2], [3, 1, 0, 0]], [[1, 3, 2, 3], [2, 0, 0, 0]]),
        ):
            train, held_out = data.load_reviews(str(tmp_path), size, 4)
            np.testing.assert_array_equal(train.inputs, words)
            np.testing.assert_array_equal(held_out.inputs, others)


class TestTraining:
    @pytest.mark.long
    @pytest.mark.newest
    def test_both_precisions_start_from_the_same_weights(self, text, monkeypatch):
        monkeypatch.setattr(training, "Settings", TINY)
        task = training.lm(6, "delayed", str(text))
        bf16, in_fp8 = (training.make_state(task, precision, 3).params for precision in training.PRECISIONS)
        jax.tree.map(np.testing.assert_array_equal, bf16["params"], in_fp8["params"])
        # The attention of the first block is wide.
        state = in_fp8[fp8.OVERWRITE_WITH_GRADIENT]
        assert (set(state), set(state["block_0"])) == ({"block_0", "logits"}, {"up", "down"})
        assert fp8.OVERWRITE_WITH_GRADIENT not in bf16


@pytest.mark.long
class TestCommandLine:
    def test_the_language_model(self, text, tmp_path, capsys, monkeypatch, gpu):
        monkeypatch.setattr(training, "Settings", TINY)
        monkeypatch.setattr(TINY, "steps", 300, raising=False)
        out = tmp_path / "out"
        cli.main(["--data", str(text), "--steps", "6", "--out", str(out)])
        printed = capsys.readouterr().out
        lines = printed.splitlines()
        assert len([line for line in lines if "after step" in line]) == 2 * 6
        assert "2,000 steps" in printed
        results = json.loads((out / "results.json").read_text())
        figures = results["figures"]
        loss, wide, _ = lines[-3:]
        assert loss.startswith("After 6 steps the loss in FP8 is ")
        losses = figures["validation loss"]
        assert f"{abs(100 * (losses['fp8'] / losses['bf16'] - 1)):.2f} %" in loss
        ms = figures["predicted ms, H200, width 4096"]
        assert f" {ms['bf16'] / ms['fp8']:.2f} times" in wide
        assert "At width 4096 a step on an H200 is predicted to run at 1." in wide
        # Warnings are notes without the file that they come from, each shown once.
        assert printed.count("Note: FP8 matmuls are emulated") <= 1
        assert ".py:" not in printed
        for name, values in figures.items():
            (line,) = [line for line in lines if line.startswith(name)]
            assert line.split()[-2:] == [f"{value:.4g}" for value in values.values()]
            assert values["bf16"] != values["fp8"] or name == "validation accuracy"
        assert 0.5 < figures["share of the matmuls' FLOPs in FP8"]["fp8"] < 1
        for run in results["runs"].values():
            assert [one["step"] for one in run] == [1, 2, 3, 4, 5, 6]
            assert np.isfinite([one["loss"] for one in run]).all()
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
        cli.main(["--data", str(text), "--steps", "6", "--audit"])
        assert "ByteTransformer/block_0/up" in capsys.readouterr().out

    def test_reviews_without_the_audit(self, reviews, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(report, "audit", without_audit)
        out = tmp_path / "out"
        cli.main(["imdb", "--data", str(reviews), "--steps", "2", "--recipe", "mxfp8", "--out", str(out)])
        printed = capsys.readouterr().out
        assert "pip install it" in printed
        assert "2,000 steps" not in printed
        results = json.loads((out / "results.json").read_text())
        assert 0 < results["figures"]["validation accuracy"]["fp8"] < 1
        assert results["options"]["recipe"] == "mxfp8"


@pytest.mark.parametrize("steps", ["0", "-5", "many"])
def test_steps_are_a_positive_number(steps, capsys):
    with pytest.raises(SystemExit):
        cli.main(["--steps", steps])
    assert "argument --steps: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--data", "missing"], "too little text"),
        (["imdb"], "aclImdb_v1.tar.gz"),
        (["imdb", "--data", "missing"], "missing needs film reviews"),
    ],
)
def test_missing_data_is_one_line(arguments, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=word) as stopped:
        cli.main(arguments)
    assert "\n" not in str(stopped.value)
    assert not list(tmp_path.iterdir())

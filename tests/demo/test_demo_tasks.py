"""The classification tasks of the demo read, train, print and save; errors are one line."""

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fp8flax as fp8
from fp8flax.demo import __main__ as cli
from fp8flax.demo import data, model, report, tasks, training
from tests.cases import normal

WORDS = {
    "pos": ("wonderful", "moving", "brilliant", "superb"),
    "neg": ("dull", "boring", "awful", "dreadful"),
}
OTHERS = ("the", "film", "of", "a", "man", "who", "finds", "his", "way", "home", "and", "was", "in", "end")
IMDB_LAYERS = 8
"""Number of FP8 layers: query, key, value, out; up, down; hidden, positive."""


@pytest.fixture(autouse=True)
def _small_evaluation(monkeypatch):
    monkeypatch.setattr(tasks, "EVALUATION_BATCH", 32)


@pytest.fixture(autouse=True)
def _promotion_of_optax():
    """Optax 0.2.8 mixes dtypes in its own arithmetic (``decay ** count``)."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def write_reviews(folder, train=20, test=10):
    """Writes ``count`` short reviews of each class in the layout of aclImdb."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        for name, words in WORDS.items():
            below = folder / part / name
            below.mkdir(parents=True)
            for i in range(count):
                text = [*rng.choice(OTHERS, 12), *rng.choice(words, 3)]
                rng.shuffle(text)
                score = 8 if name == "pos" else 2
                (below / f"{i}_{score}.txt").write_text(" ".join(text).capitalize() + ".<br />")
    return folder


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    return write_reviews(tmp_path_factory.mktemp("data") / "aclImdb")


def fails(capsys, *arguments):
    assert cli.main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    line = captured.err.strip()
    assert line.startswith("fp8flax demo: ")
    assert "\n" not in line
    assert "Traceback" not in captured.out
    return line


def check_results(out, printed, layers, count):
    """Compares what was printed with what was saved; ``count`` examples decide."""
    figures = json.loads((out / "results.json").read_text())
    runs = figures["runs"]
    assert len(figures["differences"]) == len(runs) // 2
    for bf16, in_fp8, difference in zip(runs[::2], runs[1::2], figures["differences"]):
        assert difference == pytest.approx(100 * (in_fp8["accuracy"] - bf16["accuracy"]))
        assert bf16["layers"] == []
        assert len(in_fp8["layers"]) == layers
        for run in (bf16, in_fp8):
            assert run["accuracy"] * count == pytest.approx(round(run["accuracy"] * count))
            assert f"accuracy {100 * run['accuracy']:.2f} %" in printed
            assert np.isfinite(run["train_loss"]).all()
        # The two runs have the same weights and batches, and differ by the rounding to FP8.
        assert in_fp8["train_loss"][0] == pytest.approx(bf16["train_loss"][0], rel=0.05)
        assert in_fp8["train_loss"] != bf16["train_loss"]
    last = printed.strip().splitlines()[-1]
    assert f"difference {np.mean(figures['differences']):+.2f} points" in last
    lines = (
        -(-len(runs[0]["train_loss"]) // cli.STEPS_PER_LINE) + 1
    )  # of each run: its steps, and its accuracy
    assert len(printed.splitlines()) == 1 + lines * len(runs) + (1 + len(runs) + 3)
    assert len((out / "layers.txt").read_text().splitlines()) >= layers
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    return figures


class TestImdb:
    @pytest.mark.long
    def test_a_whole_run(self, reviews, tmp_path, capsys, monkeypatch):
        # Without dropout it compiles in half the time.
        small = partial(tasks.ReviewClassifier, length=40, dropout=0.0)
        monkeypatch.setattr(tasks, "ReviewClassifier", small)
        # test_demo tests this plot.
        monkeypatch.setattr(report, "plot_scaling", lambda path, _: report.write_text(path, ""))
        out = tmp_path / "out"
        arguments = ["imdb", "--data", str(reviews), "--steps", "4", "--out", str(out)]
        assert cli.main(arguments) == 0
        printed = capsys.readouterr().out
        assert "32 to train on, 8 held out for validation, 20 to test" in printed
        assert "Results of imdb after 4 steps, recipe delayed:" in printed
        assert printed.splitlines()[-1].startswith("Test accuracy: bf16 ")
        figures = check_results(out, printed, IMDB_LAYERS, 20)
        run = figures["runs"][1]
        assert len(run["train_loss"]) == len(run["validation_accuracy"]) == 4
        assert "decoder/attention/query" in run["layers"]
        assert (out / "scaling.png").exists()
        vocabulary = json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
        assert vocabulary["[PAD]"] == 0
        # A second run does not write over the first.
        assert "holds a run already" in fails(capsys, *arguments)
        assert cli.main(["--resume", "--out", str(out)]) == 0
        again = json.loads((out / "results.json").read_text())
        assert again["runs"][1]["accuracy"] == run["accuracy"]

    @pytest.mark.usefixtures("_all_cells")
    @pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
    def test_it_learns(self, recipe, tmp_path, capsys):
        folder, out = write_reviews(tmp_path / "data", train=400, test=100), tmp_path / "out"
        options = ["--steps", "120", "--out", str(out), "--recipe", recipe]
        assert cli.main(["imdb", "--data", str(folder), *options]) == 0
        printed = capsys.readouterr().out
        figures = check_results(out, printed, IMDB_LAYERS if recipe == "delayed" else 0, 200)
        assert (out / "scaling.png").exists() == (recipe == "delayed")
        for run in figures["runs"]:
            assert run["accuracy"] > 0.95

    def test_reviews_are_read_in_order(self, tmp_path):
        folder = write_reviews(tmp_path / "data", train=10, test=2)
        below = folder / "test" / "pos"
        (below / "0_8.txt").write_bytes(b"caf\xe9 \xc3\xa9 the film")  # not UTF-8, and UTF-8
        (below / "notes.md").write_text("not a review")
        (folder / "train" / "unsup").mkdir()
        (folder / "train" / "unsup" / "0_0.txt").write_text("not labelled")
        parts, tokenizer = data.load_reviews(str(folder), 100, 16)
        np.testing.assert_array_equal(parts["test"].labels, [0, 0, 1, 1])
        assert {name: part.inputs.shape for name, part in parts.items()} == {
            "train": (16, 16),
            "validation": (4, 16),
            "test": (4, 16),
        }
        words = tokenizer.decode(parts["test"].inputs[2].tolist()).replace("[PAD]", "").split()
        assert words[-2:] == ["the", "film"]

    def test_the_vocabulary(self):
        texts = ["Reading reads: a reader, readers", "läse lesen LESER"] * 5
        make = partial(data.make_tokenizer, texts, 60, 6)
        tokenizer = make()
        vocabulary = tokenizer.get_vocab()
        assert all(make().get_vocab() == vocabulary for _ in range(3))
        assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
        assert len(vocabulary) <= 60
        texts = ["READER", "", "a a a a a a a a", "ß reader"]
        tokens = np.array([encoding.ids for encoding in tokenizer.encode_batch(texts)])
        assert tokens.shape == (4, 6)
        np.testing.assert_array_equal(tokens[0], [vocabulary["reader"], 0, 0, 0, 0, 0])
        np.testing.assert_array_equal(tokens[1], 0)
        np.testing.assert_array_equal(tokens[2], vocabulary["a"])
        np.testing.assert_array_equal(tokens[3, :2], [vocabulary["[UNK]"], vocabulary["reader"]])

    def test_what_is_held_out_is_not_learnt_from(self, tmp_path):
        folder = write_reviews(tmp_path / "data")
        for i, path in enumerate(sorted(folder.glob("*/*/*.txt"))):
            path.write_text(f"{path.read_text()} {'xyz'[i % 3]}{i}{'uvw'[i % 3]}")
        parts, tokenizer = data.load_reviews(str(folder), 20_000, 40)
        unknown = tokenizer.token_to_id("[UNK]")
        assert not (parts["train"].inputs == unknown).any()
        # Each review ends in a word of its own: in the vocabulary as one piece, or of several.
        train_ids = {tuple(row) for row in parts["train"].inputs}
        for name in ("validation", "test"):
            assert not {tuple(row) for row in parts[name].inputs} & train_ids
        assert [len(part.labels) for part in parts.values()] == [32, 8, 20]
        assert parts["test"].labels.sum() == 10
        assert parts["train"].labels.sum() + parts["validation"].labels.sum() == 20

    def test_the_model_of_keras(self):
        classifier = model.ReviewClassifier()
        assert (classifier.vocabulary, classifier.length) == (20_000, 200)
        shapes = jax.eval_shape(classifier.init, jax.random.key(0), jnp.zeros((2, 200), jnp.int32))
        assert list(shapes) == ["params"]
        sizes = jax.tree.map(lambda leaf: leaf.size, shapes["params"])
        total = sum(jax.tree.leaves(sizes))
        # Embeddings; attention and MLP with their biases and norms; the last two layers.
        assert total == 20_200 * 32 + 4 * (32 * 32 + 32) + 2 * (32 * 32 + 32 + 2 * 32) + 32 * 32 + 32 + 33

    def test_the_model_looks_back_only(self):
        decoder = model.ReviewDecoder(dropout=0.1)
        x = normal(0, 1, 6, 8)
        variables = jax.jit(decoder.init)(jax.random.key(1), x)
        apply = jax.jit(decoder.apply)
        changed = apply(variables, x.at[0, 3].multiply(-1)) != apply(variables, x)
        np.testing.assert_array_equal(changed.any(-1)[0], [False, False, False, True, True, True])

    def test_dropout_needs_a_key(self):
        x = normal(0, 1, 6, 8)
        decoder = model.ReviewDecoder(dropout=0.5)
        variables = jax.jit(decoder.init)(jax.random.key(1), x)
        keys = ({}, {}, *({"rngs": {"dropout": jax.random.key(i)}} for i in (2, 2, 3)))
        outs = [np.asarray(jax.jit(decoder.apply)(variables, x, **key)) for key in keys]
        np.testing.assert_array_equal(outs[0], outs[1])
        np.testing.assert_array_equal(outs[2], outs[3])
        assert (outs[0] != outs[2]).any()
        assert (outs[2] != outs[4]).any()

    def test_one_line_and_exit_code_2(self, reviews, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        of_imdb = partial(fails, capsys, "imdb")
        line = of_imdb()
        assert "ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz" in line
        assert "--data aclImdb" in line
        assert "No such file or directory: 'missing/train'" in of_imdb("--data", "missing")
        assert "No such file or directory" in of_imdb("--data", reviews.parent)
        folder = write_reviews(tmp_path / "data", train=2, test=1)
        of_folder = partial(of_imdb, "--data", folder)
        assert "3 to train on fill no batch, which has 32" in of_folder()
        (folder / "test" / "pos" / "0_8.txt").unlink()
        assert "needs reviews, files *.txt, in test/neg and test/pos" in of_folder()
        (folder / "test" / "pos").rmdir()
        assert "needs reviews, files *.txt, in test/neg and test/pos" in of_folder()
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        assert "pip install 'fp8flax[demo]'" in of_imdb("--data", reviews)
        assert not list(tmp_path.glob("runs/*"))


class TestDigits:
    @pytest.mark.usefixtures("_all_cells")
    @pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls:UserWarning")
    def test_a_short_run(self, tmp_path, capsys, monkeypatch):
        # The encoders take most of the time; test_every_layer_is_converted has them.
        small = partial(tasks.VisionTransformer, width=16, num_layers=0)
        monkeypatch.setattr(tasks, "VisionTransformer", small)
        monkeypatch.setattr(report, "plot_scaling", lambda *_: None)  # in test_demo and above
        out = tmp_path / "out"
        assert cli.main(["digits", "--steps", "2", "--seeds", "3", "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        assert "1,078 to train on, 719 held out for validation." in printed
        assert printed.splitlines()[-1].startswith("Validation accuracy: bf16 ")
        check_results(out, printed, 3, 719)
        for layer in ("stem", "patches", "logits"):
            assert layer in (out / "layers.txt").read_text()

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls:UserWarning")
    def test_every_layer_is_converted(self):
        task = tasks.digits(SimpleNamespace(task="digits", steps=None, recipe="delayed"))
        assert (task.steps, task.evaluations) == (240, 15)
        rows = fp8.report(task.models["fp8"], task.batch(0, 0).inputs[:2]).rows
        converted = {row.path for row in rows if row.converted}
        assert converted == {"stem", "patches", "logits"} | {
            f"encoder_{i}/{layer}"
            for i in range(2)
            for layer in (*(f"attention/{x}" for x in ("query", "key", "value", "out")), "up", "down")
        }
        assert {row.path for row in rows if not row.converted} == {
            f"encoder_{i}/attention" for i in range(2)
        }

    @pytest.mark.usefixtures("_all_cells")
    def test_fp8_is_as_accurate_as_bf16(self, tmp_path):
        """Runs the command over three seeds; each seed holds out other images."""
        process = subprocess.run(
            [sys.executable, "-m", "fp8flax.demo", "digits", "--out", str(tmp_path / "out")],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
        assert process.returncode == 0, process.stdout.decode()
        figures = json.loads((tmp_path / "out" / "results.json").read_text())
        assert [run["seed"] for run in figures["runs"]] == [0, 0, 1, 1, 2, 2]
        assert abs(np.mean(figures["differences"])) <= 0.5
        for run in figures["runs"]:
            assert run["accuracy"] > 0.97

    def test_the_split(self):
        splits = [data.load_digits(seed) for seed in (0, 0, 1)]
        for split in splits:
            inputs = np.concatenate([part.inputs for part in split.values()])
            assert inputs.shape == (1797, 8, 8, 1)
            assert inputs.min() == -1
            assert inputs.max() == 1
            assert len(split["validation"].labels) == 719
        first, again, other = (split["validation"].labels for split in splits)
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()
        numbered = data.Examples(np.arange(10), np.arange(10) % 3).split(0.4, 0)
        assert sorted(np.concatenate([part.inputs for part in numbered.values()])) == list(range(10))
        assert all((part.labels == part.inputs % 3).all() for part in numbered.values())

    def test_what_is_missing_is_one_line(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setitem(sys.modules, "sklearn", None)
        assert "pip install 'fp8flax[demo]'" in fails(capsys, "digits")
        assert not list(tmp_path.glob("runs/*"))


class Linear(nn.Module):
    """Logits that are linear in the inputs."""

    classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.classes)(nn.Dropout(0.2, deterministic=not self.has_rng("dropout"))(x))


def linear_task(steps=None):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(300, 16)).astype(np.float32)
    examples = data.Examples(inputs, (inputs[:, 0] > 0).astype(np.int32))
    options = SimpleNamespace(task="linear", steps=steps, recipe="delayed")
    parts = {"train": examples, "validation": examples}
    return tasks.classifier(
        options, "", Linear(2), lambda seed: parts, 2, 32, optimizer=lambda steps: optax.adam(1e-2)
    )


class TestClassifier:
    def test_one_logit_is_that_of_class_1(self):
        one = jnp.array([[0.3], [-2.0], [50.0]])
        two = jnp.concatenate([jnp.zeros((3, 1)), one], axis=1)
        labels = jnp.array([1, 1, 0])
        losses = (training.losses_of(logits, labels) for logits in (one, two))
        np.testing.assert_allclose(*losses, rtol=1e-6)
        for logits in (one, two):
            state = SimpleNamespace(apply_fn=lambda variables, x: x, params={})
            _, right = training.evaluate.__wrapped__(state, data.Examples(logits, labels))
            assert right == 1

    def test_batches_are_a_function_of_seed_and_epoch(self):
        task = linear_task()
        orders = [[task.batch(seed, step).inputs for step in range(9 * 2)] for seed in (0, 0, 1)]
        assert {batch.shape for order in orders for batch in order} == {(32, 16)}
        np.testing.assert_array_equal(orders[0], orders[1])
        assert (orders[0][0] != orders[2][0]).any()
        assert (orders[0][0] != orders[0][9]).any()
        for order in orders:  # each example at most once in an epoch
            assert len(np.unique(np.concatenate(order[:9]), axis=0)) == 9 * 32

    def test_steps_of_the_command_line(self):
        assert (linear_task().steps, linear_task().evaluations) == (18, 2)
        assert (linear_task(20).steps, linear_task(20).evaluations) == (20, 3)

    @pytest.mark.long
    def test_evaluation_counts_each_example_once(self):
        task = linear_task()
        run = training.Run(task, "bf16", 0)
        examples = [part.take(part.labels >= 0) for part in task.held_out(0, "validation")]
        inputs, labels = (
            np.concatenate([getattr(part, name) for part in examples]) for name in ("inputs", "labels")
        )
        assert len(labels) == 300
        logits = task.models["bf16"].apply(run.state.params, inputs)
        loss, accuracy = run.loss_and_accuracy("validation")
        assert loss == pytest.approx(float(training.loss_of(logits, labels)))
        assert accuracy == np.mean(np.argmax(logits, axis=1) == labels)

    @pytest.mark.long
    def test_a_run_depends_on_its_seed_alone(self, tmp_path):
        task, runs = linear_task(), []
        for i, (precision, seed) in enumerate((("fp8", 0), ("fp8", 0), ("fp8", 1), ("bf16", 0))):
            runs.append(training.Run(task, precision, seed))
            seen = [step for step, _ in runs[-1].train(tmp_path / str(i))]
            assert seen == list(range(1, 19))
        losses = [run.arrays["train_loss"] for run in runs]
        np.testing.assert_array_equal(losses[0], losses[1])
        assert (losses[0] != losses[2]).any()
        np.testing.assert_allclose(losses[0], losses[3], rtol=0.1)
        assert runs[0].evaluated_after == [9, 18]
        assert runs[0].layers == ["Dense_0"]
        assert runs[0].arrays["scaling"].shape == (18, 2, 1, 3)
        assert runs[0].accuracy == pytest.approx(runs[0].arrays["validation_accuracy"][-1])
        line = report.last_line(task, [runs[3], runs[0]])
        assert line.startswith("Validation accuracy: bf16 ")
        assert "seeds" not in line
        first, second = (f"accuracy {100 * runs[i].accuracy:.2f} %" for i in (0, 2))
        assert report.last_line(task, [runs[0], runs[2]]) == f"fp8: {first}, {second}"

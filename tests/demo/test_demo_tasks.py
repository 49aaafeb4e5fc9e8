"""The demo's classification tasks: what is read, trained, printed and saved; errors are one line."""

import json
import os
import subprocess
import sys
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

import fp8flax as fp8
from fp8flax.demo import __main__ as cli
from fp8flax.demo import classify, compare, digits, imdb, report
from tests.cases import normal

WORDS = {
    "pos": ("wonderful", "moving", "brilliant", "superb"),
    "neg": ("dull", "boring", "awful", "dreadful"),
}
OTHERS = ("the", "film", "of", "a", "man", "who", "finds", "his", "way", "home", "and", "was", "in", "end")
IMDB_LAYERS = 8
"""Query, key, value, out; up, down; hidden, positive."""


@pytest.fixture(autouse=True)
def _small_evaluation(monkeypatch):
    monkeypatch.setattr(classify, "EVALUATION_BATCH", 32)


@pytest.fixture(autouse=True)
def _promotion_of_optax():
    """Optax 0.2.8 mixes dtypes in its own arithmetic (``decay ** count``)."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def write_reviews(folder, train=20, test=10):
    """Writes that many short reviews of each class: ours, in the layout of aclImdb."""
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


def check_results(out, printed, layers):
    """Compares what was printed with what was saved; returns what was saved."""
    figures = json.loads((out / "results.json").read_text())
    differences = []
    for run in figures["runs"]:
        bf16, in_fp8 = (run["precisions"][p] for p in ("bf16", "fp8"))
        differences.append(100 * (in_fp8["accuracy"] - bf16["accuracy"]))
        assert run["difference_points"] == pytest.approx(differences[-1])
        assert bf16["fp8_ops"] == []
        assert len(in_fp8["fp8_ops"]) == layers
        for outcome in (bf16, in_fp8):
            count = figures["examples"][figures["accuracy_of"]]
            assert outcome["accuracy"] * count == pytest.approx(round(outcome["accuracy"] * count))
            assert f"{100 * outcome['accuracy']:.2f} %" in printed
            assert np.isfinite(outcome["train_loss"]).all()
        # From the same weights on the same batch; FP8 is another rounding.
        assert in_fp8["train_loss"][0] == pytest.approx(bf16["train_loss"][0], rel=0.05)
        assert in_fp8["train_loss"] != bf16["train_loss"]
    assert figures["mean_difference_points"] == pytest.approx(np.mean(differences))
    last = printed.strip().splitlines()[-1]
    assert last.startswith(f"{figures['accuracy_of'].capitalize()} accuracy: bf16 ")
    assert f"difference {np.mean(differences):+.2f} points" in last
    count = sum(len(run["precisions"]) for run in figures["runs"])
    steps = len(in_fp8["train_loss"])
    lines = -(-steps // report.STEPS_PER_LINE) + 1  # of each run: its steps, and its accuracy
    assert len(printed.splitlines()) == 1 + lines * count + (1 + count + 3)
    assert len((out / "layers.txt").read_text().splitlines()) >= layers
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    return figures


class TestImdb:
    @pytest.mark.long
    def test_a_whole_run(self, reviews, tmp_path, capsys, monkeypatch):
        # Without dropout it compiles in half the time.
        monkeypatch.setattr(imdb, "Settings", partial(imdb.Settings, length=40, dropout=0.0))
        # What this draws is in test_demo.
        monkeypatch.setattr(report, "plot_scaling", lambda path, _: report.save_figure(path, Figure()))
        out = tmp_path / "out"
        options = ["--epochs", "1", "--batch-size", "8", "--out", str(out)]
        assert cli.main(["--task", "imdb", "--data", str(reviews), *options]) == 0
        printed = capsys.readouterr().out
        assert "32 to train on, 8 held out for validation, 20 to test" in printed
        tables = (out / "tables.txt").read_text()
        assert "Accuracy of imdb, epochs 1, recipe delayed" in tables
        assert "FP8 variables before and after training" in tables
        assert "decoder/attention/query" in tables
        assert "decoder/attention/query" not in printed
        figures = check_results(out, printed, IMDB_LAYERS)
        assert figures["accuracy_of"] == "test"
        assert figures["settings"]["length"] == 40
        assert figures["settings"]["recipe"] == "delayed"
        assert len(figures["runs"][0]["precisions"]["fp8"]["train_loss"]) == 4
        assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")
        vocabulary = json.loads((out / "tokenizer.json").read_text())["model"]["vocab"]
        assert vocabulary["[PAD]"] == 0
        with np.load(out / "fp8_variables.npz") as variables:
            before, after = (
                {k.split("/", 2)[2]: v for k, v in variables.items() if k.split("/")[1] == when}
                for when in ("before", "after")
            )
        assert before.keys() == after.keys()
        assert len(before) == IMDB_LAYERS * 3 * 2
        scale = "decoder/attention/query/Fp8DotGeneralOp_0/kernel_scale"
        assert np.array_equal(before[scale], [1])
        assert 0 < after[scale] < 1
        for path, value in before.items():
            assert (value == path.endswith("_scale")).all()
            if path.endswith("_amax_history"):
                assert np.count_nonzero(after[path]) == 4, path
        # A second run does not write over the first.
        arguments = ("--task", "imdb", "--data", reviews, "--out", out)
        assert "holds results already" in fails(capsys, *arguments)

    @pytest.mark.usefixtures("_all_cells")
    @pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
    def test_it_learns(self, recipe, tmp_path, capsys):
        folder, out = write_reviews(tmp_path / "data", train=400, test=100), tmp_path / "out"
        options = ["--epochs", "6", "--out", str(out), "--recipe", recipe]
        assert cli.main(["--task", "imdb", "--data", str(folder), *options]) == 0
        printed = capsys.readouterr().out
        figures = check_results(out, printed, IMDB_LAYERS if recipe == "delayed" else 0)
        tables = (out / "tables.txt").read_text()
        assert ("This recipe has no FP8 variables" in tables) == (recipe == "mxfp8")
        assert (out / "scaling.png").exists() == (recipe == "delayed")
        for outcome in figures["runs"][0]["precisions"].values():
            assert outcome["accuracy"] > 0.95

    def test_reviews_are_read_in_order(self, tmp_path):
        folder = write_reviews(tmp_path / "data", train=3, test=1)
        below = folder / "train" / "pos"
        (below / "0_8.txt").write_bytes(b"caf\xe9 \xc3\xa9")  # not UTF-8, and UTF-8
        (below / ".hidden.txt").write_text("not a review")
        (below / "notes.md").write_text("not a review")
        (folder / "train" / "unsup").mkdir()
        texts, labels = imdb.read_reviews(str(folder), "train")
        np.testing.assert_array_equal(labels, [0, 0, 0, 1, 1, 1])
        assert texts[3] == "caf� é"
        assert "not a review" not in texts

    def test_the_vocabulary(self):
        texts = ["Reading reads: a reader, readers", "läse lesen LESER"] * 5
        make = partial(imdb.make_tokenizer, texts, 60, 6)
        tokenizer = make()
        vocabulary = tokenizer.get_vocab()
        assert all(make().get_vocab() == vocabulary for _ in range(3))
        assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
        assert len(vocabulary) <= 60
        tokens = imdb.encode(tokenizer, ["READER", "", "a a a a a a a a", "ß reader"])
        assert tokens.shape == (4, 6)
        assert tokens.dtype == np.int32
        np.testing.assert_array_equal(tokens[0], [vocabulary["reader"], 0, 0, 0, 0, 0])
        np.testing.assert_array_equal(tokens[1], 0)
        np.testing.assert_array_equal(tokens[2], vocabulary["a"])
        np.testing.assert_array_equal(tokens[3, :2], [vocabulary["[UNK]"], vocabulary["reader"]])

    def test_what_is_held_out_is_not_learnt_from(self, tmp_path):
        folder = write_reviews(tmp_path / "data")
        for i, path in enumerate(sorted(folder.glob("*/*/*.txt"))):
            path.write_text(f"{path.read_text()} {'xyz'[i % 3]}{i}{'uvw'[i % 3]}")
        settings = imdb.Settings(batch_size=4, length=40)
        task, tokenizer = imdb.make_task(str(folder), settings, "delayed")
        split = task.split(0)
        unknown = tokenizer.token_to_id(imdb.UNKNOWN)
        assert not (split.train.inputs == unknown).any()
        # Each review ends in a word of its own: in the vocabulary as one piece, or of several.
        train_ids = {tuple(row) for row in split.train.inputs}
        for part in (split.validation, split.test):
            assert not {tuple(row) for row in part.inputs} & train_ids
        assert [len(part) for part in (split.train, split.validation, split.test)] == [32, 8, 20]
        assert [part.labels.sum() for part in (split.test,)] == [10]
        assert split.train.labels.sum() + split.validation.labels.sum() == 20

    def test_the_model_of_keras(self):
        settings = imdb.Settings()
        assert (settings.epochs, settings.batch_size, settings.length) == (3, 32, 200)
        assert settings.vocabulary == 20_000
        shapes = jax.eval_shape(
            imdb.Classifier().init, jax.random.key(0), jnp.zeros((2, settings.length), jnp.int32)
        )
        assert list(shapes) == ["params"]
        sizes = jax.tree.map(lambda leaf: leaf.size, shapes["params"])
        total = sum(jax.tree.leaves(sizes))
        # Embeddings; attention and MLP with their biases and norms; the last two layers.
        assert total == 20_200 * 32 + 4 * (32 * 32 + 32) + 2 * (32 * 32 + 32 + 2 * 32) + 32 * 32 + 32 + 33

    def test_the_model_looks_back_only(self):
        decoder = imdb.Decoder(num_heads=2, hidden=8, dropout=0.1, dtype=jnp.float32)
        x = normal(0, 1, 6, 8)
        variables = jax.jit(decoder.init, static_argnums=2)(jax.random.key(1), x, False)
        apply = jax.jit(decoder.apply, static_argnums=2)
        changed = apply(variables, x.at[0, 3].add(1), False) != apply(variables, x, False)
        np.testing.assert_array_equal(changed.any(-1)[0], [False, False, False, True, True, True])

    def test_one_line_and_exit_code_2(self, reviews, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        of_imdb = partial(fails, capsys, "--task", "imdb")
        line = of_imdb()
        assert "ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz" in line
        assert "--data aclImdb" in line
        assert "'missing' is not a folder" in of_imdb("--data", "missing")
        assert "'' is not a folder" in of_imdb("--data", "")
        line = of_imdb("--data", reviews.parent)
        assert "holds no folder train/neg" in line
        assert "Pass the folder aclImdb inside it" in line
        folder = write_reviews(tmp_path / "data", train=2, test=1)
        of_folder = partial(of_imdb, "--data", folder)
        assert "--batch-size 32 is more than the 3 examples to train on" in of_folder()
        assert "--batch-size must be from 1 to 100,000; got 0" in of_folder("--batch-size", 0)
        assert "--epochs must be from 1 to 100,000; got -1" in of_folder("--epochs", -1)
        (folder / "test" / "pos" / "0_8.txt").write_text(" \n")
        assert "test/pos holds no review" in of_folder()
        (folder / "test" / "pos" / "0_8.txt").unlink()
        assert "test/pos holds no review" in of_folder()
        (folder / "test" / "pos").rmdir()
        assert "holds no folder test/pos" in of_folder()
        a_file = tmp_path / "file"
        a_file.touch()
        assert "cannot write to" in of_imdb("--data", reviews, "--out", a_file / "below")
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        assert "pip install 'fp8flax[demo]'" in of_imdb("--data", reviews)
        assert not list(tmp_path.glob("runs/*"))


class TestDigits:
    @pytest.mark.usefixtures("_all_cells")
    @pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls:UserWarning")
    def test_a_short_run(self, tmp_path, capsys, monkeypatch):
        # The encoders take most of the time; test_every_layer_is_converted has them.
        monkeypatch.setattr(digits, "Settings", partial(digits.Settings, width=16, num_layers=0))
        monkeypatch.setattr(report, "plot_scaling", lambda *_: None)  # in test_demo and above
        images = digits.load()
        few = classify.Examples(images.inputs[:250], images.labels[:250])
        monkeypatch.setattr(digits, "load", lambda: few)
        out = tmp_path / "out"
        options = ["--epochs", "1", "--batch-size", "64", "--seeds", "3", "--out", str(out)]
        assert cli.main(["--task", "digits", *options]) == 0
        printed = capsys.readouterr().out
        assert "150 to train on, 100 held out for validation." in printed
        figures = check_results(out, printed, 3)
        assert figures["accuracy_of"] == "validation"
        assert figures["examples"]["test"] is None
        for layer in ("stem", "patches", "logits"):
            assert layer in (out / "layers.txt").read_text()

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore:FP8 convolutions that are not matmuls:UserWarning")
    def test_every_layer_is_converted(self):
        task = digits.make_task(digits.Settings(), "delayed")
        rows = fp8.report(classify.quantized(task), task.split(0).train.inputs[:2]).rows
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
        """Over three seeds, each with images of its own held out: as the command is run."""
        process = subprocess.run(
            [sys.executable, "-m", "fp8flax.demo", "--task", "digits", "--out", str(tmp_path / "out")],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
        assert process.returncode == 0, process.stdout.decode()
        figures = json.loads((tmp_path / "out" / "results.json").read_text())
        assert [run["seed"] for run in figures["runs"]] == [0, 1, 2]
        assert abs(figures["mean_difference_points"]) <= 0.5
        for run in figures["runs"]:
            for outcome in run["precisions"].values():
                assert outcome["accuracy"] > 0.97

    def test_the_split(self):
        images = digits.load()
        assert images.inputs.shape == (1797, 8, 8, 1)
        assert images.inputs.min() == -1
        assert images.inputs.max() == 1
        numbered = classify.Examples(np.arange(len(images)), images.labels)
        splits = [digits.split(numbered, seed, 0.4) for seed in (0, 0, 1)]
        for split in splits:
            assert len(split.held_out) == 719
            together = np.concatenate([split.train.inputs, split.validation.inputs])
            np.testing.assert_array_equal(np.sort(together), numbered.inputs)
        first, again, other = (split.validation.inputs for split in splits)
        np.testing.assert_array_equal(first, again)
        assert len(np.intersect1d(first, other)) < 400

    def test_one_line_and_exit_code_2(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        of_digits = partial(fails, capsys, "--task", "digits")
        assert "--batch-size 2000 is more than the 1078 examples" in of_digits("--batch-size", 2000)
        assert "--batch-size must be from 1 to 100,000" in of_digits("--batch-size", 10**20)
        assert "--epochs must be from 1 to 100,000" in of_digits("--epochs", 10**20)
        assert "--seeds must be distinct" in of_digits("--seeds", 1, 1)
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        assert "pip install 'fp8flax[demo]'" in of_digits()
        assert not list(tmp_path.glob("runs/*"))


class TestOptions:
    @pytest.mark.parametrize(
        ("task", "option"),
        [
            ("lm", ("--epochs", "2")),
            ("lm", ("--batch-size", "2")),
            ("imdb", ("--steps", "2")),
            ("imdb", ("--precision", "fp8")),
            ("imdb", ("--resume",)),
            ("digits", ("--data", "x")),
        ],
    )
    def test_what_a_task_does_not_know(self, task, option, capsys):
        line = fails(capsys, "--task", task, *option)
        assert f"--task {task} takes no {option[0]}; it knows " in line
        assert "--recipe" in line

    def test_the_default_task_is_the_language_model(self, capsys):
        assert "--task lm takes no --epochs" in fails(capsys, "--epochs", 2)
        assert "invalid choice: 'vision'" in fails(capsys, "--task", "vision")


class Linear(nn.Module):
    """Logits that are linear in the inputs."""

    classes: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.classes)(nn.Dropout(0.2, deterministic=not train)(x))


def linear_task(classes=2, **changes):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(300, 16)).astype(np.float32)
    examples = classify.Examples(inputs, (inputs[:, 0] > 0).astype(np.int32))
    options = {"epochs": 1, "batch_size": 32, "recipe": "delayed", **changes}
    return classify.Task(
        name="linear",
        title="",
        source="",
        model=Linear(classes),
        optimizer=lambda steps: optax.adam(1e-2),
        split=lambda seed: classify.Split(examples, examples),
        **options,
    )


class TestClassify:
    def test_one_logit_is_that_of_class_1(self):
        one = jnp.array([[0.3], [-2.0], [50.0]])
        two = jnp.concatenate([jnp.zeros((3, 1)), one], axis=1)
        labels = jnp.array([1, 1, 0])
        np.testing.assert_array_equal(classify.predicted(one), [1, 0, 1])
        np.testing.assert_array_equal(classify.predicted(two), [1, 0, 1])
        losses = (classify.cross_entropy(logits, labels) for logits in (one, two))
        np.testing.assert_allclose(*losses, rtol=1e-6)

    def test_batches_are_a_function_of_seed_and_epoch(self):
        examples = classify.Examples(np.arange(10), np.arange(10) % 3)
        both = [list(classify.batches(examples, *key, 4)) for key in ((0, 0), (0, 0), (0, 1), (1, 0))]
        assert [len(b) for batch in both for b in batch] == [4] * 8
        orders = [np.concatenate([b.inputs for b in batch]).tolist() for batch in both]
        assert orders[0] == orders[1]
        assert len({tuple(order) for order in orders}) == 3
        for batch in both:
            assert all((b.labels == b.inputs % 3).all() for b in batch)
            assert len(set(orders[0])) == 8

    @pytest.mark.long
    def test_evaluation_counts_each_example_once(self):
        task = linear_task()
        examples = task.split(0).train
        variables = task.model.init(jax.random.key(0), examples.inputs[:1])
        state = fp8.TrainState.create(apply_fn=task.model.apply, params=variables, tx=optax.identity())
        logits = task.model.apply(variables, examples.inputs)
        loss, accuracy = classify.evaluate(state, examples)
        assert loss == pytest.approx(float(jnp.mean(classify.cross_entropy(logits, examples.labels))))
        assert accuracy == np.mean(np.argmax(logits, axis=1) == examples.labels)

    @pytest.mark.long
    def test_a_run_depends_on_its_seed_alone(self):
        task = linear_task(epochs=2)
        models = {"bf16": task.model, "fp8": classify.quantized(task)}
        optimizer = task.optimizer(task.steps(task.split(0)))
        seen = []
        train = partial(classify.train, task=task, models=models, optimizer=optimizer, split=task.split(0))
        runs = [
            train(precision, seed, on_step=lambda step, loss: seen.append(step))
            for precision, seed in (("fp8", 0), ("fp8", 0), ("fp8", 1), ("bf16", 0))
        ]
        assert seen == list(range(1, 19)) * 4
        np.testing.assert_array_equal(runs[0].train_loss, runs[1].train_loss)
        assert (runs[0].train_loss != runs[2].train_loss).any()
        np.testing.assert_allclose(runs[0].train_loss, runs[3].train_loss, rtol=0.1)
        assert runs[0].validation_steps == [9, 18]
        assert runs[0].ops == ["Dense_0"]
        assert runs[0].scale.shape == (18, 1, 3)
        assert runs[3].fp8_after == {}
        both = {0: {"bf16": runs[3], "fp8": runs[0]}}
        assert compare.last_line(task, both).startswith("Validation accuracy: bf16 ")
        assert "seeds" not in compare.last_line(task, both)

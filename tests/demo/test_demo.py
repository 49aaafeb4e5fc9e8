"""The demo computes the same numbers after a kill, and its errors are one line."""

import errno
import functools
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

from fp8flax.demo import __main__ as cli
from fp8flax.demo import data, report, tasks, training
from tests.cases import cells

SIZES = {"batch_size": 2, "length": 16, "width": 16, "num_layers": 1, "validation_batches": 2}
TINY = partial(tasks.Settings, **SIZES)
STEPS = 6
# The layers of the one block, and the logits. The attention of the first block stays in bf16.
FP8_LAYERS = ["block_0/down", "block_0/up", "logits"]


@pytest.fixture(autouse=True, scope="module")
def _little_optimization():
    """Compiling takes most of the time here. All programs that are compared are compiled in this way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for the processes that are started
        before = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def _promotion_of_optax():
    """Optax 0.2.8 mixes dtypes in its own arithmetic (``decay ** count``)."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def write_text(folder):
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"file {i}: the quick brown fox\n" * 20)
    (folder / "binary").write_bytes(b"\0\1" * 1000)
    (folder / "empty").touch()
    return folder


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text")


def tiny_task(text):
    return tasks.language_model(TINY(steps=STEPS), data.load_corpus(str(text), 16))


def trained(task, precision, folder, stop_after=None):
    """Trains until a given step is done, or to the end."""
    run = training.Run(task, precision, 0)
    for step, _ in run.train(folder):
        if step == stop_after:
            break
    return run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Returns a function that trains in a precision without interruption, once for each."""
    folder = tmp_path_factory.mktemp("whole")
    task = tiny_task(write_text(folder / "text"))
    return functools.cache(lambda precision: trained(task, precision, folder / precision))


@pytest.fixture(autouse=True, scope="module")
def _often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "CHECKPOINT_EVERY", 3)
        yield


PLOTS = {name: getattr(report, name) for name in ("plot_loss", "plot_scaling")}


@pytest.fixture
def tiny(monkeypatch):
    """Uses a small model; plots write no picture unless a test uses ``drawn``."""
    monkeypatch.setattr(tasks, "Settings", TINY)
    for name in PLOTS:
        monkeypatch.setattr(report, name, lambda path, *_: report.write_text(path, "no picture"))


@pytest.fixture
def drawn(tiny, monkeypatch):
    for name, plot in PLOTS.items():
        monkeypatch.setattr(report, name, plot)


class TestData:
    def test_split_by_file(self, text):
        corpus = data.load_corpus(str(text), 16)
        assert corpus.num_files == 12
        assert corpus.validation.tobytes().count(b"file 0:") == 20
        assert corpus.validation.tobytes().count(b"file 10:") == 20
        assert len(corpus.train) == sum(
            len((text / f"{i:02}.txt").read_bytes()) for i in range(12) if i % 10
        )

    def test_the_standard_library(self):
        corpus = data.load_corpus(None, 128)
        assert len(corpus.train) > 3e6
        assert len(corpus.validation) > 3e5
        assert b"def " in corpus.train.tobytes()

    def test_batches_depend_on_seed_and_step_alone(self, text):
        corpus = data.load_corpus(str(text), 16)
        batch = partial(data.train_batch, corpus, batch_size=4, length=16)
        first = batch(seed=0, step=5)
        assert first.shape == (4, 17)
        assert first.dtype == np.int32
        np.testing.assert_array_equal(first, batch(seed=0, step=5))
        assert (first != batch(seed=0, step=6)).any()
        assert (first != batch(seed=1, step=5)).any()

    def test_validation_windows_lie_within_the_text(self, text):
        corpus = data.load_corpus(str(text), 16)
        batches = data.validation_batches(corpus, 3, 2, 16)
        assert [b.shape for b in batches] == [(2, 17)] * 3
        np.testing.assert_array_equal(batches[0][0], corpus.validation[:17])


@pytest.mark.long
class TestTraining:
    @pytest.mark.oldest
    def test_both_precisions_start_from_the_same_weights(self, text):
        states = [training.make_state(tiny_task(text), p, 3) for p in training.PRECISIONS]
        params = [s.params["params"] for s in states]
        jax.tree.map(np.testing.assert_array_equal, *params)
        # The attention of the first block is wide.
        assert training.fp8_layers(states[1].params) == FP8_LAYERS
        assert training.fp8_layers(states[0].params) == []

    @pytest.mark.usefixtures("_all_cells")  # test_kill does it in CI
    @pytest.mark.parametrize(("precision", "stops"), [("bf16", (4,)), ("fp8", (2, 4, 5))])
    def test_an_interrupted_run_ends_in_the_same_bits(self, precision, stops, text, tmp_path, whole_run):
        task, whole = tiny_task(text), whole_run(precision)
        for step in stops:
            trained(task, precision, tmp_path / "parts", step)
        resumed = trained(task, precision, tmp_path / "parts")
        assert resumed.arrays.keys() == whole.arrays.keys()
        for name, array in resumed.arrays.items():
            np.testing.assert_array_equal(array, whole.arrays[name])
        assert np.isfinite(whole.arrays["train_loss"]).all()
        assert whole.evaluated_after[-1] == STEPS
        # A finished run trains no further.
        again = trained(task, precision, tmp_path / "parts")
        assert again.step_seconds == []
        np.testing.assert_array_equal(again.arrays["train_loss"], whole.arrays["train_loss"])

    @pytest.mark.oldest
    def test_recorded_scaling_is_that_of_the_state(self, whole_run):
        run = whole_run("fp8")
        scale, amax = run.arrays["scaling"].transpose(1, 0, 2, 3)
        assert scale.shape == amax.shape == (STEPS, len(FP8_LAYERS), 3)
        assert run.layers == FP8_LAYERS
        assert (scale[0] == 1).all()
        assert (amax[:, :, :2] > 0).all()
        # The scale of a step comes from the largest amax before it.
        before = np.maximum.accumulate(amax[:-1, :, 0], axis=0)
        np.testing.assert_allclose(scale[1:, :, 0], before / 448, rtol=1e-6)

    def test_ctrl_c_while_a_loss_is_converted(self, text, tmp_path, monkeypatch):
        """NumPy raises a ValueError if Ctrl-C arrives while it converts a JAX array."""

        class Loss:
            def __float__(self):
                raise KeyboardInterrupt

            def __len__(self):
                raise TypeError

            def __getitem__(self, i):
                raise TypeError

        monkeypatch.setattr(training, "train_step", lambda state, examples, key: (state, Loss(), None))
        with pytest.raises(KeyboardInterrupt):
            trained(tiny_task(text), "bf16", tmp_path)

    def test_a_damaged_checkpoint_is_one_line(self, text, tmp_path):
        trained(tiny_task(text), "bf16", tmp_path)
        for path in (tmp_path / str(STEPS)).rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
        with pytest.raises(data.DemoError, match="checkpoint .* cannot be read"):
            trained(tiny_task(text), "bf16", tmp_path)

    def test_a_flipped_bit_of_a_checkpoint_is_found(self, tmp_path):
        """The digest finds each flipped bit; Orbax alone returns many without an error."""
        weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        done = {"state": {"step": jnp.int32(3), "w": weights}, "train_loss": np.arange(9.0)}
        seen = []
        with ocp.CheckpointManager(tmp_path) as manager:
            training.save(manager, 3, done)
            restored = training.restore(manager, 3, done)
            assert training.digest(restored) == training.digest(done)
            chunks = sorted((tmp_path / "3").rglob("d/*"), key=lambda path: -path.stat().st_size)
            for path in chunks[:2]:
                whole = path.read_bytes()
                for i in range(8):
                    broken = bytearray(whole)
                    broken[len(whole) * (2 * i + 1) // 16] ^= 4
                    path.write_bytes(broken)
                    try:
                        restored = training.restore(manager, 3, done)
                    except data.DemoError as error:
                        seen.append(str(error))
                    else:
                        assert training.digest(restored) == training.digest(done)
                path.write_bytes(whole)
        assert any("its checksum does not match); delete that folder" in line for line in seen)

    def test_a_checkpoint_that_cannot_be_written_is_one_line(self, tmp_path, monkeypatch):
        def full(_):
            raise ValueError("RESOURCE_EXHAUSTED: disk full\nand more")

        done = {"state": {"step": jnp.int32(3)}}
        with ocp.CheckpointManager(tmp_path) as manager:
            training.save(manager, 3, done)
            monkeypatch.setattr(training, "digest", full)
            with pytest.raises(
                data.DemoError, match=r"/6 cannot be written \(ValueError: .* full\); --resume"
            ):
                training.save(manager, 6, done)

    def test_what_a_failed_write_left_goes(self, text, tmp_path):
        (tmp_path / "6.orbax-checkpoint-tmp").mkdir()
        next(training.Run(tiny_task(text), "bf16", 0).train(tmp_path))
        assert not list(tmp_path.glob("*tmp*"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


class FakeRun:
    """Run of 60 steps that trains nothing and takes no time."""

    def __init__(self, task, precision, seed):
        self.accuracy, self.step_seconds = None, [0.5]
        self.arrays = {"validation_loss": np.array([0.5])}

    def train(self, folder):
        yield from ((step, step / 100) for step in range(1, 61))


class TestProgress:
    def printed(self, file, monkeypatch, **environment):
        for name, value in {"TERM": "xterm", **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(cli, "Run", FakeRun)
        options = SimpleNamespace(seeds=[0], precision="fp8")
        batch = data.Examples(None, np.zeros((2, 16)))
        task = SimpleNamespace(accuracy_of=None, steps=60, batch=lambda seed, step: batch)
        console = Console(file=file, width=80, markup=False, highlight=False, soft_wrap=True)
        cli.train_all(options, task, Path(), console)
        return file.getvalue()

    @pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1"}], ids=str)
    def test_a_file_gets_a_line_every_25_steps(self, environment, monkeypatch):
        assert self.printed(io.StringIO(), monkeypatch, **environment).splitlines() == [
            "fp8, seed 0: step 25 of 60, loss 0.250, 64 tokens/s",
            "fp8, seed 0: step 50 of 60, loss 0.500, 64 tokens/s",
            "fp8, seed 0: step 60 of 60, loss 0.600, 64 tokens/s",
            "fp8, seed 0: validation loss 0.500",
        ]

    def test_a_terminal_gets_a_bar(self, monkeypatch):
        printed = self.printed(Terminal(), monkeypatch)
        assert "━" in printed
        assert "60/60" in printed
        assert "step 25" not in printed

    def test_a_terminal_that_cannot_move_its_cursor_gets_lines(self, monkeypatch):
        printed = self.printed(Terminal(), monkeypatch, TERM="dumb")
        assert len(printed.splitlines()) == 4
        assert "━" not in printed


@pytest.mark.usefixtures("tiny")
class TestCommandLine:
    @pytest.mark.usefixtures("drawn")
    @pytest.mark.long
    def test_a_whole_run(self, text, tmp_path, capsys):
        out = tmp_path / "out"
        arguments = ["--data", str(text), "--steps", str(STEPS), "--seeds", "0", "1", "--out", str(out)]
        assert cli.main(arguments) == 0
        printed = capsys.readouterr().out
        assert len(printed.splitlines()) == 1 + 4 * 2 + (1 + 4 + 3)  # the corpus, four runs, the result
        assert "block_0/up" not in printed
        last = printed.strip().splitlines()[-1]
        assert last.startswith("FP8 validation loss relative to bf16: ")
        for name in ("loss.png", "scaling.png"):
            assert (out / name).read_bytes().startswith(b"\x89PNG")
        figures = json.loads((out / "results.json").read_text())
        assert figures["versions"]["jax"] == jax.__version__
        assert figures["options"]["recipe"] == "delayed"
        named = [(run["seed"], run["precision"]) for run in figures["runs"]]
        assert named == [(0, "bf16"), (0, "fp8"), (1, "bf16"), (1, "fp8")]
        for (bf16, fp8), difference in zip(zip(*[iter(figures["runs"])] * 2), figures["differences"]):
            losses = bf16["validation_loss"][-1], fp8["validation_loss"][-1]
            assert difference == pytest.approx(100 * (losses[1] / losses[0] - 1))
            assert len(fp8["train_loss"]) == STEPS
            assert fp8["layers"] == FP8_LAYERS
            assert np.shape(fp8["scaling"]) == (STEPS, 2, len(FP8_LAYERS), 3)
        # A finished run is not trained again.
        assert cli.main(["--resume", "--out", str(out)]) == 0
        again = json.loads((out / "results.json").read_text())
        assert again["differences"] == figures["differences"]
        assert again["runs"][0]["step_seconds"] == []

    @pytest.mark.usefixtures("_all_cells")
    def test_a_recipe_without_state(self, text, tmp_path, capsys):
        out, recipe = tmp_path / "o", "mxfp8"
        arguments = ["--data", str(text), "--steps", "3", "--out", str(out), "--precision", "fp8"]
        assert cli.main([*arguments, "--recipe", recipe]) == 0
        assert f"recipe {recipe}" in capsys.readouterr().out
        assert not (out / "scaling.png").exists()
        figures = json.loads((out / "results.json").read_text())
        assert figures["options"]["recipe"] == recipe
        assert np.isfinite(figures["runs"][0]["train_loss"]).all()
        assert "--resume takes --out alone" in self.fails(capsys, "--resume", "--recipe", "delayed")

    @pytest.mark.long
    @pytest.mark.parametrize("precision", cells(training.PRECISIONS, repeated=["bf16"]))
    def test_one_precision(self, precision, text, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(report, "plot_loss", PLOTS["plot_loss"])
        arguments = ["--data", str(text), "--steps", str(STEPS), "--out", str(tmp_path / "o")]
        assert cli.main([*arguments, "--precision", precision]) == 0
        (run,) = json.loads((tmp_path / "o" / "results.json").read_text())["runs"]
        training_loss, validation_loss = run["train_loss"][-1], run["validation_loss"][-1]
        corpus, step, end, *result = capsys.readouterr().out.splitlines()
        assert corpus.endswith(f"Results in {tmp_path / 'o'}")
        assert step.startswith(f"{precision}, seed 0: step {STEPS} of {STEPS}, loss {training_loss:.3f}, ")
        assert end == f"{precision}, seed 0: validation loss {validation_loss:.3f}"
        files = "config.json, loss.png, results.json" + ", scaling.png" * (precision == "fp8")
        assert result == [
            f"Losses in nats per byte after {STEPS} steps, recipe delayed:",
            f"  {precision}, seed 0: training {training_loss:.4f}, validation {validation_loss:.4f}",
            f"Picture of the losses: {tmp_path / 'o' / 'loss.png'}",
            f"Wrote {files} in {tmp_path / 'o'}",
            f"{precision} validation loss: {validation_loss:.4f} nats per byte",
        ]
        assert (tmp_path / "o" / "scaling.png").exists() == (precision == "fp8")

    def fails(self, capsys, *arguments):
        assert cli.main([str(a) for a in arguments]) == 2
        captured = capsys.readouterr()
        line = captured.err.strip()
        assert line.startswith("fp8flax demo: ")
        assert "\n" not in line
        assert "Traceback" not in captured.out
        return line

    def test_one_line_and_exit_code_2(self, text, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        empty, a_file = tmp_path / "nothing", tmp_path / "file"
        empty.mkdir()
        a_file.touch()
        fails = partial(self.fails, capsys)
        assert "'missing' is not a folder" in fails("--data", "missing")
        assert "'' is not a folder" in fails("--data", "")
        assert "is not a folder" in fails("--data", a_file)
        assert "holds too little text: 0 text files" in fails("--data", empty)
        assert "--out: '' is not a folder" in fails("--data", text, "--out", "")
        assert "--out: '' is not a folder" in fails("--resume", "--out", "")
        assert "--steps must be from 1 to 100,000; got 0" in fails("--steps", 0)
        assert "--steps must be from 1 to 100,000" in fails("--data", text, "--steps", 10**20)
        assert "from 0 to 4294967295; got [1000" in fails("--data", text, "--seeds", 10**23)
        assert "--seeds must be distinct" in fails("--data", text, "--seeds", -1)
        assert "invalid int value: 'x'" in fails("--steps", "x")
        assert "--seeds must be distinct" in fails("--seeds", 1, 1)
        assert "invalid choice: 'fp4'" in fails("--precision", "fp4")
        assert "invalid choice: 'vision'" in fails("vision")
        assert "digits takes no --data" in fails("digits", "--data", text)
        assert "runs holds no run" in fails("--resume")
        assert "holds no run" in fails("--resume", "--out", empty)
        assert "--resume takes --out alone" in fails("--resume", "--steps", 4)
        assert "Not a directory" in fails("--data", text, "--out", a_file / "below")
        assert not list(tmp_path.glob("runs/*"))

    def test_memory_that_is_not_there(self, capsys, monkeypatch):
        def run(_):
            raise MemoryError

        monkeypatch.setattr(cli, "run", run)
        assert self.fails(capsys) == "fp8flax demo: out of memory"

    @pytest.mark.long
    def test_a_run_is_not_overwritten_nor_mixed(self, text, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        arguments = ["--data", str(text), "--precision", "bf16"]
        assert cli.main([*arguments, "--steps", str(STEPS)]) == 0
        (out,) = Path("runs").iterdir()
        fails = partial(self.fails, capsys)
        config = json.loads((out / "config.json").read_text())
        assert "holds a run already" in fails(*arguments, "--out", out)
        (text / "00.txt").write_text("something else " * 100)
        assert "has changed since the run" in fails("--resume")
        for broken in (
            "{",
            "{}",
            "[" * 10**5,
            "[]",
            "\xff",
        ):
            (out / "config.json").write_text(broken)
            assert "cannot be read" in fails("--resume")
        for name in config:
            for wrong in (True, 1.5, {}, [None], [True], [], 10**30):
                (out / "config.json").write_text(json.dumps({**config, name: wrong}))
                fails("--resume")

    def test_one_run_at_a_time(self, text, tmp_path, capsys):
        """A process holds the lock, so a killed one does not."""
        arguments = ["--data", str(text), "--precision", "bf16", "--steps", str(STEPS)]
        arguments += ["--out", str(tmp_path)]
        script = "import sys, filelock; x = filelock.FileLock(sys.argv[1]).acquire(); print(); input()"
        lock = tmp_path / ".lock"
        command = [sys.executable, "-uc", script, str(lock)]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            other.stdout.readline()
            line = self.fails(capsys, *arguments)
            assert f"The file lock '{lock}' could not be acquired" in line
            assert not (tmp_path / "config.json").exists()
        finally:
            other.kill()
            other.communicate()
        assert cli.main(arguments) == 0

    def test_full_disk(self, text, tmp_path, capsys, monkeypatch):
        out, replace, full = tmp_path / "out", os.replace, []

        def replace_unless_full(source, target):
            if Path(target).name in full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(source, target)

        def files():
            return {path: path.read_bytes() for path in out.iterdir() if path.is_file()}

        monkeypatch.setattr(os, "replace", replace_unless_full)
        arguments = ["--data", text, "--steps", STEPS, "--precision", "bf16", "--out", out]
        full = ["config.json"]
        assert f"No space left on device: '{out}/config.json'" in self.fails(capsys, *arguments)
        assert not [path for path in out.iterdir() if path.name != ".lock"]
        full = []
        assert cli.main([str(a) for a in arguments]) == 0
        capsys.readouterr()
        for name in ("results.json", "loss.png"):
            full, before = [name], files()
            assert f"No space left on device: '{out / name}'" in self.fails(
                capsys, "--resume", "--out", out
            )
            assert files().keys() == before.keys()
            assert files()[out / name] == before[out / name]

    def test_results_among_the_text_are_not_text(self, text, capsys, monkeypatch):
        monkeypatch.chdir(text)
        arguments = ["--data", ".", "--precision", "bf16", "--steps", str(STEPS)]
        assert cli.main(arguments) == 0
        assert cli.main(["--resume"]) == 0
        assert cli.main([*arguments, "--out", "here"]) == 0
        assert cli.main(["--resume", "--out", "here"]) == 0

    def test_the_newest_run_is_resumed(self, text, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        arguments = ["--data", str(text), "--precision", "bf16", "--steps", str(STEPS)]
        for name in ("runs/zz", "runs/aa"):
            assert cli.main([*arguments, "--out", name]) == 0
        os.utime("runs/zz/config.json", (0, 0))
        (tmp_path / "runs/aa/results.json").unlink()
        assert cli.main(["--resume"]) == 0
        assert (tmp_path / "runs/aa/results.json").exists()

    def test_a_diverged_loss_is_still_json(self, tmp_path):
        report.write_json(tmp_path / "r.json", {"loss": [1.0, float("nan")], "gap": float("inf")})
        assert json.loads((tmp_path / "r.json").read_text()) == {"loss": [1.0, None], "gap": None}


@pytest.mark.usefixtures("_all_cells")  # test_kill has ten of them
def test_kill_9_and_resume(text, tmp_path):
    """A killed process loses nothing but time."""
    script = textwrap.dedent("""
        import sys
        from functools import partial
        from fp8flax.demo import __main__ as cli, tasks, training
        tasks.Settings = partial(tasks.Settings, batch_size=2, length=16, width=16, num_layers=1,
                                 validation_batches=2)
        training.CHECKPOINT_EVERY = 3
        sys.exit(cli.main(sys.argv[1:]))
    """)

    def start(*arguments):
        return subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    options = ("--data", text, "--steps", 30, "--precision", "fp8")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = start(*options, "--out", whole)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()

    process = start(*options, "--out", killed)
    deadline = time.monotonic() + 300
    while not list(killed.glob("checkpoints/fp8-seed0/[1-9]*")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (killed / "results.json").exists()
    process = start("--resume", "--out", killed)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()

    def losses(folder):
        (run,) = json.loads((folder / "results.json").read_text())["runs"]
        return run["train_loss"], run["validation_loss"], run["scaling"]

    assert losses(whole) == losses(killed)

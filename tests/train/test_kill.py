"""A killed run ends like an undisturbed one, bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import FEW_OPTIMIZATIONS, xla_flags

PROGRAM = Path(__file__).parent / "programs" / "train_with_checkpoints.py"
PATIENCE = 240  # seconds until a process that should have done something is given up; nothing else is timed


class Run:
    """The program as a process, with the lines of its log."""

    def __init__(self, folder, name, *options):
        self.log = folder / name
        self.log.touch()
        self.errors = (folder / f"{name}-errors").open("w+")
        # It has its own cache of compiled programs, because a kill may leave an entry half written.
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, self.log, *options],
            env={**os.environ, **xla_flags(FEW_OPTIMIZATIONS), "JAX_NUM_CPU_DEVICES": "1", **cache},
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
        )
        self.began = time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.errors.close()

    def lines(self):
        """Returns ``(event, step, digest)`` of each line that is complete."""
        lines = [
            line.split() for line in self.log.read_text().splitlines(keepends=True) if line[-1] == "\n"
        ]
        return [(event, int(step), digest) for event, step, digest in lines]

    def steps_taken(self):
        return sum(event == "step" for event, _, _ in self.lines())

    def fail(self, what):
        self.errors.seek(0)
        pytest.fail(f"{what}; it wrote:\n{self.errors.read()[-4000:]}")

    def wait_until(self, condition, look_every=0.01):
        while not condition():
            if self.process.poll() is not None:
                self.fail(f"the program ended with {self.process.returncode}")
            if time.monotonic() - self.began > PATIENCE:
                self.fail("the program did not get there in time")
            time.sleep(look_every)

    def finish(self):
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.fail("the program did not end in time")
        if code != 0:
            self.fail(f"the program ended with {code}")

    def stop_while(self, condition):
        """Stops the process while a condition holds."""
        while True:
            self.wait_until(condition, look_every=0.001)
            self.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if condition():
                return
            self.process.send_signal(signal.SIGCONT)


def finished(checkpoints):
    return {int(path.name) for path in checkpoints.glob("*") if path.name.isdigit()}


def unfinished(checkpoints):
    """Returns the names of checkpoints that are being written."""
    return {path.name for path in checkpoints.glob("*.orbax-checkpoint-tmp*")}


MOMENTS = (
    *("writing", "starting", "any", "writing", "finished"),
    *("starting", "any", "writing", "starting", "any"),
)


def kill(run, moment, checkpoints, draw, startup):
    """Kills the program at a moment of this kind; returns the seconds that it took to its first step."""
    if moment == "starting":  # imports, reading the checkpoint, compiling
        time.sleep(draw.random() * startup)
    else:
        torn, count = unfinished(checkpoints), draw.randint(3, 6)
        run.wait_until(run.steps_taken)
        startup = time.monotonic() - run.began
        run.wait_until(lambda: run.steps_taken() >= count)
    if moment == "writing":
        run.stop_while(lambda: unfinished(checkpoints) - torn)
    elif moment == "finished":
        before = finished(checkpoints)
        run.wait_until(lambda: finished(checkpoints) - before)
    elif moment == "any":
        time.sleep(draw.random() * 0.2)
    run.process.kill()
    assert run.process.wait() == -signal.SIGKILL
    if moment == "writing":
        assert unfinished(checkpoints) - torn
    return startup


@pytest.mark.long
def test_killed_again_and_again(tmp_path, request):
    moments = MOMENTS if request.config.getoption("--all-cells") else MOMENTS[:2]
    checkpoints, draw = tmp_path / "checkpoints", random.Random(0)
    logs, startup = [], 0.0
    for number, moment in enumerate(moments):
        with Run(tmp_path, f"killed-{number}", "--checkpoints", checkpoints) as run:
            startup = kill(run, moment, checkpoints, draw, startup)
            logs.append(run.lines())
    assert len(logs) == len(moments)

    end = 5 + max(step for lines in logs for _, step, _ in lines)
    with Run(tmp_path, "last", "--checkpoints", checkpoints, "--steps", str(end)) as last:
        last.finish()
    with Run(tmp_path, "undisturbed", "--steps", str(end)) as undisturbed:
        undisturbed.finish()
    expected = {step: digest for _, step, digest in undisturbed.lines()}
    assert sorted(expected) == list(range(1, end + 1))
    assert len(set(expected.values())) == end

    logs.append(last.lines())
    assert last.lines()[-1] == ("step", end, expected[end])
    for event, step, digest in (line for lines in logs for line in lines):
        assert digest == expected[step], (event, step)
    # No process started from the beginning, or from an older checkpoint than the process before.
    starts = [lines[0][:2] for lines in logs[1:] if lines]
    assert len(starts) >= len(moments) - moments.count("starting")
    assert {event for event, _ in starts} == {"restored"}
    assert starts == sorted(starts)

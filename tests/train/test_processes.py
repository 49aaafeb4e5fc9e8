"""Two and four processes with a device each compute what one process with all the data does."""

import os
import re
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import fp8flax as fp8
from tests import FEW_OPTIMIZATIONS, ROOT, xla_flags

PROGRAM = ROOT / "tests" / "train" / "programs" / "train_on_processes.py"
PAGE = ROOT / "docs" / "clusters.md"
KINDS = ("exact", "adam")
PATIENCE = 240  # seconds until all processes must have ended


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(folder, commands, **environment):
    """Runs all commands at once; returns what each of them printed."""
    # A connection to 127.0.0.1 needs no proxy.
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        **xla_flags(FEW_OPTIMIZATIONS),
        **environment,
    }
    logs = [folder / f"{i}.txt" for i in range(len(commands))]
    processes, deadline = [], time.monotonic() + PATIENCE
    try:
        for i, (command, log) in enumerate(zip(commands, logs)):
            with log.open("w") as out, log.with_suffix(".err").open("w") as err:
                own = {**environment, "PROCESS": str(i)}
                processes.append(
                    subprocess.Popen([sys.executable, *command], env=own, stdout=out, stderr=err)
                )
        # If one process fails, the others wait for it until the time is up.
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        codes = [p.poll() for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(code != 0 for code in codes):
        errors = [log.with_suffix(".err").read_text()[-3000:] for log in logs]
        pytest.fail(f"the processes ended with {codes}:\n" + "\n\n".join(errors))
    return [log.read_text() for log in logs]


def train(folder, count, *kinds):
    """Returns the results of each of ``count`` processes that train the given kinds of network."""
    options = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
    found = [folder / f"{i}.npz" for i in range(count)]
    run(folder, [[PROGRAM, out, *kinds, *options, "--process", str(i)] for i, out in enumerate(found)])
    return [dict(np.load(out)) for out in found]


@pytest.fixture(scope="module")
def kinds_in_ci(request):
    """CI leaves out Adam, whose sums have another order; the communication is the same."""
    return KINDS if request.config.getoption("--all-cells") else KINDS[:1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, kinds_in_ci):
    return train(tmp_path_factory.mktemp("alone"), 1, *kinds_in_ci)[0]


def is_state(name):
    return fp8.OVERWRITE_WITH_GRADIENT in name


@pytest.mark.long
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.all_cells)])
def test_as_one_process(count, kinds_in_ci, alone, tmp_path):
    kinds = kinds_in_ci if count == 2 else ("exact", "shard_map")
    results = train(tmp_path, count, *kinds)
    for found in results:
        assert {name.split("/")[0] for name in found} == set(kinds)
        assert sum(map(is_state, found)) == len(kinds) * 2 * 6
        for name, value in found.items():
            expected = alone[name.replace("shard_map/", "exact/")]
            assert value.dtype == expected.dtype
            assert value.tobytes() == results[0][name].tobytes(), name  # the same on every process
            if name.startswith("adam/"):  # sums in another order
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(value, expected, err_msg=name)


@pytest.mark.long
def test_the_run_changes_the_state(alone, kinds_in_ci):
    """The run changes states and losses; otherwise equal states would prove nothing."""
    for name in filter(is_state, alone):
        assert np.all(alone[name] > 0), name
        if name.endswith("_scale"):
            assert np.all(alone[name] != 1), name
    for kind in kinds_in_ci:
        assert len(set(alone[f"{kind}/losses"].tolist())) == len(alone[f"{kind}/losses"])


@pytest.mark.usefixtures("_all_cells")  # test_readme runs it in one process
def test_the_script_of_the_docs(tmp_path):
    """Two processes train and save; two others continue from the checkpoint."""
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    printed = []
    for steps in (2, 4):
        shorter = script.replace("STEPS, ROWS = 4, 8", f"STEPS, ROWS = {steps}, 8")
        assert (shorter != script) == (steps != 4)
        (tmp_path / "train.py").write_text(shorter)
        address = f"127.0.0.1:{free_port()}"
        first, second = run(
            tmp_path,
            [[tmp_path / "train.py"]] * 2,
            COORDINATOR=address,
            PROCESSES="2",
            CHECKPOINTS=str(tmp_path / "checkpoints"),
        )
        assert "step" not in second
        printed += re.findall(r"^step (\d) loss ([\d.]+)$", first, flags=re.MULTILINE)
    assert [step for step, _ in printed] == ["1", "2", "3", "4"]
    assert float(printed[-1][1]) < float(printed[0][1])

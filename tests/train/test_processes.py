"""Two processes with a device each compute what one process with all the data does."""

import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import fp8flax as fp8
from tests import FEW_OPTIMIZATIONS, ROOT, xla_flags

PROGRAM = ROOT / "tests" / "train" / "programs" / "train_on_processes.py"
PATIENCE = 240  # seconds until all processes must have ended


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(folder, count):
    """Returns the results of each of ``count`` processes, which train at once."""
    # A connection to 127.0.0.1 needs no proxy.
    environment = {
        **{name: value for name, value in os.environ.items() if "proxy" not in name.lower()},
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        **xla_flags(FEW_OPTIMIZATIONS),
    }
    options = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
    found = [folder / f"{i}.npz" for i in range(count)]
    processes, deadline = [], time.monotonic() + PATIENCE
    try:
        for i, out in enumerate(found):
            command = [sys.executable, PROGRAM, out, *options, "--process", str(i)]
            with out.with_suffix(".err").open("w") as err:
                processes.append(subprocess.Popen(command, env=environment, stderr=err))
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
        errors = [out.with_suffix(".err").read_text()[-3000:] for out in found]
        pytest.fail(f"the processes ended with {codes}:\n" + "\n\n".join(errors))
    return [dict(np.load(out)) for out in found]


@pytest.mark.long
def test_as_one_process(tmp_path):
    (tmp_path / "alone").mkdir()
    (alone,) = train(tmp_path / "alone", 1)
    state = [name for name in alone if fp8.OVERWRITE_WITH_GRADIENT in name]
    assert len(state) == 2 * 6
    for found in train(tmp_path, 2):
        assert found.keys() == alone.keys()
        for name, value in found.items():
            assert value.dtype == alone[name].dtype
            np.testing.assert_array_equal(value, alone[name], err_msg=name)
    # The run changes states and losses; otherwise equal states would prove nothing.
    for name in state:
        assert np.all(alone[name] > 0), name
        if name.endswith("_scale"):
            assert np.all(alone[name] != 1), name
    assert len(set(alone["losses"].tolist())) == len(alone["losses"])

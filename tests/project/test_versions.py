"""The package checks the version of JAX at import."""

import runpy
import signal
import subprocess
import sys
import time
import warnings

import jax
import pytest

from fp8flax._host import versions

pytestmark = pytest.mark.oldest


@pytest.mark.parametrize("version", ["0.8.2", "0.13.0", "0.13.0.dev20260101", "1.0"])
def test_warns_of_a_version_that_is_not_known(version, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    with pytest.warns(UserWarning, match=rf"JAX 0.9 to 0.12; this is JAX {version}. .*'jax>=0.9,<0.13'"):
        runpy.run_path(versions.__file__)


@pytest.mark.parametrize("version", [jax.__version__, "0.9.0", "0.10.2", "0.11.9", "0.12.0rc1"])
def test_versions_that_are_known(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_unknown(version)


def test_ctrl_c_while_a_command_imports():
    # Ctrl-C is ignored in what a shell has started in the background, and in all that it starts.
    start = (
        "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-X", "importtime", "-m", "fp8flax.demo", "--help"]
    process = subprocess.Popen(
        [sys.executable, "-c", start, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if line.split("|")[-1].strip() == "fp8flax._host.interrupt":
            break
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert [x for x in errors.splitlines() if not x.startswith("import time:")] == ["fp8flax: interrupted"]

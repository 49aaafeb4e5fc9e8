"""``python -m fp8flax`` prints what a bug report needs."""

import importlib.metadata
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import fp8flax as fp8
from fp8flax import __main__ as command


@pytest.mark.long
def test_command():
    lines = subprocess.run(
        [sys.executable, "-m", "fp8flax"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert lines[0].startswith(f"fp8flax {fp8.__version__}, Python {sys.version.split()[0]} on ")
    assert f"jax {jax.__version__}, jaxlib {jax.lib.__version__}, " in lines[1]
    assert f"numpy {np.__version__}" in lines[1]
    assert "JAX_PLATFORMS=cpu" in lines
    assert any(line.endswith("(cpu): no FP8; the same values are emulated") for line in lines)
    extras = lines[lines.index("extras:") + 1 :]
    if "not known" not in extras[0]:
        named = {
            extra.replace("_", "-")
            for extra in importlib.metadata.metadata("fp8flax").get_all("Provides-Extra")
        }
        assert {line.split(":")[0].strip() for line in extras} == named


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--help"], 0, "fp8flax demo"),
        (["audit", "demo", "--target", "nothing"], 2, "fp8flax audit: argument --target: invalid choice"),
        (["demo", "nothing"], 2, "fp8flax demo: argument task: invalid choice"),
        (["nothing"], 2, "fp8flax: there is no command 'nothing'\nusage: "),
    ],
)
def test_the_commands(arguments, status, said, capsys):
    assert command.main(arguments) == status
    out, err = capsys.readouterr()
    assert said in (err if status else out)


@pytest.mark.long
@pytest.mark.parametrize("name", ["audit", "demo"])
def test_the_commands_have_their_old_names_too(name):
    def help_of(*words):
        command = [sys.executable, "-m", *words, "--help"]
        return subprocess.run(command, capture_output=True, check=True).stdout

    assert help_of(f"fp8flax.{name}") == help_of("fp8flax", name) != b""


@pytest.mark.parametrize(
    ("platform", "version", "said"),
    [
        ("gpu", "8.0", "no FP8, which begins with compute capability 8.9; the same values are emulated"),
        ("gpu", "9.0", "FP8 with scales per tensor or row (compute capability 9.0)"),
        ("gpu", "10.0", "FP8 with scales per tensor or row, and per 32 columns (compute capability 10.0)"),
        ("gpu", "gfx942", "FP8 in the way of its own compiler, which fp8flax does not know"),
        ("tpu", None, "FP8 in the way of its own compiler, which fp8flax does not know"),
    ],
)
def test_what_a_device_multiplies(platform, version, said):
    device = SimpleNamespace(platform=platform)
    if version is not None:
        device.compute_capability = version
    assert command.multiplies(device) == said


def test_what_is_missing_is_said(monkeypatch):
    requirements = [
        "jax>=0.10",
        "matplotlib>=3.8; extra == 'plots'",
        "nothing-of-the-kind; extra == 'other'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    lines = command.environment().splitlines()
    assert lines[-2:] == ["  other: without nothing-of-the-kind", "  plots: installed"]

    def refuse(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", refuse)
    assert "not installed (pip install -e .)" in command.environment().splitlines()[-1]

    def no_devices():
        raise RuntimeError("Unknown backend: 'gpu'")

    monkeypatch.setattr(jax, "devices", no_devices)
    assert "  none: Unknown backend: 'gpu'" in command.environment().splitlines()

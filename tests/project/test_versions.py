"""The package checks the version of JAX at import, and declares its dependencies."""

import ast
import re
import runpy
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from pathlib import Path

import jax
import pytest

import fp8flax
from fp8flax._host import versions

pytestmark = pytest.mark.oldest

PACKAGE = Path(fp8flax.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("version", ["0.9.2", "0.13.0", "0.13.0.dev20260101", "1.0"])
def test_warns_of_a_version_that_is_not_known(version, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    with pytest.warns(UserWarning, match=rf"JAX 0.10 to 0.12; this is JAX {version}. .*'jax>=0.10,<0.13'"):
        runpy.run_path(versions.__file__)


@pytest.mark.parametrize("version", [jax.__version__, "0.10.2", "0.11.9", "0.12.0rc1"])
def test_versions_that_are_known(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_of_unknown(version)


def declared(requirements):
    names = {re.match(r"[\w.-]+", requirement)[0] for requirement in requirements}
    modules = {"orbax-checkpoint": "orbax", "scikit-learn": "sklearn"}
    return {modules.get(name, name) for name in names}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_is_imported_is_declared(path):
    # jaxtyping for the type checker alone, see test_types.py.
    known = declared(PROJECT["dependencies"]) | {"fp8flax", "jaxtyping", *sys.stdlib_module_names}
    extra = {"demo": "demo", "_audit": "demo", "_serve": "safetensors"}.get(path.parent.name)
    extra = "plots" if path.name == "plots.py" else extra
    known |= declared(PROJECT["optional-dependencies"].get(extra, ()))
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= known


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


def pins_of(file):
    lines = (PACKAGE.parent / ".ci" / f"constraints{file}.txt").read_text().splitlines()
    return dict(line.lower().replace("_", "-").split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize(("file", "extras"), [("", ("test", "dev")), ("-newest", ("test",))])
def test_ci_has_an_exact_version_of_everything(file, extras):
    pins = pins_of(file)
    needed = list(PROJECT["dependencies"])
    for extra in (*extras, "demo", "audit", "notebooks", "safetensors"):
        needed += PROJECT["optional-dependencies"][extra]
    names = {re.match(r"[\w.-]+", requirement)[0].replace("_", "-") for requirement in needed}
    assert names - {"fp8flax"} <= pins.keys()
    assert len({pins[name] for name in ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt")}) == 1
    release = tuple(map(int, pins["jax"].split(".")[:2]))
    assert release == (versions.NEWEST if file == "-newest" else versions.OLDEST)


def test_the_site_has_an_exact_version_of_everything():
    """The second file pins what the site needs beside the tests; pip gets the two files together."""
    pins, more = pins_of(""), pins_of("-docs")
    assert not pins.keys() & more.keys()
    needed = {
        re.match(r"[\w-]+", requirement)[0] for requirement in PROJECT["optional-dependencies"]["docs"]
    }
    assert needed - {"fp8flax"} <= {*pins, *more}

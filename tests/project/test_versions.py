"""The package checks the version of JAX at import, and declares its dependencies."""

import re
import runpy
import tomllib
import warnings
from pathlib import Path

import jax
import pytest

import fp8flax
from fp8flax._compat import versions

pytestmark = pytest.mark.newest

PACKAGE = Path(fp8flax.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("version", ["0.9.2", "0.13.0", "0.13.0.dev20260101", "1.0"])
def test_warns_of_a_version_that_is_not_known(version, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    with pytest.warns(UserWarning, match=rf"this is JAX {version}\."):
        runpy.run_path(versions.__file__)


@pytest.mark.parametrize("version", [jax.__version__, "0.10.2", "0.11.9", "0.12.0rc1"])
def test_versions_that_are_known(version, monkeypatch):
    monkeypatch.setattr(jax, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(versions.__file__)


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

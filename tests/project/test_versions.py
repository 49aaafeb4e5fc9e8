"""The package checks the version of JAX at import."""

import runpy
import warnings

import jax
import pytest

from fp8flax._compat import versions

pytestmark = pytest.mark.newest


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

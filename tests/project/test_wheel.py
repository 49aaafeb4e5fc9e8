"""The wheel that ``python -m build`` makes has the right files; .ci/check_wheel installs it."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser

import pytest

import fp8flax
from tests import ROOT

pytestmark = pytest.mark.long

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ABOUT = ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")
INFO = f"fp8flax-{fp8flax.__version__}.dist-info"


def test_wheel_has_the_package_and_nothing_else(tmp_path):
    """It is made from the source distribution."""
    command = sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"fp8flax-{fp8flax.__version__}-py3-none-any.whl"
    package = ROOT / "fp8flax"
    wanted = {str(path.relative_to(ROOT)) for path in (*package.rglob("*.py"), package / "py.typed")}
    about = {f"{INFO}/{name}" for name in ABOUT}
    with zipfile.ZipFile(wheel) as file:
        assert set(file.namelist()) == wanted | about
        assert file.read(f"{INFO}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        metadata = Parser().parsestr(file.read(f"{INFO}/METADATA").decode())
    assert metadata["License-Expression"] == PROJECT["license"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    # The README has links into the repository, which are absolute on a package index.
    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert len(links) > 20
    assert all(link.startswith("https://") for link in links)

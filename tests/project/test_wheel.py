"""The wheel that ``python -m build`` makes has the right files, and works without a clone."""

import json
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import fp8flax
from tests import ROOT

pytestmark = pytest.mark.long

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ABOUT = ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")
INFO = f"fp8flax-{fp8flax.__version__}.dist-info"


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Returns the folder with the source distribution and the wheel that was made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    assert path.name == f"fp8flax-{fp8flax.__version__}-py3-none-any.whl"
    return path


def test_wheel_has_the_package_and_nothing_else(wheel):
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


DENSE = """
import importlib.metadata, json
import flax.linen as nn, jax, jax.numpy as jnp
import fp8flax as fp8

layer = nn.Dense(8, dot_general_cls=fp8.Fp8DotGeneralOp, kernel_init=nn.initializers.constant(1.05))
x = jnp.ones((2, 4))
variables = layer.init(jax.random.key(0), x)
out = layer.apply(variables, x, mutable=[fp8.OVERWRITE_WITH_GRADIENT])[0]
version = importlib.metadata.version("fp8flax")
print(json.dumps([fp8.__file__, version, fp8.__version__, out.tolist()]))
"""


def test_wheel_works_where_there_is_no_clone(wheel, tmp_path):
    """The wheel is installed in an environment that borrows the dependencies, so nothing is downloaded."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=tmp_path,
    )
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Files .pth in a borrowed folder are not read, so the clone is not on the path.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    output = run(python, "-I", "-W", "ignore", "-c", DENSE, cwd=tmp_path)
    file, version, said, out = json.loads(output.splitlines()[-1])
    assert Path(file) == site / "fp8flax" / "__init__.py"
    assert version == said == fp8flax.__version__
    assert out == [[4.0] * 8] * 2  # 1.05 is 1 in e4m3
    assert "usage: " in run(python, "-I", "-m", "fp8flax.demo", "--help", cwd=tmp_path)
    assert f"fp8flax: {version}" in run(python, "-I", "-m", "fp8flax", cwd=tmp_path)

"""The pages of the API describe all public names."""

import re
from collections import Counter
from pathlib import Path

import pytest

import fp8flax
import fp8flax.nnx
from tests import ROOT

PAGES = (path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))
DESCRIBED = Counter(name for text in PAGES for name in re.findall(r"^::: (\S+)$", text, re.M))


@pytest.mark.parametrize("package", [fp8flax, fp8flax.nnx], ids=lambda package: package.__name__)
def test_each_public_name_is_on_one_page(package):
    public = re.findall(r"(\w+) as \1\b", Path(package.__file__).read_text())
    assert len(public) > 10
    names = Counter(f"{package.__name__}.{name}" for name in public)
    of_nnx = {name: n for name, n in DESCRIBED.items() if name.startswith("fp8flax.nnx.")}
    assert names == (of_nnx if package is fp8flax.nnx else DESCRIBED - Counter(of_nnx))

"""The site lists all public names and pages and describes its pictures; the test does not build it."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

import fp8flax
import fp8flax.nnx
from tests import ROOT

PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md"))}
DESCRIBED = Counter(name for text in PAGES.values() for name in re.findall(r"^::: (\S+)$", text, re.M))
NAVIGATION = re.findall(r"^ +- (?:[\w ]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)


@pytest.mark.parametrize("package", [fp8flax, fp8flax.nnx], ids=lambda package: package.__name__)
def test_each_public_name_is_on_one_page(package):
    public = re.findall(r"(\w+) as \1\b", Path(package.__file__).read_text())
    assert len(public) > 10
    names = Counter(f"{package.__name__}.{name}" for name in public)
    of_nnx = {name: n for name, n in DESCRIBED.items() if name.startswith("fp8flax.nnx.")}
    assert names == (of_nnx if package is fp8flax.nnx else DESCRIBED - Counter(of_nnx))


def test_the_first_page_lists_the_others():
    links = re.findall(r"\]\(([\w.]+)\)", PAGES["index.md"])
    assert sorted([*links, "index.md"]) == sorted(PAGES)
    assert [path.removeprefix("api/") for path in NAVIGATION if "/" in path][1:] == ["index.md", *links]


def test_each_page_is_in_the_navigation():
    patterns = [re.escape(path).replace(r"\*", ".*") for path in NAVIGATION]
    for page in (ROOT / "docs").glob("*.md"):
        assert any(re.fullmatch(pattern, page.name) for pattern in patterns), page.name


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.name)
def test_each_picture_in_a_notebook_is_described_below(path):
    cells = json.loads(path.read_text())["cells"]
    for i, cell in enumerate(cells):
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", ())):
            assert "".join(cells[i + 1]["source"]).startswith("*The picture"), cell["source"]

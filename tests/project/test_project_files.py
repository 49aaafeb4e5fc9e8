"""The files about the project are true of this version and of this repository."""

import re
import subprocess
import sys
import tomllib

import pytest

import fp8flax
from tests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "docs/releasing.md")]


@pytest.mark.oldest
def test_citation_is_of_this_version():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    fields = dict(line.split(": ", 1) for line in lines if re.match(r"[a-z-]+: ", line))
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"] == fp8flax.__version__
    assert fields["license"] == PROJECT["license"]
    assert fields["title"].strip('"') == f"fp8flax: {PROJECT['description']}"
    start = lines.index("keywords:") + 1
    assert [line.removeprefix("  - ") for line in lines[start:]] == PROJECT["keywords"]


def test_changelog_has_this_version_or_what_is_to_be_released():
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", fp8flax.__version__)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_template(path):
    """The template has the header that hosts read, and names only what the package has."""
    text = path.read_text()
    assert re.match(r"---\nname: .+\nabout: .+\n---\n", text)
    assert all(hasattr(fp8flax, name) for name in re.findall(r"fp8flax\.(\w+)", text))


def test_templates_are_there():
    assert {path.stem for path in TEMPLATES} == {"bug", "gpu", "wish"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_files_that_a_page_names_exist(path):
    named = re.findall(r"`([\w./-]+\.(?:py|md|toml|txt|cff)|\.ci/\w*|dist/|Makefile)`", path.read_text())
    assert all((ROOT / name).exists() for name in named if name != "dist/")


@pytest.mark.long
def test_commands_of_the_templates():
    commands = {
        c for p in TEMPLATES for c in re.findall(r'^python -c "(.*)"$', p.read_text(), re.MULTILINE)
    }
    assert len(commands) == 2
    output = "".join(
        subprocess.run([sys.executable, "-c", c], check=True, stdout=subprocess.PIPE, text=True).stdout
        for c in sorted(commands)
    )
    assert fp8flax.__version__ in output
    assert "jaxlib" in output

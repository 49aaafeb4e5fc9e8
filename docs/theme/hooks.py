"""Adds to the site the pages that do not lie in ``docs/``, and rewrites the links to them.

The README is the start page. Notebooks and the files at the top of the repository are pages. A file of
code that a page links to becomes a page with one block of code, and JSON stays as it is. All links are
written as on a Git host, relative to the file.
"""

from __future__ import annotations

import base64
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import nbformat
from api_names import linked
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
EXECUTED = ROOT / "build" / "notebooks"
"""Where ``notebooks/execute.py --into`` wrote them."""

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".cff": "yaml", ".yml": "yaml", ".md": "markdown"}
BOOSTS = {"installation.md": 4}
"""Pages that answer a search better than the pages that repeat the word more often."""

sources: dict[str, str] = {}
"""The file of the repository that each page is made from."""


def address_of(path: str) -> str:
    """Returns which page of the site a file of the repository is."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("notebooks/") and path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + ".md"
    return path if re.fullmatch(r"[\w.-]+\.md|.*\.(?:png|json)", path) else f"{path}.md"


def is_text(path: str) -> bool:
    """Tells whether a file is Markdown, or a notebook, to be read as a page; others are code."""
    return path.endswith((".md", ".ipynb")) and not path.startswith(".")


def rewritten(text: str, path: str, host: str) -> tuple[str, set[str]]:
    """Returns the text of a file with links to pages of the site, and the files that it links to.

    Args:
        text: Markdown.
        path: the file, from the root of the repository.
        host: the address of the repository, for links to folders, which are no pages.
    """
    folder, here = posixpath.dirname(path), posixpath.dirname(address_of(path))
    targets: set[str] = set()

    def relink(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        if (ROOT / target).is_dir():
            return f"{match[1]}{host}/tree/main/{target}"
        targets.add(target)
        return f"{match[1]}{posixpath.relpath(address_of(target), here or '.')}{match[3] or ''}"

    # Links in blocks of code are no links.
    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    return "".join(p if p.startswith("```") else linked(LINK.sub(relink, p)) for p in parts), targets


def as_page(path: str, config: MkDocsConfig) -> tuple[str, list[File]]:
    """Returns a file of the repository as Markdown, and the pictures in it."""
    if path.endswith(".ipynb"):
        return notebook_as_page(path, config)
    text = (ROOT / path).read_text()
    if is_text(path) or path.endswith(".json"):
        return text, []
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n````{language}\n{text}\n````\n", []


def notebook_as_page(path: str, config: MkDocsConfig) -> tuple[str, list[File]]:
    """Returns an executed notebook as Markdown, and its pictures, described by the cell below each."""
    notebook = nbformat.read(EXECUTED / Path(path).name, as_version=4)
    parts: list[str] = []
    pictures: list[File] = []
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                below = notebook.cells[i + 1].source
                found = re.match(r"\*(The picture[^*]*\.)\*(?:\s|$)", below)
                if found is None:
                    raise ValueError(
                        f"{path}: the cell after a picture must begin with *The picture …*, which says "
                        f"what the picture shows. The cell begins with: {below[:60]}"
                    )
                name = f"{path.removesuffix('.ipynb')}_{len(pictures) + 1}.png"
                pictures.append(File.generated(config, name, content=base64.b64decode(data["image/png"])))
                description = " ".join(found[1].replace("`", "").split())
                parts.append(f"![{description}]({posixpath.basename(name)})")
            else:
                text = output.get("text") or data["text/plain"]
                parts.append(f"```{{.text .output}}\n{text.rstrip()}\n```")
    return "\n\n".join(parts), pictures


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the version, and puts the pages into the navigation that a name with a star stands for."""
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "fp8flax" / "__init__.py").read_text(), re.M)
    config.extra["package_version"] = version[1] if version else ""
    pages = sorted(address_of(str(p.relative_to(ROOT))) for p in ROOT.glob("notebooks/*.ipynb"))
    pages += sorted(p.name for p in (ROOT / "docs").glob("*.md"))

    def expanded(item: Any) -> Any:
        if isinstance(item, dict):
            return {title: expanded(what) for title, what in item.items()}
        if isinstance(item, list):
            found = [expanded(x) for x in item]
            return [y for x in found for y in (x if isinstance(x, list) else [x])]
        pattern = re.escape(item).replace(r"\*", r"[^/]*")
        return [page for page in pages if re.fullmatch(pattern, page)] if "*" in item else item

    config.nav = expanded(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that do not lie in ``docs/``, and the files that any page links to."""
    inside = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path in inside:
        files.remove(files.get_file_from_path(path.removeprefix("docs/")))
    left = [*inside, "README.md", "CONTRIBUTING.md"]
    left += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
    done: set[str] = set()
    while left:
        path = left.pop()
        if path in done or path.startswith("docs/images/"):
            continue
        done.add(path)
        text, pictures = as_page(path, config)
        text, targets = rewritten(text, path, config.repo_url or "") if is_text(path) else (text, set())
        left += sorted(p for p in targets if (ROOT / p).is_file())
        # Those of docs/ must be in the navigation.
        inclusion = InclusionLevel.INCLUDED if path.startswith("docs/") else InclusionLevel.NOT_IN_NAV
        for file in (
            File.generated(config, address_of(path), content=text, inclusion=inclusion),
            *pictures,
        ):
            files.append(file)
        if is_text(path):
            sources[address_of(path)] = path
    return files


def on_pre_page(page: Page, config: MkDocsConfig, **_: Any) -> Page:
    """Links a page to its file in the repository, to be edited there."""
    path = sources.get(page.file.src_uri)
    if path is not None and config.repo_url and config.edit_uri:
        page.edit_url = urljoin(f"{config.repo_url}/", config.edit_uri + path)
    return page


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Raises some pages in the search."""
    if page.file.src_uri in BOOSTS:
        page.meta["search"] = {"boost": BOOSTS[page.file.src_uri]}

    return markdown


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Marks Chinese pages as Chinese, and removes hints that name private modules."""
    if page.file.src_uri.endswith(".zh-CN.md"):
        output = output.replace('<html lang="en"', '<html lang="zh-CN"', 1)
        output = output.replace("Table of contents", "目录")
    return re.sub(r' title="fp8flax\._[\w.]+"', "", output)

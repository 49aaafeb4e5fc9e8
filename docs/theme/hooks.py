"""What MkDocs is told beyond ``mkdocs.yml``: pages that do not lie in ``docs/``, and links to them.

The pages are those of a Git host: the README is the start page, notebooks and the files at the top of the
repository are pages, and so is every file that a page links to, as a block of code (JSON as it is). Links
between them are what they are on the Git host, relative to the file, and are rewritten here.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
from api_names import linked
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
EXECUTED = ROOT / "build" / "notebooks"
"""Where ``notebooks/execute.py --into`` wrote them."""

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".cff": "yaml", ".yml": "yaml", ".md": "markdown"}


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


def rewritten(text: str, path: str) -> tuple[str, set[str]]:
    """Returns the text of a file with links to pages of the site, and the files that it links to."""
    folder, here = posixpath.dirname(path), posixpath.dirname(address_of(path))
    targets: set[str] = set()

    def relink(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
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
                found = re.match(r"\*(The picture.*?\.)(?:\s|\*$)", notebook.cells[i + 1].source, re.DOTALL)
                if found is None:
                    raise ValueError(
                        f"{path}: the cell after a picture must begin with *The picture …*, which says "
                        f"what it shows; it is: {notebook.cells[i + 1].source[:60]}"
                    )
                name = f"{path.removesuffix('.ipynb')}_{len(pictures) + 1}.png"
                pictures.append(File.generated(config, name, content=base64.b64decode(data["image/png"])))
                parts.append(f"![{' '.join(found[1].split())}]({posixpath.basename(name)})")
            else:
                text = output.get("text") or data["text/plain"]
                parts.append(f"```{{.text .output}}\n{text.rstrip()}\n```")
    return "\n\n".join(parts), pictures


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the pages into the navigation that a name with a star stands for."""
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
        text, targets = rewritten(text, path) if is_text(path) else (text, set())
        left += sorted(p for p in targets if (ROOT / p).is_file())
        # Those of docs/ must be in the navigation.
        inclusion = InclusionLevel.INCLUDED if path.startswith("docs/") else InclusionLevel.NOT_IN_NAV
        for file in (
            File.generated(config, address_of(path), content=text, inclusion=inclusion),
            *pictures,
        ):
            files.append(file)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the help of a command where a page asks for it."""

    def help_of(match: re.Match[str]) -> str:
        command = [sys.executable, "-m", *match[1].split(), "--help"]
        environment = {**os.environ, "COLUMNS": "90", "JAX_PLATFORMS": "cpu"}
        text = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment
        ).stdout
        return f"```text\n$ {match[1]} --help\n{text}```"

    return re.sub(r"<!-- help: ([\w. ]+) -->", help_of, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Takes away hints that would say where the package keeps a type that no page describes."""
    return re.sub(r' title="fp8flax\._[\w.]+"', "", output)

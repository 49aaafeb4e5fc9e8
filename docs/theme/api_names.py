"""Links from a name in code to its place among the API's pages."""

from __future__ import annotations

import re
from pathlib import Path

PAGES = Path(__file__).resolve().parents[1] / "api"
NAMES = {name for page in PAGES.glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)}
"""What the pages describe, as ``fp8flax.name``."""

# A heading, a link that is there already, or a name, perhaps with its call.
FOUND = re.compile(
    r"^#.*$|\[[^\]]*\]\([^)]*\)|(?<![`\w])(`+)(fp8flax\.nnx\.|fp8nnx\.|fp8flax\.|fp8\.|)(\w+)(\([^`]*\))?\1",
    re.MULTILINE,
)
PACKAGES = {
    "fp8flax.nnx.": ["fp8flax.nnx."],
    "fp8nnx.": ["fp8flax.nnx."],
    "fp8flax.": ["fp8flax."],
    "fp8.": ["fp8flax."],
}


def linked(text: str, path: str = "") -> str:
    """Returns a text with links on the names that the API's pages describe.

    Args:
        text: Markdown, without blocks of code.
        path: the name that the text describes, if any, which gets no link. Bare names are then those of its
            package, where they have a capital letter or an underscore; others may be another thing's.
    """
    own = ["fp8flax.nnx.", "fp8flax."] if path.startswith("fp8flax.nnx.") else ["fp8flax."]

    def link(match: re.Match[str]) -> str:
        whole, prefix, name = match[0], match[2], match[3]
        if name is None or name == path.split(".")[-1]:
            return whole
        if not prefix and (not path or (name.islower() and "_" not in name)):
            return whole
        found = next((p for p in (f"{x}{name}" for x in PACKAGES.get(prefix, own)) if p in NAMES), None)
        return f"[{whole}][{found}]" if found else whole

    return FOUND.sub(link, text)

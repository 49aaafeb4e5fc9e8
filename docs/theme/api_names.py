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
PREFIXES = {"fp8nnx.": "fp8flax.nnx.", "fp8.": "fp8flax.", "": "fp8flax."}


def linked(text: str, but: str = "") -> str:
    """Returns a text with links on the names that the API's pages describe.

    A bare name is one where it cannot be another thing's: where it has a capital letter, or an underscore.

    Args:
        text: Markdown, without blocks of code.
        but: the name that the text describes, which gets no link.
    """

    def link(match: re.Match[str]) -> str:
        whole, prefix, name = match[0], match[2], match[3]
        if name is None or name == but or (not prefix and name.islower() and "_" not in name):
            return whole
        path = PREFIXES.get(prefix, prefix) + name
        path = {"fp8flax.audit": "fp8flax.audit.audit"}.get(path, path)
        return f"[{whole}][{path}]" if path in NAMES else whole

    return FOUND.sub(link, text)

"""What the parser of docstrings is told: two headings of ours, and sources that are none."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Headings(griffe.Extension):
    """Gives our headings the names that the parser knows."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Changes the docstring of a function, class or module before it is parsed."""
        if obj.docstring is None:
            return
        text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = re.sub(r"^( *)The call takes:$", r"\1Args: The call takes", text, flags=re.MULTILINE)
        obj.docstring.value = re.sub(r"^ *Source: none\.$", "", text, flags=re.MULTILINE)

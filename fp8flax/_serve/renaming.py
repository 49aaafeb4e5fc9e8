"""Renames the tensors of a model for another program: ``rename`` of ``save_safetensors`` and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Rename = Mapping[str, str] | Callable[[str], str]


def is_weight_name(name: str) -> bool:
    """Returns whether a tensor of this name is a layer's ``weight``, as in PyTorch."""
    return name.rpartition(".")[2] == "weight"


def new_names_of(names: Sequence[str], rename: Rename | None) -> dict[str, str]:
    """Returns the new name of each name.

    Raises:
        TypeError: ``rename`` is neither a mapping nor a callable, or has or returns something else than
            strings.
        ValueError: a pattern is no regular expression or matches no name; or a new name is empty.
    """
    new: dict[str, Any] = {name: name for name in names}
    if callable(rename):
        new = {name: rename(name) for name in names}
    elif isinstance(rename, Mapping):
        for pattern, replacement in rename.items():
            new = _substituted(new, pattern, replacement)
    elif rename is not None:
        raise TypeError(
            "rename must be a dict of regular expressions and their replacements, or a callable that "
            f"takes a name and returns one; got {rename!r}."
        )
    for name, text in new.items():
        if not isinstance(text, str):
            raise TypeError(
                f"rename must return a string for each name; got {text!r} for {name!r}. To keep a name, "
                "return it unchanged."
            )
        if not text:
            raise ValueError(f"rename gives {name!r} an empty name. Give each tensor a name.")
    return new


def _substituted(names: dict[str, str], pattern: Any, replacement: Any) -> dict[str, str]:
    """Returns the names with each match of a pattern replaced."""
    if not (isinstance(pattern, str) and isinstance(replacement, str)):
        raise TypeError(
            f"rename must map each pattern to a name, both strings; got {pattern!r}: {replacement!r}."
        )
    try:
        changed = {name: re.subn(pattern, replacement, old) for name, old in names.items()}
    except (re.error, IndexError) as error:
        raise ValueError(
            f"rename has {pattern!r}: {replacement!r}, which is not a valid regular expression with "
            f"its replacement: {error}."
        ) from error
    if not any(count for _, count in changed.values()):
        raise ValueError(
            f"rename has the pattern {pattern!r}, which matches none of {sorted(names.values())}. "
            "Correct it, or leave it out."
        )
    return {name: text for name, (text, _) in changed.items()}

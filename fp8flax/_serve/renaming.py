"""Renames the tensors of a model for another program: ``rename`` of ``save_safetensors`` and others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

Rename = Mapping[str, str] | Callable[[str], str]


def is_weight_name(name: str) -> bool:
    """Returns whether a tensor of this name is a layer's ``weight``, as in PyTorch."""
    return name.rpartition(".")[2] == "weight"


def new_names_of(names: Sequence[str], rename: Rename | None) -> dict[str, str]:
    """Returns the new name of each name.

    Raises:
        TypeError: ``rename`` is neither a mapping nor a callable.
        ValueError: a pattern matches no name, or a new name is empty or no string.
    """
    new = {name: rename(name) if callable(rename) else name for name in names}
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        raise TypeError(
            "rename must be a dict of regular expressions and their replacements, or a callable that "
            f"takes a name and returns one; got {rename!r}."
        )
    for pattern, replacement in rename.items() if isinstance(rename, Mapping) else ():
        changed = {name: re.subn(pattern, replacement, old) for name, old in new.items()}
        if not any(count for _, count in changed.values()):
            raise ValueError(
                f"rename has the pattern {pattern!r}, which matches none of {sorted(new.values())}. "
                "Correct it, or leave it out."
            )
        new = {name: text for name, (text, _) in changed.items()}
    for name, text in new.items():
        if not (text and isinstance(text, str)):
            raise ValueError(
                f"rename must give each tensor a name; got {text!r} for {name!r}. To keep a name, return "
                "it unchanged."
            )
    return new

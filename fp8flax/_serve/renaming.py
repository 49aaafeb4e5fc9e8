"""Renames the tensors of a served model for another program, and checks the new names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fp8flax._serve.server_layout import Tensor, in_torch_layout

Rename = Mapping[str, str] | Callable[[str], str]


def renamed(tensors: Sequence[Tensor], rename: Rename) -> list[Tensor]:
    """Returns the tensors under their new names; wide kernels that become weights are transposed.

    Raises:
        TypeError: ``rename`` is neither a mapping of strings nor a callable, or returns no string.
        ValueError: a pattern is no regular expression or matches no name; a new name is empty; the tensors
            of an FP8 layer get names of different layers; or a wide kernel becomes a weight and does not
            have two dimensions.
    """
    new_names = new_names_of([tensor.name for tensor in tensors], rename)
    layers: dict[str, str] = {}
    result = []
    for tensor in tensors:
        new = new_names[tensor.name]
        if tensor.layer is not None:
            last = tensor.name.removeprefix(tensor.layer)
            to = layers.setdefault(tensor.layer, new.removesuffix(last))
            if new != to + last:
                raise ValueError(
                    f"rename changes {tensor.name!r} to {new!r}, but a loader looks for {to + last!r}, "
                    "because it finds the FP8 tensors of a layer by the name of the layer. Rename the "
                    f"layer only, and keep {last!r} at the end."
                )
        if tensor.is_wide_kernel and re.fullmatch(r"(.*\.)?weight", new):
            tensor = in_torch_layout(tensor)
        result.append(tensor._replace(name=new))
    return result


def new_names_of(names: Sequence[str], rename: Rename) -> dict[str, str]:
    """Returns the new name of each name; see ``renamed``."""
    check_rename(rename)
    if isinstance(rename, Mapping):
        return dict(zip(names, _substituted(names, rename)))
    new_names = {name: rename(name) for name in names}
    for name, new in new_names.items():
        if not isinstance(new, str):
            raise TypeError(
                f"rename must return a string for each name; got {new!r} for {name!r}. To keep a name, "
                "return it unchanged."
            )
    return _not_empty(new_names)


def check_rename(rename: Any) -> None:
    """Raises ``TypeError`` if ``rename`` is neither a mapping nor a callable."""
    if not (isinstance(rename, Mapping) or callable(rename)):
        raise TypeError(
            "rename must be a dict of regular expressions and their replacements, or a callable that "
            f"takes a name and returns one; got {rename!r}."
        )


def _substituted(names: Iterable[str], patterns: Mapping[str, str]) -> list[str]:
    """Returns the names after the substitution of all patterns, one after the other."""
    original, result = list(names), list(names)
    for pattern, replacement in patterns.items():
        if not (isinstance(pattern, str) and isinstance(replacement, str)):
            raise TypeError(
                f"rename must be a dict of strings, or a callable; got {pattern!r}: {replacement!r} in it."
            )
        try:
            found = [re.subn(pattern, replacement, name) for name in result]
        except (re.error, IndexError) as error:
            raise ValueError(
                f"rename has {pattern!r}: {replacement!r}, which is not a valid regular expression with "
                f"its replacement: {error}."
            ) from error
        if not any(count for _, count in found):
            raise ValueError(
                f"rename has the pattern {pattern!r}, which matches none of {sorted(result)}. Correct it, "
                "or leave it out."
            )
        result = [name for name, _ in found]
    return list(_not_empty(dict(zip(original, result))).values())


def _not_empty(new_names: dict[str, str]) -> dict[str, str]:
    for name, new in new_names.items():
        if not new:
            raise ValueError(f"rename gives {name!r} an empty name. Give each tensor a name.")
    return new_names

"""Renames the tensors of a served model for another program, and checks the names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8flax._serve.server_layout import Tensor

Rename = Mapping[str, str] | Callable[[str], str]


def renamed(tensors: Sequence[Tensor], rename: Rename) -> list[Tensor]:
    """Returns the tensors under their new names; wide kernels that become weights are transposed.

    Raises:
        TypeError: ``rename`` is neither a mapping nor a callable, or has or returns something else than
            strings.
        ValueError: a pattern is no regular expression or matches no name; a new name is empty; the tensors
            of an FP8 layer get names of different layers; or a wide kernel becomes a weight and does not
            have two dimensions.
    """
    new_names = new_names_of([tensor.name for tensor in tensors], rename)
    layers: dict[str, str] = {}
    result = []
    for tensor in tensors:
        name = new_names[tensor.name]
        if tensor.layer is not None:
            suffix = tensor.name.removeprefix(tensor.layer)
            expected = layers.setdefault(tensor.layer, name.removesuffix(suffix)) + suffix
            if name != expected:
                raise ValueError(
                    f"rename changes {tensor.name!r} to {name!r}, but a loader looks for {expected!r}, "
                    "because it finds the FP8 tensors of a layer by the layer's name. Rename the layer "
                    f"in all of its tensors alike, and keep {suffix!r} at the end."
                )
        written = tensor.written
        if tensor.is_wide_kernel and is_weight_name(name):
            if written.ndim != 2:
                raise ValueError(
                    f"rename makes a weight of {'/'.join(tensor.path)}, of shape {written.shape}. A "
                    "wide kernel that becomes a weight must have two dimensions: the input and the output. "
                    "Give this kernel a name that ends in 'kernel'."
                )
            written = written.T
        result.append(tensor._replace(name=name, written=written))
    return result


def is_weight_name(name: str) -> bool:
    """Returns whether a tensor of this name is a layer's ``weight``, as in PyTorch."""
    return name.rpartition(".")[2] == "weight"


def new_names_of(names: Sequence[str], rename: Rename | None) -> dict[str, str]:
    """Returns the new name of each name; see ``renamed``."""
    new = {name: name for name in names}
    if rename is None:
        return new
    check_rename(rename)
    if isinstance(rename, Mapping):
        for pattern, replacement in rename.items():
            changed = {name: _subn(pattern, replacement, old) for name, old in new.items()}
            if not any(count for _, count in changed.values()):
                raise ValueError(
                    f"rename has the pattern {pattern!r}, which matches none of {sorted(new.values())}. "
                    "Correct it, or leave it out."
                )
            new = {name: text for name, (text, _) in changed.items()}
    else:
        new = {name: rename(name) for name in names}
    for name, text in new.items():
        if not isinstance(text, str):
            raise TypeError(
                f"rename must return a string for each name; got {text!r} for {name!r}. To keep a name, "
                "return it unchanged."
            )
        if not text:
            raise ValueError(f"rename gives {name!r} an empty name. Give each tensor a name.")
    return new


def check_rename(rename: Any) -> None:
    """Raises ``TypeError`` if ``rename`` is not what ``save_safetensors`` takes."""
    if callable(rename):
        return
    if not isinstance(rename, Mapping):
        raise TypeError(
            "rename must be a dict of regular expressions and their replacements, or a callable that "
            f"takes a name and returns one; got {rename!r}."
        )
    for pattern, replacement in rename.items():
        if not (isinstance(pattern, str) and isinstance(replacement, str)):
            raise TypeError(
                f"rename must map each pattern to a name, both strings; got {pattern!r}: {replacement!r}."
            )


def _subn(pattern: str, replacement: str, name: str) -> tuple[str, int]:
    try:
        return re.subn(pattern, replacement, name)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"rename has {pattern!r}: {replacement!r}, which is not a valid regular expression with "
            f"its replacement: {error}."
        ) from error

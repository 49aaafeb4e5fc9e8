"""Renames, splits and joins the tensors of a served model for another program, and checks the names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8flax._serve.server_layout import Tensor, in_torch_layout, joined, split

Rename = Mapping[Any, str | Mapping[str, int]] | Callable[[str], str]

_NUMBER = re.compile(r"\{(\d+)\}")


class Part(NamedTuple):
    """A tensor of the file that has the values of a variable, or some of them."""

    name: str
    """The name in the file. ``{0}`` and ``{1}`` are indices along the variable's first dimensions.

    Each index has a tensor of its own."""
    size: int | None = None
    """How many output features of the variable the tensor has; None if ``rename`` does not split it."""
    place: tuple[int, int] | None = None
    """The position of the variable among those that ``rename`` joins in the tensor, and their number.

    None if ``rename`` does not join the variable with others."""

    @property
    def num_numbered_dims(self) -> int:
        """Returns how many first dimensions of the variable have numbers in the name."""
        return len(set(_NUMBER.findall(self.name)))

    def name_at(self, index: Sequence[int]) -> str:
        """Returns the name with these numbers."""
        return _NUMBER.sub(lambda found: str(index[int(found[1])]), self.name)


def renamed(tensors: Sequence[Tensor], rename: Rename) -> list[Tensor]:
    """Returns the tensors under their new names; wide kernels that become weights are transposed.

    Raises:
        TypeError: ``rename`` is neither a mapping nor a callable, or has or returns something else than
            strings.
        ValueError: a pattern is no regular expression or matches no name; a new name is empty; or the
            tensors of an FP8 layer get names of different layers. Also if a wide kernel becomes a weight
            and does not have two dimensions, or a tensor cannot be split or joined as ``rename`` says.
    """
    parts_of = new_names_of([tensor.name for tensor in tensors], rename)
    first_parts_of: dict[str, list[Part]] = {}
    result: list[Tensor] = []
    to_join: dict[str, list[tuple[tuple[int, int], Tensor]]] = {}
    for tensor in tensors:
        parts = parts_of[tensor.name]
        _check_layer(tensor, parts, first_parts_of)
        for index, entry in _numbered(tensor, parts[0].num_numbered_dims):
            pieces = split(_in_layout_of(parts[0].name, entry), [part.size for part in parts])
            for part, piece in zip(parts, pieces, strict=True):
                named = piece._replace(name=part.name_at(index))
                if part.place is None:
                    result.append(named)
                else:
                    to_join.setdefault(named.name, []).append((part.place, named))
    return result + [_joined(name, found) for name, found in to_join.items()]


def _check_layer(tensor: Tensor, parts: Sequence[Part], first_parts_of: dict[str, list[Part]]) -> None:
    """Raises ``ValueError`` if the tensors of an FP8 layer get names of different layers.

    Args:
        tensor: a tensor of the model.
        parts: the parts that it becomes.
        first_parts_of: for each FP8 layer, the parts of its first tensor, without the ends of the names.
            The function adds the layer of ``tensor``.
    """
    if tensor.layer is None:
        return
    suffix = tensor.name.removeprefix(tensor.layer)
    first_parts = [part._replace(name=part.name.removesuffix(suffix)) for part in parts]
    first_parts = first_parts_of.setdefault(tensor.layer, first_parts)
    expected = [part._replace(name=part.name + suffix) for part in first_parts]
    if list(parts) != expected:
        raise ValueError(
            f"rename changes {tensor.name!r} to {_text(parts)}, but a loader looks for {_text(expected)}, "
            "because it finds the FP8 tensors of a layer by the name of the layer. Rename the layer only, "
            f"all of its tensors in the same way, and keep {suffix!r} at the end."
        )


def _text(parts: Sequence[Part]) -> str:
    """Returns parts as an error message has them."""
    texts = []
    for part in parts:
        size = "" if part.size is None else f" with {part.size} output features"
        place = "" if part.place is None else f" as part {part.place[0] + 1} of {part.place[1]}"
        texts.append(f"{part.name!r}{size}{place}")
    return " and ".join(texts)


def _joined(name: str, found: Sequence[tuple[tuple[int, int], Tensor]]) -> Tensor:
    """Returns the tensor that ``rename`` joins from others.

    Args:
        name: the name of the joined tensor.
        found: each tensor, with its ``Part.place``.

    Raises:
        ValueError: two tensors have the same position, or a position has none; or as in
            ``server_layout.joined``.
    """
    by_position: dict[int, Tensor] = {}
    for (position, _), tensor in found:
        if position in by_position:
            raise ValueError(
                f"rename joins {'/'.join(by_position[position].path)} and {'/'.join(tensor.path)} at one "
                f"place of {name!r}. Correct it."
            )
        by_position[position] = tensor
    in_order = [by_position[position] for position in sorted(by_position)]
    count = max(count for (_, count), _ in found)
    if len(in_order) < count:
        raise ValueError(
            f"rename joins {count} variables in {name!r}, but only "
            f"{', '.join('/'.join(tensor.path) for tensor in in_order)} become this tensor. Correct it, or "
            "leave this layer out of the pattern."
        )
    return joined(in_order)


def _numbered(tensor: Tensor, dims: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields each tensor of a stack with its index along the first ``dims`` dimensions.

    Yields the tensor itself with the index ``()`` if ``dims`` is 0.
    """
    if not dims:
        yield (), tensor
        return
    if tensor.array.ndim < dims:
        raise ValueError(
            f"rename numbers {dims} dimensions of {'/'.join(tensor.path)}, of shape {tensor.array.shape}. "
            "Only a variable that is stacked along its first dimensions can have numbers in its names."
        )
    for index in np.ndindex(*tensor.array.shape[:dims]):
        yield (
            index,
            tensor._replace(array=tensor.array[index], written=tensor.written[index], is_whole=False),
        )


def _in_layout_of(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor in the layout that its new name implies.

    A wide kernel that becomes a ``weight`` is converted to PyTorch's layout.
    """
    return in_torch_layout(tensor) if tensor.is_wide_kernel and is_weight_name(name) else tensor


def is_weight_name(name: str) -> bool:
    """Returns whether a tensor of this name is a layer's ``weight``, as in PyTorch."""
    return name.rpartition(".")[2] == "weight"


def new_names_of(names: Sequence[str], rename: Rename | None) -> dict[str, list[Part]]:
    """Returns the parts that each name becomes; see ``renamed``."""
    parts_of = {name: [Part(name)] for name in names}
    if rename is None:
        return parts_of
    check_rename(rename)
    if isinstance(rename, Mapping):
        for pattern, replacement in rename.items():
            _substitute(parts_of, pattern, replacement)
    else:
        for name in names:
            new = rename(name)
            if not isinstance(new, str):
                raise TypeError(
                    f"rename must return a string for each name; got {new!r} for {name!r}. To keep a name, "
                    "return it unchanged."
                )
            parts_of[name] = [Part(new)]
    for name, parts in parts_of.items():
        _check_parts(name, parts)
    return parts_of


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
        patterns = pattern if isinstance(pattern, tuple) else (pattern,)
        is_split = isinstance(replacement, Mapping)
        texts = (*patterns, *(replacement if is_split else [replacement]))
        if not patterns or not all(isinstance(text, str) for text in texts):
            raise TypeError(
                "rename must map each pattern, or tuple of patterns, to a name, or to a dict of names and "
                f"sizes; got {pattern!r}: {replacement!r}."
            )
        if is_split and not (
            replacement and all(type(size) is int and size > 0 for size in replacement.values())
        ):
            raise TypeError(
                "rename must give the number of output features for each part of a tensor, such as "
                f"{{'q': 512, 'k': 128}}; got {pattern!r}: {replacement!r} in it."
            )


def _substitute(
    parts_of: dict[str, list[Part]], pattern: str | tuple[str, ...], replacement: str | Mapping[str, int]
) -> None:
    """Replaces, in ``parts_of``, the parts that a pattern matches: renames, splits or joins them."""
    patterns = pattern if isinstance(pattern, tuple) else (pattern,)
    is_join = isinstance(pattern, tuple)
    pairs = list(replacement.items()) if isinstance(replacement, Mapping) else [(replacement, None)]
    changed: dict[str, list[list[Part]]] = {name: [[] for _ in parts] for name, parts in parts_of.items()}
    for position, one in enumerate(patterns):  # each is searched in the names as they were before
        place = (position, len(patterns)) if is_join else None
        is_found = False
        for name, parts in parts_of.items():
            for i, part in enumerate(parts):
                if new := _changed(part, one, pairs, place):
                    is_found = True
                    if changed[name][i]:
                        raise ValueError(
                            f"rename joins by {patterns}, and {part.name!r} matches two of these patterns. "
                            "Correct them."
                        )
                    changed[name][i] = new
        if not is_found:
            all_names = sorted({part.name for parts in parts_of.values() for part in parts})
            raise ValueError(
                f"rename has the pattern {one!r}, which matches none of {all_names}. Correct it, or leave "
                "it out."
            )
    for name, news in changed.items():
        parts_of[name] = [part for old, new in zip(parts_of[name], news) for part in new or [old]]


def _changed(
    part: Part, pattern: str, pairs: Sequence[tuple[str, int | None]], place: tuple[int, int] | None
) -> list[Part]:
    """Returns the parts that replace a part; an empty list if the pattern does not match its name."""
    found = [(*_subn(pattern, text, part.name), size) for text, size in pairs]
    if not found[0][1]:
        return []
    is_split, is_join = pairs[0][1] is not None, place is not None
    was_changed = part.size is not None or part.place is not None
    if is_split + is_join + was_changed > 1:
        raise ValueError(
            f"rename splits or joins {part.name!r} a second time. Each variable can be split once, or "
            "joined once. Correct the patterns."
        )
    return [Part(name, size or part.size, place or part.place) for name, _, size in found]


def _subn(pattern: str, replacement: str, name: str) -> tuple[str, int]:
    try:
        return re.subn(pattern, replacement, name)
    except (re.error, IndexError) as error:
        raise ValueError(
            f"rename has {pattern!r}: {replacement!r}, which is not a valid regular expression with "
            f"its replacement: {error}."
        ) from error


def _check_parts(name: str, parts: Sequence[Part]) -> None:
    """Raises ``ValueError`` if a new name is empty, or its numbers in braces are wrong."""
    for part in parts:
        if not part.name:
            raise ValueError(f"rename gives {name!r} an empty name. Give each tensor a name.")
        numbers = {int(number) for number in _NUMBER.findall(part.name)}
        if numbers != set(range(parts[0].num_numbered_dims)):
            raise ValueError(
                f"rename changes {name!r} to {part.name!r}. The numbers in braces must be {{0}}, or {{0}} "
                "and {1}, and so on, and all parts of a variable must have the same ones."
            )

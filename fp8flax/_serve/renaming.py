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
    """The name in the file. ``{0}`` and ``{1}`` are numbers along the variable's first dimensions.

    There is a tensor for each number."""
    size: int | None = None
    """How many output features of the variable the tensor has; None if ``rename`` does not split it."""
    place: tuple[int, int] | None = None
    """The place of the variable among those that ``rename`` joins in the tensor, and how many these are."""

    @property
    def numbers(self) -> int:
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
    layers: dict[str, list[Part]] = {}
    result: list[Tensor] = []
    to_join: dict[str, dict[int, Tensor]] = {}
    counts: dict[str, int] = {}
    for tensor in tensors:
        parts = parts_of[tensor.name]
        if tensor.layer is not None:
            last = tensor.name.removeprefix(tensor.layer)
            own = [part._replace(name=part.name.removesuffix(last)) for part in parts]
            for part, to in zip(parts, layers.setdefault(tensor.layer, own)):
                if part != to._replace(name=to.name + last):
                    raise ValueError(
                        f"rename changes {tensor.name!r} to {part.name!r}, but a loader looks for "
                        f"{to.name + last!r}, because it finds the FP8 tensors of a layer by the name of "
                        f"the layer. Rename the layer only, and keep {last!r} at the end."
                    )
        for index, one in _numbered(tensor, parts[0].numbers):
            sizes = [part.size for part in parts]
            for part, piece in zip(parts, split(_for(parts[0].name, one), sizes)):
                named = piece._replace(name=part.name_at(index))
                if part.place is None:
                    result.append(named)
                    continue
                place, counts[named.name] = part.place
                others = to_join.setdefault(named.name, {})
                if place in others:
                    raise ValueError(
                        f"rename joins {'/'.join(others[place].path)} and {'/'.join(tensor.path)} at one "
                        f"place of {named.name!r}. Correct it."
                    )
                others[place] = named
    for name, found in to_join.items():
        if len(found) < counts[name]:
            paths = ", ".join("/".join(found[place].path) for place in sorted(found))
            raise ValueError(
                f"rename joins {counts[name]} variables in {name!r}, but only {paths} become this tensor. "
                "Correct it, or leave this layer out of the pattern."
            )
        result.append(joined([found[place] for place in sorted(found)]))
    return result


def _numbered(tensor: Tensor, dims: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yields the tensors along the first dimensions of a stack, each with its numbers."""
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


def _for(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor as a file has it under this name."""
    is_weight = re.fullmatch(r"(.*\.)?weight", name) is not None
    return in_torch_layout(tensor) if tensor.is_wide_kernel and is_weight else tensor


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
        sizes = replacement if isinstance(replacement, Mapping) else {}
        texts = (*patterns, *(sizes if isinstance(replacement, Mapping) else (replacement,)))
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(
                f"rename must be a dict of strings, or a callable; got {pattern!r}: {replacement!r} in it."
            )
        if isinstance(replacement, Mapping) and not (
            sizes and all(type(size) is int and size > 0 for size in sizes.values())
        ):
            raise TypeError(
                "rename must give the number of output features for each part of a tensor, such as "
                f"{{'q': 512, 'k': 128}}; got {pattern!r}: {replacement!r} in it."
            )


def _substitute(
    parts_of: dict[str, list[Part]], pattern: str | tuple[str, ...], replacement: str | Mapping[str, int]
) -> None:
    """Substitutes a pattern in all names: splits them, joins them, or gives them another name."""
    patterns = pattern if isinstance(pattern, tuple) else (pattern,)
    is_join = isinstance(pattern, tuple)
    pairs = list(replacement.items()) if isinstance(replacement, Mapping) else [(replacement, None)]
    changed: dict[str, list[list[Part]]] = {name: [[] for _ in parts] for name, parts in parts_of.items()}
    for place, one in enumerate(patterns):  # each is searched in the names as they were before
        of_join = (place, len(patterns)) if is_join else None
        is_found = False
        for name, parts in parts_of.items():
            for i, part in enumerate(parts):
                if new := _changed(part, one, pairs, of_join):
                    is_found = True
                    if changed[name][i]:
                        raise ValueError(
                            f"rename joins by {patterns}, and {part.name!r} matches two of these patterns. "
                            "Correct them."
                        )
                    changed[name][i] = new
        if not is_found:
            every = sorted({part.name for parts in parts_of.values() for part in parts})
            raise ValueError(
                f"rename has the pattern {one!r}, which matches none of {every}. Correct it, or leave it "
                "out."
            )
    for name, news in changed.items():
        parts_of[name] = [part for old, new in zip(parts_of[name], news) for part in new or [old]]


def _changed(
    part: Part, pattern: str, pairs: Sequence[tuple[str, int | None]], place: tuple[int, int] | None
) -> list[Part]:
    """Returns what a pattern makes of a part; nothing if the pattern does not match."""
    found = [(*_subn(pattern, text, part.name), size) for text, size in pairs]
    if not found[0][1]:
        return []
    is_split, is_in_parts = pairs[0][1] is not None, (part.size, part.place) != (None, None)
    if (is_split and place is not None) or (is_in_parts and (is_split or place is not None)):
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
    for part in parts:
        if not part.name:
            raise ValueError(f"rename gives {name!r} an empty name. Give each tensor a name.")
        numbers = {int(number) for number in _NUMBER.findall(part.name)}
        if numbers != set(range(parts[0].numbers)):
            raise ValueError(
                f"rename changes {name!r} to {part.name!r}. The numbers in braces must be {{0}}, or {{0}} "
                "and {1}, and so on, and all parts of a variable must have the same ones."
            )

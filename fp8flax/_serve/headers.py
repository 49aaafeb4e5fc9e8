"""Reads the headers of safetensors files, and maps their tensors."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}

_MOST_HEADER_BYTES = 100_000_000
"""The largest header that the library ``safetensors`` reads."""
_MOST_ELEMENTS = 2**62


class Stored(NamedTuple):
    """Place of a tensor in a file."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


def parsed(text: bytes, where: Path) -> dict[str, Any]:
    """Returns a JSON object; ``where`` is the file that an error names."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"it has the name {twice!r} twice")
        return found

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: its JSON cannot be read: {error}. Copy it again.") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{where} is damaged: its JSON must be an object; got {type(parsed).__name__}.")
    return parsed


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Returns where the tensors of a file are, and the metadata of the file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(
                f"{path} is no safetensors file, or a damaged one: it has {size} bytes, and its header "
                f"would have {length}. Copy it again."
            )
        header = parsed(file.read(length), path)
    metadata = header.pop("__metadata__", {})
    if not (isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())):
        raise ValueError(f"{path} is damaged: its metadata must be strings; got {metadata!r}.")
    begin = 8 + length
    stored = {name: _checked(path, name, entry, begin) for name, entry in header.items()}
    end, last = begin, "the header"
    for name, entry in sorted(stored.items(), key=lambda item: (item[1].start, _nbytes(item[1]))):
        if entry.start != end:
            raise ValueError(
                f"{path} is damaged: {name!r} begins at byte {entry.start}, and {last!r} ends at byte "
                f"{end}. Copy it again."
            )
        end, last = end + _nbytes(entry), name
    if end != size:
        raise ValueError(
            f"{path} is damaged: {last!r} ends at byte {end}, and the file at byte {size}. Copy it again."
        )
    return stored, metadata


def _checked(path: Path, name: str, entry: Any, begin: int) -> Stored:
    """Returns where a tensor is, after checks of its entry in the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{path} is damaged: {name!r} must have dtype, shape and data_offsets; got {entry!r}."
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{path}: {name!r} has the dtype {dtype!r}, which is none of {list(DTYPES)}.")
    if not are_sizes(shape) or math.prod(max(1, n) for n in shape) > _MOST_ELEMENTS or len(shape) > 32:
        raise ValueError(f"{path} is damaged: {name!r} must have a shape of sizes; got {shape!r}.")
    stored = Stored(path, np.dtype(DTYPES[dtype]), tuple(shape), begin)
    if not (are_sizes(offsets) and len(offsets) == 2 and offsets[1] - offsets[0] == _nbytes(stored)):
        raise ValueError(
            f"{path} is damaged: {name!r} is {dtype}{shape}, of {_nbytes(stored)} bytes, but its "
            f"data_offsets are {offsets!r}. Copy it again."
        )
    return stored._replace(start=begin + offsets[0])


def are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _nbytes(stored: Stored) -> int:
    return math.prod(stored.shape) * stored.dtype.itemsize


def mapped(stored: Stored, name: str) -> np.ndarray:
    """Returns a tensor, mapped from its file."""
    nbytes = _nbytes(stored)
    if not nbytes:
        return np.empty(stored.shape, stored.dtype)
    try:
        raw = np.memmap(stored.file, np.uint8, "r", stored.start, (nbytes,))
    except ValueError as error:
        raise ValueError(
            f"{stored.file} has become shorter since it was opened: {name!r} ends behind its end. "
            "Copy it again."
        ) from error
    return np.asarray(raw).view(stored.dtype).reshape(stored.shape)

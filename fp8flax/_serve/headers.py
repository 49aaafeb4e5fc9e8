"""Reads the headers of safetensors files, and maps their tensors.

The library ``safetensors`` checks a header. It cannot return FP8 arrays of NumPy, so this file maps them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""The names of the files in a folder: of the index of several files, or of a single file."""

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
        if len(found) < len(pairs):  # the library and Python would take the last of them
            raise ValueError(f"it has a name twice: {[name for name, _ in pairs]}")
        return found

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: its JSON cannot be read: {error}. Copy it again.") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{where} is damaged: its JSON must be an object; got {type(parsed).__name__}.")
    return parsed


def read_header(path: Path) -> dict[str, Stored]:
    """Returns where the tensors of a file are."""
    try:
        import safetensors
    except ImportError as error:
        raise ImportError(
            "safetensors is missing; install it with: pip install 'fp8flax[safetensors]'"
        ) from error
    try:
        with safetensors.safe_open(path, "np"):
            pass  # the library checks the header
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or is damaged: {error}. Copy it again."
        ) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = parsed(file.read(length), path)
    stored = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{path}: {name!r} has the dtype {entry['dtype']!r}, which is none of {list(DTYPES)}."
            )
        start = 8 + length + entry["data_offsets"][0]
        stored[name] = Stored(path, np.dtype(DTYPES[entry["dtype"]]), tuple(entry["shape"]), start)
    return stored


def mapped(stored: Stored, name: str) -> np.ndarray:
    """Returns a tensor, mapped from its file."""
    nbytes = math.prod(stored.shape) * stored.dtype.itemsize
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

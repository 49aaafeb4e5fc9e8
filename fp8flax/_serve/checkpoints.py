"""``read_checkpoint``: reads FP8 checkpoints that other libraries wrote, one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fp8flax._core.formats import FP8_DTYPES

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


_SLAB = 2**22
"""Elements that ``CheckpointTensor.dequantize`` makes wide at a time, at least one row of blocks."""
# The formats differ in the names of tensors.
_SCALES = ("_scale", "_scale_inv")
_INPUT_SCALES = ("input_scale", "activation_scale")
_TORCHAO = re.compile(r"(.*\.|)_(\w+)_qdata")
"""The name of the codes of ``<layer>.<name>`` in files of torchao; the scale is ``_<name>_scale``."""
_BESIDE = ("_zero_point", "_scale_2", "_global_scale", "_packed", "_shape", "_g_idx")
"""Endings of tensors beside a weight, with which codes times scales would not be its value."""
_NVFP4 = ("_packed", "_scale", "_global_scale")
"""Endings of the tensors of a weight in NVFP4: codes, scales of the blocks, and scale of the tensor."""
_INPUT_OF_NVFP4 = "input_global_scale"
_WIDTHS = (16, 32, 64, 128)
"""The sizes of blocks along a dimension: powers of two, of which at most one gives a number of blocks."""
_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "torchao", "mxfp8")
"""The values of ``quant_method`` in ``config.json`` that are read."""
_FLOAT8, _E8M0 = set(FP8_DTYPES), np.dtype(jnp.float8_e8m0fnu)
_E2M1 = np.dtype(jnp.float4_e2m1fn)
_WIDE = {np.dtype(dtype) for dtype in (np.float32, jnp.bfloat16, np.float16)}


class CheckpointTensor(NamedTuple):
    """A quantized tensor of a checkpoint; ``read_checkpoint`` describes its attributes.

    The ``QTensor`` of the core cannot express what a file has, such as a scale in bfloat16 or blocks of any
    size. It also lies on a device as a whole, and a file may be larger than the memory.
    """

    in_file: np.ndarray
    """The codes as the file has them. In NVFP4 there are two in a byte."""
    scale: np.ndarray
    block: tuple[int, ...]
    input_scale: np.ndarray | None
    tensor_scale: np.ndarray | None = None

    @property
    def codes(self) -> np.ndarray:
        """Returns the codes, such as ``(out, in)``."""
        return self.in_file if self.tensor_scale is None else _unpacked(self.in_file)

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype of the codes."""
        return self.in_file.dtype if self.tensor_scale is None else _E2M1

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the tensor."""
        shape = self.in_file.shape
        return shape if self.tensor_scale is None else (*shape[:-1], 2 * shape[-1])

    def dequantize(self, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Returns codes times scales, computed in float32 (for float64 in float64), in ``dtype``."""
        in_file, scale = np.atleast_1d(self.in_file, self.scale)
        of_tensor = self.tensor_scale
        result = np.empty(self.shape or (1,), dtype)
        wide = np.float64 if result.dtype == np.float64 else np.float32
        step = max(1, _SLAB // max(1, math.prod(self.shape[1:])))
        for start in range(0, len(result), step):
            codes = in_file[start : start + step]
            if of_tensor is not None:
                codes = _unpacked(codes)
            places = np.arange(start, start + len(codes)), *map(np.arange, self.shape[1:])
            scales = scale[np.ix_(*(at // width for at, width in zip(places, self.block or (1,))))]
            with np.errstate(all="ignore"):  # a scale may be NaN, and a product may overflow
                values = codes.astype(wide) * scales.astype(wide)
                if of_tensor is not None:
                    values *= of_tensor[start if len(of_tensor) > 1 else 0 :][:step].astype(wide)
                result[start : start + step] = values.astype(dtype)
        return result.reshape(self.shape)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the tensors of a safetensors checkpoint by their names, mapped from the files.

    A weight in FP8 comes with its scales, as an object with these attributes:

    * ``codes``: the FP8 codes, such as ``(out, in)``, with the bits of the file
    * ``scale``: the scales, one per block, with as many dimensions as the codes
    * ``block``: the size of a block in each dimension; the last block of a dimension may be smaller
    * ``input_scale``: the fixed scale of the layer's input, or None
    * ``tensor_scale``: in NVFP4, what multiplies the scales of all blocks; otherwise None
    * ``dequantize(dtype)``: codes times scales, computed in float32 and rounded to ``dtype``, in NumPy

    The scales are not listed under names of their own. All other tensors are NumPy arrays, also the parts
    of int8, int4 and sparse weights. Arrays are read-only and mapped from the file, which must not change.
    They cost no memory before they are used.

    These formats are read, with scales per tensor, per output feature or per block: ``weight_scale_inv`` of
    DeepSeek-V3 and Qwen3, compressed-tensors, ModelOpt, fbgemm, MXFP8 and torchao's ``Float8Tensor``.
    NVFP4 is read in the format of compressed-tensors, under the name ``<layer>.weight``; ``codes`` unpacks
    its codes, one per byte, and the scales of the tensors are the reciprocals of those in the file. The
    shapes of a weight and of its scale give the size of the blocks: 16, 32, 64 or 128 along a dimension.

    Args:
        path: a safetensors file; or a folder with ``model.safetensors``, or with
            ``model.safetensors.index.json`` and its files.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ImportError: the library ``safetensors`` is not installed.
        ValueError: a file is damaged; codes times scales are not the weights; a scale has a shape that does
            not match its weight; a folder has both a single file and an index, or a ``config.json`` of a
            format that is not read. The error names the file or the folder, and the tensor.

    Example:
        >>> import ml_dtypes, numpy as np, os, tempfile, fp8flax as fp8
        >>> from safetensors.numpy import save_file
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> codes = np.ones((256, 200), ml_dtypes.float8_e4m3fn)
        >>> scale = np.full((2, 2), 0.5, np.float32)
        >>> save_file({"up.weight": codes, "up.weight_scale_inv": scale}, path)
        >>> checkpoint = fp8.read_checkpoint(path)
        >>> list(checkpoint), checkpoint["up.weight"].block
        (['up.weight'], (128, 128))
        >>> checkpoint["up.weight"].dequantize(np.float32)[0, 0]
        np.float32(0.5)

    Source: the safetensors format; DeepSeek-V3, "Weight File Documentation"; the documentation of
    compressed-tensors, ModelOpt, fbgemm and torchao; OCP Microscaling Formats (MX) Specification v1.0.
    """
    path = Path(path)
    return _entries(path, _read_folder(path) if path.is_dir() else _read_file(path))


# Folders of files.


def _read_folder(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a folder."""
    _check_config(folder / "config.json")
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        return _read_file(single)
    if single.is_file():
        raise ValueError(
            f"{folder} must have {SINGLE} or {INDEX}; it has both, and one of them may be from an older "
            f"save. Delete the older one, or pass the path of {SINGLE} itself."
        )
    shard_of = _parsed(index.read_bytes(), index).get("weight_map")
    if not isinstance(shard_of, dict):
        raise ValueError(f"{index} is damaged: it must have a weight_map; got {shard_of!r}.")
    tensors: dict[str, np.ndarray] = {}
    there = {path.name for path in folder.iterdir() if path.is_file()}
    for shard in dict.fromkeys(map(str, shard_of.values())):
        if shard not in there:
            raise ValueError(f"{index}: {shard!r} must be the name of a file in the same folder.")
        found = _read_file(folder / shard)
        if wrong := found.keys() ^ {name for name, other in shard_of.items() if other == shard}:
            raise ValueError(
                f"{index} and {folder / shard} disagree on whether {sorted(wrong)} are in that file. "
                "Correct the index, or remove the tensor from the wrong file."
            )
        tensors |= found
    return tensors


# The description of the format.


def _check_config(where: Path) -> None:
    """Raises ``ValueError`` if a ``config.json`` says that codes times scales are not the weights."""
    config = _parsed(where.read_bytes(), where).get("quantization_config") if where.is_file() else None
    if config is None:
        return
    if not isinstance(config, dict) or config.get("quant_method", "fp8") not in _METHODS:
        raise ValueError(
            f"{where}: the quant_method must be one of {', '.join(_METHODS)}; got the quantization_config "
            f"{config!r}."
        )
    sparsity = config.get("sparsity_config")
    if config.get("transform_config") or sparsity not in (None, {}, {"format": "dense"}):
        raise ValueError(
            f"{where} has a sparsity_config or a transform_config, so codes times scales are not the "
            "weights. Save the model without it."
        )


def _entries(where: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the entries of a checkpoint: each weight in FP8 together with its scales."""
    entries: dict[str, Any] = dict(tensors)
    for key, codes in tensors.items():
        torchao = _TORCHAO.fullmatch(key)
        if not torchao and codes.dtype not in _FLOAT8:
            continue
        layer, last = torchao.groups() if torchao else ("", "")
        name = f"{layer}{last}" if torchao else key
        candidates = [f"{layer}_{last}_scale"] if torchao else [name + end for end in _SCALES]
        scales = [candidate for candidate in candidates if candidate in tensors]
        if not scales:
            continue  # such as an embedding that was cast to FP8
        more = [*scales[1:], *(name + end for end in _BESIDE), *[name] * bool(torchao)]
        if wrong := [other for other in more if other in tensors]:
            raise ValueError(
                f"{where}: {name!r} must have codes and one tensor of scales; it also has {wrong[0]!r}, so "
                "codes times scales are not its value. Such a file is not read."
            )
        inputs = [name.removesuffix("weight") + end for end in _INPUT_SCALES if name.endswith("weight")]
        used = [*scales, *[one for one in inputs if one in tensors][:1]]
        entries[name] = _quantized(where, name, codes, *(tensors[one] for one in used))
        for part in {key, *used} - {name}:
            entries.pop(part, None)
    for key, packed in tensors.items():
        name = key.removesuffix(_NVFP4[0])
        parts = [name + end for end in _NVFP4]
        if name == key or packed.dtype != np.uint8 or not all(part in tensors for part in parts):
            continue
        if tensors[parts[1]].dtype == np.dtype(jnp.float8_e4m3fn):
            others = name, *(name + end for end in _BESIDE if end not in _NVFP4)
            if wrong := [other for other in others if other in tensors]:
                raise ValueError(
                    f"{where}: {name!r} in NVFP4 also has {wrong[0]!r}, so codes times scales are not its "
                    "value. Such a file is not read."
                )
            parts += [part for part in [name.removesuffix("weight") + _INPUT_OF_NVFP4] if part in tensors]
            entries[name] = _nvfp4(where, name, *(tensors[part] for part in parts))
            for part in parts:
                del entries[part]
    return entries


def _nvfp4(
    where: Path,
    name: str,
    packed: np.ndarray,
    scale: np.ndarray,
    of_tensor: np.ndarray,
    *inputs: np.ndarray,
) -> CheckpointTensor:
    """Returns the entry of a tensor in NVFP4; raises if its parts do not match."""
    *rest, last = scale.shape or (0,)
    *stack, _ = rest or [0]
    is_right = len(rest) > 0 and packed.shape == (*rest, 8 * last) and of_tensor.size == math.prod(stack)
    if not is_right or any(x.dtype != np.float32 for x in (of_tensor, *inputs)):
        raise ValueError(
            f"{where}: {name!r} in NVFP4 must have packed codes (..., out, in / 2), scales (..., out, in / "
            f"16), and one float32 scale of the tensor; got {list(packed.shape)}, {list(scale.shape)} and "
            f"{of_tensor.dtype}{list(of_tensor.shape)}. Copy the file again."
        )
    with np.errstate(all="ignore"):  # a damaged scale may be zero
        factors = [np.float32(1) / x for x in (of_tensor.reshape(*stack, 1, 1), *inputs)]
    block = (*(1,) * len(rest), 16)
    return CheckpointTensor(packed, scale, block, factors[1] if inputs else None, factors[0])


def _unpacked(packed: np.ndarray) -> np.ndarray:
    """Returns the 4-bit codes, of which a byte has two, the first in its low bits."""
    pairs = np.stack([packed & 15, packed >> 4], -1)
    return pairs.reshape(*packed.shape[:-1], -1).view(_E2M1)


def _quantized(
    where: Path, name: str, codes: np.ndarray, scale: np.ndarray, input_scale: np.ndarray | None = None
) -> CheckpointTensor:
    """Returns the entry of a quantized tensor; raises if its scale does not match."""
    if codes.dtype not in _FLOAT8:
        raise ValueError(f"{where}: {name!r} must have codes in FP8; they are {codes.dtype}.")
    is_bytes, shape = scale.dtype == np.uint8, codes.shape
    if not (is_bytes or scale.dtype == _E8M0 or scale.dtype in _WIDE):
        raise ValueError(
            f"{where}: the scale of {name!r} is {scale.dtype}. It must be float32, bfloat16, float16 or "
            "E8M0."
        )
    counts = scale.shape
    if len(counts) == 4 and len(shape) == 2 and counts[1] == counts[3] == 1:  # ModelOpt's blocks
        counts = counts[::2]
    counts = (1,) * len(shape) if scale.size == 1 else (*counts, *(1,) * (len(shape) - len(counts)))
    block = tuple(map(_width, shape, counts))
    # A file of MXFP8 may hold the bytes of its scales.
    is_mx = len(block) > 1 and set(block[:-1]) == {1} and 1 <= block[-1] <= 32
    if 0 in block or len(counts) != len(shape) or (is_bytes and not is_mx):
        raise ValueError(
            f"{where}: the scale of {name!r} has the shape {list(scale.shape)}, and the weight "
            f"{list(shape)}. That is not one scale per tensor, per output feature or per block of "
            f"{_WIDTHS} elements. Correct the file."
        )
    scale = (scale.view(_E8M0) if is_bytes else scale).reshape(counts)
    return CheckpointTensor(codes, scale, block, input_scale)


def _width(size: int, count: int) -> int:
    """Returns the size of the blocks along a dimension that has this number of scales; 0 if none has."""
    if count in (1, size):
        return 1 if count == size else size
    return next((width for width in _WIDTHS if -(-size // width) == count), 0)


# Single files.


def _parsed(text: bytes, where: Path) -> dict[str, Any]:
    """Returns a JSON object of a file."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):  # the library and Python would take the last of them
            raise ValueError(f"it has a name twice: {[name for name, _ in pairs]}")
        return found

    try:
        found = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is damaged: its JSON cannot be read: {error}. Copy it again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} is damaged: its JSON must be an object; got {type(found).__name__}.")
    return found


def _read_file(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file, mapped from it."""
    import safetensors

    try:
        with safetensors.safe_open(path, "np"):
            pass  # the library checks the header
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is not a safetensors file, or is damaged: {error}. Copy it again."
        ) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = _parsed(file.read(length), path)
    data, tensors = np.asarray(np.memmap(path, np.uint8, "r")), {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(
                f"{path}: {name!r} has the dtype {entry['dtype']!r}, which is none of {list(DTYPES)}."
            )
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = data[start:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors

"""``read_checkpoint``: reads FP8 checkpoints that other libraries wrote, one tensor at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fp8flax._core.formats import E2M1, FP8_DTYPES

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

# The formats differ in the names of tensors.
_TORCHAO = re.compile(r"(.*\.|)_(\w+)_qdata")
"""The name of the codes of ``<layer>.<name>`` in files of torchao; the scale is ``_<name>_scale``."""
BESIDE = ("", "_scale", "_scale_inv", "_global_scale", "_scale_2", "_packed", "_zero_point", "_g_idx")
"""Endings of the tensors of a weight. If one is not used, codes times scales are not the weight."""
_INPUT_SCALES = (("input_scale", "activation_scale"), ("input_global_scale",))
"""The names of the scale of a layer's input: in FP8, and in NVFP4."""
_WIDTHS = (16, 32, 64, 128)
"""The sizes of blocks along a dimension: powers of two, of which at most one gives a number of blocks."""
_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt", "torchao", "mxfp8")
"""The values of ``quant_method`` in ``config.json`` that are read."""
E4M3, _E8M0 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e8m0fnu)
Part = np.ndarray | None
_SCALE_DTYPES = [_E8M0, *(np.dtype(dtype) for dtype in (np.float32, jnp.bfloat16, np.float16))]


class CheckpointTensor(NamedTuple):
    """A quantized tensor of a checkpoint; ``read_checkpoint`` describes its attributes.

    The ``QTensor`` of the core cannot express what a file has, such as a scale in bfloat16 or blocks of any
    size. It also lies on a device as a whole, and a file may be larger than the memory.
    """

    in_file: np.ndarray
    """The codes as the file has them. In NVFP4 there are two in a byte, the first in its low bits."""
    dtype: np.dtype
    shape: tuple[int, ...]
    scale: np.ndarray
    block: tuple[int, ...]
    input_scale: np.ndarray | None
    tensor_scale: np.ndarray | None

    @property
    def codes(self) -> np.ndarray:
        """Returns the codes, such as ``(out, in)``."""
        if self.tensor_scale is None:
            return self.in_file
        pairs = np.stack([self.in_file & 15, self.in_file >> 4], -1)
        return pairs.reshape(self.shape).view(self.dtype)

    def dequantize(self, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Returns codes times scales, computed in float32 (for float64 in float64), in ``dtype``."""
        codes, scale = np.atleast_1d(self.codes, self.scale)
        *heights, width = self.block or (1,)
        result, columns = np.empty(codes.shape, dtype), np.arange(codes.shape[-1]) // width
        wide = np.float64 if result.dtype == np.float64 else np.float32
        with np.errstate(all="ignore"):  # a scale may be NaN, and a product may overflow
            # The wide values of a large tensor as a whole could fill the memory.
            for row in np.ndindex(codes.shape[:-1]):
                scales = scale[tuple(i // height for i, height in zip(row, heights))][columns]
                values = codes[row].astype(wide) * scales.astype(wide)
                if self.tensor_scale is not None:
                    values *= np.broadcast_to(self.tensor_scale, codes.shape)[row].astype(wide)
                result[row] = values.astype(dtype)
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
    shapes of a weight and of its scale give the size of the blocks: 16, 32, 64 or 128 along each of the
    last two dimensions. Scales of joined matrices are refused, such as ``(3,)`` beside q, k and v in one
    weight ``(384, 128)``: the file does not say which rows are q. ``(3, 1)`` is read as 128×128 blocks.

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
    return paired(path, _read_folder(path) if path.is_dir() else _read_file(path))


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


def _check_config(where: Path) -> None:
    """Raises ``ValueError`` if a ``config.json`` says that codes times scales are not the weights."""
    config = _parsed(where.read_bytes(), where).get("quantization_config") if where.is_file() else None
    if config is None:
        return
    if (
        not isinstance(config, dict)
        or config.get("quant_method", "fp8") not in _METHODS
        or config.get("sparsity_config") not in (None, {}, {"format": "dense"})
        or config.get("transform_config")
    ):
        raise ValueError(
            f"{where}: the quant_method must be one of {', '.join(_METHODS)}, without a sparsity_config or "
            "a transform_config, with which codes times scales are not the weights. Save the model in such "
            f"a format; got the quantization_config {config!r}."
        )


def paired(where: str | Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a checkpoint: each quantized weight together with its scales.

    Arrays of JAX in a pair become arrays of NumPy. ``where`` names the checkpoint in errors.
    """
    entries: dict[str, Any] = dict(tensors)
    for key, codes in tensors.items():
        if not isinstance(codes, np.ndarray | jax.Array):
            continue
        name, scales, of_tensor = key, [key + "_scale", key + "_scale_inv"], ""
        if torchao := _TORCHAO.fullmatch(key):
            name, scales = "".join(torchao.groups()), [key.removesuffix("qdata") + "scale"]
        elif codes.dtype == np.uint8 and key.endswith("_packed"):  # NVFP4, if it has both scales
            name = key.removesuffix("_packed")
            scales, of_tensor = [name + "_scale"], name + "_global_scale"
        elif codes.dtype not in FP8_DTYPES:
            continue
        scale = next((part for part in scales if part in tensors), "")
        if not scale or (of_tensor and of_tensor not in tensors):
            continue  # such as an embedding that was cast to FP8
        inputs = [name.removesuffix("weight") + end for end in _INPUT_SCALES[bool(of_tensor)]]
        of_input = next((part for part in inputs if part in tensors), "")
        parts = {part: np.asarray(tensors[part]) for part in (key, scale, of_tensor, of_input) if part}
        others = [part for end in BESIDE if (part := name + end) in tensors and part not in parts]
        given = parts[key], parts[scale], parts.get(of_input)
        entry = _of_nvfp4(*given, parts[of_tensor]) if of_tensor else _of_fp8(*given)
        if entry is None or others:
            parts |= {part: tensors[part] for part in others}
            found = [f"{part!r} {x.dtype}{list(x.shape)}" for part, x in parts.items()]
            raise ValueError(
                f"{where}: {name!r} must have codes in FP8 and one tensor of scales in float32, bfloat16, "
                "float16 or E8M0: one per tensor, per output feature or per block of "
                f"{_WIDTHS} elements, with as many dimensions as the codes if per block. In NVFP4 it must "
                "have packed codes (..., out, in / 2), scales (..., out, in / 16) in e4m3, and a float32 "
                "scale of the tensor. With more tensors, codes times scales are not its value. Scales that "
                "may be of blocks, or of joined matrices, such as q, k and v, are not read, because the "
                f"shapes do not show which. It has {', '.join(found)}. Correct the file, split a joined "
                "matrix and its scales by NumPy, or save the file in another format."
            )
        entries[name] = entry
        for part in parts.keys() - {name}:
            entries.pop(part, None)
    return entries


def _of_fp8(codes: np.ndarray, scale: np.ndarray, input_scale: Part) -> CheckpointTensor | None:
    """Returns a tensor in FP8 with scales in a wide dtype or in E8M0; None if they do not match."""
    if scale.dtype == np.uint8:
        return _of_mxfp8(codes, scale.view(_E8M0), input_scale)
    found = _in_blocks(codes.shape, scale)
    if found is None or codes.dtype not in FP8_DTYPES or scale.dtype not in _SCALE_DTYPES:
        return None
    return CheckpointTensor(codes, codes.dtype, codes.shape, *found, input_scale, None)


def _of_mxfp8(codes: np.ndarray, scale: np.ndarray, input_scale: Part) -> CheckpointTensor | None:
    """Returns a tensor in MXFP8, whose file has its scales as bytes; None if they do not match."""
    tensor = _of_fp8(codes, scale, input_scale)
    return tensor if tensor and {*tensor.block[:-1]} == {1} and tensor.block[-1] <= 32 else None


def _of_nvfp4(
    packed: np.ndarray, scale: np.ndarray, input_scale: Part, tensor_scale: np.ndarray
) -> CheckpointTensor | None:
    """Returns a tensor in NVFP4 with scales in e4m3, along rows; None if they do not match."""
    if packed.ndim < 2 or scale.dtype != E4M3 or tensor_scale.dtype != np.float32:
        return None
    *rows, width = *packed.shape[:-1], 2 * packed.shape[-1]
    stack, of_tensor = ([n for n in sizes if n != 1] for sizes in (rows[:-1], tensor_scale.shape))
    found = _in_blocks((*rows, width), scale)
    if found is None or found[0].shape != (*rows, width / 16) or of_tensor != stack:
        return None
    with np.errstate(all="ignore"):  # a damaged scale may be zero
        tensor_scale = 1 / tensor_scale.reshape(*rows[:-1], 1, 1)
        input_scale = None if input_scale is None else 1 / input_scale
    return CheckpointTensor(packed, E2M1, (*rows, width), *found, input_scale, tensor_scale)


def _in_blocks(shape: tuple[int, ...], scale: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]] | None:
    """Returns a scale with the dimensions of its weight, and the size of a block in each dimension.

    Returns None if no block gives these shapes, or if the scales may be those of joined matrices.
    """
    counts = scale.shape if scale.size != 1 else ()
    if len(counts) == 4 and len(shape) == 2 and counts[1] == counts[3] == 1:  # ModelOpt's blocks
        counts = counts[::2]
    may_be_blocks = len(counts) == len(shape) > 1
    counts = (*counts, *(1,) * (len(shape) - len(counts)))
    block = tuple(map(_width, shape, counts))
    if len(counts) != len(shape) or 0 in block:
        return None
    divided = [i for i, count in enumerate(counts) if count not in (1, shape[i])]
    # Formats have blocks of the last two dimensions, of at most 128 elements in each.
    is_clear = may_be_blocks and divided and divided[0] >= len(shape) - 2 and max(block[-2:]) <= 128
    return (scale.reshape(counts), block) if is_clear or not divided else None


def _width(size: int, count: int) -> int:
    """Returns the size of the blocks along a dimension that has this number of scales; 0 if none has."""
    if count in (1, size):
        return 1 if count == size else size
    return next((width for width in _WIDTHS if -(-size // width) == count), 0)


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

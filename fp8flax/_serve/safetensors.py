"""Writes variables of frozen models, Linen or NNX, into safetensors files; checks and reads these files."""

# ``_host/shared_text.py`` fills in the words in braces of the docstrings.

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from fp8flax._serve.files import replacing, write_text
from fp8flax._serve.headers import DTYPES, Stored, mapped, read_header
from fp8flax._serve.hidden_state import ServedOp
from fp8flax._serve.renaming import Rename, renamed
from fp8flax._serve.server_layout import (
    Tensor,
    from_matrix,
    named,
    own_layout,
    quantization_config,
)

METADATA = "fp8flax"
_VERSION = 3
_WITHOUT_CHECKSUMS = 2
"""An older version of the metadata. It differs in one thing: single tensors have no checksum."""
_IN_PARTS = "in parts"
"""The version of metadata that do not say where the tensors belong in the variables.

``rename`` has split, joined or numbered some of the tensors. ``load_into`` reads such a file."""
_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def _library() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "safetensors is missing; install it with: pip install 'fp8flax[safetensors]'"
        ) from error
    return safetensors


def tensors_of(
    ops: tuple[ServedOp, ...], variables: Mapping[str, Any], rename: Rename | None
) -> dict[str, Tensor]:
    """Returns the tensors that a frozen model has in a file or in a server, by their names there.

    Args:
        ops: the ops of the model.
        variables: the variables of the model, in collections, without boxes; arrays of NumPy or JAX.
        rename: see ``save_safetensors``.
    """
    tensors: dict[str, Tensor] = {}
    described = list(named(ops, variables))
    for tensor in described if rename is None else renamed(described, rename):
        name, path, array, *_ = tensor
        if name in tensors:
            raise ValueError(
                f"{'/'.join(path)} and {'/'.join(tensors[name].path)} would both be {name!r} in the file. "
                f"{'Rename one of the parameters' if rename is None else 'Correct rename'}."
            )
        if array.dtype not in _NAMES:
            raise ValueError(
                f"{'/'.join(path)} is {array.dtype}, which safetensors files do not hold. Leave its "
                "collection out, or convert it."
            )
        tensors[name] = tensor
    return tensors


def write(
    path: str | os.PathLike[str],
    ops: tuple[ServedOp, ...],
    variables: Mapping[str, Any],
    rename: Rename | None,
    config: Mapping[str, Any] | None,
) -> None:
    """Writes the variables of a frozen model, Linen or NNX; see ``save_safetensors``.

    Args:
        path: the file to write.
        ops: the ops of the model.
        variables: the variables of the model, in collections.
        rename: see ``save_safetensors``.
        config: see ``save_safetensors``.
    """
    library = _library()
    tensors: dict[str, np.ndarray] = {}
    entries: dict[str, Any] = {}
    wide_layers: list[str] = []
    arrays = {name: jax.tree.map(np.asarray, nn.meta.unbox(tree)) for name, tree in variables.items()}
    described = tensors_of(ops, arrays, rename)
    in_parts = not all(tensor.is_whole for tensor in described.values())
    for name, tensor in described.items():
        if tensor.is_wide_kernel:
            wide_layers.append(name.rpartition(".")[0] or name)
        tensors[name] = np.asarray(tensor.written, order="C")
        entries[name] = {
            "path": tensor.path,  # the place of the array in the variables
            "dtype": _NAMES[tensor.array.dtype],  # in the variables and in the file
            "shape": tensor.array.shape,  # in the variables
            "shape_in_file": tensor.written.shape,
            "matrix": tensor.matrix,  # see ``Tensor``
            "crc32": _crc32(tensors[name]),
        }
    if in_parts:
        layouts = {name: {"matrix": own_layout(tensor)} for name, tensor in described.items()}
        own: dict[str, Any] = {"version": _IN_PARTS, "tensors": layouts}
    else:
        own = {"version": _VERSION, "tensors": entries, "checksum": _checksum(entries)}
    metadata = {METADATA: json.dumps(own), "format": "pt"}  # transformers requires the format
    quantization = quantization_config(ops, wide_layers)
    if quantization is not None:
        metadata["quantization_config"] = json.dumps(quantization)
    text = None if config is None else _config_json(config, quantization)
    with replacing(path) as new:
        try:
            library.numpy.save_file(tensors, os.fspath(new), metadata)
        except library.SafetensorError as error:
            raise OSError(f"{path} cannot be written, and stays unchanged: {error}.") from error
        header, _ = read_header(Path(new))
        if wrong := _difference(entries, header):
            raise ValueError(f"{path}: {wrong}. Save the model again.")
    if text is not None:
        write_text(Path(path).with_name("config.json"), text)


def _config_json(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> str:
    """Returns the text of a model's ``config.json``."""
    if not isinstance(config, Mapping):
        raise TypeError(
            "config must be a mapping, such as the to_dict() of a transformers config; got "
            f"{type(config).__name__}."
        )
    if quantization is None:
        raise ValueError(
            "config was given, but no quantization_config can describe this model, so a loader would take "
            "its FP8 codes for weights. The cause is MXFP8, several recipes, a dtype other than e4m3fn, "
            "the kernel of a convolution in FP8, or a kernel in FP8 that is not the parameter of one "
            "layer. Freeze the model with one other recipe, or with weight_only=True; leave such layers "
            "out of FP8; or leave config out."
        )
    if config.get("quantization_config") is not None:
        raise ValueError(
            "config must not have a quantization_config, because save_safetensors adds that of this model; "
            f"got {config['quantization_config']!r}. Leave it out."
        )
    if config.get("tie_word_embeddings"):
        # Loaders make an lm_head, which is not in the file, and would look for its scale.
        key = "ignore" if "ignore" in quantization else "modules_to_not_convert"
        quantization = {**quantization, key: sorted({*quantization[key], "lm_head"})}
    try:
        return json.dumps({**config, "quantization_config": quantization}, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise TypeError(f"config must have values that JSON can hold: {error}.") from error


def load_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the variables that ``save_safetensors`` wrote, bit for bit.

    Args:
        path: the file to read.

    Returns:
        Variables for the serving model.

    Raises:
        {errors}

    Example:
        See ``save_safetensors``.

    Source: the safetensors format.
    """
    entries, stored = _read_entries(Path(path))
    for entry in entries.values():
        check_not_narrowed(f"{path}: {'/'.join(entry['path'])}", np.dtype(DTYPES[entry["dtype"]]))

    def load(name: str) -> jax.Array:
        entry, array = entries[name], mapped(stored[name], name)
        if "crc32" in entry and entry["crc32"] != _crc32(array):
            raise ValueError(
                f"{path} is damaged: the checksum of {name!r} does not match. Save the model "
                "again, or copy the file again."
            )
        if entry["matrix"] is not None:
            array = from_matrix(array, entry["shape"], *entry["matrix"])
        return jnp.asarray(array.reshape(entry["shape"]))

    return unflatten_dict({tuple(entry["path"]): load(name) for name, entry in entries.items()})


def check_not_narrowed(name: str, dtype: Any) -> None:
    """Raises ``ValueError`` if JAX would narrow an array of this dtype when it is loaded."""
    narrow = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    if narrow != dtype:
        raise ValueError(
            f"{name} is {dtype}, which JAX would narrow to {narrow}. Enable jax_enable_x64 to load it, or "
            f"convert it to {narrow} first."
        )


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _checksum(entries: Any) -> int:
    return zlib.crc32(json.dumps(entries, sort_keys=True).encode())


def _read_entries(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Returns the entry of each tensor in the metadata of a file, and the place of each tensor in the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or ``save_safetensors`` did not write it.
    """
    stored, metadata = read_header(path)
    try:
        own = json.loads(metadata[METADATA])
        version, entries = own["version"], own["tensors"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} was not written by fp8flax.save_safetensors, or is damaged: its metadata has no "
            f"{METADATA!r} that says where in the variables its tensors belong."
        ) from error
    if version == _IN_PARTS:
        raise ValueError(
            f"{path} was written with a rename that splits, joins or numbers tensors, so it does not say "
            "where in the variables they belong. Load it by fp8flax.load_into(variables, "
            "fp8flax.read_checkpoint(path), rename=rename) with the same rename."
        )
    if version not in (readable := [_WITHOUT_CHECKSUMS, _VERSION]):
        raise ValueError(
            f"{path} has metadata of version {version!r}, and this fp8flax reads versions {readable}. Load "
            "it with the fp8flax that wrote it, or save the model again with this one."
        )
    # The checksum covers all entries, so they need no other check than a comparison with the file's header.
    wrong = None if own.get("checksum") == _checksum(entries) else "its checksum does not match"
    if wrong := wrong or _difference(entries, stored):
        raise ValueError(f"{path}: its metadata is damaged: {wrong}. Save the model again.")
    return entries, stored


def _difference(entries: Mapping[str, Any], stored: Mapping[str, Stored]) -> str | None:
    """Returns how the header of a file differs from the entries; None if it does not differ."""
    if entries.keys() != stored.keys():
        only_here = sorted(entries.keys() - stored.keys())
        only_there = sorted(stored.keys() - entries.keys())
        return f"it has the tensors {only_here}, which the file has not, and not {only_there}"
    for name, entry in entries.items():
        found = _NAMES[stored[name].dtype], list(stored[name].shape)
        written = entry["dtype"], list(entry["shape_in_file"])
        if found != written:
            found_as, written_as = (f"{dtype}{shape}" for dtype, shape in (found, written))
            return f"{name!r} is {found_as} in the file, and was written as {written_as}"
    return None

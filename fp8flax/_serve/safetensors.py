"""``save_safetensors``: writes the variables of frozen models, Linen or NNX, into safetensors files."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fp8flax._serve.freeze import described
from fp8flax._serve.headers import DTYPES, INDEX, SINGLE
from fp8flax._serve.renaming import Rename
from fp8flax._serve.server_layout import quantization_config, tensors_of

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def save_safetensors(
    path: str | os.PathLike[str],
    model: Any,
    variables: Mapping[str, Any] | None = None,
    *,
    rename: Rename | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a frozen model's variables to a safetensors file for other programs.

    The tensors of a layer whose kernel is one parameter, multiplied as it is, have these names and shapes:

    * ``<layer>.weight``: the kernel in FP8, ``(out, in)``, as PyTorch has it
    * ``<layer>.bias``: the bias, ``(out,)``
    * ``<layer>.weight_scale``: the scale, ``(1,)`` for one per tensor, ``(out, 1)`` for one per output
      feature, ``(out, in / 32)`` in E8M0 for MXFP8
    * ``<layer>.weight_scale_inv``: the scale for 128×128 blocks, ``(out / 128, in / 128)``. In spite of its
      name, it is a factor of the codes.
    * ``<layer>.input_scale``: the fixed scale of the input, ``(1,)``, if there is one

    A layer has the name of its path, with dots: ``layers.0`` for ``model.layers[0]`` of NNX. Layers that
    ``nn.scan`` or ``nnx.vmap`` stacked have a leading dimension. All other variables keep their layout and
    their names, such as ``embed.embedding``. NNX's random number generators are left out. Equal variables
    give equal files.

    These are the names of FP8 checkpoints in the Hugging Face hub, as transformers and vLLM document them.
    A loader knows an architecture by its own names: ``rename`` gives them to the tensors, and ``config``
    writes the ``config.json`` that the loader reads first. The metadata of the file contain the matching
    ``quantization_config``: ``fp8`` for 128×128 blocks, ``compressed-tensors`` for scales per tensor and
    per output feature. There is no such config for MXFP8, for dtypes other than e4m3fn, for convolutions
    in FP8, and for several recipes in one model. ``load_into`` reads the file into a model.

    Args:
        path: the file to write. An existing file is replaced by a complete new one, or stays unchanged.
        model: the model that ``freeze`` returned, of Linen or NNX.
        variables: the variables that ``freeze`` returned beside a Linen model. Collections other than
            ``params`` have their own names as prefix.
        rename: other names for the tensors: regular expressions and their replacements, each substituted
            wherever it is found in a name, in their order; or a function of one name that returns another.
            A name without a match stays unchanged. A wide ``<layer>.kernel`` that is renamed to
            ``<layer>.weight`` is transposed to ``(out, in)``, as PyTorch has it.
        config: contents of a ``config.json`` in the folder of ``path``, which describes the architecture,
            as ``to_dict()`` of a transformers config returns it; its ``quantization_config`` becomes that
            of this model. None writes no such file.

    Raises:
        OSError: a file cannot be written, for instance because the disk is full.
        TypeError: ``model`` does not come from ``freeze``, ``rename`` is neither a mapping nor a function,
            or JSON cannot hold ``config``.
        ValueError: two variables would have one name; a variable has a dtype that files do not hold; a
            pattern matches nothing; a name would be empty, or give the tensors of one layer different
            prefixes; or the folder has an index, which would hide the file.
            Also if a wide kernel that becomes a weight does not have two dimensions. Also if ``config`` is
            given, and no ``quantization_config`` describes the model.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, os, tempfile, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Dense(8), fp8.Float8CurrentScaling(), include="")
        >>> x = jnp.ones((2, 4))
        >>> serve_model, served = fp8.freeze(model8, model8.init(jax.random.key(0), x))
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> fp8.save_safetensors(path, serve_model, served, rename={"^kernel": "model.proj"})
        >>> import safetensors
        >>> sorted(safetensors.safe_open(path, "np").keys())
        ['bias', 'model.proj.weight', 'model.proj.weight_scale']

    Source: the safetensors format; vLLM's compressed-tensors checkpoints; DeepSeek-V3 for blocks.
    """
    ops, variables = described(model, variables)
    path = Path(path)
    tensors = tensors_of(ops, jax.tree.map(np.asarray, variables), rename)
    wide = [name.rpartition(".")[0] or name for name, tensor in tensors.items() if tensor.is_wide_kernel]
    quantization = quantization_config(ops, wide)
    text = None if config is None else _config_json(config, quantization)
    if path.name == SINGLE and (index := path.with_name(INDEX)).exists():
        raise ValueError(
            f"{path.parent} has {index.name}, with which loaders would read the older files that it lists. "
            "Delete the index and those files, or save into another folder."
        )
    metadata = {"format": "pt"}  # transformers requires the format
    if quantization is not None:
        metadata["quantization_config"] = json.dumps(quantization)
    with _replacing(path) as new:
        _write(new, {name: tensor.array for name, tensor in tensors.items()}, metadata)
    if text is not None:
        with _replacing(path.with_name("config.json")) as new:
            new.write_text(text, encoding="utf-8")


def _write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file.

    The library would write the metadata in a random order, so that equal models had different files.
    """
    # Tensors of wide dtypes come first, so that each tensor begins at a multiple of the size of its dtype.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        array, start = tensors[name], end
        end += array.nbytes
        dtype = _NAMES[array.dtype]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path; if there is no error, the file that was written there replaces ``path``."""
    target = path.resolve()  # a symbolic link stays a link
    new = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield new
        new.replace(target)
    except OSError as error:
        raise OSError(error.errno, f"{path} cannot be written, and stays unchanged: {error}") from error
    finally:
        new.unlink(missing_ok=True)


def _config_json(config: Mapping[str, Any], quantization: Mapping[str, Any] | None) -> str:
    """Returns the text of a model's ``config.json``."""
    if quantization is None:
        raise ValueError(
            "config was given, but no quantization_config can describe this model, so a loader would take "
            "its FP8 codes for weights. The cause is MXFP8, several recipes, a dtype other than e4m3fn, or "
            "an op such as a convolution, whose kernel is not stored in FP8 as it is multiplied. Freeze "
            "the model with one other recipe, or with weight_only=True; leave such layers out of FP8; or "
            "leave config out."
        )
    if config.get("tie_word_embeddings"):
        # Loaders make an lm_head, which is not in the file, and would look for its scale.
        key = "ignore" if "ignore" in quantization else "modules_to_not_convert"
        quantization = {**quantization, key: sorted({*quantization[key], "lm_head"})}
    return json.dumps({**config, "quantization_config": quantization}, indent=2) + "\n"

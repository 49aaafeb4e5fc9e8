"""``save_safetensors``: writes the variables of a frozen Linen model to a file."""

# ``_host/shared_text.py`` fills in the words in braces of the docstrings.

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import flax.linen as nn

from fp8flax._core.options import check_variables
from fp8flax._serve.renaming import Rename
from fp8flax._serve.safetensors import write
from fp8flax._serve.serving import serving_ops


def save_safetensors(
    path: str | os.PathLike[str],
    model: nn.Module,
    variables: Mapping[str, Any],
    *,
    rename: Rename | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a frozen model's variables to a safetensors file.

    The tensors of a layer whose kernel is one parameter, multiplied as it is, have these names and shapes:

    * ``<layer>.weight``: the kernel in FP8, ``(out, in)``, as PyTorch has it
    * ``<layer>.bias``: the bias, ``(out,)``
    * ``<layer>.weight_scale``: the scale, ``(1,)`` for one per tensor, ``(out, 1)`` for one per output
      feature, ``(out, in / 32)`` in E8M0 for MXFP8
    * ``<layer>.weight_scale_inv``: the scale for 128×128 blocks, ``(out / 128, in / 128)``. In spite of its
      name, it is a factor of the codes.
    * ``<layer>.input_scale``: the fixed scale of the input, ``(1,)``, if there is one

    Layers that ``nn.scan`` stacked have a leading dimension, unless ``rename`` numbers them. All other
    variables keep their layout and their names, with dots: ``embed.embedding``.

    These are the names of FP8 checkpoints in the Hugging Face hub, as transformers and vLLM document them.
    transformers has loaded such a file on a CPU; no inference server has been tried. A loader knows an
    architecture by its own names: ``rename`` gives them to the tensors, and ``config`` writes the
    ``config.json`` that the loader reads first.

    The metadata of the file contain the matching ``quantization_config``. Its ``quant_method`` is ``fp8``
    for 128×128 blocks, and ``compressed-tensors`` for scales per tensor and per output feature. There is no
    such config for MXFP8, for dtypes other than e4m3fn, for convolutions in FP8, and for several recipes in
    one model.

    Arrays are written unchanged. 64-bit arrays are written even without ``jax_enable_x64``, but
    ``load_safetensors`` then raises an error. An existing file is replaced by a complete new one, or stays
    unchanged.

    Args:
        path: the file to write.
        model: the serving model that ``freeze`` returned.
        variables: the variables of the serving model. Collections other than ``params`` have their own
            names as prefix.
        {args}

    Raises:
        {errors}

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, os, tempfile, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Dense(8), fp8.Float8CurrentScaling(), include="")
        >>> x = jnp.ones((2, 4))
        >>> serve_model, served = fp8.freeze(model8, model8.init(jax.random.key(0), x))
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> fp8.save_safetensors(path, serve_model, served)
        >>> loaded = fp8.load_safetensors(path)
        >>> bool((serve_model.apply(loaded, x) == serve_model.apply(served, x)).all())
        True
        >>> fp8.save_safetensors(path, serve_model, served, rename={"^kernel": "model.proj"})
        >>> import safetensors
        >>> sorted(safetensors.safe_open(path, "np").keys())
        ['bias', 'model.proj.weight', 'model.proj.weight_scale']

    Source: the safetensors format; vLLM's compressed-tensors checkpoints; DeepSeek-V3 for blocks.
    """
    ops = serving_ops(model)
    check_variables(variables)
    write(path, ops, variables, rename, config)

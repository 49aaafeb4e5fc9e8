"""Loads folders by transformers into PyTorch, and prints what came of each as a line of JSON.

Run by ``benchmarks/loaders.py`` with each Python that is to load: it needs torch, transformers, accelerate
and compressed-tensors, and neither JAX nor fp8flax.

Where transformers refuses a folder for want of a GPU and Triton is installed, the folder is loaded without
that check, and Triton's interpreter runs the matmul on the CPU. PyTorch casts inputs, with the scales of
transformers' kernel: the interpreter rounds some values to the other neighbour.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import safetensors.torch
import torch
import transformers

PACKAGES = ("transformers", "torch", "compressed-tensors", "accelerate", "safetensors")
E4M3 = torch.finfo(torch.float8_e4m3fn).max


def figures(folder: Path, interpreted: bool = False) -> dict[str, Any]:
    """Returns what loading the model of a folder gave, and how far its layers are from the file."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    wrong = {what: sorted(map(str, names)) for what, names in info.items() if names}
    if wrong:
        raise ValueError(f"loaded with {wrong}")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    errors: dict[str, float] = {}

    def compare(name: str, layer: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
        wanted = product(tensors, name, args[0], config, interpreted)
        errors[name] = float(torch.linalg.norm(out.double() - wanted) / torch.linalg.norm(wanted))

    layers = {
        name: layer
        for name, layer in model.named_modules()
        if f"{name}.weight" in tensors and tensors[f"{name}.weight"].dtype == torch.float8_e4m3fn
    }
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *args, name=name: compare(name, *args))
    tokens = torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int64))
    with torch.no_grad():
        logits = model(tokens).logits
    np.save(folder / "logits.npy", logits.float().numpy())
    (dtype,) = {str(layer.weight.dtype).removeprefix("torch.") for layer in layers.values()}
    assert len(errors) == len(layers) > 0
    return {"fp8_layers": len(layers), "weights_then": dtype, "layer_error": max(errors.values())}


def cast_per_128(x: torch.Tensor, block_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, and a float32 scale for each 128 values of a row, as the fine-grained loader does."""
    blocks = x.unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(-1) / E4M3
    return (blocks / scale[..., None]).to(torch.float8_e4m3fn).flatten(-2), scale


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """A context in which the fine-grained loader of transformers 4.57 needs no GPU."""
    from transformers.integrations import finegrained_fp8
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    with (
        mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"),
        mock.patch.object(finegrained_fp8, "is_torch_accelerator_available", return_value=False),
        mock.patch.object(finegrained_fp8, "act_quant", cast_per_128),
        mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        yield


def product(
    tensors: dict[str, torch.Tensor],
    name: str,
    x: torch.Tensor,
    config: dict[str, Any],
    interpreted: bool,
) -> torch.Tensor:
    """Returns what a layer is to compute of its input, by the file and its config, in float64.

    The loader for 128x128 blocks leaves inputs wide where it dequantizes.
    """
    weight, x = tensors[f"{name}.weight"].double(), x.double()
    if config["quant_method"] == "fp8":
        if interpreted:
            codes, scale = cast_per_128(x.float())
            x = (codes.double().unflatten(-1, (-1, 128)) * scale.double()[..., None]).flatten(-2)
        scale = tensors[f"{name}.weight_scale_inv"].double()
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return x @ (weight * scale[: weight.shape[0], : weight.shape[1]]).T
    inputs = config["config_groups"]["group_0"]["input_activations"]
    if inputs is not None:
        if not inputs["dynamic"]:
            scale = tensors[f"{name}.input_scale"]
        elif inputs["strategy"] == "token":
            scale = x.float().abs().amax(-1, keepdim=True) / E4M3
        else:
            scale = x.float().abs().amax() / E4M3
        codes = (x.float() / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn)
        x = codes.double() * scale.double()
    return x @ (weight * tensors[f"{name}.weight_scale"].double()).T


def main() -> None:
    warnings.simplefilter("ignore")
    for folder in map(Path, sys.argv[1:]):
        try:
            row = figures(folder)
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            row = {"error": re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:300]}
            if "No GPU" in row["error"] and importlib.util.find_spec("triton"):
                row["triton_interpreter"] = importlib.metadata.version("triton")
                with without_gpu():
                    row |= figures(folder, interpreted=True)
        versions = {package: importlib.metadata.version(package) for package in PACKAGES}
        print(json.dumps({"recipe": folder.name, **versions, **row}), flush=True)


if __name__ == "__main__":
    main()

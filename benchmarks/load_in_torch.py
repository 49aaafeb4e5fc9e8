"""Loads folders by transformers into PyTorch, and prints what came of each as a line of JSON.

Run by ``benchmarks/loaders.py`` with each Python that is to load: it needs torch, transformers, accelerate
and compressed-tensors, and neither JAX nor fp8flax.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers

PACKAGES = ("transformers", "torch", "compressed-tensors", "accelerate", "safetensors")
E4M3 = torch.finfo(torch.float8_e4m3fn).max


def figures(folder: Path) -> dict[str, Any]:
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
        wanted = product(tensors, name, args[0], config)
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


def product(
    tensors: dict[str, torch.Tensor], name: str, x: torch.Tensor, config: dict[str, Any]
) -> torch.Tensor:
    """Returns what a layer is to compute of its input, by the file and its config, in float64.

    The loader for 128x128 blocks leaves inputs wide where it dequantizes.
    """
    weight, x = tensors[f"{name}.weight"].double(), x.double()
    if config["quant_method"] == "fp8":
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
        versions = {package: importlib.metadata.version(package) for package in PACKAGES}
        print(json.dumps({"recipe": folder.name, **versions, **row}), flush=True)


if __name__ == "__main__":
    main()

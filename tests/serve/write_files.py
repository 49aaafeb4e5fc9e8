"""Writes the small FP8 checkpoints of tests/serve/files with the libraries whose formats they have.

Run ``python tests/serve/write_files.py`` with a Python that has torch, transformers 5, compressed-tensors
and torchao. It needs no GPU and downloads nothing. Beside each checkpoint, ``expected.safetensors`` has the
weights as the library itself dequantizes them; for the Llama its logits, as transformers computes them from
the folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

FILES = Path(__file__).with_name("files")
SINGLE = "model.safetensors"


def model(shapes: dict[str, tuple[int, int]]) -> Any:
    """Returns linear layers with random weights ``(out, in)``, whose rows have different magnitudes."""
    torch.manual_seed(0)
    layers = {}
    for name, (out, width) in shapes.items():
        layers[name] = torch.nn.Linear(width, out)
        layers[name].weight.data *= torch.logspace(-2, 1, out)[:, None]
    return torch.nn.ModuleDict(layers)


def compressed_tensors(folder: Path, kind: str, weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Writes layers that compressed-tensors quantized; returns the weights that it dequantizes."""
    # Blocks of 16×32 do not fill the weight up. Groups of 32 columns must.
    net = model({"up": (20, 48) if weights["strategy"] == "block" else (8, 64), "down": (4, 32)})
    compressor = quantized(net, kind, weights)
    save_file({name: x.contiguous() for name, x in net.state_dict().items()}, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps({"model_type": "two_layers"}))
    compressor.update_config(folder)
    compressor.decompress_model(net)
    return {f"{name}.weight": layer.weight.data for name, layer in net.items()}


def quantized(net: Any, kind: str, weights: dict[str, Any]) -> Any:
    """Quantizes the linear layers of a model in place; returns the compressor, which can undo it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights, "format": kind}
    if kind == "nvfp4-pack-quantized":
        group["input_activations"] = {**weights, "dynamic": "local"}
    options = {"quantization_status": "frozen", "format": kind, "ignore": ["lm_head"]}
    config = QuantizationConfig(config_groups={"group_0": group}, **options)
    apply_quantization_config(net, config)
    for layer in net.modules():
        if not hasattr(layer, "weight_scale"):
            continue
        rows, columns = layer.weight.shape
        height, width = {
            "tensor": (rows, columns),
            "channel": (1, columns),
            "block": weights.get("block_structure", (1, 1)),
            "group": (1, weights.get("group_size", 1)),
        }[weights["strategy"].removeprefix("tensor_")]
        blocks = [b.abs().amax() for r in layer.weight.split(height) for b in r.split(width, 1)]
        amax = torch.stack(blocks).reshape(layer.weight_scale.shape)
        arguments = [-amax, amax, config.config_groups["group_0"].weights]
        if weights["strategy"] == "tensor_group":
            layer.input_global_scale.data = generate_gparam(torch.tensor(-3.0), torch.tensor(3.0))
            layer.weight_global_scale.data = generate_gparam(-amax.amax(), amax.amax())
            arguments.append(layer.weight_global_scale)
        layer.weight_scale.data, _ = calculate_qparams(*arguments)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(net)
    return compressor


def llama(folder: Path) -> dict[str, torch.Tensor]:
    """Writes a Llama in several files; returns the logits that transformers computes from the folder."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(0)
    net = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.3))
    compressor = quantized(net, "float-quantized", {"strategy": "channel"})
    net.config.dtype = torch.float32
    net.save_pretrained(folder, max_shard_size="16KB")
    compressor.update_config(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.arange(16).reshape(2, 8) * 7 % 24
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return {"tokens": tokens, "logits": loaded(tokens).logits}


def finegrained(folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Writes layers in the ``fp8`` format of transformers; returns the weights that it dequantizes."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    config = FineGrainedFP8Config(**options)
    quantizer = SimpleNamespace(quantization_config=config)
    net = model({"up": (32, 32), "down": (16, 32)})
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, weight in net.state_dict().items():
        tensors |= Fp8Quantize(quantizer).convert({name: weight})
        if name.endswith("weight"):
            scale = tensors[f"{name}_scale_inv"]
            expected[name] = Fp8Dequantize(quantizer)._dequantize_one(tensors[name], scale, torch.float32)
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config.to_dict()}, default=str))
    return expected


def torchao(folder: Path, granularity: Any) -> dict[str, torch.Tensor]:
    """Writes layers that torchao quantized; returns the weights that it dequantizes."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    net = model({"up": (8, 64), "down": (4, 32)})
    for layer in net.values():
        tensor = Float8Tensor.from_hp(layer.weight.data, granularity=granularity)
        layer.weight = torch.nn.Parameter(tensor, requires_grad=False)
    tensors, metadata = flatten_tensor_state_dict(net.state_dict())
    save_file(tensors, folder / SINGLE, metadata)
    return {f"{name}.weight": layer.weight.dequantize() for name, layer in net.items()}


def cases() -> dict[str, Callable[[Path], dict[str, torch.Tensor]]]:
    """Returns what writes each folder."""
    from torchao.quantization import PerRow, PerTensor

    def of_compressed_tensors(kind: str, **weights: Any) -> Callable[[Path], dict[str, torch.Tensor]]:
        return lambda folder: compressed_tensors(folder, kind, weights)

    group_of_16: Any = {"num_bits": 4, "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
    return {
        "compressed_tensor": of_compressed_tensors("float-quantized", strategy="tensor"),
        "compressed_channel": of_compressed_tensors("float-quantized", strategy="channel"),
        "compressed_naive": of_compressed_tensors("naive-quantized", strategy="channel"),
        "compressed_block": of_compressed_tensors(
            "float-quantized", strategy="block", block_structure=[16, 32]
        ),
        "compressed_mxfp8": of_compressed_tensors(
            "mxfp8-quantized", strategy="group", group_size=32, scale_dtype=torch.uint8
        ),
        "compressed_nvfp4": of_compressed_tensors(
            "nvfp4-pack-quantized", strategy="tensor_group", **group_of_16
        ),
        "transformers_block": lambda folder: finegrained(folder, weight_block_size=(16, 32)),
        "transformers_ue8m0": lambda folder: finegrained(
            folder, weight_block_size=(16, 32), scale_fmt="ue8m0"
        ),
        "transformers_llama": llama,
        "torchao_row": lambda folder: torchao(folder, PerRow()),
        "torchao_tensor": lambda folder: torchao(folder, PerTensor()),
    }


def main() -> None:
    shutil.rmtree(FILES, ignore_errors=True)
    for name, write in cases().items():
        folder = FILES / name
        folder.mkdir(parents=True)
        expected = write(folder)
        save_file({key: x.contiguous() for key, x in expected.items()}, folder / "expected.safetensors")
    packages = ("torch", "transformers", "compressed-tensors", "torchao", "safetensors")
    versions = {package: version(package) for package in packages}
    (FILES / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()

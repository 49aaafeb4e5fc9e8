"""A served model as inference servers read it: names and layouts of its tensors, and its config."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from fp8flax._core.names import PARAMS
from fp8flax._serve.hidden_state import INPUT_SCALE, KERNEL_SCALE, ServedOp


def _order(ndim: int, out: Sequence[int], summed: Sequence[int]) -> list[int]:
    """Returns a kernel's dimensions in the file's order: stacked, of the output, summed over."""
    stacked = ndim - len(out) - len(summed)
    return [*range(stacked), *(stacked + i for i in out), *(stacked + i for i in summed)]


def matrix_shape(shape: Sequence[int], out: Sequence[int], summed: Sequence[int]) -> list[int]:
    """Returns the shape ``(..., out, in)`` of a kernel as a matrix."""
    ordered = [shape[i] for i in _order(len(shape), out, summed)]
    end = len(shape) - len(summed)
    start = end - len(out)
    return [*ordered[:start], math.prod(ordered[start:end]), math.prod(ordered[end:])]


def _as_matrix(array: np.ndarray, out: Sequence[int], summed: Sequence[int]) -> np.ndarray:
    order = _order(array.ndim, out, summed)
    return array.transpose(order).reshape(matrix_shape(array.shape, out, summed))


def from_matrix(
    matrix: np.ndarray, shape: Sequence[int], out: Sequence[int], summed: Sequence[int]
) -> np.ndarray:
    """Returns a kernel of this shape from what it is as a matrix."""
    order = _order(len(shape), out, summed)
    return matrix.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def named(
    ops: tuple[ServedOp, ...], variables: Mapping[str, Any]
) -> Iterator[tuple[str, list[str], np.ndarray, np.ndarray, Any]]:
    """Yields each variable: name in the file, path, value, value in the file, how it became a matrix."""
    plain = [op for op in ops if op.layout is not None]
    kernels = {op.kernels[0][0]: op for op in plain}
    biases = {(*path[:-1], "bias"): op for path, op in kernels.items() if path[-1] == "kernel"}
    scales = {(*op.path, KERNEL_SCALE): op for op in plain}
    inputs = {(*op.path, INPUT_SCALE): op for op in plain}
    for collection, tree in variables.items():
        for keys, leaf in jax.tree_util.tree_flatten_with_path(nn.meta.unbox(tree))[0]:
            if not all(isinstance(key, jax.tree_util.DictKey) for key in keys):
                raise ValueError(
                    f"The collection {collection!r} must be dicts of arrays; got "
                    f"{jax.tree_util.keystr(keys)} in it. Leave sown values out of the variables."
                )
            path = tuple(str(key.key) for key in keys)
            array, matrix = np.asarray(leaf), None
            written, name = array, ".".join(path if collection == PARAMS else (collection, *path))
            if collection != PARAMS:
                pass
            elif path in kernels:
                name, matrix = f"{_layer(kernels[path])}.weight", kernels[path].layout
            elif path in scales:
                op = scales[path]
                quantizer = op.gemms.forward.rhs
                assert quantizer is not None
                name = f"{_layer(op)}.weight_scale{'_inv' if quantizer.strategy == 'block' else ''}"
                if quantizer.scales_along_contraction:  # of a batch of one matrix
                    written = array.reshape(*array.shape[:-3], *array.shape[-2:])
                elif array.shape[-1] != 1 or array.ndim > 2:
                    matrix = op.layout
            elif path in inputs:
                name = f"{_layer(inputs[path])}.input_scale"
            elif path in biases:
                written = _flat_bias(array, biases[path].layout)
            if matrix is not None:
                written = _as_matrix(array, *matrix)
            yield name, [collection, *path], array, written, matrix


def _flat_bias(bias: np.ndarray, layout: Any) -> np.ndarray:
    """Returns a bias with one dimension for all features, as PyTorch has it."""
    stacked = max(0, bias.ndim - len(layout[0]))
    return bias.reshape(*bias.shape[:stacked], -1)


def _layer(op: ServedOp) -> str:
    """Returns the name of a layer: of its module, or of the parameter if the module has several."""
    *module, last = op.kernels[0][0]
    return ".".join(module if last == "kernel" and module else (*module, last))


def quantization_config(ops: tuple[ServedOp, ...], names: Iterable[str]) -> dict[str, Any] | None:
    """Returns the quantization config that inference servers know; None if they know none."""
    plain = [op for op in ops if op.layout is not None]
    kinds = {(op.gemms.forward.lhs, op.gemms.forward.rhs) for op in plain}
    if len(kinds) != 1 or len(plain) != len(ops):
        return None
    lhs, rhs = kinds.pop()
    wide = sorted(n.removesuffix(".kernel") for n in names if n.endswith(".kernel"))
    assert rhs is not None
    if rhs.strategy in ("tensor", "block"):
        scheme = "static" if lhs is not None and lhs.needs_state else "dynamic"
        config: dict[str, Any] = {
            "quant_method": "fp8",
            "activation_scheme": scheme,
            "modules_to_not_convert": wide,
        }
        if rhs.strategy == "block":
            config["weight_block_size"] = [128, 128]
        return config
    if rhs.strategy is None:
        return None
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": rhs.strategy,
        "dynamic": False,
    }
    inputs = None if lhs is None else {**weights, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": wide,
    }

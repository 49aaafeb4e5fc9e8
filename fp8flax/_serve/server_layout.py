"""Converts a served model to the form that inference servers read: tensor names, layouts and config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import PARAMS
from fp8flax._serve.hidden_state import INPUT_SCALE, KERNEL_SCALE, ServedOp


class Tensor(NamedTuple):
    """A variable of the model, as it is in the file."""

    name: str
    """The name in the file."""
    path: list[str]
    """The path in the variables; the collection comes first."""
    written: Any
    """The array in the file, of NumPy or JAX: the values of the variable, in another order and shape."""
    layer: str | None
    """The name of the FP8 layer whose weight or scale the variable is; None for other variables."""

    @property
    def is_wide_kernel(self) -> bool:
        """Whether the variable has the name of a layer's kernel, and a dtype other than FP8."""
        return self.path[0] == PARAMS and self.path[-1] == "kernel" and self.written.dtype.itemsize > 1


def _as_matrix(array: Any, out: Sequence[int], summed: Sequence[int]) -> Any:
    """Returns a kernel as a matrix ``(..., out, in)``, after its stacked dimensions."""
    stacked = array.ndim - len(out) - len(summed)
    ordered = array.transpose(*range(stacked), *(stacked + i for i in (*out, *summed)))
    stack, rest = ordered.shape[:stacked], ordered.shape[stacked:]
    return ordered.reshape(*stack, math.prod(rest[: len(out)]), math.prod(rest[len(out) :]))


def named(ops: tuple[ServedOp, ...], variables: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields each variable, an array of NumPy or JAX, as a ``Tensor`` of the file."""
    biases, places = dict[Any, Any](), dict[Any, Any]()
    for op in ops:
        if op.kernel is not None and op.layout is not None:
            kernel, layer = op.kernel[0], _layer(op.kernel[0])
            if kernel[-1] == "kernel":
                biases[*kernel[:-1], "bias"] = "bias", op, layer
            places[kernel] = "weight", op, layer
            places[*op.path, KERNEL_SCALE] = "weight_scale", op, layer
            places[*op.path, INPUT_SCALE] = "input_scale", op, layer
    places = biases | places
    for collection, tree in variables.items():
        for path, array in _by_path(collection, tree).items():
            if collection != PARAMS or path not in places:
                name = ".".join(path if collection == PARAMS else (collection, *path))
                yield Tensor(name, [collection, *path], array, None)
                continue
            last, op, layer = places[path]
            name, written = f"{layer}.{last}", array
            if last == "weight":
                written = _as_matrix(array, *op.layout)
            elif last == "weight_scale":
                quantizer = op.gemms.forward.rhs
                name += "_inv" if quantizer.strategy == "block" else ""
                if quantizer.scales_along_contraction:  # block scales have a batch dimension of size 1
                    written = array.reshape(*array.shape[:-3], *array.shape[-2:])
                elif quantizer.strategy == "channel" and sum(map(len, op.layout)) > 1:
                    written = _as_matrix(array, *op.layout)
            elif last == "bias":  # one dimension for all features, as in PyTorch
                name = ".".join(path)
                stacked = max(0, array.ndim - len(op.layout[0]))
                written = array.reshape(*array.shape[:stacked], -1)
            yield Tensor(name, [collection, *path], written, None if last == "bias" else layer)


def _by_path(collection: str, tree: Any) -> dict[tuple[str, ...], Any]:
    """Returns the arrays of a collection by their paths."""
    arrays = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not all(isinstance(key, jax.tree_util.DictKey) for key in keys):
            raise ValueError(
                f"The collection {collection!r} must be dicts of arrays; got "
                f"{jax.tree_util.keystr(keys)} in it. Leave sown values out of the variables."
            )
        arrays[tuple(str(key.key) for key in keys)] = leaf
    return arrays


def _layer(kernel: tuple[str, ...]) -> str:
    """Returns the name of an FP8 layer: that of its module.

    If the kernel is not named ``kernel``, the module may have several. The name of the kernel is then
    added.
    """
    *module, last = kernel
    return ".".join(module if last == "kernel" and module else (*module, last))


def quantization_config(ops: tuple[ServedOp, ...], wide_layers: Sequence[str]) -> dict[str, Any] | None:
    """Returns the quantization config that inference servers know; None if they know none.

    Args:
        ops: the FP8 ops of the model.
        wide_layers: the names that the layers without FP8 have in the file.
    """
    in_fp8 = [op for op in ops if any(op.gemms.quantizers)]
    plain = [op for op in in_fp8 if op.layout is not None]
    kinds = {(op.gemms.forward.lhs, op.gemms.forward.rhs) for op in plain}
    if len(kinds) != 1 or len(plain) != len(in_fp8):
        return None
    lhs, rhs = kinds.pop()
    assert rhs is not None
    if any(q.dtype != np.dtype(jnp.float8_e4m3fn) for q in (lhs, rhs) if q is not None):
        return None
    if rhs.strategy == "block":
        if lhs is None or lhs.scale_columns != 128 or rhs.scale_columns != 128:
            return None
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": sorted(wide_layers),
        }
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": rhs.strategy,
        "dynamic": False,
    }
    strategy = None if lhs is None else {"tensor": "tensor", "channel": "token"}.get(lhs.strategy)
    if rhs.strategy not in ("tensor", "channel") or (lhs is not None and strategy is None):
        return None
    inputs = None if lhs is None else {**weights, "strategy": strategy, "dynamic": not lhs.needs_state}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": sorted(wide_layers),
    }

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


class Features(NamedTuple):
    """The place of a layer's output features in a tensor of the file."""

    axis: int
    """The dimension of the features, counted from the end."""
    per_entry: int
    """How many features an entry of this dimension is for; 0 if one entry is for all."""
    size: int
    """How many output features the layer has."""


class Tensor(NamedTuple):
    """A variable of the model, with its name and its array in the file."""

    name: str
    """The name in the file."""
    path: list[str]
    """The path in the variables; the collection comes first."""
    array: Any
    """The array in the variables, of NumPy or JAX."""
    written: Any
    """The array in the file: the same values in another order and shape."""
    matrix: Any
    """For a kernel that became a matrix: its output dimensions, and its summed dimensions.

    None for all other variables."""
    layer: str | None
    """The name of the FP8 layer whose weight or scale the variable is; None for other variables."""
    features: Features | None = None
    """The output features of the layer in ``written``; None if they are not known."""
    is_whole: bool = True
    """Whether the tensor has all values of one variable, and no others."""

    @property
    def is_wide_kernel(self) -> bool:
        """Whether the variable has the name of a layer's kernel, and a dtype other than FP8."""
        return self.path[0] == PARAMS and self.path[-1] == "kernel" and self.array.dtype.itemsize > 1


def _order(ndim: int, out: Sequence[int], summed: Sequence[int]) -> list[int]:
    """Returns the dimensions of a kernel in the order of the file: stacked, output, summed."""
    stacked = ndim - len(out) - len(summed)
    return [*range(stacked), *(stacked + i for i in out), *(stacked + i for i in summed)]


def matrix_shape(shape: Sequence[int], out: Sequence[int], summed: Sequence[int]) -> list[int]:
    """Returns the shape ``(..., out, in)`` that a kernel has as a matrix."""
    ordered = [shape[i] for i in _order(len(shape), out, summed)]
    end = len(shape) - len(summed)
    start = end - len(out)
    return [*ordered[:start], math.prod(ordered[start:end]), math.prod(ordered[end:])]


def _as_matrix(array: Any, out: Sequence[int], summed: Sequence[int]) -> Any:
    order = _order(array.ndim, out, summed)
    return array.transpose(order).reshape(matrix_shape(array.shape, out, summed))


def from_matrix(
    matrix: np.ndarray, shape: Sequence[int], out: Sequence[int], summed: Sequence[int]
) -> np.ndarray:
    """Returns the kernel of shape ``shape`` that a matrix in the file stands for."""
    order = _order(len(shape), out, summed)
    return matrix.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def in_torch_layout(kernel: Tensor) -> Tensor:
    """Returns the kernel ``(in, out)`` of a wide dense layer in PyTorch's layout, ``(out, in)``.

    Raises:
        ValueError: the kernel does not have two dimensions, so its output dimensions are not known.
    """
    if kernel.array.ndim != 2:
        raise ValueError(
            f"rename makes a weight of {'/'.join(kernel.path)}, of shape {kernel.array.shape}. A weight in "
            "PyTorch has its output dimensions first, and they are known only for kernels in FP8 and for "
            "kernels with two dimensions. Give this kernel a name that ends in 'kernel'."
        )
    matrix = ((1,), (0,))
    features = Features(-2, 1, kernel.array.shape[1])
    return kernel._replace(written=_as_matrix(kernel.array, *matrix), matrix=matrix, features=features)


def split(tensor: Tensor, sizes: Sequence[int | None]) -> list[Tensor]:
    """Returns the parts of a tensor with these numbers of output features; all of it for ``[None]``.

    If all features share a scale, each part gets this scale.

    Raises:
        ValueError: the output features are not known, there are not as many, or a block of scales is cut.
    """
    if sizes[0] is None:
        return [tensor]
    features, parts, start = _features(tensor, "splits"), [], 0
    if sum(size or 0 for size in sizes) != features.size:
        raise ValueError(
            f"rename splits {'/'.join(tensor.path)} into {sizes} output features, and it has "
            f"{features.size}. Correct the numbers."
        )
    for size in sizes:
        stop = start + (size or 0)
        written = tensor.written
        if features.per_entry:
            _check_cut(tensor, stop, features, is_end=stop == features.size)
            entries = slice(start // features.per_entry, -(-stop // features.per_entry))
            written = written[(..., entries, *(slice(None),) * (-features.axis - 1))]
        parts.append(tensor._replace(written=written, array=written, is_whole=False))
        start = stop
    return parts


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Returns one tensor with the output features of all tensors, one after the other.

    Raises:
        ValueError: the output features of a tensor are not known, the tensors do not fit together, or a
            block of scales would be cut.
    """
    first = tensors[0]
    paths = ", ".join("/".join(tensor.path) for tensor in tensors)
    found = [_features(tensor, "joins") for tensor in tensors]
    kinds = set()
    for tensor, features in zip(tensors, found):
        shape = list(tensor.written.shape)
        shape[features.axis] = 0
        kinds.add((tensor.written.dtype, tuple(shape), features[:2]))
        if features.per_entry and tensor is not tensors[-1]:
            _check_cut(tensor, features.size, features, is_end=False)
    if len(kinds) > 1 or len({own_layout(tensor) for tensor in tensors}) > 1:
        raise ValueError(
            f"rename joins {paths}, which differ in dtype, shape or layout. Leave one of them out."
        )
    if not found[0].per_entry:
        raise ValueError(
            f"rename joins {paths}, and each of them has one scale. A joined layer would need one scale "
            "for all. Freeze the model with a scale for each output feature, or with 128-blocks."
        )
    arrays = [tensor.written for tensor in tensors]
    together = (jnp if isinstance(arrays[0], jax.Array) else np).concatenate(arrays, found[0].axis)
    return first._replace(written=together, array=together, is_whole=False)


def _features(tensor: Tensor, verb: str) -> Features:
    if tensor.features is not None:
        return tensor.features
    if tensor.written.ndim == 1:
        return Features(-1, 1, tensor.written.shape[0])
    raise ValueError(
        f"rename {verb} {'/'.join(tensor.path)}, of shape {tensor.array.shape}, and its output features "
        "are not known. Rename a kernel to 'weight', or leave it out of the pattern."
    )


def _check_cut(tensor: Tensor, stop: int, features: Features, *, is_end: bool) -> None:
    """Raises ``ValueError`` if a part that ends at this feature ends inside of a block of scales.

    ``is_end`` says that nothing follows the part, so that its last block may be smaller.
    """
    if stop % features.per_entry and not is_end:
        raise ValueError(
            f"rename cuts {'/'.join(tensor.path)} at output feature {stop}, inside of a block of "
            f"{features.per_entry} that share a scale. Use multiples of {features.per_entry}, or freeze "
            "the model with a scale for each output feature."
        )


def own_layout(tensor: Tensor) -> Any:
    """Returns the layout that a reader must know; None for Flax's, whose first dimensions are summed."""
    if tensor.matrix is None:
        return None
    out, summed = map(tuple, tensor.matrix)
    return None if (*summed, *out) == tuple(range(len(out) + len(summed))) else (out, summed)


def named(ops: tuple[ServedOp, ...], variables: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields each variable, an array of NumPy or JAX, as a ``Tensor`` of the file."""
    plain = [op for op in ops if op.layout is not None]
    kernels = {op.kernels[0][0]: op for op in plain}
    biases = {(*path[:-1], "bias"): op for path, op in kernels.items() if path[-1] == "kernel"}
    scales = {(*op.path, KERNEL_SCALE): op for op in plain}
    inputs = {(*op.path, INPUT_SCALE): op for op in plain}
    for collection, tree in variables.items():
        arrays = _by_path(collection, tree)
        for path, array in arrays.items():
            matrix, layer, features = None, None, None
            written, name = array, ".".join(path if collection == PARAMS else (collection, *path))
            op = next((ops[path] for ops in (kernels, scales, inputs, biases) if path in ops), None)
            if collection == PARAMS and op is not None:
                layer, axis, per_entry = _layer(op), -1, 0
                if path in kernels:
                    matrix, axis, per_entry = op.layout, -2, 1
                    name = f"{layer}.weight"
                elif path in scales:
                    quantizer = op.gemms.forward.rhs
                    assert quantizer is not None
                    name = f"{layer}.weight_scale{'_inv' if quantizer.strategy == 'block' else ''}"
                    if quantizer.scales_along_contraction:  # block scales have a batch dimension of size 1
                        written = array.reshape(*array.shape[:-3], *array.shape[-2:])
                        axis, per_entry = -2, quantizer.block[0] if hasattr(quantizer, "block") else 0
                    elif _is_per_feature(array, op, arrays):
                        matrix, axis, per_entry = op.layout, -2, 1
                elif path in inputs:
                    name = f"{layer}.input_scale"
                else:
                    layer, per_entry = None, 1
                    written = _flat_bias(array, op.layout)
                size = _output_features(op, arrays)
                features = None if size is None else Features(axis, per_entry, size)
            if matrix is not None:
                written = _as_matrix(array, *matrix)
            yield Tensor(name, [collection, *path], array, written, matrix, layer, features)


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


def _is_per_feature(scale: Any, op: ServedOp, arrays: Mapping[tuple[str, ...], Any]) -> bool:
    """Returns whether a scale that broadcasts to its kernel has one entry for each output feature."""
    kernel, layout = arrays.get(op.kernels[0][0]), op.layout
    if kernel is None or layout is None:
        return bool(scale.shape[-1] != 1 or scale.ndim > 2)
    return bool(scale.ndim == kernel.ndim and len(layout[0]) + len(layout[1]) > 1)


def _output_features(op: ServedOp, arrays: Mapping[tuple[str, ...], Any]) -> int | None:
    """Returns how many output features a layer has; None if its kernel is not among the arrays."""
    kernel = arrays.get(op.kernels[0][0])
    if kernel is None or op.layout is None:
        return None
    return matrix_shape(kernel.shape, *op.layout)[-2]


def _flat_bias(bias: Any, layout: Any) -> Any:
    """Returns a bias in PyTorch's layout: one dimension for all features."""
    stacked = max(0, bias.ndim - len(layout[0]))
    return bias.reshape(*bias.shape[:stacked], -1)


def _layer(op: ServedOp) -> str:
    """Returns the name of an FP8 layer: that of its module.

    If the kernel is not named ``kernel``, the module may have several. The name of the kernel is then
    added.
    """
    *module, last = op.kernels[0][0]
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

"""Converts a frozen model to the form that inference servers read: tensor names, layouts and config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import PARAMS
from fp8flax._core.state.tree import path_names
from fp8flax._serve.headers import DTYPES
from fp8flax._serve.renaming import Rename, is_weight_name, new_names_of
from fp8flax._serve.stored_op import INPUT_SCALE, KERNEL_SCALE, ServedOp, as_matrix, merged, scale_in_file

_DTYPES = {np.dtype(dtype) for dtype in DTYPES.values()}


class Tensor(NamedTuple):
    """A variable of the model, as it is in the file."""

    name: str
    """The name in the file."""
    path: tuple[str, ...]
    """The path in the variables; the collection comes first."""
    array: Any
    """The array in the file, of NumPy or JAX: the values of the variable, in another order and shape."""
    layer: str | None = None
    """The name of the FP8 layer whose weight or scale the variable is; None for other variables."""

    @property
    def is_wide_kernel(self) -> bool:
        """Whether the variable has the name of a layer's kernel, and a dtype other than FP8."""
        return self.path[0] == PARAMS and self.path[-1] == "kernel" and self.array.dtype.itemsize > 1


def tensors_of(
    ops: Sequence[ServedOp], variables: Mapping[str, Any], rename: Rename | None
) -> dict[str, Tensor]:
    """Returns the tensors that a frozen model has in a file or in a server, by their sorted names there.

    Args:
        ops: the ops of the model.
        variables: the variables of the model, in collections, without boxes; arrays of NumPy or JAX.
        rename: see ``save_safetensors``.

    Raises:
        TypeError: as ``new_names_of``.
        ValueError: as ``new_names_of``; two tensors get one name, or the tensors of an FP8 layer names of
            different layers; a wide kernel becomes a weight and does not have two dimensions; or a dtype is
            not one of files.
    """
    described = sorted(_named(ops, variables), key=lambda tensor: (tensor.name, tensor.path))
    new_names = new_names_of([tensor.name for tensor in described], rename)
    found, layers = dict[str, Tensor](), dict[str, str]()
    for tensor in described:
        name, path, array = new_names[tensor.name], "/".join(tensor.path), tensor.array
        if tensor.layer is not None:
            end = tensor.name.removeprefix(tensor.layer)
            expected = layers.setdefault(tensor.layer, name.removesuffix(end)) + end
            if name != expected:
                raise ValueError(
                    f"rename changes {tensor.name!r} to {name!r}, but a loader looks for {expected!r}, "
                    "because it finds the FP8 tensors of a layer by the layer's name. Rename the layer "
                    f"in all of its tensors alike, and keep {end!r} at the end."
                )
        if tensor.is_wide_kernel and is_weight_name(name):
            if array.ndim != 2:
                raise ValueError(
                    f"rename makes a weight of {path}, of shape {array.shape}. A wide kernel that becomes "
                    "a weight must have two dimensions: the input and the output. Give this kernel a name "
                    "that ends in 'kernel'."
                )
            array = array.T
        if name in found:
            raise ValueError(
                f"{'/'.join(found[name].path)} and {path} would both be {name!r} in the file. "
                f"{'Rename one of the parameters' if rename is None else 'Correct rename'}."
            )
        if array.dtype not in _DTYPES:
            raise ValueError(
                f"{path} is {array.dtype}, which safetensors files do not hold. Leave its collection out, "
                "or convert it."
            )
        found[name] = tensor._replace(name=name, array=array)
    return dict(sorted(found.items()))


def _named(ops: Sequence[ServedOp], variables: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields each variable as a tensor with its own name in the file."""
    arrays = dict[tuple[str, ...], Any]()
    for collection, tree in variables.items():
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            arrays[collection, *map(str, path_names(keys))] = leaf
    for op in ops:
        if op.kernel is None or op.layout is None or (PARAMS, *op.kernel) not in arrays:
            continue
        # If the kernel is not named ``kernel``, the module may have several. Its name is then added.
        *module, last = op.kernel
        layer = ".".join(module if last == "kernel" and module else op.kernel)
        path = PARAMS, *op.kernel
        yield Tensor(f"{layer}.weight", path, as_matrix(arrays.pop(path), op.layout), layer)
        for name in (KERNEL_SCALE, INPUT_SCALE):
            path = PARAMS, *op.path, name
            if path in arrays:
                end, scale = scale_in_file(op, name, arrays.pop(path))
                yield Tensor(f"{layer}.{end}", path, scale, layer)
        path = PARAMS, *module, "bias"
        if last == "kernel" and path in arrays:  # one dimension for all features, as in PyTorch
            bias, num_out = arrays.pop(path), len(op.layout.out)
            bias = merged(bias, max(0, bias.ndim - num_out), min(bias.ndim, num_out))
            yield Tensor(".".join(path[1:]), path, bias)
    for path, array in arrays.items():
        yield Tensor(".".join(path[1:] if path[0] == PARAMS else path), path, array)


def quantization_config(ops: Sequence[ServedOp], wide_layers: Sequence[str]) -> dict[str, Any] | None:
    """Returns the quantization config that inference servers know; None if they know none.

    Args:
        ops: the FP8 ops of the model.
        wide_layers: the names that the layers without FP8 have in the file.
    """
    in_fp8 = [op for op in ops if any(op.gemms.quantizers)]
    kinds = {(op.gemms.forward.lhs, op.gemms.forward.rhs) for op in in_fp8}
    if len(kinds) != 1 or any(op.layout is None for op in in_fp8):
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
    strategy = None if lhs is None else {"tensor": "tensor", "channel": "token"}.get(lhs.strategy)
    if rhs.strategy not in ("tensor", "channel") or (lhs is not None and strategy is None):
        return None
    float8 = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = {**float8, "strategy": rhs.strategy, "dynamic": False}
    inputs = None if lhs is None else {**float8, "strategy": strategy, "dynamic": not lhs.needs_state}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        },
        "ignore": sorted(wide_layers),
    }

"""``load_into``: loads the tensors of a checkpoint into the variables of a model."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.formats import FP8_DTYPES
from fp8flax._core.names import PARAMS
from fp8flax._core.options import check_no_train_state
from fp8flax._core.state.tree import find_state, path_names
from fp8flax._model.quantize_model import is_nnx
from fp8flax._serve.checkpoints import CheckpointTensor
from fp8flax._serve.export import Rename, is_weight_name, new_names_of

Path = tuple[str, ...]


def load_into(
    variables: Any,
    checkpoint: Mapping[str, Any],
    *,
    rename: Rename | None = None,
) -> Any:
    """Returns the variables of a model with the values of a checkpoint.

    Each variable gets its tensor, dequantized, in its own dtype, such as float32 or bfloat16. To serve the
    model in FP8, load the original model, and ``freeze`` it.

    A variable is found under the name that ``save_safetensors`` gives it, after ``rename``:
    ``params/Dense_0/kernel`` is ``Dense_0.weight`` for a layer in FP8, or ``Dense_0.kernel``. A kernel is
    ``(out, in)`` in the file, and is transposed, if the file calls it ``weight`` or has scales for it.
    Fused experts with scales and another name may be ``(experts, in, out)``, so they are refused. Each
    variable has one tensor. To split, join, transpose or stack tensors, pass a dict of the arrays that
    NumPy makes of them; they are taken as they are.

    The scaling state of FP8 ops and NNX's generators of random numbers stay unchanged. To leave other
    variables unchanged, such as LoRA adapters or caches, do not pass them: of an NNX model, pass a state
    such as ``nnx.state(model, nnx.Param)``, and give the result to ``nnx.update``.

    Args:
        variables: the collections of a Linen model, or the state of an NNX model; arrays, or
            ``jax.ShapeDtypeStruct``. They stay unchanged. Or an NNX model, whose variables are replaced.
        checkpoint: the result of ``read_checkpoint``, or a dict of a part of it.
        rename: names of the file for those of the model; see ``save_safetensors``.

    Returns:
        Variables of the same structure, or the NNX model. Each variable has the sharding of the variable
        that it replaces. It is on the default device if that variable has no sharding, such as one of
        ``jax.eval_shape``.

    Raises:
        TypeError: ``checkpoint`` is not a mapping, a variable is not an array, or as ``rename`` in
            ``save_safetensors``.
        ValueError: a variable has no tensor, a tensor has no variable, or the two do not match. One error
            lists all of them. Nothing is loaded then. Also if a pattern of ``rename`` matches nothing.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, ml_dtypes, numpy as np, fp8flax as fp8
        >>> from safetensors.numpy import save_file
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> codes, scale = np.ones((8, 4), ml_dtypes.float8_e4m3fn), np.full((8, 1), 0.5, np.float32)
        >>> save_file({"proj.weight": codes, "proj.weight_scale": scale}, path)
        >>> model, x = nn.Dense(8, use_bias=False), jnp.ones((2, 4))
        >>> variables = jax.eval_shape(model.init, jax.random.key(0), x)
        >>> loaded = fp8.load_into(variables, fp8.read_checkpoint(path), rename={"^kernel": "proj"})
        >>> loaded["params"]["kernel"].shape, float(loaded["params"]["kernel"][0, 0])
        ((4, 8), 0.5)

    Source: PyTorch, ``torch.nn.Linear``, for the layout of weights; as for ``read_checkpoint``.
    """
    if is_nnx(variables):
        from flax import nnx

        state = nnx.state(variables, nnx.Not(nnx.RngState))
        nnx.update(variables, load_into(state, checkpoint, rename=rename))
        return variables
    if not isinstance(checkpoint, Mapping):
        raise TypeError(
            "checkpoint must be a mapping, such as the result of fp8flax.read_checkpoint(path); got "
            f"{type(checkpoint).__name__}."
        )
    check_no_train_state(variables)
    flat, treedef = jax.tree_util.tree_flatten_with_path(variables)
    leaves: dict[Path, Any] = {path_names(keys): leaf for keys, leaf in flat}
    for path, leaf in leaves.items():
        if not path or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"variables must be a tree of arrays; got {type(leaf).__name__} at {'/'.join(path)!r}. "
                "Leave everything out that is not an array."
            )
    is_state = find_state([keys for keys, _ in flat])
    wanted = {path: leaf for (path, leaf), found in zip(leaves.items(), is_state) if not found}
    for path, name in _fits(wanted, checkpoint, rename).items():
        leaf, tensor = leaves[path], checkpoint[name]
        array = _values(tensor, leaf.dtype)
        array = array.swapaxes(-1, -2) if _is_weight(path, name, tensor) else array
        # The array must be copied, because its memory may be a file that is replaced later.
        # ``device_put`` may use the memory of an array of NumPy, even with ``may_alias=False``.
        sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
        leaves[path] = jax.device_put(np.array(array.reshape(leaf.shape)), sharding)
    return treedef.unflatten(leaves.values())


def _values(tensor: Any, dtype: Any) -> np.ndarray:
    """Returns a tensor in the dtype of a variable."""
    if isinstance(tensor, CheckpointTensor):
        return tensor.dequantize(dtype)
    with np.errstate(all="ignore"):  # a value may overflow a narrower dtype
        return np.asarray(tensor).astype(dtype)


# Which tensor becomes which variable.


def _fits(
    wanted: Mapping[Path, Any], checkpoint: Mapping[str, Any], rename: Rename | None
) -> dict[Path, str]:
    """Returns the name of the tensor of each variable; raises one error that lists all faults."""
    names = {path: _names(path, leaf) for path, leaf in wanted.items()}
    new_names = new_names_of(list(dict.fromkeys(name for own in names.values() for name in own)), rename)
    fits: dict[Path, str] = {}
    used_by: dict[str, Path] = {}
    missing, wrong = list[str](), list[str]()
    for path, leaf in wanted.items():
        candidates = list(dict.fromkeys(new_names[name] for name in names[path]))
        there = [name for name in candidates if name in checkpoint]
        if len(there) != 1:
            text = f"{'/'.join(path)} (as {' or '.join(candidates)})"
            (wrong if there else missing).append(text)
            continue
        name = fits[path] = there[0]
        if (first := used_by.setdefault(name, path)) != path:
            wrong.append(f"{name} is for both {'/'.join(first)} and {'/'.join(path)}")
        if fault := _fault(path, leaf, name, checkpoint[name]):
            wrong.append(f"{'/'.join(path)} from {name}: {fault}")
    left = [name for name in checkpoint if name not in used_by]
    faults = {"missing from the checkpoint": missing, "left over in it": left, "not matching": wrong}
    if any(faults.values()):
        text = "; ".join(f"{what}: {', '.join(some)}" for what, some in faults.items() if some)
        raise ValueError(
            f"The checkpoint must have one tensor for each variable. {text}. Nothing was loaded. Correct "
            "rename, leave variables out that the checkpoint does not have, or pass a dict of some of its "
            "tensors."
        )
    return fits


def _names(path: Path, leaf: Any) -> list[str]:
    """Returns the names that ``save_safetensors`` may give a variable.

    A variable of several dimensions may have a second name, which ends in ``weight``.
    """
    if path[0] == PARAMS and len(path) > 1:
        path = path[1:]
    names = [".".join(path)]
    if len(leaf.shape) > 1:
        layer = path[:-1] if path[-1] == "kernel" and len(path) > 1 else path
        names.append(".".join((*layer, "weight")))
    return names


def _is_weight(path: Path, name: str, tensor: Any) -> bool:
    """Returns whether a tensor is a weight ``(..., out, in)``, the transposed variable."""
    is_quantized = isinstance(tensor, CheckpointTensor)
    return path[-1] != "embedding" and (is_quantized or (path[-1] == "kernel" and is_weight_name(name)))


def _fault(path: Path, leaf: Any, name: str, tensor: Any) -> str:
    """Returns why a tensor cannot become a variable; empty if it can."""
    is_quantized = isinstance(tensor, CheckpointTensor)
    if not (is_quantized or isinstance(tensor, np.ndarray | jax.Array)):
        return f"it must be an array of NumPy or JAX, and is of type {type(tensor).__name__}"
    dtype = tensor.codes.dtype if is_quantized else tensor.dtype
    are_wide = _is_wide(leaf.dtype) and (is_quantized or _is_wide(dtype))
    if not are_wide and (is_quantized or dtype != leaf.dtype):
        hint = "; load the original model, and freeze it" if leaf.dtype in FP8_DTYPES else ""
        scales = "with scales" if is_quantized else "without scales"
        return f"it must be {leaf.dtype}, and is {dtype} {scales}{hint}"
    shape, given = tuple(leaf.shape), tuple(tensor.shape)
    if not _is_weight(path, name, tensor):
        allowed = [shape]
        if path[-1] == "bias":
            # In the file the features are one dimension, which may follow one dimension of stacked layers.
            allowed += [(math.prod(shape),), (*shape[:1], math.prod(shape[1:]))]
        return "" if given in allowed else f"it must have the shape {list(shape)}, and has {list(given)}"
    if len(given) != 2 and not (len(given) > 2 and is_quantized and is_weight_name(name)):
        # Without scales it may be the kernel of a convolution; with scales, fused experts.
        return (
            f"its shape {list(given)} and its name do not show whether it is (..., out, in) or (..., in, "
            "out). Pass a dict with the array that dequantize or NumPy returns, in the order of the "
            "variable, under a name that does not end in weight"
        )
    *stack, out, width = given
    dims = shape[len(stack) :]  # first those that a matmul sums over, then those of the output
    ends = itertools.accumulate(dims[:-1], operator.mul)
    fits = [*shape[: len(stack)]] == stack and math.prod(dims) == out * width and width in ends
    return "" if fits else f"a weight (out, in) of shape {list(given)} does not become {list(shape)}"


def _is_wide(dtype: Any) -> bool:
    """Returns whether a dtype is a float of more than 8 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1

"""``load_into``: loads the tensors of a checkpoint into the variables of a model, wide or frozen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.formats import FP8_DTYPES
from fp8flax._core.names import PARAMS
from fp8flax._core.options import check_no_train_state
from fp8flax._core.state.tree import find_state, path_names
from fp8flax._serve.checkpoints import CheckpointTensor
from fp8flax._serve.freeze import nnx_front
from fp8flax._serve.renaming import Rename, is_weight_name, new_names_of
from fp8flax._serve.stored_op import INPUT_SCALE, KERNEL_SCALE, Path, scale_of_file

Makers = dict[Path, Callable[[], np.ndarray]]
"""For each variable a function that makes its array."""


class Misfit(Exception):  # noqa: N818
    """A tensor of the checkpoint cannot become the variable; the text says why."""


def load_into(
    variables: Any,
    checkpoint: Mapping[str, Any],
    *,
    rename: Rename | None = None,
) -> Any:
    """Returns the variables of a model with the values of a checkpoint.

    * A wide variable gets the dequantized tensor in its own dtype, such as float32 or bfloat16.
    * A kernel that ``freeze`` stored in FP8 gets codes and scales bit for bit. The frozen model's recipe
      must be able to hold the scales of the file: one per tensor, one per output feature, 128×128 blocks in
      float32, or MXFP8.

    A variable is found under the name that ``save_safetensors`` gives it, after ``rename``:
    ``params/Dense_0/kernel`` is ``Dense_0.weight`` for a layer in FP8, or ``Dense_0.kernel``. A kernel is
    ``(out, in)`` in the file, and is transposed, if the file calls it ``weight`` or has scales for it.
    Fused experts with scales and another name may also be ``(experts, in, out)``: their shape decides, and
    if it is square, an error asks. ``rename`` is that of ``save_safetensors``. For a Llama of the Hugging
    Face hub, it maps the names of the model to those of the hub. Each variable has one tensor. To split,
    join, transpose or stack tensors, pass a dict of the arrays that NumPy makes of them.

    The scaling state of FP8 ops and NNX's generators of random numbers stay unchanged. To leave other
    variables unchanged, such as LoRA adapters or caches, do not pass them. Of an NNX model, pass a state
    such as ``nnx.state(model, nnx.Param)``, and give the result to ``nnx.update``.

    Args:
        variables: the collections of a Linen model or a frozen one, or the state of an NNX model; arrays,
            or ``jax.ShapeDtypeStruct``. They stay unchanged. Or an NNX model, whose variables are replaced.
        checkpoint: the result of ``read_checkpoint``, or a mapping of the same kind. A part of it can be
            selected as a dict.
        rename: names of the file for those of the model; see ``save_safetensors``.

    Returns:
        Variables of the same structure, or the NNX model. Each variable has the sharding of the variable
        that it replaces. It is on the default device if that variable has no sharding, such as one of
        ``jax.eval_shape``. An input scale of the file is used if the frozen model has one.

    Raises:
        TypeError: ``checkpoint`` is not a mapping, a variable is not an array, or as ``rename`` in
            ``save_safetensors``.
        ValueError: a variable has no tensor, a tensor has no variable, or the two do not match. One error
            lists all of them. Nothing is loaded then. Also if a pattern of ``rename`` matches nothing, or
            a variable has 64 bits and ``jax_enable_x64`` is off.

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
    if (front := nnx_front(variables)) is not None:
        return front.updated(variables, lambda state: load_into(state, checkpoint, rename=rename))
    if not isinstance(checkpoint, Mapping):
        raise TypeError(
            "checkpoint must be a mapping, such as the result of fp8flax.read_checkpoint(path); got "
            f"{type(checkpoint).__name__}."
        )
    check_no_train_state(variables)
    flat, treedef = jax.tree_util.tree_flatten_with_path(variables)
    leaves: dict[Path, Any] = {path_names(keys): leaf for keys, leaf in flat}
    is_state = find_state([keys for keys, _ in flat])
    wanted = {path: leaf for (path, leaf), found in zip(leaves.items(), is_state) if not found}
    for path, leaf in leaves.items():
        if not path or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            what = f"{'/'.join(path)} must be an array" if path else "variables must be a tree of arrays"
            raise TypeError(
                f"{what}; got {type(leaf).__name__}. The order is load_into(variables, checkpoint). Leave "
                "everything out of variables that is not an array."
            )
        narrow = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        if path in wanted and narrow != leaf.dtype:
            raise ValueError(
                f"{'/'.join(path)} is {leaf.dtype}, which JAX would narrow to {narrow}. Enable "
                f"jax_enable_x64 to load it, or convert it to {narrow} first."
            )
    for path, name in _names_in_file(wanted, checkpoint, rename).items():
        # One tensor is mapped at a time: a process may have fewer maps than a large model has tensors.
        for place, make in _makers(path, wanted, name, checkpoint[name]).items():
            with np.errstate(all="ignore"):  # a value may overflow a narrower dtype
                leaves[place] = _placed(make(), leaves[place])
    return treedef.unflatten(leaves.values())


def _names_in_file(
    wanted: Mapping[Path, Any], checkpoint: Mapping[str, Any], rename: Rename | None
) -> dict[Path, str]:
    """Returns the name of the tensor for each variable, after a check of all of them.

    The scales of a frozen kernel are left out if they come with the tensor of the kernel.

    Raises:
        ValueError: variables and tensors do not match. The error lists all faults.
    """
    names = {path: _names(path, leaf) for path, leaf in wanted.items()}
    new_names = new_names_of(list(dict.fromkeys(name for own in names.values() for name in own)), rename)
    found: dict[Path, str] = {}
    used_by: dict[str, Path] = {}
    missing, wrong = list[str](), list[str]()
    beside = set[Path]()
    """The scales that come with the tensor of their frozen kernel."""
    for path in sorted(wanted, key=lambda path: not _scales_of(path, wanted)):  # frozen kernels first
        if path in beside:
            continue
        candidates = list(dict.fromkeys(new_names[name] for name in names[path]))
        there = [name for name in candidates if name in checkpoint]
        if len(there) != 1:
            (wrong if there else missing).append(f"{'/'.join(path)} (as {' or '.join(candidates)})")
            beside.update(_scales_of(path, wanted))
            continue
        name = found[path] = there[0]
        first = used_by.setdefault(name, path)
        if first != path:
            wrong.append(f"{name} is for both {'/'.join(first)} and {'/'.join(path)}")
        tensor = checkpoint[name]
        if isinstance(tensor, CheckpointTensor):
            beside.update(_scales_of(path, wanted))
        try:
            _makers(path, wanted, name, tensor)
        except Misfit as error:
            wrong.append(f"{'/'.join(path)} from {name}: {error}")
    left = [name for name in checkpoint if name not in used_by]
    faults = {"missing from the checkpoint": missing, "left over in it": left, "not matching": wrong}
    if any(faults.values()):
        text = "; ".join(f"{what}: {', '.join(some)}" for what, some in faults.items() if some)
        raise ValueError(
            f"The checkpoint must have one tensor for each variable. {text}. Nothing was loaded. Correct "
            "rename, leave variables out that the checkpoint does not have, or pass a dict of some of its "
            "tensors."
        )
    return found


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


def _is_wide(dtype: Any) -> bool:
    """Returns whether a dtype is a float of more than 8 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def _scales_of(kernel: Path, leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns the scales beside a frozen kernel; several if the module has several ops."""
    scales = (KERNEL_SCALE, INPUT_SCALE)
    if kernel[-1] in scales or leaves[kernel].dtype not in FP8_DTYPES:
        return {}
    return {p: leaf for p, leaf in leaves.items() if p[-1] in scales and p[:-2] == kernel[:-1]}


def _makers(path: Path, leaves: Mapping[Path, Any], name: str, tensor: Any) -> Makers:
    """Returns functions that make a variable, and the scales beside it, from a tensor of the checkpoint.

    Raises:
        Misfit: the tensor does not have the shape, the dtype or the scales of the variables.
    """
    leaf, shape = leaves[path], tuple(leaves[path].shape)
    is_quantized = isinstance(tensor, CheckpointTensor)
    if not (is_quantized or isinstance(getattr(tensor, "dtype", None), np.dtype)):
        raise Misfit(f"it must be an array of NumPy or JAX, and is of type {type(tensor).__name__}")
    dtype = tensor.codes.dtype if is_quantized else tensor.dtype
    num_summed, tensor = _in_pytorch_order(path, shape, name, tensor)

    def arranged(array: np.ndarray) -> np.ndarray:
        return (array.swapaxes(-1, -2) if num_summed else array).reshape(shape)

    def values() -> np.ndarray:
        if is_quantized:
            return tensor.dequantize(leaf.dtype) if _is_wide(leaf.dtype) else tensor.codes
        return np.asarray(tensor).astype(leaf.dtype)

    if not (dtype == leaf.dtype or (_is_wide(leaf.dtype) and (is_quantized or _is_wide(dtype)))):
        raise Misfit(f"it must be {leaf.dtype}, and is {dtype} with{'' if is_quantized else 'out'} scales")
    if not is_quantized or _is_wide(leaf.dtype):
        return {path: lambda: arranged(values())}
    scales = _scales_of(path, leaves)
    siblings = [p for p in leaves if p[:-1] == path[:-1] and _scales_of(p, leaves)]
    if [p[-1] for p in scales].count(KERNEL_SCALE) != 1 or len(siblings) != 1:
        raise Misfit(
            "its module must have one frozen kernel with one scale. Load the wide model, and freeze it"
        )
    made: Makers = {path: lambda: arranged(values())}
    for place, like in scales.items():
        given, size = tensor.input_scale, math.prod(like.shape)
        array = None if given is None or given.size != size else given.reshape(like.shape)
        if place[-1] == KERNEL_SCALE:
            given = tensor.scale
            array = scale_of_file(tensor.shape, given, tensor.block, shape, num_summed, like)
        if array is None:
            raise Misfit(
                f"{place[-1]} of the frozen model is {like.dtype}{list(like.shape)}, and in the checkpoint "
                f"it is {'none' if given is None else f'{given.dtype}{list(given.shape)}'}, with blocks of "
                f"{list(tensor.block)}. Freeze the model with the recipe of the checkpoint"
            )
        made[place] = partial(array.astype, like.dtype)
    return made


def _in_pytorch_order(path: Path, shape: tuple[int, ...], name: str, tensor: Any) -> tuple[int, Any]:
    """Returns a matrix, or a stack of matrices, as ``(..., out, in)``; other tensors unchanged.

    Returns:
        The number of dimensions of the kernel that the matmul sums over, or 0 if the variable is no matrix;
        and the tensor.

    Raises:
        Misfit: the tensor does not have the shape of the variable, or may have it in both orders.
    """
    given, is_quantized = tuple(tensor.shape), isinstance(tensor, CheckpointTensor)
    is_weight, ndim = is_weight_name(name), len(given)
    if path[-1] == "embedding" or not (is_quantized or (path[-1] == "kernel" and is_weight)):
        allowed = [shape]
        if path[-1] == "bias":
            # In the file the features are one dimension, which may follow one dimension of stacked layers.
            allowed += [(math.prod(shape),), (*shape[:1], math.prod(shape[1:]))]
        if given not in allowed:
            raise Misfit(f"it must have the shape {list(shape)}, and has {list(given)}")
        return 0, tensor
    # A stack in one tensor must have scales. Without scales it may be the kernel of a convolution.
    is_stack = is_quantized and ndim > 2
    num_summed = _num_summed(given, shape) if ndim == 2 or is_stack else 0
    if is_stack and not is_weight:
        # Fused experts of other libraries may be (experts, in, out).
        swapped = tensor._replace(
            codes=tensor.codes.swapaxes(-1, -2),
            scale=tensor.scale.swapaxes(-1, -2),
            block=(*tensor.block[:-2], tensor.block[-1], tensor.block[-2]),
        )
        if num_if_swapped := _num_summed(swapped.shape, shape):
            if num_summed:
                raise Misfit(
                    f"its shape {list(given)} does not show whether it is (..., out, in) or (..., in, "
                    "out). Pass a dict with the array that dequantize returns, in the variable's order"
                )
            return num_if_swapped, swapped
    if not num_summed:
        raise Misfit(f"a weight (out, in) of shape {list(given)} does not become {list(shape)}")
    return num_summed, tensor


def _num_summed(weight: Sequence[int], kernel: Sequence[int]) -> int:
    """Returns how many dimensions of a kernel a matmul sums over; 0 if the weight cannot be the kernel.

    The weight is ``(..., out, in)``. The kernel has the dimensions of the stack first, then those that are
    summed over, and then those of the output, as in the layers of Flax.
    """
    *stack, out, width = weight
    dims = list(kernel)[len(stack) :]
    for k in range(1, len(dims)):
        if [*stack, width, out] == [*kernel[: len(stack)], math.prod(dims[:k]), math.prod(dims[k:])]:
            return k
    return 0


def _placed(array: np.ndarray, leaf: Any) -> jax.Array:
    """Copies an array to the devices that the variable is committed to, or to the default device."""
    # The array must be copied, because its memory may be a file that is replaced later. ``device_put`` may
    # use the memory of an array of NumPy, even with ``may_alias=False``.
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    return jax.device_put(np.array(array), sharding)

"""``load_into``: loads the tensors of a checkpoint into the variables of a model, wide or frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
from fp8flax._serve.stored_op import INPUT_SCALE, KERNEL_SCALE, Path


class Misfit(Exception):  # noqa: N818
    """A tensor of the checkpoint cannot become the variable; the text says why."""


class Fit(NamedTuple):
    """How a tensor of the checkpoint becomes a variable."""

    name: str
    """The name of the tensor."""
    is_swapped: bool
    """Whether the last two dimensions of the tensor are in the other order in the variable."""
    scales: dict[Path, np.ndarray]
    """The scales beside a frozen kernel that come with its tensor."""


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
    Fused experts with scales and another name may also be ``(experts, in, out)``, for wide variables: their
    shape decides, and if it is square, an error asks. Each variable has one tensor. To split, join,
    transpose or stack tensors, pass a dict of the arrays that NumPy makes of them.

    The scaling state of FP8 ops and NNX's generators of random numbers stay unchanged. To leave other
    variables unchanged, such as LoRA adapters or caches, do not pass them: of an NNX model, pass a state
    such as ``nnx.state(model, nnx.Param)``, and give the result to ``nnx.update``.

    Args:
        variables: the collections of a Linen model or a frozen one, or the state of an NNX model; arrays,
            or ``jax.ShapeDtypeStruct``. They stay unchanged. Or an NNX model, whose variables are replaced.
        checkpoint: the result of ``read_checkpoint``, or a dict of a part of it.
        rename: names of the file for those of the model; see ``save_safetensors``.

    Returns:
        Variables of the same structure, or the NNX model. Each variable has the sharding of the variable
        that it replaces. It is on the default device if that variable has no sharding, such as one of
        ``jax.eval_shape``. An input scale of the file is used if the frozen model has one.

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
    for path, fit in _fits(wanted, checkpoint, rename).items():
        array = _values(checkpoint[fit.name], leaves[path].dtype)
        array = array.swapaxes(-1, -2) if fit.is_swapped else array
        new = {path: array.reshape(leaves[path].shape), **fit.scales}
        leaves.update((place, _placed(x, leaves[place])) for place, x in new.items())
    return treedef.unflatten(leaves.values())


def _values(tensor: Any, dtype: Any) -> np.ndarray:
    """Returns a tensor in the dtype of a variable."""
    if isinstance(tensor, CheckpointTensor):
        return tensor.dequantize(dtype) if _is_wide(dtype) else tensor.codes
    with np.errstate(all="ignore"):  # a value may overflow a narrower dtype
        return np.asarray(tensor).astype(dtype)


def _placed(array: np.ndarray, leaf: Any) -> jax.Array:
    """Copies an array to the devices that the variable is committed to, or to the default device."""
    # The array must be copied, because its memory may be a file that is replaced later. ``device_put`` may
    # use the memory of an array of NumPy, even with ``may_alias=False``.
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    return jax.device_put(np.array(array), sharding)


# Which tensor becomes which variable.


def _fits(
    wanted: Mapping[Path, Any], checkpoint: Mapping[str, Any], rename: Rename | None
) -> dict[Path, Fit]:
    """Returns how each variable is made, except the scales that come with the tensor of a frozen kernel.

    Raises:
        ValueError: variables and tensors do not match. The error lists all faults.
    """
    names = {path: _names(path, leaf) for path, leaf in wanted.items()}
    new_names = new_names_of(list(dict.fromkeys(name for own in names.values() for name in own)), rename)
    candidates = {path: list(dict.fromkeys(new_names[name] for name in names[path])) for path in wanted}
    there = {path: [name for name in candidates[path] if name in checkpoint] for path in wanted}
    beside: set[Path] = set()
    """The scales that come with the tensor of their frozen kernel, or are missing as it is."""
    for path in wanted:
        scales = _scales_of(path, wanted)
        if scales and all(isinstance(checkpoint[name], CheckpointTensor) for name in there[path]):
            beside.update(scales)
    fits: dict[Path, Fit] = {}
    used_by: dict[str, Path] = {}
    missing, wrong = list[str](), list[str]()
    for path in wanted:
        if path in beside:
            continue
        if len(there[path]) != 1:
            text = f"{'/'.join(path)} (as {' or '.join(candidates[path])})"
            (wrong if there[path] else missing).append(text)
            continue
        (name,) = there[path]
        if (first := used_by.setdefault(name, path)) != path:
            wrong.append(f"{name} is for both {'/'.join(first)} and {'/'.join(path)}")
        try:
            fits[path] = _fit(path, wanted, name, checkpoint[name])
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


def _is_wide(dtype: Any) -> bool:
    """Returns whether a dtype is a float of more than 8 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1


def _scales_of(kernel: Path, leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns the scales beside a frozen kernel; several if the module has several ops."""
    scales = (KERNEL_SCALE, INPUT_SCALE)
    if kernel[-1] in scales or leaves[kernel].dtype not in FP8_DTYPES:
        return {}
    return {p: leaf for p, leaf in leaves.items() if p[-1] in scales and p[:-2] == kernel[:-1]}


# Whether a tensor can become a variable.


def _fit(path: Path, leaves: Mapping[Path, Any], name: str, tensor: Any) -> Fit:
    """Returns how a variable is made of a tensor.

    Raises:
        Misfit: the tensor does not have the shape, the dtype or the scales of the variables.
    """
    leaf, shape = leaves[path], tuple(leaves[path].shape)
    is_quantized = isinstance(tensor, CheckpointTensor)
    if not (is_quantized or isinstance(getattr(tensor, "dtype", None), np.dtype)):
        raise Misfit(f"it must be an array of NumPy or JAX, and is of type {type(tensor).__name__}")
    dtype = tensor.codes.dtype if is_quantized else tensor.dtype
    num_summed = _num_summed_of(path, shape, name, tensor)
    if not (dtype == leaf.dtype or (_is_wide(leaf.dtype) and (is_quantized or _is_wide(dtype)))):
        raise Misfit(f"it must be {leaf.dtype}, and is {dtype} with{'' if is_quantized else 'out'} scales")
    if not is_quantized or _is_wide(leaf.dtype):
        return Fit(name, num_summed > 0, {})
    scales = _scales_of(path, leaves)
    siblings = [p for p in leaves if p[:-1] == path[:-1] and _scales_of(p, leaves)]
    if not num_summed or [p[-1] for p in scales].count(KERNEL_SCALE) != 1 or len(siblings) != 1:
        raise Misfit(
            "its module must have one frozen kernel with one scale, and the tensor must be (..., out, in). "
            "Load the wide model, and freeze it"
        )
    made: dict[Path, np.ndarray] = {}
    for place, like in scales.items():
        if place[-1] == KERNEL_SCALE:
            given, array = tensor.scale, _kernel_scale(tensor, shape, num_summed, like)
        else:
            given, size = tensor.input_scale, math.prod(like.shape)
            array = None if given is None or given.size != size else given.reshape(like.shape)
        if array is None:
            raise Misfit(
                f"{place[-1]} of the frozen model is {like.dtype}{list(like.shape)}, and in the checkpoint "
                f"it is {'none' if given is None else f'{given.dtype}{list(given.shape)}'}, with blocks of "
                f"{list(tensor.block)}. Freeze the model with the recipe of the checkpoint"
            )
        made[place] = array.astype(like.dtype)
    return Fit(name, num_summed > 0, made)


def _num_summed_of(path: Path, shape: tuple[int, ...], name: str, tensor: Any) -> int:
    """Returns the number of summed dimensions of the kernel that a tensor ``(..., out, in)`` becomes.

    The number is 0 if the tensor is in the order of the variable.

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
        return 0
    # A stack in one tensor must have scales. Without scales it may be the kernel of a convolution.
    is_stack = is_quantized and ndim > 2
    num_summed = _num_summed(given, shape) if ndim == 2 or is_stack else 0
    # Fused experts of other libraries may be (experts, in, out).
    if is_stack and not is_weight and _num_summed((*given[:-2], given[-1], given[-2]), shape):
        if num_summed:
            raise Misfit(
                f"its shape {list(given)} does not show whether it is (..., out, in) or (..., in, out). "
                "Pass a dict with the array that dequantize returns, in the variable's order"
            )
        return 0
    if not num_summed:
        raise Misfit(f"a weight (out, in) of shape {list(given)} does not become {list(shape)}")
    return num_summed


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


def _kernel_scale(
    weight: CheckpointTensor, kernel: tuple[int, ...], num_summed: int, like: Any
) -> np.ndarray | None:
    """Returns the scale of a frozen kernel, with the bits of a file; None if it cannot hold that scale.

    The shape of the frozen scale shows which kinds of scale it can be. All must give the same values.

    Args:
        weight: the weight in the file, ``(..., out, in)``.
        kernel: the shape of the frozen kernel: stacked dimensions, summed dimensions, output dimensions.
        num_summed: how many of its dimensions are summed over.
        like: the scale of the frozen model, with a shape and a dtype.
    """
    *stack, out, width = weight.shape
    rows, columns = (1, 32) if like.dtype.itemsize == 1 else (128, 128)
    sizes, found = [max(1, n) for n in (out, width)], list[np.ndarray]()
    # The frozen model has one scale for the tensor, for each output feature, or for each block.
    for shape, kind in (
        ((*stack, 1), (out, width)),
        ((*stack, *(1,) * num_summed, *kernel[len(stack) + num_summed :]), (1, width)),
        ((*stack, 1, -(-out // rows), -(-width // columns)), (rows, columns)),
    ):
        if shape == tuple(like.shape):
            wanted, given = ([*map(min, sizes, each)] for each in (kind, weight.block[-2:]))
            if given not in (wanted, sizes):  # one scale per tensor serves all kinds
                return None
            counts = (-(-n // size) for n, size in zip(sizes, wanted))
            found.append(np.broadcast_to(weight.scale, (*stack, *counts)).reshape(shape))
    can_hold = like.dtype in (weight.scale.dtype, np.dtype(np.float32))  # float32 holds every scale
    is_clear = can_hold and len({each.tobytes() for each in found}) == 1
    return found[0] if is_clear else None

"""``load_into``: takes the tensors of a checkpoint into the variables of a model, wide or frozen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.state.tree import path_str
from fp8flax._serve.checkpoints import CheckpointTensor, Layout
from fp8flax._serve.hidden_state import INPUT_SCALE, KERNEL_SCALE
from fp8flax._serve.renaming import new_names_of
from fp8flax._serve.server_layout import from_matrix, matrix_shape
from fp8flax._serve.trees import Path

_SQUARE, _MX = (128, 128), (1, 32)


class _Misfit(Exception):  # noqa: N818
    """A tensor of the checkpoint cannot become the variable; the text says why."""


def load_into(
    variables: Any,
    checkpoint: Mapping[str, Any],
    *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
) -> Any:
    """Returns the variables of a model with the values of a checkpoint.

    * A wide variable gets the dequantized tensor in its own dtype, such as float32 or bfloat16.
    * A kernel that ``freeze`` stored in FP8 gets codes and scales bit for bit. The scales in the file must
      have the layout of the frozen model's recipe: one per tensor, one per output feature, 128×128 blocks
      in float32, or MXFP8.

    A variable is found under the name that ``save_safetensors`` gives it, after ``rename``:
    ``params/Dense_0/kernel`` is ``Dense_0.weight`` for a layer in FP8, or ``Dense_0.kernel``. A kernel that
    is named ``weight`` in the file is ``(out, in)`` there, and is transposed. ``rename`` is that of
    ``save_safetensors``. For a Llama of the Hugging Face hub, it maps the names of the model to those of
    the hub.

    The scaling state of FP8 ops stays unchanged. To leave other variables unchanged, such as LoRA adapters,
    caches or generators of random numbers, do not pass them. Pass the state of an NNX model, such as
    ``nnx.state(model, nnx.Param)``, and give the result to ``nnx.update``.

    Each layer must have its own tensors. The tensors of several layers are not stacked for ``nn.scan``, and
    not joined for fused queries, keys and values. An error names these kernels.

    Args:
        variables: the collections of a Linen model or a frozen one, or the state of an NNX model; arrays,
            or ``jax.ShapeDtypeStruct``. They stay unchanged.
        checkpoint: the result of ``read_checkpoint``, or a mapping of the same kind. A part of it can be
            selected as a dict.
        rename: names of the file for those of the model; see ``save_safetensors``.

    Returns:
        Variables of the same structure, on the devices of the old ones. An input scale of the file is used
        if the frozen model has one.

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
    if not isinstance(checkpoint, Mapping):
        raise TypeError(
            "checkpoint must be a mapping, such as the result of fp8flax.read_checkpoint(path); got "
            f"{type(checkpoint).__name__}."
        )
    flat, treedef = jax.tree_util.tree_flatten_with_path(variables)
    leaves: dict[Path, Any] = {tuple(path_str(keys).split("/")): leaf for keys, leaf in flat}
    for path, leaf in leaves.items():
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(f"{'/'.join(path)} must be an array; got {type(leaf).__name__}. Leave it out.")
    wanted = {path: leaf for path, leaf in leaves.items() if path[0] != OVERWRITE_WITH_GRADIENT}
    names = {path: _names(path, leaf) for path, leaf in wanted.items()}
    every = list(dict.fromkeys(name for own in names.values() for name in own))
    in_file = {name: name for name in every} if rename is None else new_names_of(every, rename)
    new: dict[Path, Callable[[], np.ndarray]] = {}
    users: dict[str, Path] = {}
    missing, wrong, beside = list[str](), list[str](), set[Path]()
    # The kernels come first, because they decide how their scales are loaded.
    for path in sorted(wanted, key=lambda path: not _is_frozen_kernel(path, wanted[path])):
        if path in beside:
            continue
        scales = _scales_of(path, wanted)
        found = {in_file[name]: name for name in reversed(names[path]) if in_file[name] in checkpoint}
        if len(found) == 1:
            [(name, own)] = found.items()
            if name in users:
                wrong.append(f"{name} is for both {'/'.join(users[name])} and {'/'.join(path)}")
            users[name] = path
            is_weight = re.fullmatch(r"(.*\.)?weight", name) is not None
            is_matrix = is_weight and (path[-1] == "kernel" or own != names[path][0])
            is_either = len({in_file[name] for name in names[path]}) < len(names[path])
            try:
                if is_either and path[-1] != "kernel" and isinstance(checkpoint[name], CheckpointTensor):
                    raise _Misfit("rename does not show whether it is transposed; keep 'weight' at the end")
                new |= _loaders(path, wanted, checkpoint[name], is_matrix, scales)
            except _Misfit as error:
                wrong.append(f"{'/'.join(path)} from {name}: {error}")
            if not isinstance(checkpoint[name], CheckpointTensor):
                continue  # the scales are in the file under their own names
        else:
            options = " or ".join(dict.fromkeys(in_file[name] for name in names[path]))
            (wrong if found else missing).append(f"{'/'.join(path)} (as {options})")
        beside |= set(scales)
    left = [name for name in checkpoint if name not in users]
    _raise_if(("missing from the checkpoint", missing), ("left over in it", left), ("not matching", wrong))
    return treedef.unflatten(
        [_placed(new[path](), leaf) if path in new else leaf for path, leaf in leaves.items()]
    )


def _raise_if(*faults: tuple[str, Sequence[str]]) -> None:
    """Raises an error that lists all faults; returns if there are none."""
    found = [f"{what}: {', '.join(some)}" for what, some in faults if some]
    if found:
        raise ValueError(
            f"The checkpoint must have one tensor for each variable. {'; '.join(found)}. Nothing was "
            "loaded. Correct rename, leave variables out that the checkpoint does not have, or pass a dict "
            "of some of its tensors."
        )


def _names(path: Path, leaf: Any) -> list[str]:
    """Returns the names that ``save_safetensors`` may give a variable; the second is for FP8 kernels."""
    if path[0] == PARAMS and len(path) > 1:
        path = path[1:]
    names = [".".join(path)]
    if len(leaf.shape) > 1:
        layer = path[:-1] if path[-1] == "kernel" and len(path) > 1 else path
        names.append(".".join((*layer, "weight")))
    return names


def _is_narrow(leaf: Any) -> bool:
    """Returns whether a variable is FP8 codes, or scales in E8M0."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 1


def _is_frozen_kernel(path: Path, leaf: Any) -> bool:
    return _is_narrow(leaf) and path[-1] not in (KERNEL_SCALE, INPUT_SCALE)


def _scales_of(kernel: Path, leaves: Mapping[Path, Any]) -> dict[Path, Any]:
    """Returns the scales of the op of a frozen kernel; several if the module has several ops."""
    if not _is_frozen_kernel(kernel, leaves[kernel]):
        return {}
    module = kernel[:-1]
    return {
        path: leaf
        for path, leaf in leaves.items()
        if path[-1] in (KERNEL_SCALE, INPUT_SCALE) and len(path) == len(kernel) + 1 and path[:-2] == module
    }


def _loaders(
    path: Path, leaves: Mapping[Path, Any], tensor: Any, is_matrix: bool, scales: Mapping[Path, Any]
) -> dict[Path, Callable[[], np.ndarray]]:
    """Returns functions that make a variable, and the scales beside it, from a tensor of the checkpoint.

    Raises:
        _Misfit: the tensor does not have the shape, the dtype or the scales of the variables.
    """
    leaf, shape = leaves[path], tuple(leaves[path].shape)
    is_quantized = isinstance(tensor, CheckpointTensor)
    dtype = tensor.codes.dtype if is_quantized else tensor.dtype
    layouts = _layouts(tensor, shape) if is_matrix else []
    if not is_matrix:
        _check_shape(path, tensor.shape, shape)
    elif not layouts:
        raise _Misfit(f"a weight (out, in) of shape {list(tensor.shape)} does not become {list(shape)}")

    def arranged(array: np.ndarray) -> np.ndarray:
        return from_matrix(array, shape, *layouts[0]) if layouts else array.reshape(shape)

    if is_quantized and not _is_narrow(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise _Misfit(f"it must be {leaf.dtype}, and is {dtype} with scales")
        return {path: lambda: arranged(tensor.dequantize(leaf.dtype))}
    is_wide = not _is_narrow(leaf) and not _is_narrow(tensor)
    if not is_quantized and is_wide and all(jnp.issubdtype(x, jnp.floating) for x in (dtype, leaf.dtype)):
        return {path: lambda: arranged(_rounded(tensor, leaf.dtype))}
    if dtype != leaf.dtype:
        without = " without scales" if dtype.itemsize == 1 and not is_quantized else ""
        raise _Misfit(f"it must be {leaf.dtype}, and is {dtype}{without}")
    if not is_quantized:
        return {path: lambda: arranged(np.asarray(tensor))}
    made = {path: lambda: arranged(tensor.codes)}
    siblings = [p for p, x in leaves.items() if p[:-1] == path[:-1] and _is_frozen_kernel(p, x)]
    if [p[-1] for p in scales].count(KERNEL_SCALE) != 1 or len(siblings) != 1:
        raise _Misfit(
            "a frozen kernel must have one op and one scale; joined and split kernels are not loaded. Load "
            "the wide model, and freeze it"
        )
    for place, scale in scales.items():
        is_of_kernel = place[-1] == KERNEL_SCALE
        made[place] = _scale(tensor, shape, layouts, scale) if is_of_kernel else _input_scale(tensor, scale)
    return made


def _rounded(array: Any, dtype: Any) -> np.ndarray:
    with np.errstate(all="ignore"):  # a value may overflow a narrower dtype
        return np.asarray(array).astype(dtype)


def _check_shape(path: Path, given: Sequence[int], shape: Sequence[int]) -> None:
    """Raises ``_Misfit`` if a tensor that is not transposed cannot become the variable."""
    allowed = [tuple(shape)]
    if path[-1] == "bias":  # all features are one dimension in the file
        allowed += [(math.prod(shape),), (*shape[:1], math.prod(shape[1:]))]
    if tuple(given) not in allowed:
        raise _Misfit(f"it must have the shape {list(shape)}, and has {list(given)}")


def _layouts(tensor: Any, shape: tuple[int, ...]) -> list[Layout]:
    """Returns how a weight ``(out, in)`` may become a kernel of this shape; all ways give the same kernel.

    The first dimensions of a kernel are the summed ones, as in the layers of Flax, unless the file has the
    layout. A stack of weights must have scales: without them it may be the kernel of a convolution.
    """
    is_quantized = isinstance(tensor, CheckpointTensor)
    given, dims = list(tensor.shape), len(shape) - len(tensor.shape) + 2
    if not 2 <= len(given) <= (3 if is_quantized else 2):
        return []
    known = tensor.layout if is_quantized else None
    options = [known] if known else [(tuple(range(k, dims)), tuple(range(k))) for k in range(1, dims)]
    return [(a, b) for a, b in options if len(a) + len(b) == dims and matrix_shape(shape, a, b) == given]


def _has_blocks(tensor: CheckpointTensor, block: Sequence[int]) -> bool:
    """Returns whether the last two dimensions of a tensor have scales for blocks of this size."""
    return all(
        -(-size // want) == count and (want == have or count == 1)
        for size, count, have, want in zip(
            tensor.shape[-2:], tensor.scale.shape[-2:], tensor.block[-2:], block
        )
    )


def _scale(
    tensor: CheckpointTensor, shape: tuple[int, ...], layouts: Sequence[Layout], leaf: Any
) -> Callable[[], np.ndarray]:
    """Returns a function that makes the scale of a frozen kernel of shape ``shape``.

    The shape and the dtype of the frozen scale show which kinds of scale it may have. The checkpoint must
    have all of these kinds, so that no doubt is left.
    """
    stack, (out, summed) = tensor.shape[:-2], tensor.shape[-2:]
    is_e8m0, to = _is_narrow(leaf), tuple(leaf.shape)
    block = _MX if is_e8m0 else _SQUARE
    kinds: list[tuple[int, int]] = []
    if to == (*stack, 1, -(-out // block[0]), -(-summed // block[1])):
        kinds.append(block)
    if not is_e8m0 and to == (*stack, 1):
        kinds.append((out, summed))
    arranged = tensor.scale
    for layout in layouts if not is_e8m0 else ():
        ones = {i + len(stack) for i in layout[1]}
        if to == tuple(1 if i in ones else n for i, n in enumerate(shape)):
            kinds.append((1, summed))
            if tensor.scale.shape[-2:] == (out, 1):
                arranged = from_matrix(tensor.scale, to, *layout)
    can_hold = leaf.dtype in (tensor.scale.dtype, np.dtype(np.float32))  # which holds all scales
    if not kinds or not can_hold or not all(_has_blocks(tensor, kind) for kind in kinds):
        raise _Misfit(
            f"its scale is {tensor.scale.dtype}{list(tensor.scale.shape)}, for blocks of "
            f"{list(tensor.block)}, and the scale of the frozen kernel is {leaf.dtype}{list(to)}. Freeze "
            "the model with the recipe of the checkpoint"
        )
    return lambda: arranged.astype(leaf.dtype).reshape(to)


def _input_scale(tensor: CheckpointTensor, leaf: Any) -> Callable[[], np.ndarray]:
    """Returns a function that makes the fixed scale of a frozen layer's input."""
    scale = tensor.input_scale
    if scale is None or scale.size != math.prod(leaf.shape):
        raise _Misfit(
            f"the frozen layer needs an input scale of shape {list(leaf.shape)}, and the checkpoint has "
            f"{'none' if scale is None else list(scale.shape)}. Freeze the model with another recipe"
        )
    return lambda: scale.astype(leaf.dtype).reshape(leaf.shape)


def _placed(array: np.ndarray, leaf: Any) -> jax.Array:
    """Returns an array on the devices of the variable that it replaces."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None and len(sharding.device_set) > 1:
        return jax.device_put(array, sharding, may_alias=False)
    return jnp.array(array)  # a copy, because the file may be replaced

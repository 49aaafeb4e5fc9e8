"""``load_into``: loads the tensors of a checkpoint into the variables of a model, wide or frozen.

The function gets no model. So names and shapes must show which tensor belongs to a variable, and how, as
for a frozen ``nn.Dense(32)`` on 16 features::

    Dense_0/kernel                           (16, 32)   from   Dense_0.weight         (32, 16)
    Dense_0/Fp8DotGeneralOp_0/kernel_scale   (1,)       from   Dense_0.weight_scale   (1,)

1. ``_possible_names`` returns the names that the tensor of a variable may have in the file.
2. ``_groups_of`` finds which dimensions of the variable are ``out`` and ``in`` in the tensor.
3. ``_scales_beside`` finds the variables with the scales of a frozen kernel, and ``_scales_from`` gives
   them the scales that came with the tensor.
4. ``_variable`` makes the new array.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.formats import is_wide_float
from fp8flax._core.names import KERNEL_TENSOR_SCALE
from fp8flax._core.options import check_no_train_state
from fp8flax._core.state.tree import find_state, path_names
from fp8flax._core.types import Path
from fp8flax._model.param_origin import kernel_named
from fp8flax._model.quantize_model import is_nnx
from fp8flax._serve.checkpoints import CheckpointTensor, paired
from fp8flax._serve.export import Rename, is_weight_name, names_of, new_names_of, unmerged
from fp8flax._serve.stored_op import INPUT_SCALE, KERNEL_SCALE, Groups, groups_in_weight

Sources = dict[Path, tuple[Any, Groups]]
"""The tensor of each variable by its path, and which dimensions of the variable are one in the tensor.

There are no groups if the tensor has the order of the variable."""

_SCALES = KERNEL_SCALE, INPUT_SCALE, KERNEL_TENSOR_SCALE
_BLOCKS = {np.dtype(jnp.float8_e8m0fnu): (1, 32), np.dtype(jnp.float8_e4m3fn): (1, 16)}
"""The blocks of a weight ``(out, in)`` whose scales have this dtype: MXFP8, NVFP4."""


def load_into(variables: Any, checkpoint: Mapping[str, Any], *, rename: Rename | None = None) -> Any:
    """Returns the variables of a model with the values of a checkpoint.

    A wide variable gets the dequantized tensor in its own dtype. A kernel that ``freeze`` stored in FP8
    gets codes and scales bit for bit. The frozen model's recipe must be able to hold the scales of the
    file: one per tensor, one per output feature, 128×128 blocks in float32, MXFP8, or NVFP4.

    A variable is found under the name that ``save_safetensors`` gives it, after ``rename``:
    ``params/Dense_0/kernel`` is ``Dense_0.weight`` or ``Dense_0.kernel``. A kernel is ``(out, in)`` in the
    file, and is transposed, if the file calls it ``weight`` or has scales for it. Fused experts with scales
    and another name may also be ``(experts, in, out)``, for wide variables: their shape decides, and if it
    is square, an error asks. Each variable has one tensor. To split, join, transpose or stack tensors, pass
    a dict of the arrays that NumPy makes of them.

    The scaling state of FP8 ops and NNX's generators of random numbers stay unchanged. To leave other
    variables unchanged, such as LoRA adapters, do not pass them: of an NNX model, pass a state such as
    ``nnx.state(model, nnx.Param)``, and give the result to ``nnx.update``.

    Args:
        variables: the collections of a Linen model or a frozen one, or the state of an NNX model; arrays,
            or ``jax.ShapeDtypeStruct``. They stay unchanged. Or an NNX model, whose variables are replaced.
        checkpoint: the result of ``read_checkpoint`` or of ``weights_for_serving``, or a dict of a part of
            it.
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
    checkpoint = paired("checkpoint", checkpoint)
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
    for path, (tensor, groups) in _sources(wanted, checkpoint, rename).items():
        leaves[path] = _variable(tensor, groups, leaves[path])
    return treedef.unflatten(leaves.values())


def _sources(wanted: Mapping[Path, Any], checkpoint: Mapping[str, Any], rename: Rename | None) -> Sources:
    """Returns what each variable is made of; one error lists everything that does not match."""
    names = {path: _possible_names(path, len(leaf.shape)) for path, leaf in wanted.items()}
    new_names = new_names_of({name for own in names.values() for name in own}, rename, wanted)
    sources: Sources = {}
    used_by: dict[str, str] = {}
    missing, wrong = list[str](), list[str]()
    # The scales of a frozen kernel come with its tensor, so they are last.
    for path in sorted(wanted, key=lambda path: path[-1] in _SCALES):
        if path in sources:
            continue
        place, candidates = "/".join(path), list(dict.fromkeys(new_names[name] for name in names[path]))
        there = [name for name in candidates if name in checkpoint]
        if len(there) != 1:
            (wrong if there else missing).append(f"{place} (as {' or '.join(candidates)})")
            continue
        (name,) = there
        if (first := used_by.setdefault(name, place)) != place:
            wrong.append(f"{name} is for both {first} and {place}")
        try:
            sources |= _sources_of(path, wanted, name, checkpoint[name])
        except ValueError as error:
            wrong.append(f"{place} from {name}: {error}")
    left = [name for name in checkpoint if name not in used_by]
    faults = {"missing from the checkpoint": missing, "left over in it": left, "not matching": wrong}
    if any(faults.values()):
        text = "; ".join(f"{what}: {', '.join(some)}" for what, some in faults.items() if some)
        raise ValueError(
            f"The checkpoint must have one tensor for each variable. {text}. Nothing was loaded. Correct "
            "rename, leave variables out that the checkpoint does not have, or pass a dict of some of its "
            "tensors."
        )
    return sources


def _possible_names(path: Path, ndim: int) -> tuple[str, ...]:
    """Returns the names that a variable may have in a file."""
    own, weight = names_of(path)
    if path[-1] == INPUT_SCALE:  # of a layer that shares the kernel of another one
        return own, names_of(_kernel_of(path[:-1])[0])[1].removesuffix("weight") + INPUT_SCALE
    # A vector may be the kernel of a matrix-vector product, and its weight is then (1, in).
    return (own, weight) if ndim > 1 or path[-1] != "bias" else (own,)


def _kernel_of(op: Path) -> tuple[Path, int | None]:
    """Returns the path of the kernel of an op, and the index if the kernel is one of a stack.

    If the model writes the contraction out, the op is named after the kernel: ``Fp8DotGeneralOp_w-axis0-3``
    multiplies by ``w[3]``. Otherwise the op, such as ``dot_general``, is that of a layer with a ``kernel``.
    """
    own = re.fullmatch(r"(?:Fp8[A-Za-z]+?Op_|fp8_|fp8-\w+-)(?!\d+$)(.+)", op[-1])
    path, index = kernel_named(own[1]) if own else (("kernel",), None)
    return (*op[:-1], *path), index


def _sources_of(path: Path, leaves: Mapping[Path, Any], name: str, tensor: Any) -> Sources:
    """Returns what a variable is made of and, for a frozen kernel, the scales beside it, or raises."""
    leaf, is_quantized = leaves[path], isinstance(tensor, CheckpointTensor)
    is_wide, dtype = is_wide_float(leaf.dtype), getattr(tensor, "dtype", None)
    if not isinstance(dtype, np.dtype):
        raise ValueError(f"it must be an array of NumPy or JAX, and is of type {type(tensor).__name__}")
    groups = _groups_of(path, leaf.shape, name, tensor)
    if not (dtype == leaf.dtype or (is_wide and (is_quantized or is_wide_float(dtype)))):
        raise ValueError(
            f"it must be {leaf.dtype}, and is {dtype} with{'' if is_quantized else 'out'} scales"
        )
    sources: Sources = {path: (tensor, groups)}
    if is_quantized and not is_wide:
        sources |= {place: (x, ()) for place, x in _scales_from(tensor, groups, path, leaves).items()}
    return sources


def _groups_of(path: Path, shape: tuple[int, ...], name: str, tensor: Any) -> Groups:
    """Returns which dimensions of a variable are one in a tensor, or raises.

    These shapes of a tensor are accepted. A tensor in the order of the variable has no groups::

        variable                              tensor                        groups
        a kernel whose tensor is a weight     (out, in)                     of ``groups_in_weight``
        any with scales, but no embedding     (..., out, in)                of ``groups_in_weight``
        the same, if no weight: experts       (..., in, out), not a matrix  none
        a bias                                (out,) or (layers, out)       none
        any without scales, or an embedding   the shape of the variable     none

    A stack without scales is refused, because it may be the kernel of a convolution.
    """
    given, is_quantized = tuple(tensor.shape), isinstance(tensor, CheckpointTensor)
    is_weight, accepted = is_weight_name(name), list[Groups]()
    if path[-1] != "embedding" and (is_quantized or (path[-1] == "kernel" and is_weight)):
        if is_quantized or len(given) == 2:
            accepted += groups_in_weight(given, shape)
        turned = (*given[:-2], *given[:-3:-1])
        if is_quantized and len(given) > 2 and not is_weight and groups_in_weight(turned, shape):
            accepted.append(())
    else:
        merged = [(math.prod(shape),), (*shape[:1], math.prod(shape[1:]))]
        if given == shape or (path[-1] == "bias" and given in merged):
            accepted.append(())
    if len(accepted) == 1:
        return accepted[0]
    wrong = f"does not become {list(shape)}; a weight is (..., out, in)"
    unclear = (
        "does not show whether it is (..., out, in) or (..., in, out). Pass a dict with the array that "
        "dequantize returns, in the variable's order"
    )
    raise ValueError(f"its shape {list(given)} {unclear if accepted else wrong}")


def _scales_beside(kernel: Path, leaves: Mapping[Path, Any]) -> dict[Path, int | None]:
    """Returns the paths of the scales of a frozen kernel, each with the index of its kernel in a stack.

    The ops of the kernel are those of the first rule that finds some::

        kernel   op                       rule
        mlp/w    mlp/Fp8DotGeneralOp_w    has the name and the place of the kernel
        mlp/w    mlp/Fp8DotGeneralOp_0    is in the same module, which calls an op of its own
        first    layer/dot_general        has a kernel that is listed elsewhere: ``model.first`` is the same
    """
    ops = [path[:-1] for path in leaves if path[-1] == KERNEL_SCALE]
    own = (
        [op for op in ops if _kernel_of(op)[0] == kernel]
        or [op for op in ops if op[:-1] == kernel[:-1]]
        or [op for op in ops if _kernel_of(op)[0] not in leaves]
    )
    return {path: _kernel_of(path[:-1])[1] for path in leaves if path[:-1] in own and path[-1] in _SCALES}


def _scales_from(
    tensor: CheckpointTensor, groups: Groups, kernel: Path, leaves: Mapping[Path, Any]
) -> dict[Path, np.ndarray]:
    """Returns the scales of a frozen kernel by the paths of their variables, or raises.

    The kernels ``w[i]`` of a stack ``w`` have one tensor and an op each; the tensor has the scales of all.
    """
    places = _scales_beside(kernel, leaves)
    indices = [index for place, index in places.items() if place[-1] == KERNEL_SCALE]
    is_stack = {*indices} == {*range(math.prod(tensor.shape[-3:-2]))}
    if not groups or not (len(indices) == 1 or is_stack):
        raise ValueError(
            "its module must have one frozen kernel with one scale, and the tensor must be (..., out, in). "
            "Load the wide model, and freeze it"
        )
    scales = dict[Path, np.ndarray]()
    for place, index in places.items():
        like, axis = leaves[place], len(tensor.shape) - 3  # the axis of the stack, after those of layers
        if is_stack:
            shape = *like.shape[:axis], len(indices), *like.shape[axis:]
            like = jax.ShapeDtypeStruct(shape, like.dtype)
        if (scale := _scale_for(place[-1], like, tensor, groups, leaves[kernel].shape)) is None:
            raise ValueError(
                f"{place[-1]} of the frozen model is {like.dtype}{list(like.shape)}, and the scales in the "
                f"checkpoint are {tensor.scale.dtype} for blocks of {list(tensor.block)}. Freeze the model "
                "with the recipe of the checkpoint"
            )
        scales[place] = scale if index is None or not is_stack else scale.take(index, axis)
    return scales


def _scale_for(
    name: str, like: Any, tensor: CheckpointTensor, groups: Groups, kernel: tuple[int, ...]
) -> np.ndarray | None:
    """Returns the scale of a tensor that a variable of this name has; None if ``like`` cannot hold it."""
    others = {INPUT_SCALE: tensor.input_scale, KERNEL_TENSOR_SCALE: tensor.tensor_scale}
    scale = others[name] if name in others else _kernel_scale(tensor, groups, kernel, like)
    size = math.prod(like.shape)
    if scale is not None and scale.size > size and scale.size % size == 0:
        # A file repeats the scale that the kernels of a batched matmul share.
        repeated = scale.reshape(size, -1)
        scale = repeated[:, 0] if (repeated == repeated[:, :1]).all() else None
    return None if scale is None or scale.size != size else scale.reshape(like.shape)


def _kernel_scale(
    weight: CheckpointTensor, groups: Groups, kernel: tuple[int, ...], like: Any
) -> np.ndarray | None:
    """Returns the scale of a weight for a frozen kernel of a shape; None if ``like`` cannot hold it.

    The shape of ``like``, the variable of the frozen model, shows its kind of scale. A file with one scale
    serves all kinds. For a weight (256, 384) and a kernel (384, 256)::

        like                     the scale in the file
        (1,)                     (1, 1)
        (1, 256)                 (256, 1), one for each output feature
        (1, 2, 3) in float32     (2, 3), one for each block of 128×128
        (1, 256, 12) in E8M0     (256, 12), of MXFP8
        (1, 256, 24) in e4m3     (256, 24), of NVFP4
    """
    *stack, out, width = weight.shape
    rows, columns = _BLOCKS.get(np.dtype(like.dtype), (128, 128))
    per_block = -(-out // rows), -(-width // columns)
    per_feature = (1 if i in groups[1] else n for i, n in enumerate(kernel[len(stack) :]))
    # The rows of the table, each with the axes of stacked layers and experts.
    shapes = (
        ((*stack[: len(like.shape) - 1], 1), (1, 1)),  # the kernels of a batched matmul may share one scale
        ((*stack, *per_feature), (out, 1)),
        ((*stack, 1, *per_block), per_block),
    )
    counts = {numbers for shape, numbers in shapes if like.shape == shape}
    can_hold = like.dtype in (weight.scale.dtype, np.dtype(np.float32))  # float32 holds every scale
    if not can_hold or len(counts) != 1 or weight.scale.shape[-2:] not in (*counts, (1, 1)):
        return None
    return np.broadcast_to(weight.scale, (*stack, *counts.pop()))


def _variable(tensor: Any, groups: Groups, like: Any) -> jax.Array:
    """Returns a tensor with the shape, the dtype and the sharding of a variable."""
    if isinstance(tensor, CheckpointTensor):
        tensor = tensor.dequantize(like.dtype) if is_wide_float(like.dtype) else tensor.codes
    # The array must be copied, because its memory may be a file that is replaced later. ``device_put`` may
    # use the memory of an array of NumPy, even with ``may_alias=False``.
    with np.errstate(all="ignore"):  # a value may overflow a narrower dtype
        array = np.array(unmerged(np.asarray(tensor), groups, like.shape), like.dtype, order="C")
    # Without a committed variable, this is the default device.
    sharding = getattr(like, "sharding", None) if getattr(like, "committed", True) else None
    return jax.device_put(array, sharding)

"""Writes frozen models for other programs: into safetensors files, or as arrays for a server."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from fp8flax._core.formats import E2M1
from fp8flax._core.names import KERNEL_TENSOR_SCALE, PARAMS
from fp8flax._core.quantize import quotient
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.types import Path, PyTree
from fp8flax._serve.checkpoints import BESIDE, DTYPES, E4M3, INDEX, SINGLE
from fp8flax._serve.freeze import described, freeze
from fp8flax._serve.stored_op import INPUT_SCALE, KERNEL_SCALE, Groups, ServedOp

Rename = Mapping[str, str] | Callable[[str], str]

Array = jax.Array | np.ndarray

_NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def save_safetensors(
    path: str | os.PathLike[str],
    model: Any,
    variables: Mapping[str, PyTree] | None = None,
    *,
    rename: Rename | None = None,
) -> None:
    """Writes a frozen model's variables to a safetensors file for other programs.

    The tensors of a layer whose kernel is one parameter, multiplied as it is, have these names and shapes:

    * ``<layer>.weight``: the kernel in FP8, ``(out, in)``, as PyTorch has it
    * ``<layer>.bias``: the bias, ``(out,)``
    * ``<layer>.weight_scale``: the scale, ``(1,)`` for one per tensor, ``(out, 1)`` for one per output
      feature, ``(out, in / 32)`` in E8M0 for MXFP8
    * ``<layer>.weight_scale_inv``: the scale for 128×128 blocks, ``(out / 128, in / 128)``. In spite of its
      name, it is a factor of the codes.
    * ``<layer>.input_scale``: the fixed scale of the input, ``(1,)``, if there is one
    * in NVFP4, instead of these: ``<layer>.weight_packed``, ``(out, in / 2)``, two codes in a byte, the
      first in the low bits; ``<layer>.weight_scale``, ``(out, in / 16)`` in e4m3; and
      ``<layer>.weight_global_scale``, ``(1,)``, by which the scales are divided

    A layer has the name of its path, with dots: ``layers.0`` for ``model.layers[0]`` of NNX. Layers that
    ``nn.scan`` or ``nnx.vmap`` stacked, and experts, have a leading dimension: ``(experts, out, in)``, with
    the scales ``(experts, 1)`` or ``(experts, out, 1)``, as vLLM's fused experts. So has a parameter of
    two or more kernels ``w[i]``. All other variables keep their layout and their names, such as
    ``embed.embedding``. So do kernels that are sliced in another way or have only ``w[0]``, and square
    kernels that are ``(out, in)`` in the model, as for ``bi,oi->bo``: their shape does not show this order.
    Scaling state and NNX's random number generators are left out. Equal variables give equal files.
    ``load_into`` reads the file into a model.

    The metadata of the file contain the ``quantization_config`` for a ``config.json``: ``fp8`` for 128×128
    blocks, ``compressed-tensors`` for scales per tensor and per output feature, and for NVFP4. There is
    none for MXFP8, for dtypes other than e4m3fn, for convolutions in FP8, and for several recipes in one
    model. The config for NVFP4 is that of quantized weights and wide inputs: servers quantize inputs with a
    fixed scale of the tensor, and NVFP4BlockScaling with that of each call.

    Args:
        path: the file to write. An existing file is replaced by a complete new one, or stays unchanged.
        model: the model that ``freeze`` returned, of Linen or NNX.
        variables: the variables that ``freeze`` returned beside a Linen model. Collections other than
            ``params`` have their own names as prefix.
        rename: other names for the tensors: regular expressions and their replacements, each substituted
            wherever it is found in a name, in their order; or a function of one name that returns another.
            A name without a match stays unchanged. A pattern must match a name that a variable has in some
            file, such as ``kernel$`` if all kernels are in FP8. A wide ``<layer>.kernel`` that is renamed
            to ``<layer>.weight`` is transposed to ``(out, in)``, as PyTorch has it.

    Raises:
        OSError: a file cannot be written.
        TypeError: ``model`` does not come from ``freeze``, or ``rename`` is neither a mapping nor a
            function.
        ValueError: two variables would have one name; a variable has a dtype that files do not hold; a
            pattern matches nothing; the folder has an index, which would hide the file; or a wide kernel
            that becomes a weight does not have two dimensions.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, os, tempfile, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Dense(8), fp8.Float8CurrentScaling(), include="")
        >>> x = jnp.ones((2, 4))
        >>> serve_model, served = fp8.freeze(model8, model8.init(jax.random.key(0), x), x)
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> fp8.save_safetensors(path, serve_model, served, rename={"^kernel": "model.proj"})
        >>> import safetensors
        >>> sorted(safetensors.safe_open(path, "np").keys())
        ['bias', 'model.proj.weight', 'model.proj.weight_scale']

    Source: the safetensors format; FP8 checkpoints as transformers and vLLM document them; DeepSeek-V3.
    """
    ops, arrays = described(model, variables)
    path = pathlib.Path(path)
    tensors, wide = _tensors_of(ops, {name: np.asarray(x) for name, x in arrays.items()}, rename)
    if path.name == SINGLE and (index := path.with_name(INDEX)).exists():
        raise ValueError(
            f"{path.parent} has {index.name}, with which loaders would read the older files that it lists. "
            "Delete the index and those files, or save into another folder."
        )
    metadata = {"format": "pt"}  # transformers requires the format
    if (quantization := _quantization_config(ops, wide)) is not None:
        metadata["quantization_config"] = json.dumps(quantization)
    _write(path, tensors, metadata)


def weights_for_serving(
    model: Any,
    *args: Any,
    rename: Rename | None = None,
    weight_only: bool = False,
    methods: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, Array]:
    """Returns the FP8 weights of a model in training under the names of an inference server.

    The tensors are those of the file that ``save_safetensors`` writes after ``freeze``, bit for bit, by
    their names in the file. Under ``jax.jit`` or ``nnx.jit``, as a function of the variables, one compiled
    program makes the tensors on the devices, sharded as the variables.

    Args, errors and warnings: as in ``freeze`` and, for ``rename``, in ``save_safetensors``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model8 = fp8.quantize_model(nn.Dense(8), fp8.Float8CurrentScaling(), include="")
        >>> x = jnp.ones((2, 4))
        >>> rename = {"^kernel": "proj"}
        >>> weights_of = jax.jit(lambda v: fp8.weights_for_serving(model8, v, x, rename=rename))
        >>> weights = weights_of(model8.init(jax.random.key(0), x))
        >>> {name: x.shape for name, x in weights.items()}
        {'bias': (8,), 'proj.weight': (8, 4), 'proj.weight_scale': (1,)}

    Source: as for ``save_safetensors``.
    """
    frozen = freeze(model, *args, weight_only=weight_only, methods=methods, **kwargs)
    served, variables = frozen if isinstance(frozen, tuple) else (frozen, None)
    ops, arrays = described(served, variables)
    return _tensors_of(ops, arrays, rename)[0]


def is_weight_name(name: str) -> bool:
    """Returns whether a tensor of this name is a layer's ``weight``, as in PyTorch.

    vLLM's fused experts are ``w13_weight`` and ``w2_weight``.
    """
    return name.rpartition(".")[2] in ("weight", "w13_weight", "w2_weight")


def new_names_of(
    names: Collection[str], rename: Rename | None, variables: Mapping[Path, Array]
) -> dict[str, str]:
    """Returns the new name of each name; a pattern that matches no name is an error.

    It may also match a name that the tensors of a variable have in files of another recipe, or without FP8.
    So one ``rename`` serves a model wherever its layers are converted.
    """
    if callable(rename):
        return {name: rename(name) for name in names}
    if not (rename is None or isinstance(rename, Mapping)):
        raise TypeError(
            "rename must be a dict of regular expressions and their replacements, or a callable that "
            f"takes a name and returns one; got {rename!r}."
        )
    new = {name: name for name in names}
    for path, x in variables.items() if rename else ():
        own, weight = names_of(path)
        of_weight = [weight + end for end in BESIDE] + [weight.removesuffix("weight") + INPUT_SCALE]
        new |= {name: name for name in (own, *(of_weight if len(x.shape) > 1 else ()))}
    for pattern, replacement in (rename or {}).items():
        if not any(re.search(pattern, name) for name in new.values()):
            raise ValueError(
                f"rename has the pattern {pattern!r}, which matches none of "
                f"{sorted(new[name] for name in names)}. Correct it, or leave it out."
            )
        new = {name: re.sub(pattern, replacement, text) for name, text in new.items()}
    return new


def names_of(path: Path) -> tuple[str, str]:
    """Returns the name that a variable has in a file as it is, and the name as a weight ``(out, in)``."""
    if path[0] == PARAMS and len(path) > 1:
        path = path[1:]
    # If the kernel is not named ``kernel``, the module may have several. Its name is then added.
    layer = path[:-1] if path[-1] == "kernel" and len(path) > 1 else path
    return ".".join(path), ".".join((*layer, "weight"))


def _tensors_of(
    ops: Sequence[ServedOp], arrays: Mapping[Path, Array], rename: Rename | None
) -> tuple[dict[str, Array], list[str]]:
    """Returns the tensors of a frozen model in a file or in a server, and its layers without FP8.

    The tensors are arrays of NumPy or JAX by their sorted names there.
    """
    in_file = _in_file(ops, arrays)
    new_names = new_names_of(sorted(name for name, _ in in_file.values()), rename, arrays)
    found, wide, first = dict[str, Array](), list[str](), dict[str, str]()
    for path, (own_name, array) in sorted(in_file.items()):
        name, place = new_names[own_name], "/".join(path)
        is_in_order = own_name == names_of(path)[0]  # that of the model
        is_stored = not is_in_order or array.dtype.itemsize == 1
        if is_in_order and is_stored and path[-1] == "kernel" and is_weight_name(name):
            raise ValueError(
                f"rename makes a weight of {place}, an FP8 kernel that the file has in the order of the "
                "model. Give this kernel a name that ends in 'kernel'."
            )
        if path[0] == PARAMS and path[-1] == "kernel" and not is_stored:
            wide.append(name.rpartition(".")[0] or name)
            if is_weight_name(name):
                if array.ndim != 2:
                    raise ValueError(
                        f"rename makes a weight of {place}, of shape {array.shape}. Such a wide kernel "
                        "must have two dimensions. Give this kernel a name that ends in 'kernel'."
                    )
                array = array.T
        if first.setdefault(name, place) != place:
            raise ValueError(
                f"{first[name]} and {place} would both be {name!r} in the file. Rename one of the "
                "parameters, or correct rename."
            )
        if array.dtype not in _NAMES:
            raise ValueError(
                f"{place} is {array.dtype}, which safetensors files do not hold. Leave its collection out, "
                "or convert it. (NVFP4 kernels are held that a layer multiplies as they are.)"
            )
        found[name] = array
    return dict(sorted(found.items())), wide


def _in_file(ops: Sequence[ServedOp], arrays: Mapping[Path, Array]) -> dict[Path, tuple[str, Array]]:
    """Returns the name and the array of each variable in a file, before ``rename``."""
    layers, arrays = _layers(ops, arrays)
    found = {path: (names_of(path)[0], Groups()) for path in arrays}
    for op in layers:
        found |= _of_layer(op, arrays)
        arrays |= _repeated(op, arrays)
    return {path: (found[path][0], merged(x, found[path][1])) for path, x in arrays.items()}


def _layers(
    ops: Sequence[ServedOp], arrays: Mapping[Path, Array]
) -> tuple[list[ServedOp], dict[Path, Array]]:
    """Returns an op for each weight in the file, and the arrays, with the scales of a stack in one array.

    The matmuls of a loop over experts are different ops. For ``x @ w[0]`` and ``x @ w[1]``::

        w                                       (2, 16, 32)     w                         (2, 16, 32)
        Fp8DotGeneralOp_w-axis0-0/kernel_scale  (1,)            …w-axis0-0/kernel_scale   (2, 1)
        Fp8DotGeneralOp_w-axis0-1/kernel_scale  (1,)
    """
    layers, left = dict[Path, list[ServedOp]](), dict(arrays)
    for op in ops:
        if op.groups and op.cut is None:
            layers[op.path] = [op]
        elif op.groups and (PARAMS, *op.kernel) in arrays:  # otherwise another layer has all kernels
            layers.setdefault(op.kernel, []).append(op)
    for own in layers.values():
        own.sort(key=lambda op: op.cut or ())
        for name, _ in own[0].scales if own[0].cut else ():
            paths = [(PARAMS, *op.path, name) for op in own]
            left[paths[0]] = jnp.stack([left.pop(path) for path in paths], axis=len(own[0].stack))
    return [own[0] for own in layers.values()], left


def _of_layer(op: ServedOp, arrays: Mapping[Path, Array]) -> dict[Path, tuple[str, Groups]]:
    """Returns the names and the groups of the variables that a layer with this op may have.

    A bias with the dimensions in another order than the weight has, as of the einsum ``td,dhb->tbh``, keeps
    its shape.
    """
    weight, quantizer = names_of((PARAMS, *op.kernel))[1], op.quantizer
    packed = "_packed" * (quantizer.dtype == E2M1)
    end, scale = "_scale", () if quantizer.has_one_scale else op.groups
    if quantizer.block:  # scales per block have a batch dimension of size 1
        end, scale = "_scale_inv" if quantizer.block == (128, 128) else end, ((0, 1), (2,))
    found = {
        (PARAMS, *op.kernel): (weight + packed, op.groups),
        (PARAMS, *op.path, KERNEL_SCALE): (weight + end, scale),
        (PARAMS, *op.path, KERNEL_TENSOR_SCALE): (weight + "_global_scale", ()),
        (PARAMS, *op.path, INPUT_SCALE): (weight.removesuffix("weight") + INPUT_SCALE, ()),
    }
    if op.kernel[-1] == "kernel":
        bias, out = (PARAMS, *op.kernel[:-1], "bias"), op.groups[0]
        kernel, x = (arrays.get((PARAMS, *path)) for path in (op.kernel, bias[1:]))
        sizes = () if kernel is None else kernel.shape[kernel.ndim - sum(map(len, op.groups)) :]
        is_alike = x is None or not sizes or x.shape[-len(out) or None :] == tuple(sizes[i] for i in out)
        found[bias] = names_of(bias)[0], (tuple(range(len(out))),) if is_alike else ()
    return found


def _repeated(op: ServedOp, arrays: Mapping[Path, Array]) -> dict[Path, Array]:
    """Returns the scale of a whole kernel by its path, repeated for each kernel of a batched matmul."""
    has_one_scale = op.quantizer.has_one_scale
    path = PARAMS, *op.path, KERNEL_SCALE if has_one_scale else KERNEL_TENSOR_SCALE
    codes, x = arrays.get((PARAMS, *op.kernel)), arrays.get(path)
    if codes is None or x is None:
        return {}
    stack = codes.shape[: codes.ndim - sum(map(len, op.groups))]
    x = jnp.broadcast_to(x.reshape(*x.shape[:-1], *(1,) * (len(stack) - x.ndim + 2)), (*stack, 1))
    return {path: x if has_one_scale else quotient(jnp.ones_like(x), x)}


def merged(x: Array, groups: Groups) -> Array:
    """Returns an array with each group of its last dimensions merged to one dimension, for a file."""
    num_kept = x.ndim - sum(map(len, groups))
    if not groups or num_kept < 0:  # or a bias that all features share
        return x
    x = x.transpose(*range(num_kept), *(num_kept + i for group in groups for i in group))
    ends = [*itertools.accumulate(map(len, groups), initial=num_kept)]
    shape = (*x.shape[:num_kept], *(math.prod(x.shape[a:b]) for a, b in itertools.pairwise(ends)))
    spec = jax.typeof(x).sharding.spec  # on explicit axes of a mesh
    kept = [s if i < num_kept or i in ends else None for i, s in enumerate(spec)]
    if kept != list(spec):  # JAX merges no sharded dimension into the one before
        x = jax.sharding.reshard(x, PartitionSpec(*kept))
    x = x.reshape(shape)
    return _packed(x) if x.dtype == E2M1 else x


def unmerged(x: np.ndarray, groups: Groups, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the array of this shape that ``merged`` returned ``x`` for."""
    num_kept = len(shape) - sum(map(len, groups))
    order = (*range(num_kept), *(num_kept + i for group in groups for i in group))
    return x.reshape([shape[i] for i in order]).transpose(np.argsort(order))


def _packed(codes: Array) -> Array:
    """Returns 4-bit codes of NumPy or JAX in uint8, two neighbors in a byte, the first in its low bits."""
    if isinstance(codes, np.ndarray):
        bits: Array = codes.view(np.uint8)
    else:  # XLA for CPUs fails to compile some programs with bitcast_convert_type of 4-bit codes
        x = codes.astype(jnp.float32)
        size = jnp.abs(x)  # 0, 0.5, 1, 1.5, 2, 3, 4 or 6, whose bits are their ranks, 0 to 7
        rank = jnp.minimum(jnp.minimum(2 * size, size + 2), size / 2 + 4)
        bits = jnp.where(jnp.signbit(x), rank + 8, rank).astype(jnp.uint8)
    pairs = bits.reshape(*bits.shape[:-1], bits.shape[-1] // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << np.uint8(4)


def _quantization_config(ops: Sequence[ServedOp], wide_layers: Sequence[str]) -> dict[str, Any] | None:
    """Returns the quantization config that inference servers know; None if they know none.

    ``wide_layers`` are the names that the layers without FP8 have in the file.
    """
    in_fp8 = [op for op in ops if any(op.gemms.quantizers)]
    kinds = {(op.gemms.forward.lhs, op.gemms.forward.rhs) for op in in_fp8}
    if len(kinds) != 1 or not all(op.groups for op in in_fp8):
        return None
    lhs, rhs = kinds.pop()
    assert rhs is not None
    used, inputs = [quantizer for quantizer in (lhs, rhs) if quantizer is not None], None
    if [(q.dtype, q.scale_columns) for q in used] == [(E4M3, 128)] * 2 and rhs.block == (128, 128):
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": sorted(wide_layers),
        }
    number: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
    if all(q.dtype == E2M1 for q in used):
        number["num_bits"], kind = 4, "nvfp4-pack-quantized"
        weights: dict[str, Any] = {"strategy": "tensor_group", "group_size": 16}
    elif any(q.dtype != E4M3 or q.block for q in used):
        return None
    else:
        kind, weights = "float-quantized", {"strategy": "tensor" if rhs.has_one_scale else "channel"}
        if lhs is not None:
            per_input = {"strategy": "tensor" if lhs.has_one_scale else "token"}
            inputs = {**number, **per_input, "dynamic": not isinstance(lhs, DelayedQuantizer)}
    weights = {**number, **weights, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(wide_layers),
    }


def _write(path: pathlib.Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file at once, or leaves an existing one as it is if that fails.

    The library would write the metadata in a random order, so that equal models had different files.
    """
    # Tensors of wide dtypes come first, so that each tensor begins at a multiple of the size of its dtype.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        array, start = tensors[name], end
        end += array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = path.resolve()  # a symbolic link stays a link
    try:
        # Only this call knows the new folder. A file that ``open`` makes there has the usual permissions.
        with tempfile.TemporaryDirectory(prefix=".", dir=target.parent, ignore_cleanup_errors=True) as own:
            new = pathlib.Path(own, target.name)
            with open(new, "wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for name in names:
                    file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
            new.replace(target)
    except OSError as error:
        message = f"{path} cannot be written: {error}. If there is an older file, it stays unchanged."
        raise OSError(error.errno, message) from error

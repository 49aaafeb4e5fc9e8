"""``load_into``: takes the tensors of a checkpoint into the variables of a model, wide or frozen."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.state.tree import path_str
from fp8flax._serve.checkpoints import CheckpointTensor, Layout
from fp8flax._serve.hidden_state import INPUT_SCALE, KERNEL_SCALE
from fp8flax._serve.parts import Misfit, joined, rows, scale_in_blocks, stacked
from fp8flax._serve.renaming import Part, Rename, new_names_of
from fp8flax._serve.server_layout import from_matrix, matrix_shape
from fp8flax._serve.trees import Path

_SQUARE, _MX = (128, 128), (1, 32)


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
    ``(out, in)`` in the file, and is transposed, if the file has scales for it or calls it ``weight``.
    ``rename`` is that of ``save_safetensors``. For a Llama of the Hugging Face hub, it maps the names of
    the model to those of the hub. It also says where one variable has several tensors, such as fused
    queries, keys and values or the layers of ``nn.scan``, and where several variables have one tensor.

    The scaling state of FP8 ops stays unchanged. To leave other variables unchanged, such as LoRA adapters,
    caches or generators of random numbers, do not pass them. Pass the state of an NNX model, such as
    ``nnx.state(model, nnx.Param)``, and give the result to ``nnx.update``.

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
    new: dict[Path, jax.Array] = {}
    for source, load in _checked(wanted, checkpoint, rename):  # one variable is in memory at a time
        made = load(source.tensor(is_outline=False))
        new |= {path: _placed(make(), leaves[path]) for path, make in made.items()}
    return treedef.unflatten([new.get(path, leaf) for path, leaf in leaves.items()])


_Load = Callable[[Any], dict[Path, Callable[[], np.ndarray]]]
"""A function of a tensor of the checkpoint, which returns functions that make variables."""


def _checked(
    wanted: Mapping[Path, Any], checkpoint: Mapping[str, Any], rename: Rename | None
) -> list[tuple[_Source, _Load]]:
    """Returns where each variable comes from, and what loads it, after a check of all of them.

    Raises:
        ValueError: variables and tensors do not match. The error lists all faults.
    """
    names = {path: _names(path, leaf) for path, leaf in wanted.items()}
    every = list(dict.fromkeys(name for own in names.values() for name in own))
    parts_of = new_names_of(every, rename)
    shapes = {path: tuple(leaf.shape) for path, leaf in wanted.items()}
    together = _joined_with(names, parts_of)
    checked: list[tuple[_Source, _Load]] = []
    users: dict[str, dict[Any, Path]] = {}
    missing, wrong, beside = list[str](), list[str](), set[Path]()
    # The kernels come first, because they decide how their scales are loaded.
    for path in sorted(wanted, key=lambda path: not _is_frozen_kernel(path, wanted[path])):
        if path in beside:
            continue
        scales = _scales_of(path, wanted)
        options: dict[tuple[Part, ...], str] = {}
        for name in names[path]:
            options.setdefault(tuple(parts_of[name]), name)
        sources = [
            _Source(checkpoint, parts, path, name == names[path][0], shapes, together)
            for parts, name in options.items()
        ]
        found = [source for source in sources if any(name in checkpoint for name in source.file_names)]
        beside |= set(scales)
        if len(found) != 1:
            text = " or ".join(source.text for source in sources)
            (wrong if found else missing).append(f"{'/'.join(path)} (as {text})")
            continue
        [source] = found
        place = source.parts[0].place
        for name in source.file_names:
            others = users.setdefault(name, {})
            if place in others or (others and None in (place, *others)):
                user = next(iter(others.values()))
                wrong.append(f"{name} is for both {'/'.join(user)} and {'/'.join(path)}")
            others[place] = path
        if absent := [name for name in source.file_names if name not in checkpoint]:
            missing.append(f"{'/'.join(path)} (as {source.text}, without {', '.join(absent[:3])})")
            continue
        loaders = partial(_loaders, path, wanted, source, scales)
        try:
            loaders(source.tensor(is_outline=True))
        except Misfit as error:
            wrong.append(f"{'/'.join(path)} from {source.text}: {error}")
        checked.append((source, loaders))
        if not source.is_quantized:  # the scales are in the file under their own names
            beside -= set(scales)
    left = [name for name in checkpoint if name not in users]
    _raise_if(("missing from the checkpoint", missing), ("left over in it", left), ("not matching", wrong))
    return checked


class _Source(NamedTuple):
    """The tensors of a checkpoint that a variable comes from."""

    checkpoint: Mapping[str, Any]
    parts: tuple[Part, ...]
    path: Path
    is_own_name: bool
    """Whether the variable was found under the name that it has in the model."""
    shapes: Mapping[Path, tuple[int, ...]]
    """The shapes of all variables."""
    together: Mapping[str, Sequence[Path]]
    """For each tensor in which ``rename`` joins variables, these variables in their order."""

    @property
    def numbers(self) -> int:
        """Returns along how many dimensions each part of the variable is a tensor of its own."""
        return self.parts[0].num_numbered_dims

    @property
    def file_names(self) -> list[str]:
        """Returns the names of the tensors in the file."""
        shape = self.shapes[self.path]
        if self.numbers > len(shape):
            return []
        return [part.name_at(index) for index in np.ndindex(*shape[: self.numbers]) for part in self.parts]

    @property
    def text(self) -> str:
        """Returns the names as an error message has them."""
        return " with ".join(part.name for part in self.parts)

    @property
    def is_quantized(self) -> bool:
        """Returns whether the tensors have scales."""
        return isinstance(self.checkpoint[self.file_names[0]], CheckpointTensor)

    @property
    def is_matrix(self) -> bool:
        """Returns whether the tensors are stored as ``(out, in)``.

        All formats with scales store weights in this way. A wide tensor is stored in this way if it is
        called ``weight``, as in PyTorch, and is not found under the own name of an embedding.
        """
        if self.is_quantized:
            return self.path[-1] != "embedding"
        is_weight = re.fullmatch(r"(.*\.)?weight", self.parts[0].name) is not None
        return is_weight and (self.path[-1] == "kernel" or not self.is_own_name)

    def tensor(self, *, is_outline: bool) -> Any:
        """Returns the tensors as one; an outline has zeros for values that are not in the file as one.

        Raises:
            Misfit: the tensors do not fit together.
        """
        axis, sizes = -2 if self.is_matrix else -1, self.shapes[self.path][: self.numbers]
        tensors = (
            joined(
                [self._piece(part, self.checkpoint[part.name_at(index)], axis) for part in self.parts],
                axis,
                is_outline=is_outline,
            )
            for index in np.ndindex(*sizes)
        )
        return stacked(tensors, sizes, is_outline=is_outline)

    def _piece(self, part: Part, tensor: Any, axis: int) -> Any:
        """Returns what the variable has of a tensor in the file."""
        if part.size is None and part.place is None:
            return tensor
        name, shape = part.name, tensor.shape
        if len(shape) < -axis or (axis == -1 and len(shape) > 1 and self.path[-1] != "bias"):
            raise Misfit("its output features are not known, so that it cannot be split or joined")
        if part.size is not None:
            if shape[axis] != part.size:
                raise Misfit(f"{name} must have {part.size} output features, and has {shape[axis]}")
            return tensor
        assert part.place is not None
        place, count = part.place
        paths = self.together[name]
        if len(paths) != count:
            raise Misfit(
                f"rename joins {count} variables in {name}, but only {', '.join(map('/'.join, paths))} "
                "were passed. Pass all of them"
            )
        others = math.prod(shape) // max(1, shape[axis])
        sizes = [math.prod(self.shapes[path][part.num_numbered_dims :]) / max(1, others) for path in paths]
        if sum(sizes) != shape[axis] or not all(size.is_integer() for size in sizes):
            raise Misfit(
                f"{name} has {shape[axis]} output features, and the variables that rename joins in it have "
                f"{' + '.join(f'{size:g}' for size in sizes)}"
            )
        start = int(sum(sizes[:place]))
        return rows(tensor, axis, start, start + int(sizes[place]))


def _joined_with(
    names: Mapping[Path, Sequence[str]], parts_of: Mapping[str, Sequence[Part]]
) -> dict[str, list[Path]]:
    """Returns, for each tensor in which ``rename`` joins variables, these variables in their order."""
    found: dict[str, dict[int, Path]] = {}
    for path, own in names.items():
        for part in (part for name in own for part in parts_of[name]):
            if part.place is not None:
                found.setdefault(part.name, {})[part.place[0]] = path
    return {name: [paths[place] for place in sorted(paths)] for name, paths in found.items()}


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
    path: Path,
    leaves: Mapping[Path, Any],
    source: _Source,
    scales: Mapping[Path, Any],
    tensor: Any,
) -> dict[Path, Callable[[], np.ndarray]]:
    """Returns functions that make a variable, and the scales beside it, from a tensor of the checkpoint.

    Raises:
        Misfit: the tensor does not have the shape, the dtype or the scales of the variables.
    """
    leaf, shape = leaves[path], tuple(leaves[path].shape)
    is_quantized = isinstance(tensor, CheckpointTensor)
    dtype = tensor.codes.dtype if is_quantized else tensor.dtype
    layouts = _layouts(tensor, shape, source.numbers) if source.is_matrix else []
    if not source.is_matrix:
        _check_shape(path, tensor.shape, shape)
    elif not layouts:
        raise Misfit(f"a weight (out, in) of shape {list(tensor.shape)} does not become {list(shape)}")

    def arranged(array: np.ndarray) -> np.ndarray:
        return from_matrix(array, shape, *layouts[0]) if layouts else array.reshape(shape)

    if is_quantized and not _is_narrow(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise Misfit(f"it must be {leaf.dtype}, and is {dtype} with scales")
        return {path: lambda: arranged(tensor.dequantize(leaf.dtype))}
    is_wide = not _is_narrow(leaf) and not _is_narrow(tensor)
    if not is_quantized and is_wide and all(jnp.issubdtype(x, jnp.floating) for x in (dtype, leaf.dtype)):
        return {path: lambda: arranged(_rounded(tensor, leaf.dtype))}
    if dtype != leaf.dtype:
        without = " without scales" if dtype.itemsize == 1 and not is_quantized else ""
        raise Misfit(f"it must be {leaf.dtype}, and is {dtype}{without}")
    if not is_quantized:
        return {path: lambda: arranged(np.asarray(tensor))}
    made = {path: lambda: arranged(tensor.codes)}
    siblings = [p for p, x in leaves.items() if p[:-1] == path[:-1] and _is_frozen_kernel(p, x)]
    if [p[-1] for p in scales].count(KERNEL_SCALE) != 1 or len(siblings) != 1:
        raise Misfit(
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
    """Raises ``Misfit`` if a tensor that is not transposed cannot become the variable."""
    allowed = [tuple(shape)]
    if path[-1] == "bias":  # all features are one dimension in the file
        allowed += [(math.prod(shape),), (*shape[:1], math.prod(shape[1:]))]
    if tuple(given) not in allowed:
        raise Misfit(f"it must have the shape {list(shape)}, and has {list(given)}")


def _layouts(tensor: Any, shape: tuple[int, ...], numbers: int) -> list[Layout]:
    """Returns how a weight ``(out, in)`` may become a kernel of this shape; all ways give the same kernel.

    The first dimensions of a kernel are the summed ones, as in the layers of Flax, unless the file has the
    layout. A stack of weights in one tensor must have scales: without them it may be the kernel of a
    convolution. ``numbers`` is the number of dimensions along which each weight is a tensor of its own.
    """
    is_quantized = isinstance(tensor, CheckpointTensor)
    given, dims = list(tensor.shape), len(shape) - len(tensor.shape) + 2
    if not 2 <= len(given) - numbers <= (3 if is_quantized else 2):
        return []
    known = tensor.layout if is_quantized else None
    options = [known] if known else [(tuple(range(k, dims)), tuple(range(k))) for k in range(1, dims)]
    return [(a, b) for a, b in options if len(a) + len(b) == dims and matrix_shape(shape, a, b) == given]


def _scale(
    tensor: CheckpointTensor, shape: tuple[int, ...], layouts: Sequence[Layout], leaf: Any
) -> Callable[[], np.ndarray]:
    """Returns a function that makes the scale of a frozen kernel of shape ``shape``.

    The shape and the dtype of the frozen scale show which kinds of scale it may have. If there are several,
    all must have the same values, so that no doubt is left.
    """
    stack, (out, summed) = tensor.shape[:-2], tensor.shape[-2:]
    is_e8m0, to = _is_narrow(leaf), tuple(leaf.shape)
    block = _MX if is_e8m0 else _SQUARE
    found: list[np.ndarray | None] = []
    if to == (*stack, 1, -(-out // block[0]), -(-summed // block[1])):
        found.append(scale_in_blocks(tensor, block))
    if not is_e8m0 and to == (*stack, 1):
        found.append(scale_in_blocks(tensor, (out, summed)))
    for layout in layouts if not is_e8m0 else ():
        ones = {i + len(stack) for i in layout[1]}
        if to == tuple(1 if i in ones else n for i, n in enumerate(shape)):
            scale = scale_in_blocks(tensor, (1, summed))
            found.append(None if scale is None else from_matrix(scale, to, *layout))
    can_hold = leaf.dtype in (tensor.scale.dtype, np.dtype(np.float32))  # which holds all scales
    bits = {None if scale is None else scale.tobytes() for scale in found}
    if len(bits) != 1 or found[0] is None or not can_hold:
        raise Misfit(
            f"its scale is {tensor.scale.dtype}{list(tensor.scale.shape)}, for blocks of "
            f"{list(tensor.block)}, and the scale of the frozen kernel is {leaf.dtype}{list(to)}. Freeze "
            "the model with the recipe of the checkpoint"
        )
    scale = found[0]
    return lambda: scale.astype(leaf.dtype).reshape(to)


def _input_scale(tensor: CheckpointTensor, leaf: Any) -> Callable[[], np.ndarray]:
    """Returns a function that makes the fixed scale of a frozen layer's input."""
    scale = tensor.input_scale
    if scale is None or scale.size != math.prod(leaf.shape):
        raise Misfit(
            f"the frozen layer needs an input scale of shape {list(leaf.shape)}, and the checkpoint has "
            f"{'not one for all of it' if scale is None else list(scale.shape)}. Freeze the model with "
            "another recipe"
        )
    return lambda: scale.astype(leaf.dtype).reshape(leaf.shape)


def _placed(array: np.ndarray, leaf: Any) -> jax.Array:
    """Returns an array on the devices of the variable that it replaces."""
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None and len(sharding.device_set) > 1:
        return jax.device_put(array, sharding, may_alias=False)
    return jnp.array(array)  # a copy, because the file may be replaced

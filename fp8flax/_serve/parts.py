"""Takes tensors of a checkpoint apart, joins them and stacks them, without a change of their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from fp8flax._serve.checkpoints import CheckpointTensor


class Misfit(Exception):  # noqa: N818
    """A tensor of the checkpoint cannot become the variable; the text says why."""


def rows(tensor: Any, axis: int, start: int, stop: int) -> Any:
    """Returns the output features ``start`` to ``stop`` of a tensor.

    If a block of scales is cut, each row of the result has scales of its own.

    Args:
        tensor: a ``CheckpointTensor``, or a wide array.
        axis: the dimension of output features, counted from the end (negative).
        start: the first feature.
        stop: the feature after the last one.
    """
    after: Any = (slice(None),) * (-axis - 1)
    at = (..., slice(start, stop), *after)
    if not isinstance(tensor, CheckpointTensor):
        return np.asarray(tensor)[at]
    height = tensor.block[axis]
    if start % height or (stop % height and stop != tensor.shape[axis]):
        tensor = _per_row(tensor, axis)
        height = 1
    blocks = (..., slice(start // height, -(-stop // height)), *after)
    return tensor._replace(codes=tensor.codes[at], scale=tensor.scale[blocks])


def joined(tensors: Sequence[Any], axis: int, *, is_outline: bool) -> Any:
    """Returns one tensor with the output features of all tensors, one after the other.

    Args:
        tensors: tensors that differ in the dimension ``axis`` only.
        axis: the dimension of output features, counted from the end (negative).
        is_outline: if True, codes and wide values of several tensors are not read, and are zeros in the
            result. A single tensor is returned unchanged.

    Returns:
        One tensor. The result has an input scale only if all tensors have the same one.

    Raises:
        Misfit: the tensors do not fit together.
    """
    if len(tensors) == 1:
        return tensors[0]
    _check_alike(tensors, {axis})
    if not isinstance(tensors[0], CheckpointTensor):
        return _concatenated(tensors, axis, is_outline)
    heights = {tensor.block[axis] for tensor in tensors}
    # A block must not cross the end of a tensor.
    if len(heights) > 1 or any(tensor.shape[axis] % min(heights) for tensor in tensors[:-1]):
        tensors = [_per_row(tensor, axis) for tensor in tensors]
    inputs = [tensor.input_scale for tensor in tensors]
    have_same_input_scale = all(x is not None and x.tobytes() == inputs[0].tobytes() for x in inputs)
    return tensors[0]._replace(
        codes=_concatenated([tensor.codes for tensor in tensors], axis, is_outline),
        scale=np.concatenate([tensor.scale for tensor in tensors], axis),
        input_scale=inputs[0] if have_same_input_scale else None,
    )


def stacked(tensors: Iterable[Any], sizes: Sequence[int], *, is_outline: bool) -> Any:
    """Returns one tensor with leading dimensions of these sizes; ``is_outline`` as in ``joined``.

    Each tensor is copied before the next one is taken, because a process can map a limited number of them.

    Raises:
        Misfit: the tensors do not fit together.
    """
    rest = iter(tensors)
    first = next(rest)
    if not sizes:
        return first
    is_quantized = isinstance(first, CheckpointTensor)
    values = _new_stack(first.codes if is_quantized else np.asarray(first), sizes, is_outline)
    scales = _new_stack(first.scale, sizes) if is_quantized else None
    inputs: list[Any] = []
    for index, tensor in zip(np.ndindex(*sizes), chain([first], rest)):
        _check_alike([first, tensor], set())
        if not is_outline:
            values[index] = tensor.codes if is_quantized else tensor
        if scales is not None:
            scales[index] = tensor.scale
            inputs.append(None if tensor.input_scale is None else tensor.input_scale.copy())
    if scales is None:
        return values
    return first._replace(
        codes=values,
        scale=scales,
        block=(*(1,) * len(sizes), *first.block),
        input_scale=None if any(x is None for x in inputs) else np.stack(inputs),
    )


def scale_in_blocks(tensor: CheckpointTensor, block: Sequence[int]) -> np.ndarray | None:
    """Returns the scales of a tensor for blocks of this size in its last two dimensions.

    The result is None if the scales differ within such a block.
    """
    scale = tensor.scale
    for axis, want in zip((-2, -1), block):
        size, have = tensor.shape[axis], tensor.block[axis]
        chosen = scale.take(np.arange(0, size, want) // have, axis)
        # If ``have`` is a multiple of ``want``, no wanted block has two scales.
        if have % want and have < size:
            places = np.arange(size)
            expected = scale.take(places // have, axis)
            if chosen.take(places // want, axis).tobytes() != expected.tobytes():
                return None
        scale = chosen
    return scale


def _per_row(tensor: CheckpointTensor, axis: int) -> CheckpointTensor:
    """Returns the same tensor with scales for each output feature."""
    places = np.arange(tensor.shape[axis]) // tensor.block[axis]
    block = list(tensor.block)
    block[axis] = 1
    return tensor._replace(scale=tensor.scale.take(places, axis), block=tuple(block))


def _check_alike(tensors: Sequence[Any], but: set[int]) -> None:
    """Raises ``Misfit`` if tensors differ in dtype, scales, layout or shape.

    Dimensions ``but`` may differ.
    """

    def kind(tensor: Any) -> Any:
        is_quantized = isinstance(tensor, CheckpointTensor)
        codes = tensor.codes if is_quantized else tensor
        axes = [i for i in range(-codes.ndim, 0) if i not in but]
        shape = [codes.shape[i] for i in axes]
        if not is_quantized:
            return codes.dtype, codes.ndim, shape
        block = [min(tensor.block[i], tensor.shape[i]) for i in axes]
        return codes.dtype, codes.ndim, shape, tensor.scale.dtype, block, tensor.layout

    for tensor in tensors[1:]:
        if kind(tensor) != kind(tensors[0]):
            raise Misfit(
                f"its tensors must be alike to become one variable; they are {_text(tensors[0])} and "
                f"{_text(tensor)}"
            )


def _text(tensor: Any) -> str:
    """Returns a tensor as an error message has it."""
    if not isinstance(tensor, CheckpointTensor):
        return f"{tensor.dtype}{list(tensor.shape)}"
    layout = "" if tensor.layout is None else f" and the layout {tensor.layout}"
    return (
        f"{tensor.codes.dtype}{list(tensor.shape)} with {tensor.scale.dtype} scales for blocks of "
        f"{list(tensor.block)}{layout}"
    )


def _concatenated(arrays: Sequence[Any], axis: int, is_outline: bool) -> np.ndarray:
    """Returns the arrays one after the other; an outline has the shape and the dtype without memory."""
    if not is_outline:
        return np.concatenate(arrays, axis)
    shape = list(arrays[0].shape)
    shape[axis] = sum(x.shape[axis] for x in arrays)
    return np.broadcast_to(np.zeros((), arrays[0].dtype), shape)


def _new_stack(like: np.ndarray, sizes: Sequence[int], is_outline: bool = False) -> np.ndarray:
    """Returns an uninitialized array of shape ``(*sizes, *like.shape)``.

    An outline has zeros, and takes no memory.
    """
    shape = (*sizes, *like.shape)
    return np.broadcast_to(np.zeros((), like.dtype), shape) if is_outline else np.empty(shape, like.dtype)

"""Runs GPU kernels on arrays that XLA splits over several devices: each device computes its part.

XLA cannot split a GPU kernel, and would gather its operands. ``custom_partitioning`` gets a rule that says
which dimensions of operands and result correspond. It then runs the kernel on each device's part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8flax._core.gemm.kernels.block_gemm import BLOCK
from fp8flax._core.gemm.kernels.groups import bounded
from fp8flax._core.names import BLOCK_QUANTIZE, GROUPED_GEMM
from fp8flax._core.qtensor import QTensor

Axes = tuple[str, ...]


def gemm_on_shards(
    multiply: Callable[..., jax.Array], *, name: str, is_square: bool
) -> Callable[..., jax.Array]:
    """Returns ``multiply`` for operands that may be split over devices in every dimension.

    If the contraction is split, the partial results are summed over the devices, in their own dtype.

    Args:
        multiply: a block-scaled GEMM of two stacks of matrices, called as
            ``(lhs, rhs, lhs_scale, rhs_scale)``; see ``hopper_block_gemm``.
        name: the scope in which the kernel runs, by which an audit recognizes the kernel.
        is_square: whether 128 rows of the right operand share a scale.
    """

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        """Returns what each device computes, and the shardings of result and operands."""
        del result
        lhs, rhs, lhs_scale, rhs_scale = args
        batch, rows, summed = _axes_of(lhs)
        other_batch, columns, other_summed = _axes_of(rhs)
        taken = _Taken(mesh)
        summed = taken.take(summed if summed == other_summed else (), lhs_scale.shape[2])
        batch = taken.take(batch if batch == other_batch else (), lhs.shape[0])
        rows = taken.take(rows, lhs.shape[1])
        columns = taken.take(columns, rhs_scale.shape[1])

        def compute(*args: jax.Array) -> jax.Array:
            out = multiply(*args)
            return lax.psum(out, summed) if summed else out

        left, right = _sharding(mesh, batch, rows, summed), _sharding(mesh, batch, columns, summed)
        return mesh, compute, _sharding(mesh, batch, rows, columns), (left, right, left, right)

    @custom_partitioning
    def split(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> jax.Array:
        return multiply(lhs, rhs, lhs_scale, rhs_scale)

    # The rule does not relate blocks to columns. Otherwise, if the number of devices does not divide the
    # number of blocks, Shardy could split columns over a part of a mesh axis. JAX has no such sharding.
    scales = "d" if is_square else "n"
    rule = f"b m k, b n k, b m c, b {scales} c -> b m n"
    split.def_partition(partition, sharding_rule=rule, reduction_factors=("k",))
    return jax.named_scope(name)(split)


def quantize_on_shards(kernel: Callable[..., Any], *, is_square: bool) -> Callable[..., Any]:
    """Returns ``kernel`` for a stack of matrices that may be split over devices at any block boundary.

    Args:
        kernel: ``block_quantize`` with all options bound, called with the stack ``(batch, M, N)``. M and N
            are multiples of 128.
        is_square: whether 128 rows and 128 columns share a scale; see ``block_quantize``.
    """

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        """Returns what each device computes, and the shardings of result and operands."""
        del result
        (x,) = args
        batch, rows, columns = _axes_of(x)
        taken = _Taken(mesh)
        batch = taken.take(batch, x.shape[0])
        rows = taken.take(rows, x.shape[1] // BLOCK)
        columns = taken.take(columns, x.shape[2] // BLOCK)
        first, second = _sharding(mesh, batch, rows, columns), _sharding(mesh, batch, columns, rows)
        return mesh, kernel, ((first, first), (second, second)), (first,)

    @custom_partitioning
    def split(x: Any) -> Any:
        return kernel(x)

    scales = ("b e c", "b c e") if is_square else ("b r c", "b s e")
    split.def_partition(partition, sharding_rule=f"b r s -> b r s, {scales[0]}, b s r, {scales[1]}")
    return jax.named_scope(BLOCK_QUANTIZE)(split)


def ragged_on_shards(
    multiply: Callable[[QTensor, QTensor, jax.Array], jax.Array],
    dims: tuple[str, str, str],
    lhs: QTensor,
    rhs: QTensor,
    group_sizes: jax.Array,
) -> jax.Array:
    """Returns ``multiply(lhs, rhs, group_sizes)``; all dimensions except the experts may be split.

    Each device calls ``multiply`` with its rows, and with the number of its rows in each group. If a split
    dimension is contracted, the partial results are summed over the devices, in the dtype of the result.

    Args:
        multiply: a ragged dot, called as ``(lhs, rhs, group_sizes)``.
        dims: three strings with a letter for each dimension of the codes of ``lhs``, of the codes of
            ``rhs``, and of the result. Dimensions with the same letter correspond. ``m`` stands for the
            rows in groups, ``e`` for the experts, and ``-`` for a dimension of size 1.
        lhs: the left operand.
        rhs: the right operand.
        group_sizes: number of rows of each group.
    """
    letters = dict.fromkeys("".join(dims).replace("e", "").replace("-", ""))
    # The result lacks the dimensions that are contracted: the devices add up their partial results.
    added = tuple(letter for letter in letters if letter not in dims[2])
    operands = [dataclasses.replace(x, scale=jnp.atleast_1d(x.scale)) for x in (lhs, rhs)]
    arrays, treedef = jax.tree.flatten(operands)
    # The letters of each array in ``arrays``: codes and scales of lhs, then codes and scales of rhs.
    names = [name for x, of_codes in zip(operands, dims) for name in (of_codes, _of_scale(x, of_codes))]

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        """Returns what each device computes, and the shardings of result and operands."""
        del result
        taken, axes = _Taken(mesh), dict[str, Axes]({"e": (), "-": ()})
        for letter in letters:
            sizes = [x.shape[name.index(letter)] for x, name in zip(args, names) if letter in name]
            found = {_axes_of(args[i])[names[i].index(letter)] for i in (0, 2) if letter in names[i]}
            axes[letter] = taken.take(found.pop() if len(found) == 1 else (), math.gcd(*sizes))
        sums = tuple(axis for letter in added for axis in axes[letter])

        def compute(*args: jax.Array) -> jax.Array:
            *parts, sizes = args
            if axes["m"]:
                sizes = _sizes_of_part(sizes, parts[0].shape[dims[0].index("m")], axes["m"])
            lhs, rhs = treedef.unflatten(parts)
            out = multiply(lhs, rhs, sizes)
            return lax.psum(out, sums) if sums else out

        *of_args, of_result = (
            _sharding(mesh, *(axes[letter] for letter in name)) for name in (*names, "e", dims[2])
        )
        return mesh, compute, of_result, tuple(of_args)

    @custom_partitioning
    def split(lhs: Any, lhs_scale: Any, rhs: Any, rhs_scale: Any, sizes: Any) -> jax.Array:
        lhs, rhs = treedef.unflatten((lhs, lhs_scale, rhs, rhs_scale))
        return multiply(lhs, rhs, sizes)

    # In the rule a dimension of scales that is smaller than that of the codes gets a name of its own.
    sizes = {letter: n for i in (0, 2) for letter, n in zip(names[i], arrays[i].shape)}
    others = map("u{}".format, itertools.count())
    of_arrays = (
        " ".join(x if x != "-" and sizes[x] == n else next(others) for x, n in zip(name, array.shape))
        for name, array in zip(names, arrays)
    )
    rule = f"{', '.join(of_arrays)}, e -> {' '.join(dims[2])}"
    split.def_partition(partition, sharding_rule=rule, reduction_factors=added)
    with jax.named_scope(GROUPED_GEMM):
        return split(*arrays, group_sizes)


def _of_scale(x: QTensor, of_codes: str) -> str:
    """Returns a letter for each dimension of the scales of ``x``, in the notation of ``ragged_on_shards``.

    A dimension with more than one scale gets the letter of the codes, and any other dimension gets ``-``.
    With scales per block each dimension gets the letter of the codes, also if its size is 1. This keeps
    devices from splitting a single block.

    Args:
        x: the operand.
        of_codes: the letters of the dimensions of the codes.
    """
    if x.scale.ndim != x.codes.ndim:
        return "-" * x.scale.ndim
    is_per_block = x.quantizer.scales_along_contraction
    return "".join(letter if n > 1 or is_per_block else "-" for letter, n in zip(of_codes, x.scale.shape))


def _sizes_of_part(group_sizes: jax.Array, rows: int, axes: Axes) -> jax.Array:
    """Returns how many rows of each group lie on this device.

    Args:
        group_sizes: number of rows of each group, over all devices.
        rows: number of rows on each device.
        axes: the mesh axes over which the rows are split.
    """
    total = rows * lax.axis_size(axes)
    ends = jnp.minimum(jnp.cumsum(bounded(group_sizes, total), dtype=jnp.int32), total)
    ends = jnp.clip(ends - lax.axis_index(axes) * rows, 0, rows)
    return jnp.diff(ends, prepend=np.int32(0))


def _axes_of(x: Any) -> list[Axes]:
    """Returns, for each dimension of ``x``, the mesh axes over which it is split."""
    spec = [*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec))]
    return [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]


def _sharding(mesh: Any, *dims: Axes) -> NamedSharding:
    """Returns the sharding of an array, given the mesh axes of each dimension."""
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims)))


class _Taken:
    """Records which axes of a mesh are used, so that each axis splits only one dimension."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.axes: set[str] = set()

    def take(self, axes: Axes, count: int) -> Axes:
        """Returns the axes and records them as used, or returns ``()`` if they cannot split a dimension.

        Args:
            axes: the mesh axes over which a dimension is to be split.
            count: number of elements or blocks of that dimension; the number of devices must divide it.
        """
        parts = 1
        for axis in axes:
            parts *= self.mesh.shape[axis]
        if count % parts or self.axes & set(axes):
            return ()
        self.axes |= set(axes)
        return axes

"""Runs GPU kernels on arrays that XLA splits over several devices: each device computes its part.

XLA cannot split a GPU kernel; it would gather the arrays that the kernel takes. ``custom_partitioning``
says which dimensions of operands and result are the same, and runs the kernel on each part.
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
    """Returns a GEMM of stacks, as ``hopper_block_gemm``, that may be split in every dimension.

    Where the contraction is, the parts of the result are added, in its dtype.

    Args:
        multiply: called as ``(lhs, rhs, lhs_scale, rhs_scale)``.
        name: the scope of the kernel, by which an audit knows it.
        is_square: whether a scale of the right operand is that of 128 rows.
    """

    def partition(mesh: Any, args: Any, result: Any) -> Any:
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

    # Blocks are not said to be parts of columns: where the devices do not divide them, Shardy would split
    # columns over parts of an axis, of which JAX's shardings know nothing.
    scales = "d" if is_square else "n"
    rule = f"b m k, b n k, b m c, b {scales} c -> b m n"
    split.def_partition(partition, sharding_rule=rule, reduction_factors=("k",))
    return jax.named_scope(name)(split)


def quantize_on_shards(kernel: Callable[..., Any], *, is_square: bool) -> Callable[..., Any]:
    """Returns ``block_quantize`` of a stack of whole blocks, which may be split between any of them.

    Args:
        kernel: called with the stack.
        is_square: as of ``block_quantize``.
    """

    def partition(mesh: Any, args: Any, result: Any) -> Any:
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
    """Returns ``multiply(lhs, rhs, group_sizes)``; all dimensions but that of the experts may be split.

    Each device has some of the rows, and the sizes of the groups among these. Where the result has not the
    dimension that is split, its parts are added, in its dtype.

    Args:
        multiply: a ragged dot.
        dims: a letter for each dimension of the codes of ``lhs``, of those of ``rhs``, and of the result:
            ``m`` for the rows in groups, ``e`` for the experts, ``-`` for one that is 1.
        lhs: its operand.
        rhs: likewise.
        group_sizes: rows of each group.
    """
    letters = dict.fromkeys("".join(dims).replace("e", "").replace("-", ""))
    added = tuple(letter for letter in letters if letter not in dims[2])
    operands = [dataclasses.replace(x, scale=jnp.atleast_1d(x.scale)) for x in (lhs, rhs)]
    arrays, treedef = jax.tree.flatten(operands)
    names = [name for x, of_codes in zip(operands, dims) for name in (of_codes, _of_scale(x, of_codes))]

    def partition(mesh: Any, args: Any, result: Any) -> Any:
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

    # What is not as large as the dimension of the codes is none of the same name.
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
    """Returns the letters of a scale's dimensions: those of the codes where it has more than one value.

    Or where it has one for each block: of a part of a block there is none.
    """
    if x.scale.ndim != x.codes.ndim:
        return "-" * x.scale.ndim
    is_per_block = x.quantizer.scales_along_contraction
    return "".join(letter if n > 1 or is_per_block else "-" for letter, n in zip(of_codes, x.scale.shape))


def _sizes_of_part(group_sizes: jax.Array, rows: int, axes: Axes) -> jax.Array:
    """Returns how many of the rows that a device has are of each group; all devices have as many."""
    total = rows * lax.axis_size(axes)
    ends = jnp.minimum(jnp.cumsum(bounded(group_sizes, total), dtype=jnp.int32), total)
    ends = jnp.clip(ends - lax.axis_index(axes) * rows, 0, rows)
    return jnp.diff(ends, prepend=np.int32(0))


def _axes_of(x: Any) -> list[Axes]:
    """Returns the axes of the mesh that each dimension is split over."""
    spec = [*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec))]
    return [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]


def _sharding(mesh: Any, *dims: Axes) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims)))


class _Taken:
    """The axes of a mesh that dimensions are split over, each by one."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.axes: set[str] = set()

    def take(self, axes: Axes, count: int) -> Axes:
        """Returns the axes, or none where so many blocks cannot be split over them."""
        parts = 1
        for axis in axes:
            parts *= self.mesh.shape[axis]
        if count % parts or self.axes & set(axes):
            return ()
        self.axes |= set(axes)
        return axes

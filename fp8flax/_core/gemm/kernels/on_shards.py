"""Runs GPU kernels on arrays that XLA splits over several devices: each device computes its part.

XLA cannot split a GPU kernel, and would gather its operands. ``custom_partitioning`` gets a rule that says
which dimensions of operands and result correspond. It then runs the kernel on each device's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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


def on_shards(
    kernel: Callable[..., Any],
    operands: Sequence[str],
    results: Any,
    *,
    order: str,
    num_deciding: int,
    name: str,
    of_part: Callable[..., Sequence[jax.Array]] = lambda axes, *args: args,
) -> Callable[..., Any]:
    """Returns ``kernel`` for arrays that may be split over devices in all dimensions of ``order``.

    Each device calls the kernel with its part of each operand. If a split dimension is not in the result,
    the partial results are summed over the devices, in their own dtype.

    An array is described by a string with a letter for each dimension. Dimensions with the same letter
    correspond, and are split together. The upper case letter stands for a dimension with one element per
    128 elements of the dimension with the lower case letter; devices then split at these blocks. A
    dimension ``-`` has size 1. Letters that are not in ``order`` are not split.

    Args:
        kernel: a function of arrays.
        operands: the description of each operand.
        results: the description of each result, in a tree like the result of the kernel.
        order: the letters of the dimensions that may be split. If two of them could use the same mesh axis,
            the first one uses it.
        num_deciding: how many of the first operands decide how a dimension is split. They must agree. The
            other operands are split in the same way, however they come.
        name: the scope in which the kernel runs, by which an audit recognizes the kernel.
        of_part: called with the mesh axes of each letter and the operands of a device; returns the operands
            to call the kernel with.
    """
    names = jax.tree.leaves(results)
    has_blocks = {letter for letter in order if any(letter.upper() in of for of in (*operands, *names))}
    # The results lack the dimensions that are contracted: the devices add up their partial results.
    added = tuple(letter for letter in order if not any(letter in of for of in names))

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        """Returns what each device computes, and the shardings of results and operands."""
        del result
        taken, axes = _Taken(mesh), dict[str, Axes]()
        for letter in order:
            places = [
                (x, of.index(letter)) for of, x in [*zip(operands, args)][:num_deciding] if letter in of
            ]
            wanted = {_axes_of(x)[i] for x, i in places}
            (size,) = {x.shape[i] for x, i in places}
            count = size // BLOCK if letter in has_blocks else size
            axes[letter] = taken.take(wanted.pop() if len(wanted) == 1 else (), count)
        sums = tuple(axis for letter in added for axis in axes[letter])

        def compute(*args: jax.Array) -> Any:
            out = kernel(*of_part(axes, *args))
            return lax.psum(out, sums) if sums else out

        def sharding(of: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(letter) or None for letter in of.lower())))

        return mesh, compute, jax.tree.map(sharding, results), tuple(map(sharding, operands))

    @custom_partitioning
    def split(*args: Any) -> Any:
        return kernel(*args)

    # The rule does not relate blocks to columns: an upper case letter is another letter. Otherwise, if the
    # number of devices does not divide the number of blocks, Shardy could split columns over a part of a
    # mesh axis. JAX has no such sharding.
    others = map("u{}".format, itertools.count())
    of_arrays = [" ".join(next(others) if x == "-" else x for x in of) for of in (*operands, *names)]
    rule = f"{', '.join(of_arrays[: len(operands)])} -> {', '.join(of_arrays[len(operands) :])}"
    split.def_partition(partition, sharding_rule=rule, reduction_factors=added)
    return jax.named_scope(name)(split)


def gemm_on_shards(
    multiply: Callable[..., jax.Array], *, name: str, is_square: bool
) -> Callable[..., jax.Array]:
    """Returns ``multiply`` for operands that may be split over devices in every dimension.

    Args:
        multiply: a block-scaled GEMM of two stacks of matrices, called as
            ``(lhs, rhs, lhs_scale, rhs_scale)``; see ``hopper_block_gemm``.
        name: the scope in which the kernel runs, by which an audit recognizes the kernel.
        is_square: whether 128 rows of the right operand share a scale.
    """
    operands = "bmk", "bnk", "bmK", "bNK" if is_square else "bnK"
    return on_shards(multiply, operands, "bmn", order="kbmn", num_deciding=2, name=name)


def quantize_on_shards(kernel: Callable[..., Any], *, is_square: bool) -> Callable[..., Any]:
    """Returns ``kernel`` for a stack of matrices that may be split over devices at any block boundary.

    Args:
        kernel: ``block_quantize`` with all options bound, called with the stack ``(batch, M, N)``. M and N
            are multiples of 128.
        is_square: whether 128 rows and 128 columns share a scale; see ``block_quantize``.
    """
    results = ("brs", "bRS" if is_square else "brS"), ("bsr", "bSR" if is_square else "bsR")
    return on_shards(kernel, ["brs"], results, order="brs", num_deciding=1, name=BLOCK_QUANTIZE)


def ragged_on_shards(
    multiply: Callable[[QTensor, QTensor, jax.Array], jax.Array],
    dims: tuple[str, str, str],
    lhs: QTensor,
    rhs: QTensor,
    group_sizes: jax.Array,
) -> jax.Array:
    """Returns ``multiply(lhs, rhs, group_sizes)``; all dimensions except the experts may be split.

    Each device calls ``multiply`` with its rows, and with the number of its rows in each group.

    Args:
        multiply: a ragged dot, called as ``(lhs, rhs, group_sizes)``.
        dims: the descriptions of the codes of ``lhs``, of the codes of ``rhs``, and of the result, see
            ``on_shards``. ``m`` stands for the rows in groups, ``e`` for the experts, and ``-`` for a
            dimension of size 1.
        lhs: the left operand.
        rhs: the right operand.
        group_sizes: number of rows of each group.
    """
    quantizers, rows = (lhs.quantizer, rhs.quantizer), dims[0].index("m")
    scales = [jnp.atleast_1d(x.scale) for x in (lhs, rhs)]
    of_scales = map(_of_scale, (lhs, rhs), scales, dims)

    def kernel(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, sizes: Any) -> jax.Array:
        left, right = QTensor(lhs, lhs_scale, quantizers[0]), QTensor(rhs, rhs_scale, quantizers[1])
        return multiply(left, right, sizes)

    def of_part(axes: dict[str, Axes], *args: jax.Array) -> Sequence[jax.Array]:
        *parts, sizes = args
        return (*parts, _sizes_of_part(sizes, parts[0].shape[rows], axes["m"]) if axes["m"] else sizes)

    order = "".join(dict.fromkeys("".join(dims).replace("e", "").replace("-", "")))
    run = on_shards(
        kernel,
        (dims[0], dims[1], *of_scales, "e"),
        dims[2],
        order=order,
        num_deciding=2,
        name=GROUPED_GEMM,
        of_part=of_part,
    )
    return run(lhs.codes, rhs.codes, *scales, group_sizes)


def _of_scale(x: QTensor, scale: jax.Array, of_codes: str) -> str:
    """Returns the description of the scales of ``x``, see ``on_shards``.

    With scales per block each dimension of blocks gets a letter, also if its size is 1. This keeps devices
    from splitting a single block.

    Args:
        x: the operand.
        scale: its scales, with one dimension or more.
        of_codes: the description of the codes.
    """
    if scale.ndim != x.codes.ndim:
        return "-" * scale.ndim
    is_per_block = x.quantizer.scales_along_contraction
    return "".join(
        letter if n == size else letter.upper() if is_per_block else "-"
        for letter, n, size in zip(of_codes, scale.shape, x.codes.shape)
    )


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

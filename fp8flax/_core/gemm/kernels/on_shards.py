"""Runs GPU kernels on arrays that XLA splits over several devices: each device computes its part.

XLA cannot split a GPU kernel, and would gather its operands. ``custom_partitioning`` gets a rule that says
which dimensions of operands and result correspond. It then runs the kernel on each device's part.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8flax._core.gemm.kernels.groups import ends_of_groups
from fp8flax._core.qtensor import QTensor

if TYPE_CHECKING:
    from fp8flax._core.gemm.gemm import Gemm

Axes = tuple[str, ...]


def on_shards(
    kernel: Callable[..., Any],
    operands: Sequence[str],
    results: Any,
    *,
    order: str,
    num_deciding: int,
    name: str,
    adapt: Callable[..., Sequence[jax.Array]] = lambda axes, *args: args,
) -> Callable[..., Any]:
    """Returns ``kernel`` for arrays that may be split over devices in all dimensions of ``order``.

    Each device calls the kernel with its part of each operand. If a split dimension is not in the result,
    the partial results are summed over the devices, in their own dtype.

    An array is described by a string with a letter for each dimension. Dimensions with the same letter
    correspond, and are split together. The upper case letter stands for a dimension with one element per
    block of the dimension with the lower case letter; devices then split at these blocks. A dimension ``-``
    corresponds to no other and is not split, and neither are letters that are not in ``order``. Example:
    the codes of a matrix are ``mk``. One scale per row and 128 columns is ``mK``; one scale per row is
    ``m-``.

    Args:
        kernel: a function of arrays.
        operands: the description of each operand.
        results: the description of each result, in a tree like the result of the kernel.
        order: the letters of the dimensions that may be split. A mesh axis splits a single dimension. If
            several could use it, the first of this list gets it: (1) a summed dimension, as the operands
            split it; (2) one that operands and results split alike; (3) one that operands split; (4) one
            that results split. Among equals, the first letter gets it.
        num_deciding: how many of the first operands decide how a dimension is split. If they do not agree,
            they do not decide. The other operands are split in the same way, however they come.
        name: the scope in which the kernel runs, by which an audit recognizes the kernel; empty for none.
        adapt: called with the mesh axes of each letter that is split, and with the operands of a device;
            returns the operands to call the kernel with.
    """
    result_dims = jax.tree.leaves(results)
    # The results lack the dimensions that are contracted: the devices add up their partial results.
    summed = tuple(letter for letter in order if not any(letter in dims for dims in result_dims))

    def partition(mesh: Any, args: Any, result: Any) -> Any:
        """Returns what each device computes, and the shardings of results and operands."""
        given, results_of_xla = [*zip(operands, args)], [*zip(result_dims, jax.tree.leaves(result))]
        operand_axes = {letter: _agreed(letter, given[:num_deciding]) for letter in order}
        result_axes = {letter: _agreed(letter, results_of_xla) for letter in order}
        wishes = [
            *((letter, operand_axes[letter]) for letter in summed),
            *((letter, axes) for letter, axes in operand_axes.items() if axes == result_axes[letter]),
            *operand_axes.items(),
            *result_axes.items(),
        ]
        split_over = dict[str, Axes]()
        for letter, axes in wishes:  # the first wish that can be met counts
            is_used = any(set(axes) & set(others) for others in split_over.values())
            num_parts = math.prod(mesh.shape[axis] for axis in axes)
            can_split = not is_used and _count(letter, [*given, *results_of_xla]) % num_parts == 0
            if axes and can_split and letter not in split_over:
                split_over[letter] = axes
        summed_axes = tuple(axis for letter in summed for axis in split_over.get(letter, ()))

        def compute(*args: jax.Array) -> Any:
            out = kernel(*adapt(split_over, *args))
            return lax.psum(out, summed_axes) if summed_axes else out

        def sharding(dims: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(split_over.get(letter) for letter in dims.lower())))

        return mesh, compute, jax.tree.map(sharding, results), tuple(map(sharding, operands))

    def rule(mesh: Any, operand_types: Any, result_types: Any) -> tuple[str, dict[str, Any]]:
        """Returns the rule by which Shardy propagates shardings, and the sizes of its factors.

        The dimension ``n``, if it has blocks, is written as ``(N n)``: ``N`` blocks of ``n`` elements. If
        the number of devices does not divide the number of blocks, Shardy could split columns over a part
        of a mesh axis. JAX has no such sharding. The rule then gives blocks and columns unrelated factors,
        and ``partition`` splits them alike.
        """
        arrays = [*zip((*operands, *result_dims), (*operand_types, *result_types))]
        letters = {letter for dims, _ in arrays for letter in dims.lower()} - {"-"}
        counts = {letter: _count(letter, arrays) for letter in letters}
        sizes = {letter: n for dims, x in arrays for letter, n in zip(dims, x.shape)}
        blocks = {x for x in letters if x.upper() in sizes and x in sizes and counts[x] % mesh.size == 0}
        # Each dimension ``-`` needs a factor of its own.
        others = map("u{}".format, itertools.count())

        def factor(x: str) -> str:
            return next(others) if x == "-" else f"({x.upper()} {x})" if x in blocks else x

        texts = [" ".join(map(factor, dims)) for dims, _ in arrays]
        text = f"{', '.join(texts[: len(operands)])} -> {', '.join(texts[len(operands) :])}"
        summed_factors = {*summed, *(x.upper() for x in summed if x in blocks)}
        in_order = dict.fromkeys(re.findall(r"\w+", text))
        return text, {
            "reduction_factors": tuple(x for x in in_order if x in summed_factors),
            **{x: sizes[x] // counts[x] for x in blocks},
        }

    @custom_partitioning
    def split(*args: Any) -> Any:
        return kernel(*args)

    split.def_partition(partition, sharding_rule=rule)
    return jax.named_scope(name)(split) if name else split


def _agreed(letter: str, arrays: Sequence[tuple[str, Any]]) -> Axes:
    """Returns the mesh axes over which all arrays split a dimension, or ``()`` if they do not agree.

    Args:
        letter: the letter of the dimension.
        arrays: the description of each array, and its shape and sharding.
    """
    found = {_axes_of(x)[dims.index(letter)] for dims, x in arrays if letter in dims}
    return found.pop() if len(found) == 1 else ()


def _count(letter: str, arrays: Sequence[tuple[str, Any]]) -> int:
    """Returns the number of elements of a dimension, or of its blocks if an array has one per block."""
    letters = letter, letter.upper()
    return min(n for dims, x in arrays for name, n in zip(dims, x.shape) if name in letters)


def gemm_on_shards(
    multiply: Callable[[Gemm, QTensor, QTensor], jax.Array],
    gemm: Gemm,
    a: QTensor,
    b: QTensor,
    *,
    name: str,
) -> jax.Array:
    """Returns ``multiply(gemm, a, b)``; the operands may be split over devices in every dimension.

    Devices exchange codes and scales of the operands. A device that has a part of the contraction
    multiplies its result by the scales and rounds it to the dtype of the result before the results of the
    devices are added up.

    Args:
        multiply: runs a GEMM on one device.
        gemm: what is multiplied.
        a: the left operand, with scales per block.
        b: the right operand, with scales per block.
        name: the scope in which ``multiply`` runs; empty for none.
    """
    letters = iter(string.ascii_lowercase)
    of_a = [next(letters) for _ in a.shape]
    (a_contract, b_contract), (a_batch, b_batch) = gemm.dims
    partners = dict(zip((*b_batch, *b_contract), (*a_batch, *a_contract), strict=True))
    of_b = [of_a[partners[i]] if i in partners else next(letters) for i in range(b.ndim)]
    # A dimension with a partial block is not split.
    partial_ones = {x for q, of in ((a, of_a), (b, of_b)) for x in _partial_dims(q, of)}
    of_out = [of_a[i] for i in (*a_batch, *gemm.lhs(a).free)] + [of_b[i] for i in gemm.rhs(b).free]
    of_a, of_b, of_out = (["-" if x in partial_ones else x for x in of] for of in (of_a, of_b, of_out))
    dims, out_dims = ("".join(of_a), "".join(of_b)), "".join(of_out)

    def multiply_part(a_codes: Any, b_codes: Any, a_scale: Any, b_scale: Any) -> jax.Array:
        left = dataclasses.replace(a, codes=a_codes, scale=a_scale)
        right = dataclasses.replace(b, codes=b_codes, scale=b_scale)
        return multiply(gemm, left, right)

    summed = "".join(x for x in of_a if x not in of_out)
    order = (summed + out_dims).replace("-", "")
    operands = *dims, _of_scale(a, dims[0]), _of_scale(b, dims[1])
    run = on_shards(multiply_part, operands, out_dims, order=order, num_deciding=2, name=name)
    return run(a.codes, b.codes, a.scale, b.scale)


def _partial_dims(x: QTensor, letters: Sequence[str]) -> list[str]:
    """Returns the letters of the dimensions whose last block is partial."""
    return [one for one, size, width in zip(letters, x.shape, x.block) if size % width]


def quantize_on_shards(
    quantize: Callable[[jax.Array], tuple[QTensor, QTensor]], x: jax.Array, *, name: str
) -> tuple[QTensor, QTensor]:
    """Returns ``quantize(x)``; the tensor may be split over devices at any block boundary.

    Args:
        quantize: quantizes a tensor in blocks, for each of the two GEMMs that it enters.
        x: the tensor.
        name: the scope in which ``quantize`` runs; empty for none.
    """
    pair = jax.eval_shape(quantize, x)
    letters = string.ascii_lowercase[: x.ndim]
    partial_ones = {one for q in pair for one in _partial_dims(q, letters)}
    dims = "".join("-" if one in partial_ones else one for one in letters)
    results = tuple((dims, _of_scale(q, dims)) for q in pair)

    def quantize_part(x: jax.Array) -> Any:
        return tuple((q.codes, q.scale) for q in quantize(x))

    run = on_shards(quantize_part, [dims], results, order=dims.replace("-", ""), num_deciding=1, name=name)
    first, second = (
        dataclasses.replace(q, codes=codes, scale=scale) for q, (codes, scale) in zip(pair, run(x))
    )
    return first, second


def ragged_on_shards(
    multiply: Callable[[QTensor, QTensor, jax.Array], jax.Array],
    dims: tuple[str, str, str],
    lhs: QTensor,
    rhs: QTensor,
    group_sizes: jax.Array,
    *,
    name: str = "",
) -> jax.Array:
    """Returns ``multiply(lhs, rhs, group_sizes)``; all dimensions except the experts may be split.

    Each device calls ``multiply`` with its rows, and with the number of its rows in each group.

    Args:
        multiply: a ragged dot, called as ``(lhs, rhs, group_sizes)``.
        dims: the descriptions of the codes of ``lhs``, of the codes of ``rhs``, and of the result, see
            ``on_shards``. ``m`` stands for the rows in groups, and ``e`` for the experts.
        lhs: the left operand.
        rhs: the right operand.
        group_sizes: number of rows of each group.
        name: the scope in which ``multiply`` runs; empty for none.
    """
    partial_ones = {x for q, of in zip((lhs, rhs), dims) for x in _partial_dims(q, of)}
    row_axis = dims[0].index("m")
    of_lhs, of_rhs, of_out = ("".join("-" if x in partial_ones else x for x in of) for of in dims)

    def kernel(codes: Any, other_codes: Any, scale: Any, other_scale: Any, sizes: Any) -> jax.Array:
        left = dataclasses.replace(lhs, codes=codes, scale=scale)
        right = dataclasses.replace(rhs, codes=other_codes, scale=other_scale)
        return multiply(left, right, sizes)

    def adapt(axes: dict[str, Axes], *args: jax.Array) -> Sequence[jax.Array]:
        *parts, sizes = args
        if "m" in axes:
            sizes = _sizes_of_part(sizes, parts[0].shape[row_axis], axes["m"])
        return *parts, sizes

    order = "".join(dict.fromkeys((of_lhs + of_rhs + of_out).replace("e", "").replace("-", "")))
    run = on_shards(
        kernel,
        (of_lhs, of_rhs, _of_scale(lhs, of_lhs), _of_scale(rhs, of_rhs), "e"),
        of_out,
        order=order,
        num_deciding=2,
        name=name,
        adapt=adapt,
    )
    return run(lhs.codes, rhs.codes, lhs.scale, rhs.scale, group_sizes)


def _of_scale(x: QTensor, of_codes: str) -> str:
    """Returns the description of the scales of ``x``, see ``on_shards``, given that of the codes.

    With scales per block each dimension of blocks gets a letter, also if its size is 1. This keeps devices
    from splitting a single block.
    """
    if x.scale.ndim != len(of_codes):
        return "-" * x.scale.ndim
    if x.block:
        return "".join(one.upper() if width > 1 else one for one, width in zip(of_codes, x.block))
    sizes = zip(of_codes, x.scale.shape, x.shape)
    return "".join(one if size == whole else "-" for one, size, whole in sizes)


def _sizes_of_part(group_sizes: jax.Array, rows: int, axes: Axes) -> jax.Array:
    """Returns how many rows of each group lie on this device.

    Args:
        group_sizes: number of rows of each group, over all devices.
        rows: number of rows on each device.
        axes: the mesh axes over which the rows are split.
    """
    ends = ends_of_groups(group_sizes, rows * lax.axis_size(axes))
    ends = jnp.clip(ends - lax.axis_index(axes) * rows, 0, rows)
    return jnp.diff(ends, prepend=np.int32(0))


def _axes_of(x: Any) -> list[Axes]:
    """Returns, for each dimension of ``x``, the mesh axes over which it is split."""
    spec = [*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec))]
    return [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]

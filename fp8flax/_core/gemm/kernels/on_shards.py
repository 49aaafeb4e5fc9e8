"""Runs GPU kernels on arrays that XLA splits over several devices: each device computes its part.

XLA cannot split a GPU kernel, and would gather its operands. ``custom_partitioning`` gets a rule that says
which dimensions of operands and result correspond. It then runs the kernel on each device's part.
"""

from __future__ import annotations

import itertools
import math
import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8flax._core.gemm.kernels.groups import ends_of_groups
from fp8flax._core.qtensor import QTensor, View

if TYPE_CHECKING:
    from fp8flax._core.gemm.request import Gemm

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
    lhs: QTensor,
    rhs: QTensor,
    *,
    name: str = "",
) -> jax.Array:
    """Returns ``multiply(gemm, lhs, rhs)``; the operands may be split over devices in every dimension.

    Devices exchange codes and scales of the operands. A device that has a part of the contraction
    multiplies its result by the scales and rounds it to the dtype of the result before the results of the
    devices are added up.

    Args:
        multiply: runs a GEMM on one device.
        gemm: what is multiplied.
        lhs: the left operand.
        rhs: the right operand. Both operands have scales per block (``BlockQuantizer``), or neither has.
        name: the scope in which ``multiply`` runs; empty for none.
    """
    if lhs.quantizer.scales_along_contraction:
        return _block_gemm_on_shards(multiply, gemm, lhs, rhs, name=name)
    (of_lhs, of_rhs, of_out), quantizers = _dims_of(gemm), (lhs.quantizer, rhs.quantizer)

    def multiply_part(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> jax.Array:
        left, right = map(QTensor, (lhs, rhs), (lhs_scale, rhs_scale), quantizers)
        return multiply(gemm.of_parts(lhs.shape, rhs.shape), left, right)

    summed = "".join(letter for letter in of_lhs if letter not in of_out)
    operands = of_lhs, of_rhs, _of_scale(lhs, of_lhs), _of_scale(rhs, of_rhs)
    run = on_shards(multiply_part, operands, of_out, order=summed + of_out, num_deciding=2, name=name)
    return run(lhs.codes, rhs.codes, lhs.scale, rhs.scale)


class _Exchanged(NamedTuple):
    """An operand with scales per block, in the form in which devices exchange it."""

    spread: QTensor
    """The operand after ``BlockQuantizer.spread``."""
    dims: str
    """The description of the codes, see ``on_shards``."""
    rank_of_rows: int
    """How many dimensions the rows of a matrix are flattened from; the columns are those behind them."""
    is_swapped: bool
    """Whether the transpose is exchanged, so that each device must transpose what it receives."""

    def matrices(self, codes: jax.Array, scale: jax.Array) -> QTensor:
        """Returns the operand of ``multiply``, from the parts of codes and scales that a device has."""
        flat_codes, flat_scale = (_as_matrices(x, self.rank_of_rows) for x in (codes, scale))
        return _swapped(QTensor(flat_codes, flat_scale, self.spread.quantizer), self.is_swapped)


def _exchanged(x: QTensor, view: View, batch: str, rows: str, columns: str, is_swapped: bool) -> _Exchanged:
    """Returns an operand in the form in which devices exchange it.

    Args:
        x: the operand, with codes ``(batch, rows, columns)``.
        view: the view of the operand; its dimensions are those that rows and columns are spread to.
        batch: the letter of the batch.
        rows: a letter for each dimension of the rows.
        columns: a letter for each dimension of the columns.
        is_swapped: see ``_Exchanged``.
    """
    first, second = (columns, rows) if is_swapped else (rows, columns)
    view = view._replace(contract=view.free) if is_swapped else view
    spread = x.quantizer.spread(_swapped(x, is_swapped), view)
    return _Exchanged(spread, batch + first + second, len(first), is_swapped)


def _block_gemm_on_shards(
    multiply: Callable[[Gemm, QTensor, QTensor], jax.Array],
    gemm: Gemm,
    lhs: QTensor,
    rhs: QTensor,
    *,
    name: str,
) -> jax.Array:
    """Returns ``multiply(gemm, lhs, rhs)`` of operands with scales per block, see ``gemm_on_shards``.

    The dimensions that rows and columns flatten are split separately, see ``BlockQuantizer.spread``.
    """
    operands, views = (lhs, rhs), (gemm.lhs, gemm.rhs)
    are_swapped = [_is_out_of_order(x, view) for x, view in zip(operands, views)]
    inner = gemm.of_matrices(lhs.codes.shape, rhs.codes.shape)
    ranks = [x.quantizer.ranks(view) for x, view in zip(operands, views)]
    if ranks[0][1] != ranks[1][1]:  # only one of the operands can have separate columns
        views, ranks = (inner.lhs, inner.rhs), [(1, 1), (1, 1)]
    letters = iter(string.ascii_lowercase)
    batch, columns, *rows = (_next(letters, n) for n in (1, ranks[0][1], ranks[0][0], ranks[1][0]))
    left, right = (
        _exchanged(x, view, batch, of_rows, columns, is_swapped)
        for x, view, of_rows, is_swapped in zip(operands, views, rows, are_swapped)
    )
    out_dims = batch + rows[0] + rows[1]

    def multiply_part(*parts: jax.Array) -> jax.Array:
        lhs_codes, rhs_codes, lhs_scale, rhs_scale = parts
        lhs, rhs = left.matrices(lhs_codes, lhs_scale), right.matrices(rhs_codes, rhs_scale)
        out = multiply(inner.of_parts(lhs.codes.shape, rhs.codes.shape), lhs, rhs)
        sizes = dict(zip(left.dims + right.dims, lhs_codes.shape + rhs_codes.shape))
        return out.reshape([sizes[letter] for letter in out_dims])

    run = on_shards(
        multiply_part,
        (left.dims, right.dims, *(_of_scale(x.spread, x.dims) for x in (left, right))),
        out_dims,
        order=columns + out_dims,
        num_deciding=2,
        name=name,
    )
    out = run(left.spread.codes, right.spread.codes, left.spread.scale, right.spread.scale)
    return gemm.unpadded(_as_matrices(out, len(rows[0])))


def _next(letters: Iterator[str], count: int) -> str:
    """Returns the next ``count`` letters."""
    return "".join(itertools.islice(letters, count))


def _as_matrices(x: jax.Array, rank_of_rows: int) -> jax.Array:
    """Flattens ``(batch, *rows, *columns)`` to matrices; the rows have ``rank_of_rows`` dimensions."""
    first = 1 + rank_of_rows
    return x.reshape(x.shape[0], math.prod(x.shape[1:first]), math.prod(x.shape[first:]))


def _is_out_of_order(x: QTensor, view: View) -> bool:
    """Returns whether devices exchange the transpose of ``x``, and each transposes what it receives.

    Codes in square blocks serve both GEMMs of a tensor, transposed in one of them. If both GEMMs take them
    in the order of the tensor's dimensions, XLA gathers them once.
    """
    is_transposed = sorted(view.order) == [*view.batch, *view.contract, *view.free]
    return is_transposed and x.quantizer.serves(x.quantizer, view)


def _swapped(x: QTensor, is_swapped: bool) -> QTensor:
    """Returns ``x`` with rows and columns swapped if ``is_swapped``, and unchanged otherwise."""
    return x.quantizer.transpose(x) if is_swapped else x


def _dims_of(gemm: Gemm) -> tuple[str, str, str]:
    """Returns the descriptions of both operands and of the result, see ``on_shards``."""
    letters = iter(string.ascii_lowercase)
    lhs = dict(zip(range(len(gemm.lhs.shape)), letters))
    partners = dict(
        zip((*gemm.rhs.batch, *gemm.rhs.contract), (*gemm.lhs.batch, *gemm.lhs.contract), strict=True)
    )
    rhs = {i: lhs[partners[i]] if i in partners else next(letters) for i in range(len(gemm.rhs.shape))}
    out = [lhs[i] for i in (*gemm.lhs.batch, *gemm.lhs.free)] + [rhs[i] for i in gemm.rhs.free]
    return "".join(lhs.values()), "".join(rhs.values()), "".join(out)


def quantize_on_shards(
    kernel: Callable[..., Any],
    *,
    block: tuple[int, int],
    ranks: tuple[int, int],
    are_whole: tuple[bool, bool],
    name: str,
) -> Callable[..., Any]:
    """Returns ``kernel`` for a stack of matrices that may be split over devices at any block boundary.

    Args:
        kernel: quantizes a stack of matrices ``(batch, M, N)``, as ``block_quantize``.
        block: rows and columns of a block; rows are 1 or equal to columns.
        ranks: the numbers of dimensions that M and N are flattened from. The operand and the results have
            these dimensions, and each of them may be split.
        are_whole: whether M and N are multiples of the columns of a block. If one is not, each device gets
            all of this dimension, and the codes are padded to whole blocks.
        name: the scope in which the kernel runs; empty for none.
    """
    letters = iter(string.ascii_lowercase)
    batch, rows, columns = (_next(letters, n) for n in (1, *ranks))
    whole = [dims for dims, is_whole in zip((rows, columns), are_whole) if is_whole]
    is_square = block[0] > 1

    def pair_dims(rows: str, columns: str) -> tuple[str, str]:
        """Returns the descriptions of the codes and of the scales of a matrix."""
        codes, blocks = batch, batch
        for dims, has_blocks in ((rows, is_square), (columns, True)):
            if has_blocks and dims not in whole:  # padded
                codes, blocks = codes + "-" * len(dims), blocks + "-" * len(dims)
            elif has_blocks:
                codes, blocks = codes + dims, blocks + dims[:-1] + dims[-1].upper()
            else:
                codes, blocks = codes + dims, blocks + dims
        return codes, blocks

    def quantize_part(x: jax.Array) -> Any:
        behind = 1 + len(rows)
        rows_of_x, columns_of_x = x.shape[1 : behind - 1], x.shape[behind:-1]

        def spread(matrices: jax.Array, outer_rows: Any, outer_columns: Any) -> jax.Array:
            """Gives rows and columns their dimensions back.

            The last dimension of each may be padded. It is not given, but follows from the others.
            """
            size, num_rows, num_columns = matrices.shape
            last = num_rows // math.prod(outer_rows), num_columns // math.prod(outer_columns)
            return matrices.reshape(size, *outer_rows, last[0], *outer_columns, last[1])

        one, other = kernel(_as_matrices(x, len(rows)))
        return (
            tuple(spread(a, rows_of_x, columns_of_x) for a in one),
            tuple(spread(a, columns_of_x, rows_of_x) for a in other),
        )

    # Codes and scales of each matrix, then those of its transpose.
    results = pair_dims(rows, columns), pair_dims(columns, rows)
    return on_shards(
        quantize_part,
        [batch + rows + columns],
        results,
        order=batch + "".join(whole),
        num_deciding=1,
        name=name,
    )


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
            ``on_shards``. ``m`` stands for the rows in groups, ``e`` for the experts, and ``-`` for a
            dimension of size 1.
        lhs: the left operand.
        rhs: the right operand.
        group_sizes: number of rows of each group.
        name: the scope in which ``multiply`` runs; empty for none.
    """
    quantizers, row_axis = (lhs.quantizer, rhs.quantizer), dims[0].index("m")
    of_scales = (_of_scale(x, of) for x, of in zip((lhs, rhs), dims))

    def kernel(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any, sizes: Any) -> jax.Array:
        left, right = map(QTensor, (lhs, rhs), (lhs_scale, rhs_scale), quantizers)
        return multiply(left, right, sizes)

    def adapt(axes: dict[str, Axes], *args: jax.Array) -> Sequence[jax.Array]:
        *parts, sizes = args
        if "m" in axes:
            sizes = _sizes_of_part(sizes, parts[0].shape[row_axis], axes["m"])
        return *parts, sizes

    order = "".join(dict.fromkeys("".join(dims).replace("e", "").replace("-", "")))
    run = on_shards(
        kernel,
        (dims[0], dims[1], *of_scales, "e"),
        dims[2],
        order=order,
        num_deciding=2,
        name=name,
        adapt=adapt,
    )
    return run(lhs.codes, rhs.codes, lhs.scale, rhs.scale, group_sizes)


def _of_scale(x: QTensor, of_codes: str) -> str:
    """Returns the description of the scales of ``x``, see ``on_shards``.

    With scales per block each dimension of blocks gets a letter, also if its size is 1. This keeps devices
    from splitting a single block.

    Args:
        x: the operand. The description of a scalar scale is the empty string.
        of_codes: the description of the codes.
    """
    scale = x.scale
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
    ends = ends_of_groups(group_sizes, rows * lax.axis_size(axes))
    ends = jnp.clip(ends - lax.axis_index(axes) * rows, 0, rows)
    return jnp.diff(ends, prepend=np.int32(0))


def _axes_of(x: Any) -> list[Axes]:
    """Returns, for each dimension of ``x``, the mesh axes over which it is split."""
    spec = [*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec))]
    return [() if names is None else (names,) if isinstance(names, str) else tuple(names) for names in spec]

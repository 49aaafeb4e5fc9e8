"""Our kernels for scales per block on arrays that XLA splits over devices: each computes its part.

XLA cannot split a kernel; it would gather what the kernel takes. ``custom_partitioning`` is told instead
which dimensions belong together, and computes the kernel of each part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8flax._core.kernels.block_gemm import BLOCK
from fp8flax._core.names import BLOCK_QUANTIZE

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

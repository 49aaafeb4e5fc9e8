"""Runs GPU kernels on arrays that XLA splits over several devices: each device computes its part.

XLA cannot split a GPU kernel, and would gather its operands. ``custom_partitioning`` of JAX gets a rule
that says which dimensions of operands and result correspond, and then runs the kernel on the parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8flax._compat.choice_at_lowering import choose_at_lowering
from fp8flax._core.gemm.gpus import compute_capability
from fp8flax._core.qtensor import QTensor
from fp8flax._core.types import PyTree


class NamedDims(NamedTuple):
    """Names of the dimensions of an array: devices split dimensions of the same name alike."""

    names: tuple[Hashable, ...]
    """A name for each dimension; None for a dimension that is not split."""
    decides: bool = True
    """Whether the way in which XLA has split this array decides how devices split the dimensions."""


Function: TypeAlias = Callable[..., PyTree]
Axes: TypeAlias = tuple[str, ...]
"""The axes of a mesh over which a dimension is split; ``()`` if it is not split."""
Named: TypeAlias = Sequence[tuple[NamedDims, jax.ShapeDtypeStruct]]
"""Arrays with the names of their dimensions."""


def on_shards(
    kernel: Function, operands: Sequence[NamedDims], results: Sequence[NamedDims], scope: str = ""
) -> Function:
    """Returns ``kernel`` for tensors that devices may split: each device computes its part.

    The names of dimensions say what corresponds, as letters do in einsum::

        rows, kernel = NamedDims(("m", "k")), NamedDims(("k", "n"))
        on_shards(multiply, [rows, kernel], [NamedDims(("m", "n"))])(a, b)

    * Devices that split ``m`` or ``n`` compute parts of the result.
    * Devices that split ``k``, which the result lacks, sum their results, in the dtype of the results.
    * ``NamedDims((None, "n"))``: no device splits the first dimension, such as the experts of kernels.
    * ``NamedDims(("m",), decides=False)``: the array is split as other arrays split ``m``, however XLA has
      split it: the index of each row, or the scales of a ``QTensor`` (``on_shards`` names them itself).

    Devices split a dimension between blocks. They do not split one that ends in a partial block.

    Args:
        kernel: a function of arrays and of ``QTensor``.
        operands: the names of each operand, or of the codes of a ``QTensor``.
        results: the names of the result, or of each result.
        scope: the scope in which the kernel runs, by which an audit recognizes the kernel; empty for none.
    """
    kernel = jax.jit(kernel, inline=True)  # traced once for eval_shape and custom_partitioning

    def run(*args: PyTree) -> PyTree:
        made = jax.eval_shape(kernel, *args)
        of_results = jax.tree.leaves(made, is_leaf=lambda x: isinstance(x, QTensor))
        tensors = [*zip(operands, args, strict=True), *zip(results, of_results, strict=True)]
        partial_blocks = {
            name
            for (names, _), x in tensors
            if isinstance(x, QTensor)
            for name, size, width in zip(names, x.shape, x.block)
            if size % width
        }
        dims = [one for named, x in tensors for one in _dims_of_arrays(x, named, partial_blocks)]
        arrays, treedef = jax.tree.flatten(args)

        def kernel_of_arrays(*arrays: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(kernel(*treedef.unflatten(arrays)))

        split = _split(kernel_of_arrays, dims[: len(arrays)], dims[len(arrays) :])
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            made_arrays = split(*arrays)
        return jax.tree.unflatten(jax.tree.structure(made), made_arrays)

    return run


def in_parts_on_gpus(f: Function, operands: Sequence[NamedDims], results: Sequence[NamedDims]) -> Function:
    """Returns ``f``, plain JAX for arrays; if XLA splits a program for GPUs, ``f`` runs ``on_shards``.

    XLA alone could gather the arrays, and transpose wide tensors. Under ``jax.vmap`` the result is
    ``jax.vmap`` of ``f``.
    """
    if not compute_capability():
        return f

    @custom_vmap
    def run(*args: jax.Array) -> PyTree:
        in_parts = on_shards(f, operands, results)
        return lax.platform_dependent(*args, cuda=partial(choose_at_lowering, f, in_parts, f), default=f)

    @run.def_vmap
    def _(size: int, is_batched: Sequence[bool], *args: jax.Array) -> tuple[PyTree, PyTree]:
        made = jax.vmap(f, [0 if has_batch else None for has_batch in is_batched])(*args)
        return made, jax.tree.map(lambda _: True, made)

    return run


def _dims_of_arrays(x: QTensor | jax.Array, dims: NamedDims, whole: Iterable[Hashable]) -> list[NamedDims]:
    """Returns the names of each array of a tensor; no device splits the names in ``whole``.

    Codes ``(m, k)`` of shape ``(256, 512)`` with blocks ``(1, 128)`` have scales ``(m, k)`` of shape
    ``(256, 4)``. Each dimension of blocks has its name, also if there is a single block, which devices then
    do not split. Other scales have a name only where their size is that of the codes.
    """
    names = tuple(None if name in whole else name for name in dims.names)
    if not isinstance(x, QTensor):
        return [NamedDims(names, dims.decides)]
    sizes = zip(names, x.scale.shape, x.shape)
    of_scale = tuple(name if x.block or n == size else None for name, n, size in sizes)
    return [NamedDims(names), NamedDims(of_scale, decides=False)]


def _split(kernel: Function, operands: list[NamedDims], results: list[NamedDims]) -> Function:
    """Returns ``kernel``, a function of arrays with these names, in ``custom_partitioning``.

    First XLA asks for the rule, by which it chooses a sharding for each array. Then it calls ``partition``
    with these shardings, which may change them.
    """
    names = list(
        dict.fromkeys(name for dims in (*operands, *results) for name in dims.names if name is not None)
    )
    # The results lack the dimensions that are contracted: the devices add up their partial results.
    summed = [name for name in names if not any(name in dims.names for dims in results)]

    def rule(mesh: Mesh, operand_types: Any, result_types: Any) -> tuple[str, dict[str, tuple[str, ...]]]:
        """Returns the rule by which XLA's partitioner (Shardy) propagates shardings.

        The rule of ``(m, k), (k, n) -> (m, n)`` is ``d0 d1, d1 d2 -> d0 d2``, with a factor for each name.
        A factor is as large as the smallest of its dimensions, the number of blocks. If that is no multiple
        of the number of devices, Shardy could split it unevenly. Then the dimensions of blocks have factors
        of their own, as those without a name have, and ``partition`` splits them alike. For example, for 2
        devices, codes ``(m, k)`` with ``(3, 4)`` blocks, their scales ``(m, k)`` and a result ``(m, None)``
        have the rule ``d0 d1, u2 d1 -> d0 u5``: ``u2`` for 3 scales, ``u5`` for no name.
        """
        arrays = [*zip((*operands, *results), (*operand_types, *result_types))]
        factors: list[str] = []

        def factor(name: Hashable, decides: bool) -> str:
            is_apart = name is None or not (decides or _count(name, arrays) % mesh.size == 0)
            factors.append(f"u{len(factors)}" if is_apart else f"d{names.index(name)}")
            return factors[-1]

        texts = [" ".join(factor(name, dims.decides) for name in dims.names) for dims, _ in arrays]
        text = f"{', '.join(texts[: len(operands)])} -> {', '.join(texts[len(operands) :])}"
        of_sums = (f"d{names.index(name)}" for name in summed)
        return text, {"reduction_factors": tuple(x for x in of_sums if x in factors)}

    def partition(mesh: Mesh, args: Any, outs: Any) -> tuple[Mesh, Callable[..., Any], Any, Any]:
        """Returns what each device computes, and the shardings of results and operands."""
        axes_of = _axes_of_names(mesh, names, summed, [*zip(operands, args)], [*zip(results, outs)])
        summed_axes = tuple(axis for name in summed for axis in axes_of.get(name, ()))

        def compute(*args: jax.Array) -> list[jax.Array]:
            out = kernel(*args)
            return lax.psum(out, summed_axes) if summed_axes else out

        def sharding(dims: NamedDims) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*map(axes_of.get, dims.names)))

        return mesh, compute, [*map(sharding, results)], tuple(map(sharding, operands))

    split = custom_partitioning(kernel)
    split.def_partition(partition, sharding_rule=rule)
    return split


def _axes_of_names(
    mesh: Mesh, names: list[Hashable], summed: list[Hashable], operands: Named, results: Named
) -> dict[Hashable, Axes]:
    """Returns the mesh axes over which devices split each name that they split.

    A mesh axis splits a single dimension. If several could use it, the first of this list gets it: a summed
    dimension; one that operands and results split alike; one that operands split; one that results split.

    For example, XLA has split ``(m, k)`` over the axes ``("x", "y")``, ``(k, n)`` over ``("y", "x")``, and
    the result ``(m, n)`` over ``("x", None)``. Then ``k`` gets ``y``, ``m`` gets ``x``, and ``n`` is whole.
    """
    of_operands, of_results = ({x: _agreed(x, arrays) for x in names} for arrays in (operands, results))

    def rank(name: Hashable) -> tuple[bool, ...]:
        return name not in summed, of_operands[name] != of_results[name], not of_operands[name]

    axes_of: dict[Hashable, Axes] = {}
    for name in sorted(names, key=rank):
        axes = of_operands[name] or of_results[name]
        is_used = any(set(axes) & set(others) for others in axes_of.values())
        num_parts = math.prod(mesh.shape[axis] for axis in axes)
        if axes and not is_used and _count(name, [*operands, *results]) % num_parts == 0:
            axes_of[name] = axes
    return axes_of


def _agreed(name: Hashable, arrays: Named) -> Axes:
    """Returns the mesh axes over which all deciding arrays split a name, or ``()`` if they differ."""
    found = set()
    for (names, decides), x in arrays:
        if decides and name in names:
            axes = dict(enumerate(x.sharding.spec)).get(names.index(name)) or ()
            found.add((axes,) if isinstance(axes, str) else tuple(axes))
    return found.pop() if len(found) == 1 else ()


def _count(name: Hashable, arrays: Named) -> int:
    """Returns the number of elements of a dimension, or of its blocks if an array has one per block."""
    return min(n for (names, _), x in arrays for one, n in zip(names, x.shape) if one == name)

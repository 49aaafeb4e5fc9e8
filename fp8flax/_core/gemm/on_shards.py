"""Runs GPU kernels on arrays that XLA splits over several devices: each device computes its part.

XLA cannot split a GPU kernel, and would gather its operands. ``custom_partitioning`` gets a rule that says
which dimensions of operands and result correspond. It then runs the kernel on each device's part.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8flax._compat.choice_at_lowering import unless_partitioned
from fp8flax._core.gemm.gpus import compute_capability
from fp8flax._core.qtensor import QTensor

Axes = tuple[str, ...]


def on_shards(
    kernel: Callable[..., Any], operands: Sequence[str], results: str | tuple[str, ...], name: str = ""
) -> Callable[..., Any]:
    """Returns ``kernel`` for tensors that devices may split: each device computes its part.

    Letters name the dimensions, as in einsum: ``on_shards(f, ("mk", "nk"), "mn")(a, b)``. Devices that
    split a dimension that is not in the result, k here, sum their results, in the dtype of the results. A
    mesh axis splits a single dimension. If several could use it, the first of this list gets it: a summed
    dimension; one that operands and results split alike; one that operands split; one that results split.
    Devices split a dimension between blocks. They do not split one that ends in a partial block.

    Args:
        kernel: a function of arrays and of ``QTensor``.
        operands: for each operand, a letter for each dimension (of the codes of a ``QTensor``), or ``-``
            for one that is not split. Operands that split a dimension in different ways do not decide how
            it is split. Nor does a dimension with an upper case letter, which is split as the lower case
            one.
        results: the letters of the result, or of each result.
        name: the scope in which the kernel runs, by which an audit recognizes the kernel; empty for none.
    """
    kernel = jax.jit(kernel, inline=True)  # traced once for eval_shape and custom_partitioning

    def run(*args: Any) -> Any:
        made = jax.eval_shape(kernel, *args)
        of_results = [(results, made)] if isinstance(results, str) else [*zip(results, made)]
        tensors = [*zip(operands, args), *of_results]
        whole = {  # dimensions that end in a partial block
            one
            for letters, x in tensors
            if isinstance(x, QTensor)
            for one, size, width in zip(letters, x.shape, x.block)
            if size % width
        }
        dims = [one for letters, x in tensors for one in _dims_of_leaves(x, letters, whole)]
        leaves, treedef = jax.tree.flatten(args)

        def kernel_of_leaves(*leaves: Any) -> list[Any]:
            return jax.tree.leaves(kernel(*treedef.unflatten(leaves)))

        split = _split(kernel_of_leaves, dims[: len(leaves)], dims[len(leaves) :])
        with jax.named_scope(name) if name else contextlib.nullcontext():
            made_leaves = split(*leaves)
        return jax.tree.unflatten(jax.tree.structure(made), made_leaves)

    return run


def on_devices(f: Callable[..., Any], operands: Sequence[str], results: Any) -> Callable[..., Any]:
    """Returns ``f``, a function of arrays with these letters, so that each GPU computes its part.

    XLA alone could gather the arrays, and transpose wide tensors. Under ``jax.vmap`` it is ``jax.vmap`` of
    ``f``.
    """
    if not compute_capability():
        return f

    @custom_vmap
    def run(*args: jax.Array) -> Any:
        of_parts = on_shards(f, operands[: len(args)], results)
        return lax.platform_dependent(*args, cuda=partial(unless_partitioned, f, of_parts, f), default=f)

    @run.def_vmap
    def _(size: int, is_batched: Any, *args: jax.Array) -> Any:
        made = jax.vmap(f, [0 if has_batch else None for has_batch in is_batched])(*args)
        return made, jax.tree.map(lambda _: True, made)

    return run


def _dims_of_leaves(x: Any, letters: str, whole: Iterable[str]) -> list[str]:
    """Returns the letters of each array of a tensor; the letters in ``whole`` become ``-``.

    With scales per block each dimension of blocks has a letter, also if its size is 1. This keeps devices
    from splitting a single block.
    """
    letters = "".join("-" if one.lower() in whole else one for one in letters)
    if not isinstance(x, QTensor):
        return [letters]
    sizes = zip(letters, x.scale.shape, x.shape)
    return [letters, "".join(one.upper() if x.block or n == size else "-" for one, n, size in sizes)]


def _split(kernel: Callable[..., Any], operands: list[str], results: list[str]) -> Callable[..., Any]:
    """Returns ``kernel``, a function of arrays with these letters, in ``custom_partitioning``."""
    letters = dict.fromkeys(one for one in "".join([*operands, *results]).lower() if one != "-")
    # The results lack the dimensions that are contracted: the devices add up their partial results.
    summed = [letter for letter in letters if letter not in "".join(results).lower()]

    def partition(mesh: Any, args: Any, outs: Any) -> Any:
        """Returns what each device computes, and the shardings of results and operands."""
        given, made = [*zip(operands, args)], [*zip(results, outs)]
        of_operands, of_results = ({x: _agreed(x, arrays) for x in letters} for arrays in (given, made))

        def rank(x: str) -> tuple[bool, ...]:
            return x not in summed, of_operands[x] != of_results[x], not of_operands[x]

        axes_of: dict[str, Axes] = {}
        for letter in sorted(letters, key=rank):
            axes = of_operands[letter] or of_results[letter]
            is_used = any(set(axes) & set(others) for others in axes_of.values())
            num_parts = math.prod(mesh.shape[axis] for axis in axes)
            if axes and not is_used and _count(letter, [*given, *made]) % num_parts == 0:
                axes_of[letter] = axes
        summed_axes = tuple(axis for letter in summed for axis in axes_of.get(letter, ()))

        def compute(*args: jax.Array) -> Any:
            out = kernel(*args)
            return lax.psum(out, summed_axes) if summed_axes else out

        def sharding(dims: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(axes_of.get(letter) for letter in dims.lower())))

        return mesh, compute, [*map(sharding, results)], tuple(map(sharding, operands))

    def rule(mesh: Any, operand_types: Any, result_types: Any) -> tuple[str, dict[str, Any]]:
        """Returns the rule by which Shardy propagates shardings: one factor for each letter.

        The factor is as large as the smallest of its dimensions, the number of blocks. If that is no
        multiple of the number of devices, the dimensions of blocks have factors of their own, as those
        without a letter have: Shardy could split them unevenly. ``partition`` splits them alike.
        """
        arrays = [*zip((*operands, *results), (*operand_types, *result_types))]
        others = map("u{}".format, itertools.count())

        def factor(one: str, n: int) -> str:
            is_apart = one == "-" or (one.isupper() and _count(one.lower(), arrays) % mesh.size)
            return next(others) if is_apart else one.lower()

        texts = [" ".join(map(factor, dims, x.shape)) for dims, x in arrays]
        text = f"{', '.join(texts[: len(operands)])} -> {', '.join(texts[len(operands) :])}"
        used = {factor for text in texts for factor in text.split()}
        return text, {"reduction_factors": tuple(x for x in summed if x in used)}

    split = custom_partitioning(kernel)
    split.def_partition(partition, sharding_rule=rule)
    return split


def _agreed(letter: str, arrays: Sequence[tuple[str, Any]]) -> Axes:
    """Returns the mesh axes over which all arrays split a dimension, or ``()`` if they do not agree."""
    found = set()
    for dims, x in arrays:
        if letter in dims:
            names = dict(enumerate(x.sharding.spec)).get(dims.index(letter)) or ()
            found.add((names,) if isinstance(names, str) else tuple(names))
    return found.pop() if len(found) == 1 else ()


def _count(letter: str, arrays: Sequence[tuple[str, Any]]) -> int:
    """Returns the number of elements of a dimension, or of its blocks if an array has one per block."""
    return min(n for dims, x in arrays for one, n in zip(dims, x.shape) if one.lower() == letter)

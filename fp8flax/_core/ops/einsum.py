"""Computes a two-operand einsum by one ``dot_general`` that does not swap input and kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp8flax._core.ops.canonical import DimensionNumbers
from fp8flax._core.shapes import Float


class _Steps(NamedTuple):
    """The steps of an einsum: sums over axes of one operand, a ``dot_general``, and a transpose."""

    lhs_summed: tuple[int, ...]
    """The axes of ``lhs`` that neither ``rhs`` nor the result has; they are summed first."""
    rhs_summed: tuple[int, ...]
    """The axes of ``rhs`` that neither ``lhs`` nor the result has; they are summed first."""
    dimension_numbers: DimensionNumbers
    permutation: tuple[int, ...]
    """The transpose of the result of ``dot_general`` that gives the result of the einsum."""


def _steps(eqn: str, lhs: jax.Array, rhs: jax.Array) -> _Steps:
    """Returns the steps of a two-operand einsum: sums, one ``dot_general(lhs, rhs)``, and a transpose."""
    # JAX raises its own errors if the equation does not fit the shapes.
    shapes = (jax.ShapeDtypeStruct(jax.typeof(x).shape, np.float32) for x in (lhs, rhs))
    jax.eval_shape(partial(jnp.einsum, eqn), *shapes)
    inputs, result, _ = opt_einsum.parser.parse_einsum_input((eqn, lhs, rhs))
    lhs_names, rhs_names = inputs.split(",")
    for names in (lhs_names, rhs_names):
        if len(set(names)) != len(names):
            raise ValueError(
                f"The einsum equation {eqn!r} repeats an index within one operand ({names!r}). Take the "
                "diagonal before the FP8 einsum."
            )

    def summed(names: str, other: str) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(names) if n not in other and n not in result)

    lhs_summed, rhs_summed = summed(lhs_names, rhs_names), summed(rhs_names, lhs_names)
    lhs_names = "".join(n for i, n in enumerate(lhs_names) if i not in lhs_summed)
    rhs_names = "".join(n for i, n in enumerate(rhs_names) if i not in rhs_summed)
    shared = [n for n in lhs_names if n in rhs_names]
    batch = [n for n in result if n in shared]
    contract = [n for n in shared if n not in result]
    free = [n for names in (lhs_names, rhs_names) for n in names if n not in shared]

    def axes(wanted: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        lhs, rhs = (tuple(names.index(n) for n in wanted) for names in (lhs_names, rhs_names))
        return lhs, rhs

    permutation = tuple([*batch, *free].index(n) for n in result)
    return _Steps(lhs_summed, rhs_summed, (axes(contract), axes(batch)), permutation)


def einsum_with(
    dot_general: Callable[..., jax.Array],
    eqn: str,
    lhs: Float[jax.Array, "*input"],
    rhs: Float[jax.Array, "*kernel"],
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> Float[jax.Array, "*output"]:
    """Computes a two-operand einsum by one call of ``dot_general(lhs, rhs, …)``, without swapping operands.

    ``jnp.einsum`` swaps the operands if that saves a transpose. A swap would exchange the roles of input
    and kernel.

    Raises:
        ValueError: ``eqn`` does not have two operands, does not fit their shapes, or repeats an index
            within one operand.
        TypeError: an operand is not an array; or an index has a size of 1 in one operand, and a larger size
            in the other.
    """
    steps = _steps(eqn, lhs, rhs)
    lhs = jnp.sum(lhs, axis=steps.lhs_summed) if steps.lhs_summed else lhs
    rhs = jnp.sum(rhs, axis=steps.rhs_summed) if steps.rhs_summed else rhs
    keywords = {} if out_sharding is None else {"out_sharding": _before(out_sharding, steps.permutation)}
    out = dot_general(lhs, rhs, steps.dimension_numbers, precision, preferred_element_type, **keywords)
    return lax.transpose(out, steps.permutation)


def _before(sharding: Any, permutation: tuple[int, ...]) -> Any:
    """Returns the sharding of ``x``, given the sharding of ``lax.transpose(x, permutation)``."""
    is_spec = isinstance(sharding, PartitionSpec)
    spec = sharding if is_spec else sharding.spec
    names = [*spec, *[None] * (len(permutation) - len(spec))]
    of_array = PartitionSpec(*(names[permutation.index(i)] for i in range(len(permutation))))
    return of_array if is_spec else NamedSharding(sharding.mesh, of_array)

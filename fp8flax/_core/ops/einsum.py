"""Computes a two-operand einsum by one ``dot_general`` that does not swap input and kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
    try:
        inputs, result, _ = opt_einsum.parser.parse_einsum_input((eqn, lhs, rhs))
        lhs_names, rhs_names = inputs.split(",")
    except ValueError as error:
        raise ValueError(
            f"The einsum equation {eqn!r} does not fit operands of shapes {lhs.shape} and {rhs.shape}: "
            f"{error}"
        ) from error
    for names, operand in ((lhs_names, lhs), (rhs_names, rhs)):
        if len(names) != operand.ndim:
            raise ValueError(
                f"The einsum equation {eqn!r} names {len(names)} indices ({names!r}) for an operand of "
                f"shape {operand.shape}."
            )
        if len(set(names)) != len(names):
            raise ValueError(
                f"The einsum equation {eqn!r} repeats an index within one operand ({names!r}). Take the "
                "diagonal before the FP8 einsum."
            )

    sizes = dict(zip(lhs_names, lhs.shape))
    for name, size in zip(rhs_names, rhs.shape):
        if sizes.get(name, size) != size:
            raise ValueError(
                f"The einsum equation {eqn!r} requires one size for the index {name!r}; got {sizes[name]} "
                f"in lhs of shape {lhs.shape} and {size} in rhs of shape {rhs.shape}. A size of 1 is not "
                "broadcast: use jnp.broadcast_to before the FP8 einsum."
            )

    def summed(names: str, other: str) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(names) if n not in other and n not in result)

    lhs_summed, rhs_summed = summed(lhs_names, rhs_names), summed(rhs_names, lhs_names)
    lhs_names = "".join(n for i, n in enumerate(lhs_names) if i not in lhs_summed)
    rhs_names = "".join(n for i, n in enumerate(rhs_names) if i not in rhs_summed)
    shared = [n for n in lhs_names if n in rhs_names]
    batch = [n for n in result if n in shared]
    contract = [n for n in shared if n not in result]
    names = [
        *batch,
        *(n for n in lhs_names if n not in shared),
        *(n for n in rhs_names if n not in shared),
    ]

    def axes(of: str, wanted: list[str]) -> tuple[int, ...]:
        return tuple(of.index(n) for n in wanted)

    return _Steps(
        lhs_summed,
        rhs_summed,
        (
            (axes(lhs_names, contract), axes(rhs_names, contract)),
            (axes(lhs_names, batch), axes(rhs_names, batch)),
        ),
        tuple(names.index(n) for n in result),
    )


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
        TypeError: an operand is not an array, but for instance a list, which ``jnp.einsum`` refuses too.
        ValueError: ``eqn`` does not have two operands, does not fit their shapes, or repeats an index
            within one operand; or an index has a size of 1 in one operand, and a larger size in the other.
    """
    for operand in (lhs, rhs):
        if not hasattr(operand, "ndim"):
            raise TypeError(
                "The operands of an FP8 einsum must be arrays; got a value of type "
                f"{type(operand).__name__}. Pass jnp.asarray(…)."
            )
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

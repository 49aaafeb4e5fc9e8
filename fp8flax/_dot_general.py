"""The FP8 matmul as a pure function of its operands and their scaling states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import opt_einsum
from jax import lax

from fp8flax._qdq import DelayedConfig, delayed_in_qdq, delayed_out_qdq
from fp8flax._quantize import as_float_array
from fp8flax._recipes import DelayedScaling
from fp8flax._state import ScalingState

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class DotStates(NamedTuple):
    """The scaling states of one matmul."""

    input: ScalingState
    kernel: ScalingState
    output_grad: ScalingState


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def dot_general_with_precision(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """``lax.dot_general`` with fast accumulation forward and exact accumulation in the two gradients.

    Args:
        lhs: left operand, any shape.
        rhs: right operand, any shape.
        dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
        precision: None for ``DEFAULT`` forward and ``HIGHEST`` backward; else used for all three GEMMs.
        preferred_element_type: dtype of the result, or None for that of the operands.

    Returns:
        The product, shaped like that of ``lax.dot_general``.

    Raises:
        TypeError: the operands do not fit the dimension numbers.

    Example:
        >>> import jax.numpy as jnp, fp8flax as fp8
        >>> fp8.dot_general_with_precision(jnp.ones((2, 3)), jnp.ones((3,)), (((1,), (0,)), ((), ())))
        Array([3., 3.], dtype=float32)

    Source: ``flax.linen.fp8_ops.dot_general_with_precision``, which ignores the last two arguments.
    """
    precision = lax.Precision.DEFAULT if precision is None else precision
    return lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type=preferred_element_type
    )


@dot_general_with_precision.defjvp
def _dot_general_with_precision_jvp(
    dimension_numbers: DimensionNumbers,
    precision: Any,
    preferred_element_type: Any,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    (lhs, rhs), (lhs_dot, rhs_dot) = primals, tangents
    out = dot_general_with_precision(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    dot = partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=lax.Precision.HIGHEST if precision is None else precision,
        preferred_element_type=preferred_element_type,
    )
    return out, dot(lhs_dot, rhs) + dot(lhs, rhs_dot)


def fp8_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    states: DotStates,
    recipe: DelayedScaling,
) -> jax.Array:
    """Multiplies in FP8: ``lhs`` as the input, ``rhs`` as the kernel, and the cotangent on the way back.

    Args:
        lhs: the input, any shape, a wide float.
        rhs: the kernel, any shape, a wide float.
        dimension_numbers: those of ``lax.dot_general``.
        precision: None, or the precision of all three GEMMs.
        preferred_element_type: dtype of the result; None for what ``lax.dot_general`` gives.
        states: scaling states; their "gradients" are their next values.
        recipe: how the tensors are scaled.

    Returns:
        The product, shaped like that of ``lax.dot_general``.

    Raises:
        TypeError: an operand is not a wide float, or ``preferred_element_type`` is not.
    """
    lhs, rhs = as_float_array(lhs, "lhs"), as_float_array(rhs, "rhs")
    if preferred_element_type is not None and not (
        jnp.issubdtype(preferred_element_type, jnp.floating)
        and jnp.dtype(preferred_element_type).itemsize >= 2
    ):
        raise TypeError(
            "preferred_element_type must be None, bfloat16, float16, float32 or float64; got "
            f"{preferred_element_type!r}."
        )
    config = partial(
        DelayedConfig,
        jnp.float32,
        margin=recipe.margin,
        amax_compute_algo=recipe.amax_compute_algo,
    )
    forward = config(q_dtype=recipe.fp8_format.forward_dtype)
    backward = config(q_dtype=recipe.fp8_format.backward_dtype)
    lhs = delayed_in_qdq(forward, lhs, *states.input)
    rhs = delayed_in_qdq(forward, rhs, *states.kernel)
    out = dot_general_with_precision(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    return delayed_out_qdq(backward, out, *states.output_grad)


class _EinsumPlan(NamedTuple):
    lhs_summed: tuple[int, ...]
    rhs_summed: tuple[int, ...]
    dimension_numbers: DimensionNumbers
    permutation: tuple[int, ...]


def _plan_einsum(eqn: str, lhs: jax.Array, rhs: jax.Array) -> _EinsumPlan:
    """Turns a two-operand einsum into sums, one ``dot_general`` with operands in order, a transpose."""
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

    return _EinsumPlan(
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
    lhs: jax.Array,
    rhs: jax.Array,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Evaluates a two-operand einsum by one call of ``dot_general(lhs, rhs, …)``, never with them swapped.

    ``jnp.einsum`` swaps the operands where that saves a transpose, which would exchange the roles of
    input and kernel.

    Raises:
        ValueError: ``eqn`` does not have two operands that fit, or repeats an index within one.
    """
    plan = _plan_einsum(eqn, lhs, rhs)
    lhs = jnp.sum(lhs, axis=plan.lhs_summed) if plan.lhs_summed else lhs
    rhs = jnp.sum(rhs, axis=plan.rhs_summed) if plan.rhs_summed else rhs
    out = dot_general(
        lhs,
        rhs,
        plan.dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return lax.transpose(out, plan.permutation)

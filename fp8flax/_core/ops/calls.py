"""How the ops are called: one class per op, with the signature that Linen and NNX ops share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
from jax.typing import DTypeLike

from fp8flax._core.ops.canonical import DimensionNumbers
from fp8flax._core.ops.einsum import einsum_with
from fp8flax._core.shapes import Float, Integer


class Called:
    """Base class of the signatures: ``__call__`` puts all arguments in the order of the JAX function."""

    def _multiplier(self) -> Callable[..., jax.Array]:
        """Returns the function that computes the op from the operands and the arguments of the call."""
        raise NotImplementedError


def calling(call: type[Called], multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function with the signature of an op, which computes with ``multiply``.

    NNX models get it in the place of an op: to multiply by a frozen kernel, or to count the calls.
    """
    called: Any = call.__call__
    return partial(called, SimpleNamespace(_multiplier=lambda: multiply))


class DotGeneralCall(Called):
    """The signature of ``lax.dot_general``."""

    def __call__(
        self,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        dimension_numbers: DimensionNumbers,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[jax.Array, "*output"]:
        """Multiplies the operands in FP8, as ``lax.dot_general`` does in their own dtypes.

        Args:
            lhs: the input, any shape; bfloat16, float16, float32 or float64.
            rhs: the kernel, any shape; bfloat16, float16, float32 or float64.
            dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
            precision: None takes the accumulation of the recipe (by default fast forward, exact gradients).
                ``DEFAULT`` accumulates fast, ``HIGH`` and ``HIGHEST`` exactly, in all three GEMMs.
            preferred_element_type: dtype of the result; None for the dtype that ``lax.dot_general``
                returns. (For operands of two dtypes this is the wider one; Flax's op casts the input to the
                kernel's dtype.)
            out_sharding: how to shard the result on a mesh with explicit axes, as in ``lax.dot_general``.
        """
        arguments = dimension_numbers, precision, preferred_element_type
        return self._multiplier()(lhs, rhs, *arguments, out_sharding=out_sharding)


class EinsumCall(Called):
    """The signature of ``jnp.einsum`` for two operands."""

    def __call__(
        self,
        eqn: str,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[jax.Array, "*output"]:
        """Contracts the operands in FP8, as ``jnp.einsum`` does in their own dtypes.

        Args:
            eqn: the equation; no index may occur twice within one operand.
            lhs: the input, any shape; bfloat16, float16, float32 or float64.
            rhs: the kernel, any shape; bfloat16, float16, float32 or float64.
            precision: as for ``Fp8DotGeneralOp``.
            preferred_element_type: dtype of the result; None for the dtype that ``lax.dot_general``
                returns.
            out_sharding: how to shard the result on a mesh with explicit axes.
        """
        arguments = precision, preferred_element_type, out_sharding
        return einsum_with(self._multiplier(), eqn, lhs, rhs, *arguments)


class ConvCall(Called):
    """The signature of ``lax.conv_general_dilated``."""

    def __call__(
        self,
        lhs: Float[jax.Array, "*input"],
        rhs: Float[jax.Array, "*kernel"],
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[jax.Array, "*output"]:
        """Convolves the operands in FP8, as ``lax.conv_general_dilated`` does in their own dtypes.

        Args:
            lhs: the input, in the layout of ``dimension_numbers``; bfloat16, float16, float32 or float64.
            rhs: the kernel, in the layout of ``dimension_numbers`` and the dtype of ``lhs``.
            window_strides: one int for each spatial dimension.
            padding: ``"SAME"``, ``"SAME_LOWER"``, ``"VALID"``, or a pair ``(before, after)`` for each
                spatial dimension.
            lhs_dilation: one int for each spatial dimension; None for 1.
            rhs_dilation: one int for each spatial dimension; None for 1.
            dimension_numbers: the layouts, as ``lax.conv_general_dilated`` takes them.
            feature_group_count: number of groups of features.
            batch_group_count: number of groups of the batch.
            precision: for a matmul as in ``Fp8DotGeneralOp``; otherwise the precision of all three
                convolutions.
            preferred_element_type: dtype of the result; None for the dtype of the operands.
            out_sharding: how to shard the result on a mesh with explicit axes.
        """
        out = self._multiplier()(
            *(lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers),
            *(feature_group_count, batch_group_count, precision, preferred_element_type),
        )
        return out if out_sharding is None else jax.sharding.reshard(out, out_sharding)


class RaggedDotCall(Called):
    """The signature of ``lax.ragged_dot``."""

    def __call__(
        self,
        lhs: Float[jax.Array, "rows depth"],
        rhs: Float[jax.Array, "experts depth columns"],
        group_sizes: Integer[jax.Array, " experts"],
        precision: jax.lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Float[jax.Array, "rows columns"]:
        """Multiplies each row by the kernel of its expert, in FP8.

        Args:
            lhs: the input, ``(rows, K)``, sorted by expert; bfloat16, float16, float32 or float64.
            rhs: the kernels, ``(experts, K, N)``; bfloat16, float16, float32 or float64.
            group_sizes: rows of each expert, ``(experts,)``, integers.
            precision: as for ``Fp8DotGeneralOp``.
            preferred_element_type: dtype of the result; None for the dtype that ``lax.ragged_dot`` returns.
        """
        return self._multiplier()(lhs, rhs, group_sizes, precision, preferred_element_type)

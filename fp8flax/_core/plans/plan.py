"""``Plan``: the interface of an FP8 op to the engine. A plan computes the op forward and backward.

A plan gets scales and returns amaxes. ``state.step_scales`` converts between these and the states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from fp8flax._compat.varying import manual_axes
from fp8flax._core.state.state import DelayedConfig

Extra = tuple[jax.Array, ...]
"""Arrays beside the operands that are not differentiated, such as the group sizes of a ragged dot."""

Scales = dict[str, jax.Array]
"""The float32 scale of each tensor with delayed scaling, by the name of the tensor."""


class Operand(NamedTuple):
    """Static description of an operand of an op (hashable)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    """The sharding of an array on a mesh with explicit axes; None for all other arrays."""
    axes: frozenset[str]
    """The manual axes of ``shard_map`` over which the operand varies."""

    @classmethod
    def of(cls, x: jax.Array) -> Operand:
        """Returns the operand description of ``x``."""
        return cls(x.shape, x.dtype, explicit_sharding(x), manual_axes(x))


def explicit_sharding(x: Any) -> Any:
    """Returns the sharding of an array if it lies on a mesh with explicit axes, and None otherwise."""
    sharding = jax.typeof(x).sharding
    return sharding if explicit_axes(sharding.mesh) else None


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """Returns the names of the explicit axes of a mesh."""
    return tuple(n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)


class Plan:
    """Base class of plans, which are frozen dataclasses of static data (hashable).

    A plan gives each tensor that it quantizes a name. The dicts of scales and amaxes have an entry for each
    tensor with delayed scaling, under this name.
    """

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The descriptions of the operands that get gradients, in the order of the arguments."""
        raise NotImplementedError

    @property
    def configs(self) -> Mapping[str, DelayedConfig]:
        """The options of each tensor with delayed scaling, by the name of the tensor."""
        raise NotImplementedError

    def primal(self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales) -> jax.Array:
        """Returns the result of the op only, for a call that is not differentiated."""
        raise NotImplementedError

    def forward(
        self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Returns the result of the op, the residuals for ``backward``, and the amaxes.

        The amaxes have an entry for each tensor with delayed scaling that the forward pass quantizes.
        """
        raise NotImplementedError

    def backward(
        self, residuals: Any, extra: Extra, scales: Scales, g: jax.Array
    ) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
        """Returns the cotangents of the operands, and the amaxes of the tensors that it quantizes.

        A cotangent may have another dtype than its operand, and may vary over more manual axes. The engine
        corrects both.

        Args:
            residuals: the residuals that ``forward`` returned.
            extra: the arrays that are not differentiated.
            scales: the scales that ``forward`` was called with.
            g: the cotangent of the result.
        """
        raise NotImplementedError

"""What the engine asks of an op: a *plan* computes an op forward and backward, and knows no state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType

from fp8flax._compat.varying import manual_axes
from fp8flax._core.state.state import DelayedConfig, ScalingState, scale_of

Extra = tuple[jax.Array, ...]
"""Arrays beside the operands that are not differentiated, such as the group sizes of a ragged dot."""

Scales = dict[str, jax.Array]
"""The float32 scale of each tensor with delayed scaling, by the name of the tensor."""


class Operand(NamedTuple):
    """What a plan knows of an operand (hashable)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any
    """On a mesh with explicit axes, else None."""
    axes: frozenset[str]
    """The manual axes of ``shard_map`` over which it varies."""

    @classmethod
    def of(cls, x: jax.Array) -> Operand:
        """Returns that of an array."""
        return cls(x.shape, x.dtype, explicit_sharding(x), manual_axes(x))


def explicit_sharding(x: Any) -> Any:
    """Returns the sharding of an array on a mesh with explicit axes, else None."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


class Plan:
    """Base class of plans, which are frozen dataclasses of static data (hashable).

    A plan names its tensors. The names of those with delayed scaling are the keys of states, scales and
    amaxes.
    """

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The operands that get gradients, in their order."""
        raise NotImplementedError

    @property
    def configs(self) -> Mapping[str, DelayedConfig]:
        """The options of each tensor with delayed scaling."""
        raise NotImplementedError

    def scales(self, states: Mapping[str, ScalingState]) -> Scales:
        """Returns the scales of this step."""
        return {name: scale_of(config, states[name]) for name, config in self.configs.items()}

    def primal(self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales) -> jax.Array:
        """Returns the result, for a call that is not differentiated."""
        raise NotImplementedError

    def forward(
        self, operands: tuple[jax.Array, ...], extra: Extra, scales: Scales
    ) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        """Returns the result, the residuals, and the amaxes of the tensors that it has quantized.

        Each entry of the amaxes is an array of numbers along a last axis; the largest number is the amax.
        """
        raise NotImplementedError

    def backward(
        self, residuals: Any, extra: Extra, scales: Scales, g: jax.Array
    ) -> tuple[tuple[jax.Array, ...], dict[str, jax.Array]]:
        """Returns the cotangents of the operands, and the amaxes of the tensors that it has quantized.

        A cotangent may have another dtype than its operand, and vary over more manual axes.
        """
        raise NotImplementedError

"""Reads and writes the manual axes of ``jax.shard_map`` that the type of an array varies over.

Why: an amax must be merged over the devices that share its state, and the results of our GPU kernels must
vary as their operands do.

Internals: none. ``manual_axis_type`` is public, but its name has changed between versions of JAX.
"""

from __future__ import annotations

from typing import Any

import jax


def manual_axes(x: Any) -> frozenset[str]:
    """Returns the axes of the mesh over which ``x`` varies inside ``jax.shard_map``.

    The set is empty outside of ``shard_map``, and under ``check_vma=False``, where JAX does not record it.
    """
    axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return axes


def shape_varying_as(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies over the manual axes that ``x`` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)

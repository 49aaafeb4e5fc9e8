"""Reads and writes the manual axes of ``jax.shard_map`` that the type of an array varies over.

Why: an amax must be merged over the devices that share its state, and the results of our GPU kernels must
vary as their operands do.

The attribute of a type is ``vma`` in JAX 0.9 and ``manual_axis_type`` from JAX 0.10 on. Both are public.
The package needs one of them.
"""

from __future__ import annotations

from typing import Any

import jax


def manual_axes(x: Any) -> frozenset[str]:
    """Returns the axes of the mesh over which ``x`` varies inside ``jax.shard_map``.

    The set is empty outside of ``shard_map``, and under ``check_vma=False``, where JAX does not record it.
    """
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # before JAX 0.10
        return aval.vma
    return aval.manual_axis_type.varying


def shape_varying_as(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies over the manual axes that ``x`` varies over."""
    if hasattr(jax.typeof(x), "vma"):  # before JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, vma=manual_axes(x))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)

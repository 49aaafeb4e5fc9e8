"""What our GPU kernels in Pallas's Mosaic GPU backend share."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from fp8flax._core.gemm.gemm import TILE, Ref

HALF = TILE // 2
"""The number of rows of a tile that one warpgroup (128 threads) keeps in registers at a time."""


def in_units(itemsize: int) -> tuple[Any, ...]:
    """Returns how a tile lies in shared memory: in units of 8 rows and 128 bytes, as ``wgmma`` reads it."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.TilingTransform((8, 128 // itemsize)), plgpu.SwizzleTransform(128)


def repeated(scale: jax.Array, axis: int) -> jax.Array:
    """Repeats a vector of scales along ``axis`` of an accumulator of a warpgroup."""
    return lax.broadcast_in_dim(scale, (HALF, TILE), (1 - axis,))


def load(ref: Ref, index: Any, layout: Any, interpret: Any = None) -> jax.Array:
    """Loads a part of ``ref`` into registers, laid out over the threads of a warpgroup by ``layout``."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if interpret:
        return ref[index]
    # JAX 0.10 requires the index as a separate argument, which JAX 0.11 deprecates.
    args = (ref.at[index],) if jax.__version_info__ >= (0, 11) else (ref, index)
    return plgpu.load(*args, layout=layout)

"""Sizes of the arrays that GPU kernels take, and padding up to these sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._core.qtensor import BLOCK

_MAX_ELEMENTS = 2**31


def round_up(size: int, multiple: int = BLOCK) -> int:
    """Rounds a size up to a multiple of ``multiple``."""
    return -(-size // multiple) * multiple


def padded(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Pads an array with zeros at the end of each dimension, to these sizes."""
    padding = [(0, size - have, 0) for size, have in zip(sizes, x.shape, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), padding)


def are_positive(sizes: Iterable[int]) -> bool:
    """Returns whether all sizes are known and positive. Under ``jax.export`` a size may be symbolic."""
    return all(isinstance(size, int) and size > 0 for size in sizes)


def fits_kernels(*shapes: tuple[int, ...]) -> bool:
    """Returns whether our GPU kernels can take arrays of these shapes: they count elements in 32 bits."""
    return all(math.prod(shape) < _MAX_ELEMENTS for shape in shapes)

"""``observed``: an identity that calls a function with its cotangent; calibration and statistics use it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


# The forward rule calls ``observed`` again, and does not return ``x``. If a model takes a gradient inside
# its forward pass, the inner gradient uses up one ``custom_vjp``, and the outer gradient needs another.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def observed(
    observer: Callable[[jax.Array, Any], tuple[jax.Array, Any]], x: jax.Array, args: Any
) -> jax.Array:
    """Returns ``x``. The backward pass calls ``observer(g, args)`` with the cotangent ``g`` of the result.

    Args:
        observer: a function that returns the cotangents of ``x`` and of ``args``. It must be hashable, such
            as a ``partial`` of a function and a plan.
        x: the tensor to observe.
        args: a tree of arrays for the observer. An observer returns next states, for instance, as the
            cotangents of states in ``args``.
    """
    del observer, args
    return x


observed.defvjp(
    lambda observer, x, args: (observed(observer, x, args), args),
    lambda observer, args, g: observer(g, args),
)

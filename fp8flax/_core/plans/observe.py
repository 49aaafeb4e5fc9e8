"""Looks at a tensor without changing it: what calibrating and statistics do in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax


# Derivation. The value passes as it is. The observer sees its cotangent, which passes as it is, too, and
# returns what stands for the cotangents of the arguments. The forward rule calls the identity again: a
# model that differentiates itself consumes the first call, and the gradient around it needs the next.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def observed(
    observer: Callable[[jax.Array, Any], tuple[jax.Array, Any]], x: jax.Array, args: Any
) -> jax.Array:
    """Returns ``x``. In the backward pass ``observer(g, args)`` is called with the cotangent.

    Args:
        observer: returns the cotangents of ``x`` and of ``args`` (hashable, such as a ``partial`` of a
            function and a plan).
        x: the tensor.
        args: a tree of arrays.
    """
    del observer, args
    return x


observed.defvjp(
    lambda observer, x, args: (observed(observer, x, args), args),
    lambda observer, args, g: observer(g, args),
)

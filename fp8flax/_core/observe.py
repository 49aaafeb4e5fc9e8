"""``observed``: an identity that calls a function with its cotangent.

Calibration, statistics and the quantize-dequantize functions use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

Observer = Callable[[Any, Any], tuple[Any, Any]]


def observed(observer: Observer, x: Any, args: Any, *, innermost_only: bool = False) -> Any:
    """Returns ``x``. The backward pass calls ``observer(g, args)`` with the cotangent ``g`` of the result.

    Args:
        observer: a function that returns the cotangents of ``x`` and of ``args``.
        x: the tensor to observe, or a tree of tensors.
        args: a tree of arrays for the observer. An observer returns next states, for instance, as the
            cotangents of states in ``args``.
        innermost_only: whether only the innermost gradient is observed, if a model takes a gradient inside
            its forward pass. If False, each outer gradient is observed, too.
    """
    return _observed(observer, innermost_only, x, args)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _observed(observer: Observer, innermost_only: bool, x: Any, args: Any) -> Any:
    """Returns ``x``, see ``observed``."""
    del observer, innermost_only, args
    return x


# An outer gradient differentiates the forward rule of the inner one.
_observed.defvjp(
    lambda observer, innermost, x, args: (
        x if innermost else _observed(observer, innermost, x, args),
        args,
    ),
    lambda observer, innermost, args, g: observer(g, args),
)

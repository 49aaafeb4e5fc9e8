"""``observed``: an identity that calls a function with its cotangent; and the reports to ``calibrate``.

Calibration, statistics and the quantize-dequantize functions use ``observed``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax

from fp8flax._compat.max_dtype import from_max_dtype, is_digest
from fp8flax._compat.report_primitive import ToHost, with_report
from fp8flax._core.axes import merge_amax
from fp8flax._core.mode import Observing
from fp8flax._core.state.state import DelayedConfig, ScalingState, next_state

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


def report_amax(
    observing: Observing, config: DelayedConfig, x: jax.Array, amax: jax.Array, state: ScalingState
) -> jax.Array:
    """Returns ``x``, and reports the amax of the tensor that ``state`` belongs to, for ``calibrate``.

    Args:
        observing: the mode.
        config: the options of the cast.
        x: the array that the report is bound to, see ``with_report``.
        amax: the amax.
        state: the state, in which the scale is the number of the tensor.
    """
    assert observing.amaxes_to is not None
    amax = lax.stop_gradient(amax).astype(np.float32)
    number = from_max_dtype(state.scale).reshape(amax.shape)
    return with_report(x, [number, amax], ToHost(observing.amaxes_to, config))


def report_cotangent(
    observing: Observing, config: DelayedConfig, amax_of: Callable[..., jax.Array], g: Any, args: Any
) -> Any:
    """Observer: returns the cotangent unchanged, and reports its amax for ``calibrate``.

    ``args`` are the further arguments of ``amax_of``, and the state. The "gradient" of the state depends on
    the report. So ``calibrate`` needs no gradient but that of the state.
    """
    extra, state = args
    amax = lax.stop_gradient(amax_of(g, extra)).astype(np.float32)
    amax = report_amax(observing, config, amax, amax, state)
    number = from_max_dtype(state.scale).reshape(amax.shape)
    merged = merge_amax(amax, number)
    return g, (None, next_state(merged, number, None if is_digest(state.scale) else state))

"""The ambient mode of all FP8 ops: compute as usual, or report their tensors. Part of jit's cache key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

mode = jax.make_user_context(None)
"""The mode of the code that runs: None for training and inference, otherwise ``Observing``."""


class Observing(NamedTuple):
    """Mode in which each FP8 op reports its tensors to the host, see ``observe``."""

    calibrates: bool
    """Whether ops report amaxes for ``calibrate``. They then multiply in the wide dtypes of their operands,
    and each scale in their states is a number that names the tensor.

    Otherwise ops compute as usual, and report quantization errors for ``statistics``."""
    backward: bool = True
    """Whether output gradients are calibrated. Without them, forward-mode differentiation works, too."""
    key: object = None
    """For statistics: an object for each measured function, which makes JAX trace the function again."""
    path: tuple[str, ...] = ()
    """For statistics: the path (module names) of the op that runs; ``()`` outside of ops."""


def is_calibrating() -> bool:
    """Returns whether FP8 ops multiply in wide dtypes, and report amaxes to the host."""
    return mode.value is not None and mode.value.calibrates


def in_op(path: Callable[[], tuple[str, ...]]) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which an op runs; for statistics it sets the path of the op in ``mode``."""
    if mode.value is None or is_calibrating():
        return contextlib.nullcontext()
    return mode(mode.value._replace(path=path()))

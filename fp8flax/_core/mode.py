"""The ambient mode of all FP8 ops: train as usual, calibrate or measure. It is part of jit's cache key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

mode = jax.make_user_context(None)
"""The mode of the code that runs: None for training and inference, ``Calibrating`` or ``Measuring``."""


class Calibrating(NamedTuple):
    """Mode in which FP8 ops multiply in the operands' wide dtypes, and compute the next scaling states."""

    report: Callable[..., None] | None = None
    """A function that is called on the host with the next states of each op's input and kernel.

    If it is None, the next states are returned as the gradients of the old states, as in training."""


class Measuring(NamedTuple):
    """Mode in which FP8 ops train as usual, and also report the quantization errors of their tensors."""

    measurement: object
    """A new object for each measurement, so that jit's cache key differs between measurements.

    Functions traced in one measurement report under the paths of that measurement. Another measurement must
    trace them again."""
    path: tuple[str, ...] = ()
    """The path (module names) of the op that runs; ``()`` outside of ops."""


def is_measuring() -> bool:
    """Returns whether FP8 ops report the quantization errors of their tensors."""
    return isinstance(mode.value, Measuring)


def in_op(path: Callable[[], tuple[str, ...]]) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which an op runs; while measuring it sets the path of the op in ``mode``.

    Args:
        path: a function that returns the path of the op. It is called only while measuring.
    """
    if not isinstance(mode.value, Measuring):
        return contextlib.nullcontext()
    return mode(mode.value._replace(path=path()))

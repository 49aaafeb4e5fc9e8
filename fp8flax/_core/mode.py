"""What ops do beside computing: nothing, calibrate or measure. An ambient value that jit's cache knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

mode = jax.make_user_context(None)
"""None, ``Calibrating`` or ``Measuring``."""


class Calibrating(NamedTuple):
    """Contractions run in the operands' wide dtypes, and only the next scaling states are made."""

    report: Callable[..., None] | None = None
    """Called on the host with the states of inputs and kernels. None makes states as gradients."""


class Measuring(NamedTuple):
    """Ops report what FP8 leaves of their tensors."""

    measurement: object
    """An object of each measurement: what ``nn.jit`` traced in one has the paths of that one."""
    path: tuple[str, ...] = ()
    """The path of the op that runs; ``()`` outside of ops."""


def is_measuring() -> bool:
    """Returns whether ops report what FP8 leaves of their tensors."""
    return isinstance(mode.value, Measuring)


def in_op(path: Callable[[], tuple[str, ...]]) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which an op runs.

    Args:
        path: returns the path of the op; it is called while measuring.
    """
    if not isinstance(mode.value, Measuring):
        return contextlib.nullcontext()
    return mode(mode.value._replace(path=path()))

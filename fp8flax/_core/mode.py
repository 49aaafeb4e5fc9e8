"""The ambient mode of all FP8 ops: compute as usual, or report their tensors. Part of jit's cache key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

mode = jax.make_user_context(None)
"""The mode of the code that runs: None for training and inference, otherwise ``Observing``."""


class Observing(NamedTuple):
    """Mode in which each FP8 op reports its tensors: to ``statistics``, or to ``calibrate``."""

    observation: object = None
    """For statistics: a new object for each call, so that jit's cache key differs between calls.

    Functions traced in one call report under the paths of that call. Another call must trace them again."""
    path: tuple[str, ...] = ()
    """For statistics: the path (module names) of the op that runs; ``()`` outside of ops."""
    amaxes_to: Callable[..., None] | None = None
    """For calibration: the function on the host that gets the amax of each tensor; None for statistics.

    While calibrating, ops multiply in the wide dtypes of their operands. Each scale in their states is a
    number that names the tensor."""
    backward: bool = True
    """Whether output gradients are reported. Without them, forward-mode differentiation works, too."""


def is_calibrating() -> bool:
    """Returns whether FP8 ops multiply in wide dtypes, and report amaxes to the host."""
    return mode.value is not None and mode.value.amaxes_to is not None


def in_op(path: Callable[[], tuple[str, ...]]) -> contextlib.AbstractContextManager[Any]:
    """Returns the context in which an op runs; for statistics it sets the path of the op in ``mode``.

    Args:
        path: a function that returns the path of the op. It is called only for statistics.
    """
    if mode.value is None or is_calibrating():
        return contextlib.nullcontext()
    return mode(mode.value._replace(path=path()))

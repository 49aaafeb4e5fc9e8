"""Observes the tensors of FP8 ops, for ``calibrate`` and ``statistics``: each op reports to the host.

The op may be inside a loop, a rematerialized block or a jitted function, which do not return the numbers of
the op. So the op reports them by a primitive (``reported``). ``collect`` runs a program and returns what
its ops report.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.typing import ArrayLike

from fp8flax._compat.max_dtype import from_max_dtype
from fp8flax._compat.report_primitive import reported
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.state.state import ScalingState
from fp8flax._core.types import PyTree

# The mode of the ops.

mode = jax.make_user_context(None)
"""The mode of the code that runs, a part of the cache key of jit: None, or ``Observing``."""


class Observing(NamedTuple):
    """Mode in which each FP8 op reports its tensors to the host."""

    calibrates: bool
    """Whether ops report amaxes for ``calibrate``. They then multiply in the wide dtypes of their operands,
    and each scale in their states is a number that names the tensor.

    Otherwise ops compute as usual, and report quantization errors for ``statistics``."""
    backward: bool = True
    """Whether output gradients are calibrated. Without them, forward-mode differentiation works, too."""
    path: tuple[str, ...] = ()
    """For statistics: the path (module names) of the op that runs; ``()`` outside of ops."""


def is_calibrating() -> bool:
    """Returns whether FP8 ops multiply in wide dtypes, and report amaxes to the host."""
    return mode.value is not None and mode.value.calibrates


def in_op(path: Callable[[], tuple[str, ...]]) -> contextlib.AbstractContextManager[object]:
    """Returns the context in which an op runs; for statistics it sets the path of the op in ``mode``."""
    if mode.value is None or is_calibrating():
        return contextlib.nullcontext()
    return mode(mode.value._replace(path=path()))


# Receiving reports on the host.


class Report(NamedTuple):
    """What an op reported to the host in one call, on one device."""

    label: Any
    device: int
    """The number of the device in ``jax.shard_map``; 0 elsewhere."""
    call: int
    """How many reports with this label the device had made before."""
    numbers: list[np.ndarray]
    """Arrays, which the label describes, with a first axis for each ``jax.vmap`` around the op."""


_lock = threading.Lock()
_received: list[tuple[list[Report], Counter[Hashable]]] = []
"""What has been reported to the observation that runs now, and counted by label and device; or nothing."""


def collect(observing: Observing, run: Callable[..., PyTree], *args: PyTree) -> list[Report]:
    """Returns what the ops report while ``run(*args)``, a jitted function, is computed in a mode.

    If there are several processes, each gets the reports of all.
    """
    if mode.value is not None:
        raise ValueError(
            "fp8flax.statistics and fp8flax.calibrate cannot be called inside of a function that one of "
            "them runs. Call them outside of it, one after another."
        )
    reports: list[Report] = []
    with _lock, mode(observing):
        _received.append((reports, Counter()))
        try:
            # When the results are ready, all reports have arrived.
            jax.block_until_ready(run(*args))
        finally:
            _received.clear()
    if jax.process_count() == 1:
        return reports
    own = np.frombuffer(pickle.dumps(reports), np.uint8)
    size = np.max(multihost_utils.process_allgather(np.int32(own.size)))
    gathered = multihost_utils.process_allgather(np.pad(own, (0, size - own.size)))
    return [report for data in gathered for report in pickle.loads(data.tobytes())]


def _receive(label: Hashable, device: ArrayLike, *numbers: ArrayLike) -> np.int32:
    """Passes a report to the observation that runs now; returns its ``call``.

    It is a function of the module, because JAX's caches keep it: a closure would keep arrays alive.
    """
    call = 0
    for reports, counts in _received:
        call, counts[label, int(device)] = counts[label, int(device)], counts[label, int(device)] + 1
        reports.append(Report(label, int(device), call, list(map(np.asarray, numbers))))
    return np.int32(call)


# Reporting from an op.


def report(x: jax.Array, label: Hashable, *numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns ``x`` and the number of the call in the ``Report`` that is made if ``x`` is used.

    ``x`` is there only after the report has arrived. So if one call of an op needs the result of another,
    their reports are in this order, also out of a loop that XLA unrolled.
    """
    call = reported(_receive, label, *numbers)
    return lax.select(call >= 0, x, lax.neg(x)), call  # the number is never negative


def report_amax(
    quantizer: DelayedQuantizer, x: jax.Array, amax: jax.Array, state: ScalingState
) -> jax.Array:
    """Returns ``x``, and reports the amax of a tensor, or of several stacked ones, for ``calibrate``."""
    amax = lax.stop_gradient(amax).astype(np.float32)
    # While calibrating, the place of the scale has the number of the tensor.
    number = lax.stop_gradient(from_max_dtype(state.scale)).reshape(amax.shape)
    return report(x, quantizer, jnp.stack([number, amax], -1))[0]

"""Observes the tensors of FP8 ops, for ``calibrate`` and ``statistics``: each op reports to the host.

The op may be inside a loop, a rematerialized block or a jitted function, which do not return the numbers of
the op. So the op reports them by a primitive (``with_report``). ``collect`` runs a program and returns what
its ops report. A model does not have to declare anything for this: no variable, and no collection in
``nn.scan``.
"""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from fp8flax._compat.max_dtype import from_max_dtype
from fp8flax._compat.report_primitive import with_report
from fp8flax._core.axes import merge_amax
from fp8flax._core.mode import Observing, mode
from fp8flax._core.state.state import DelayedConfig, ScalingState

# Receiving reports on the host.

Records = dict[Any, np.ndarray]
"""The different records that ops reported, by label: shape ``(records, numbers)``, float32."""

_lock = threading.Lock()
_received: list[dict[Any, set[tuple[float, ...]]]] = []
"""What has been reported to the observation that runs now: one dict, or none."""


def collect(observing: Observing, run: Callable[..., Any], *args: Any) -> Records:
    """Returns what the ops report while ``run(*args)``, a jitted function, is computed in a mode.

    Equal records count once, because ``jax.checkpoint`` repeats a forward pass, and its reports. If there
    are several processes, each gets the reports of all.
    """
    found: dict[Any, set[tuple[float, ...]]] = defaultdict(set)
    with _lock, mode(observing):
        _received.append(found)
        try:
            # When the results are ready, all reports have arrived.
            jax.block_until_ready(run(*args))
        finally:
            _received.clear()
    if jax.process_count() > 1:
        own = np.frombuffer(pickle.dumps(dict(found)), np.uint8)
        size = np.max(multihost_utils.process_allgather(np.int32(own.size)))
        for data in multihost_utils.process_allgather(np.pad(own, (0, size - own.size))):
            for label, records in pickle.loads(data.tobytes()).items():
                found[label] |= records
    return {label: np.array(sorted(records), np.float32) for label, records in found.items()}


def _receive(label: Hashable, records: Any) -> None:
    """Passes the records of an op, along the last axis of an array, to the observation that runs now.

    It is a function of the module, because JAX's caches keep it: a closure would keep arrays alive.
    """
    rows = np.asarray(records)
    for found in _received:
        found[label].update(map(tuple, rows.reshape(-1, rows.shape[-1]).tolist()))


# Reporting from an op.


def report_amax(config: DelayedConfig, x: jax.Array, amax: jax.Array, number: jax.Array) -> jax.Array:
    """Returns ``x``, and reports an amax for ``calibrate``.

    Args:
        config: the options of the cast.
        x: the array that the report is bound to, see ``with_report``.
        amax: the amax of a tensor, or of several that are stacked.
        number: the number of the tensor, see ``number_of``; the shape of ``amax``.
    """
    amax = lax.stop_gradient(amax).astype(np.float32)
    return with_report(x, jnp.stack([number, amax], -1), _receive, config)


def number_of(state: ScalingState) -> jax.Array:
    """Returns the number that names a tensor while calibrating; it is in the place of the old scale."""
    number = lax.stop_gradient(from_max_dtype(state.scale))
    return number.reshape(state.amax_history.shape[:-1])


def on_cotangent(
    f: Callable[[Any, Any], tuple[Any, Any]], x: Any, args: Any, *, innermost_only: bool = False
) -> Any:
    """Returns ``x``. The backward pass calls ``f(g, args)`` with the cotangent ``g`` of the result.

    Args:
        f: a function that returns the cotangents of ``x`` and of ``args``.
        x: an array, or a tree of arrays.
        args: a tree of arrays for ``f``. For a scale of ``step_scales``, ``f`` returns the amax as the
            cotangent.
        innermost_only: whether ``f`` is called for the innermost gradient only, if a model takes a gradient
            inside its forward pass. If False, it is called for each outer gradient, too.
    """
    return _on_cotangent(f, innermost_only, x, args)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _on_cotangent(f: Callable[..., Any], innermost_only: bool, x: Any, args: Any) -> Any:
    """Returns ``x``, see ``on_cotangent``."""
    del f, innermost_only, args
    return x


# An outer gradient differentiates the forward rule of the inner one.
_on_cotangent.defvjp(
    lambda f, innermost_only, x, args: (
        x if innermost_only else _on_cotangent(f, innermost_only, x, args),
        args,
    ),
    lambda f, innermost_only, args, g: f(g, args),
)


class Tensor(NamedTuple):
    """One of the three tensors of a contraction, as ``observed`` needs it."""

    amax: Callable[..., jax.Array]
    """``amax(x, *extra)`` returns the amax of the tensor, or the amaxes of a stack."""
    measure: Callable[..., list[jax.Array]]
    """``measure(x, scale, *extra)`` returns the records of ``measuring.numbers_of``: one for each different
    quantizer of the tensor."""
    config: DelayedConfig | None = None
    """The options of delayed scaling; None for other recipes."""
    scale: jax.Array | None = None
    """The scale of ``step_scales``; None without delayed scaling."""
    number: jax.Array | None = None
    """``number_of`` the state; None without delayed scaling."""

    def reported(self, observing: Observing, role: str, x: jax.Array, extra: Any) -> jax.Array:
        """Returns ``x``, and reports it."""
        wide = lax.stop_gradient(x)
        if observing.calibrates:
            if self.config is None or self.number is None:
                return x
            return report_amax(self.config, x, self.amax(wide, *extra), self.number)
        for record in self.measure(wide, lax.stop_gradient(self.scale), *extra):
            x = with_report(x, record, _receive, (observing.path, role))
        return x


def observed(
    multiply: Callable[[jax.Array, jax.Array], jax.Array],
    tensors: Mapping[str, Tensor],
    lhs: jax.Array,
    rhs: jax.Array,
    *extra: jax.Array,
) -> jax.Array:
    """Returns the product of the operands, and reports its tensors to the host.

    Args:
        multiply: computes the product.
        tensors: the tensors to report, by role; only those that a product quantizes.
        lhs: the input.
        rhs: the kernel.
        *extra: further arrays of the op, for the functions in ``tensors``.
    """
    observing = mode.value
    # The mode is part of jit's cache key. Without the path in it, layers with equal plans share one trace.
    with mode(None):
        if "input" in tensors:
            lhs = tensors["input"].reported(observing, "input", lhs, extra)
        if "kernel" in tensors:
            rhs = tensors["kernel"].reported(observing, "kernel", rhs, extra)
        out = multiply(lhs, rhs)
        if "output_grad" not in tensors or not observing.backward:
            return out
        tensor = tensors["output_grad"]
        static = tensor._replace(scale=None, number=None)
        arrays = tensor.scale, tensor.number, extra
        return on_cotangent(partial(_report_output_grad, observing, static), out, arrays)


def _report_output_grad(observing: Observing, static: Tensor, g: jax.Array, arrays: Any) -> Any:
    """Returns the output gradient, and reports it; the arrays get no cotangents but for calibration.

    While calibrating, the "gradient" of the state depends on the report. So ``calibrate`` needs no gradient
    but that of the state.
    """
    scale, number, extra = arrays
    tensor = static._replace(scale=scale, number=number)
    if not observing.calibrates or number is None:
        return tensor.reported(observing, "output_grad", g, extra), (None, None, None)
    return g, (reported_as_amax(tensor.config, tensor.amax(g, *extra), number), None, None)


def reported_as_amax(config: Any, amax: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the amax of an output gradient, as the cotangent of a scale, and reports it."""
    amax = lax.stop_gradient(amax).astype(np.float32)
    return merge_amax(report_amax(config, amax, amax, number), number)

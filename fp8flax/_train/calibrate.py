"""Calibrates: fills the scaling state of trained or converted variables from sample batches."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._compat.max_dtype import differentiating
from fp8flax._core.autocast import ambient_hint
from fp8flax._core.axes import UNCHECKED_ERROR, axes_around_gradient, current_manual_axes
from fp8flax._core.mode import Calibrating, mode
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.options import check_function, check_loss, check_variables
from fp8flax._core.scaling import SMALLEST_SCALE
from fp8flax._core.state.tree import Places, check_state_dtype, from_max, kept_tree, path_str, to_max
from fp8flax._train.gradients import is_from_container

WITHOUT_STATE = (
    "Recipes without delayed scaling have no state and need no calibration. A frozen model has fixed "
    "scales: calibrate the model before freeze."
)


def calibrate(
    fun: Callable[[Any, Any], Any],
    variables: Mapping[str, Any],
    batches: Iterable[Any],
    *,
    backward: bool = False,
    has_aux: bool = False,
) -> Mapping[str, Any]:
    """Fills the scaling state from sample batches, so that the first FP8 step has the right scales.

    It runs the function on each batch and records the largest magnitudes. Every FP8 op runs in its
    operands' own dtype, so that saturation in an early layer does not mislead a later one. The result is
    the state of one step on all batches, with the scales that the next step uses.

    Without ``backward=True`` the state of inputs and kernels is filled; the state of output gradients needs
    a loss and ``backward=True``.

    Args:
        fun: ``fun(variables, batch)``, such as ``model.apply``, or ``lambda v, batch: loss(v, *batch)`` for
            batches of several arguments.
            It is compiled. Without ``backward`` it may return any arrays, and every layer must affect a
            float that it returns, because reverse mode records the magnitudes. If it has no reverse mode,
            because a layer runs in a ``lax.while_loop`` or in ``jax.jvp``, callbacks to the host record
            them.
        variables: collections with scaling state (see ``add_fp8_state``).
        batches: a few samples, similar to those that the model will see.
        backward: whether the function is a loss (a scalar), whose gradients fill the state of output
            gradients too. Otherwise that state stays unchanged.
        has_aux: whether the loss comes in a pair ``(loss, aux)``.

    Returns:
        ``variables`` with new scaling state, bitwise the same otherwise; a ``FrozenDict`` if ``variables``
        is one.

    Raises:
        TypeError: scaling state is not float32; the function is a model; it takes the parts of a batch as
            separate arguments, or returns no loss although ``backward`` is True; or ``batches`` is one
            batch.
        ValueError: there is no scaling state; there is no batch; a batch produced a NaN or an Inf in a
            tensor of a layer; or the function reaches no FP8 op.

    Warns:
        UserWarning: some op did not run; its state stays unchanged.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> x = jnp.full((2, 4), 3584.0)
        >>> variables = layer.init(jax.random.key(0), x)
        >>> variables = fp8.calibrate(layer.apply, variables, [x, x / 2])
        >>> variables["_overwrite_with_gradient"]["Fp8DotGeneralOp_0"]["input_scale"]
        Array([8.], dtype=float32)

    Source: Transformer Engine, ``autocast(calibrating=True)``, which calibrates forward.
    """
    check_function("fun", fun, "model.apply")
    check_variables(variables)
    if not variables.get(OVERWRITE_WITH_GRADIENT):
        raise ValueError(
            f"The variables have no {OVERWRITE_WITH_GRADIENT!r}, so there is nothing to calibrate. Add it "
            f"with fp8flax.add_fp8_state(variables, model, *inputs). {WITHOUT_STATE}"
        )
    old = {OVERWRITE_WITH_GRADIENT: flax.core.unfreeze(variables[OVERWRITE_WITH_GRADIENT])}
    jax.tree_util.tree_map_with_path(check_state_dtype, old)
    measure = _Measure(fun, backward, has_aux)
    merged = None
    for i, batch in enumerate(_each(batches)):
        try:
            new = measure(variables, batch)
        except (AttributeError, TypeError) as error:
            if not is_from_container(error, batch):
                raise
            reason, _, _ = str(error).partition("\n")
            raise TypeError(
                f"calibrate calls fun(variables, batch), with a batch as one argument; batch {i} is a "
                f"{type(batch).__name__} of {len(batch)}, and the call failed: {reason}. For a function of "
                "several arguments pass fun=lambda v, batch: fun(v, *batch)."
            ) from error
        if bad := _names("_amax_history", lambda history: history == np.inf, new, backward):
            raise ValueError(
                f"Batch {i} puts a NaN or an Inf into {', '.join(bad)}, so no scale can be taken from it. "
                "Leave the batch out, or find the cause."
            )
        merged = new if merged is None else jax.tree.map(jnp.maximum, merged, new)
    if merged is None:
        raise ValueError("batches is empty; calibration needs at least one batch.")
    # A scale that got no gradient is 0. A scale whose tensor was empty in all batches is -inf.
    missing = _names("_scale", lambda scale: scale <= 0, merged, backward)
    if len(missing) == len(_names("_scale", lambda scale: True, merged, backward)):
        raise ValueError(
            "No FP8 layer was reached: no float that fun returns depends on scaling state. fun must use "
            "the variables that it is given, and return the model's outputs or its loss."
            + ambient_hint(needs_state=True)
        )
    if missing:
        warnings.warn(
            "These layers were not calibrated, because nothing that fun returns depends on them, or their "
            f"tensors were empty in all batches: {', '.join(missing)}. If they run, return their results "
            "from fun." + ambient_hint(needs_state=True),
            stacklevel=2,
        )
    kept = _calibrated(old, merged)
    if not backward:
        kept = jax.tree_util.tree_map_with_path(
            lambda path, before, after: before if _is_backward(path) else after, old, kept
        )
    result = {**variables, **kept}
    return flax.core.freeze(result) if isinstance(variables, flax.core.FrozenDict) else result


def _each(batches: Any) -> Iterator[Any]:
    """Iterates over the batches; raises ``TypeError`` for a mapping, a string or what is not iterable."""
    if not isinstance(batches, Mapping | str):
        with contextlib.suppress(TypeError):
            return iter(batches)
    raise TypeError(
        f"batches must be an iterable, such as a list; got a value of type {type(batches).__name__}. Pass "
        "[batch] for one batch."
    )


@jax.jit
def _calibrated(old: Any, merged: Any) -> Any:
    """Returns the state to keep, given the old state and the merged states of all batches."""
    return jax.tree.map(
        # A tensor that was zero in all batches keeps its old scale.
        lambda before, after: jnp.where(after == SMALLEST_SCALE, before, after),
        old,
        kept_tree(old, merged),
    )


class _Measure:
    """Computes the scaling state of one batch, to be merged by maximum with that of other batches.

    The state comes from the gradient of ``fun``. If ``fun`` has no reverse mode, callbacks to the host
    report it.
    """

    def __init__(self, fun: Callable[[Any, Any], Any], backward: bool, has_aux: bool) -> None:
        self._reports: _Reports | None = None
        self._is_forward = not backward
        self._as_gradient = jax.jit(partial(_measure, fun, backward, has_aux))
        # It returns the result of fun, because JAX would drop the arithmetic of a result that is not used.
        self._run = jax.jit(fun)

    def __call__(self, variables: Any, batch: Any) -> dict[str, Any]:
        if self._reports is None:
            try:
                with mode(Calibrating()):
                    return self._as_gradient(variables, batch)
            except (NotImplementedError, TypeError, ValueError) as error:
                if not self._is_forward or UNCHECKED_ERROR in str(error):
                    raise
            # fun may have no reverse mode. If the error has another cause, the run below raises it again.
            self._reports = _Reports(variables)
        self._reports.clear()
        with _calibrate_lock, mode(Calibrating(_report)):
            _receivers.append(self._reports)
            try:
                # When the result is ready, all callbacks have run.
                jax.block_until_ready(self._run(self._reports.named, batch))
            finally:
                _receivers.clear()
        return self._reports.state()


_calibrate_lock = threading.Lock()
_receivers: list[_Reports] = []
"""The reports of the calibration that runs now: one or none."""


def _report(name: Any, scale: Any, history: Any) -> None:
    """Passes the report of a layer to the calibration that runs now.

    It is a function of the module, because JAX's caches keep it: a closure would keep the variables alive.
    """
    for reports in _receivers:
        reports(name, scale, history)


class _Reports:
    """Collects what layers report to the host, merged by maximum for each tensor.

    ``named`` holds the variables with a number in the place of each scale. A layer reports this number with
    its new state, and the number identifies the tensor.
    """

    def __init__(self, variables: Any) -> None:
        state = {OVERWRITE_WITH_GRADIENT: flax.core.unfreeze(variables[OVERWRITE_WITH_GRADIENT])}
        found, self._treedef = jax.tree_util.tree_flatten_with_path(state)
        self._leaves = [leaf for _, leaf in found]
        self._places = Places.of([path for path, _ in found], self._leaves)
        named, count = list(self._leaves), 0
        self._numbers: list[np.ndarray] = []
        for i, _ in self._places.pairs:
            scale = named[i]
            numbers = np.arange(count, count + scale.size).reshape(scale.shape)
            count += scale.size
            named[i] = jax.device_put(numbers.astype(np.float32))
            self._numbers.append(numbers)
        self.named = type(variables)({**variables, **self._treedef.unflatten(named)})
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Removes all reports."""
        self._seen: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def __call__(self, name: Any, scale: Any, history: Any) -> None:
        length = np.shape(history)[-1]
        rows = np.reshape(name, -1), np.reshape(scale, (-1, 1)), np.reshape(history, (-1, length))
        with self._lock:
            for key, *new in zip(*rows):
                before = self._seen.get(int(key), new)
                self._seen[int(key)] = np.maximum(before[0], new[0]), np.maximum(before[1], new[1])

    def state(self) -> dict[str, Any]:
        """Returns the collection of scaling state, with -inf for tensors without a report."""
        leaves = [np.full(leaf.shape, -np.inf, np.float32) for leaf in self._leaves]
        for (i, j), axis, numbers in zip(self._places.pairs, self._places.axes, self._numbers):
            scales, histories = (np.moveaxis(leaves[k], axis, -1) for k in (i, j))
            rows = np.moveaxis(numbers, axis, -1)[..., 0]
            for index in np.ndindex(rows.shape):
                if (seen := self._seen.get(int(rows[index]))) is not None:
                    scales[index], histories[index] = seen
        result: dict[str, Any] = self._treedef.unflatten(map(jax.device_put, leaves))
        return result


def _measure(
    fun: Callable[[Any, Any], Any], backward: bool, has_aux: bool, variables: Any, batch: Any
) -> dict[str, Any]:
    """Returns the scaling state of one batch, as the gradient of the old state."""

    def run(state: Any) -> Any:
        given = {**variables, **to_max(state)}
        with axes_around_gradient(current_manual_axes()):
            out = from_max(fun(type(variables)(given), batch))
        if backward:
            check_loss(out, has_aux, "With backward=True, fun")
        return out

    state = {OVERWRITE_WITH_GRADIENT: flax.core.unfreeze(variables[OVERWRITE_WITH_GRADIENT])}
    with differentiating():
        if backward:
            new = jax.grad(run, has_aux=has_aux)(state)
            return new[0] if has_aux else new
        # The cotangents can be zeros, because the states of inputs and kernels do not depend on them.
        out, transpose = jax.vjp(lambda state: jax.tree.map(jnp.asarray, run(state)), state)
        return transpose(jax.tree.map(_zero_cotangent, out))[0]


def _zero_cotangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _is_backward(path: Any) -> bool:
    return path[-1].key.startswith("output_grad")


def _names(ending: str, holds: Callable[[Any], Any], state: Any, backward: bool) -> list[str]:
    """Returns the paths of the leaves with this ending that have an entry for which ``holds`` is true.

    Leaves of output gradients count only with ``backward``.
    """
    return [
        path_str(path)
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
        if path[-1].key.endswith(ending)
        and (backward or not _is_backward(path))
        and np.any(holds(jax.device_get(leaf)))
    ]

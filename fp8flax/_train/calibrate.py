"""Calibrates: fills the scaling state of trained or converted variables from sample batches."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import flax.core
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.autocast import ambient_hint
from fp8flax._core.mode import Observing
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.observe import Records, collect
from fp8flax._core.options import check_function, check_variables
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.state.state import ScalingState, calibrated_state
from fp8flax._core.state.tree import Places, flatten, path_str

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

    It runs the function on each batch and records the largest magnitudes, which each call of
    an op, ``in_qdq``, ``out_qdq`` or ``in_q`` reports to the host. Every FP8 op runs in its operands' own
    dtype, so that saturation in an early layer does not mislead a later one. The result is
    the state of one step on all batches, with the scales that the next step uses.

    Without ``backward=True`` the state of inputs and kernels is filled; the state of output gradients needs
    a loss and ``backward=True``.

    Args:
        fun: ``fun(variables, batch)``, such as ``model.apply``, or ``lambda v, batch: loss(v, *batch)`` for
            batches of several arguments.
            It is compiled. Without ``backward`` it may return any arrays. Each layer must affect a result
            of ``fun``, because JAX drops what has no effect. Layers may run in ``lax.while_loop``, in
            ``jax.jvp`` and under ``lax.stop_gradient``.
        variables: collections with scaling state (see ``add_fp8_state``).
        batches: a few samples, similar to those that the model will see.
        backward: whether the function is a loss (a scalar), whose gradients fill the state of output
            gradients too. Otherwise that state stays unchanged.
        has_aux: whether the loss comes in a pair ``(loss, aux)``.

    Returns:
        ``variables`` with new scaling state, bitwise the same otherwise; a ``FrozenDict`` if ``variables``
        is one.

    Raises:
        TypeError: scaling state is not float32; the function is a model, or returns no loss although
            ``backward`` is True; or ``batches`` is one batch.
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
    amaxes = _Amaxes({OVERWRITE_WITH_GRADIENT: flax.core.unfreeze(variables[OVERWRITE_WITH_GRADIENT])})
    run = jax.jit(functools.partial(_run, fun, backward, has_aux))
    i = -1
    for i, batch in enumerate(_each(batches)):
        observing = Observing(calibrates=True, backward=backward)
        amaxes.add(collect(observing, run, amaxes.numbered, variables, batch))
        if bad := amaxes.names("amax_history", lambda amax: ~(amax < np.inf), backward):
            raise ValueError(
                f"Batch {i} puts a NaN or an Inf into {', '.join(bad)}, so no scale can be taken from it. "
                "Leave the batch out, or find the cause."
            )
    if i < 0:
        raise ValueError("batches is empty; calibration needs at least one batch.")
    missing = amaxes.names("scale", lambda amax: amax == -np.inf, backward)
    if len(missing) == len(amaxes.names("scale", lambda amax: True, backward)):
        raise ValueError(
            "No FP8 layer was reached: no result of fun depends on scaling state. fun must use "
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
    result = {**variables, **amaxes.state()}
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


def _run(
    fun: Callable[[Any, Any], Any], backward: bool, has_aux: bool, state: Any, variables: Any, batch: Any
) -> list[jax.Array]:
    """Calls ``fun``, with gradients for ``backward``, and returns the arrays of all results.

    JAX drops the arithmetic, and the reports, of a result that is not returned.
    """

    def call(state: Any) -> Any:
        return fun(type(variables)({**variables, **state}), batch)

    results = jax.value_and_grad(call, has_aux=has_aux)(state) if backward else call(state)
    return [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]


class _Amaxes:
    """The amaxes that ops report, merged by maximum over all calls and batches.

    Each tensor has a number. ``numbered`` is the scaling state with this number in the place of the scale.
    An op reports the number with the amax. A tensor that was not reported has the amax -inf.
    """

    def __init__(self, state: Any) -> None:
        self._paths, self._leaves, self._treedef = flatten(state)
        self._places = Places.of(self._paths, self._leaves)
        self._amaxes: dict[DelayedQuantizer, np.ndarray] = {}
        self._numbers: list[np.ndarray] = []
        """The numbers of each pair of ``_places``, in the shape of its scale."""
        self._count = 0
        numbered = self._places.states(self._leaves)
        for k, (scale, history) in enumerate(numbered):
            numbers = self._count + np.arange(math.prod(scale.shape)).reshape(scale.shape)
            self._count += numbers.size
            self._numbers.append(numbers)
            numbered[k] = ScalingState(_put(numbers, scale), history)
        leaves = list(self._leaves)
        self._places.put(leaves, numbered)
        self.numbered = self._treedef.unflatten(leaves)

    def add(self, records: Records) -> None:
        """Merges what the ops reported for a batch with the amaxes of earlier batches."""
        for config, rows in records.items():
            before = self._amaxes.setdefault(config, np.full(self._count, -np.inf, np.float32))
            np.maximum.at(before, rows[:, 0].astype(int), rows[:, 1])

    def names(self, leaf: str, holds: Callable[[np.ndarray], Any], backward: bool) -> list[str]:
        """Returns the paths of the state of tensors that have an amax for which ``holds`` is true.

        Args:
            leaf: whether the paths are those of the ``"scale"`` or of the ``"amax_history"``.
            holds: a function of the amaxes of a tensor.
            backward: whether output gradients count.
        """
        missing = np.full(self._count, -np.inf, np.float32)
        amaxes = np.max([missing, *self._amaxes.values()], axis=0)
        pairs = (ScalingState(*(self._paths[i] for i in pair)) for pair in self._places.pairs)
        return [
            path_str(getattr(pair, leaf))
            for pair, numbers in zip(pairs, self._numbers)
            if (backward or not _is_backward(pair.scale)) and np.any(holds(amaxes[numbers]))
        ]

    def state(self) -> Any:
        """Returns the scaling state after the calibration."""
        states = self._places.states(self._leaves)
        for k, (old, numbers) in enumerate(zip(states, self._numbers)):
            # Only calls with different recipes give one tensor several configurations.
            after = [
                _calibrated(config, old, _put(amaxes[numbers], old.scale))
                for config, amaxes in self._amaxes.items()
                if np.any(amaxes[numbers] > -np.inf)
            ]
            if after:
                states[k] = jax.tree.map(lambda *xs: functools.reduce(jnp.maximum, xs), *after)
        leaves = list(self._leaves)
        self._places.put(leaves, states)
        return self._treedef.unflatten(leaves)


_calibrated = jax.jit(calibrated_state, static_argnums=0)


def _put(x: np.ndarray, like: Any) -> jax.Array:
    """Returns ``x`` in float32, on the devices that ``like`` is committed to."""
    return jax.device_put(
        x.astype(np.float32), like.sharding if getattr(like, "committed", False) else None
    )


def _is_backward(path: Any) -> bool:
    return path[-1].key.startswith("output_grad")

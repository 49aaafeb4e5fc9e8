"""Calibrates: fills the scaling state of trained or converted variables from sample batches."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable

import flax.core
import jax
import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, state_leaf_names
from fp8flax._core.observe import Observing, Report, collect
from fp8flax._core.options import check_function, check_variables
from fp8flax._core.quantizers import DelayedQuantizer
from fp8flax._core.state.state import calibrated_state
from fp8flax._core.state.tree import StateTree
from fp8flax._core.types import PyTree


def calibrate(
    fun: Callable[[PyTree, PyTree], PyTree],
    variables: PyTree,
    batches: Iterable[PyTree],
    *,
    backward: bool = False,
    has_aux: bool = False,
) -> PyTree:
    """Fills the scaling state from sample batches, so that the first FP8 step has the right scales.

    The new state depends on the batches alone, and not on the old state: each history holds one amax, the
    largest of all batches, and the next step uses the scale that follows from it. Every FP8 op runs in its
    operands' own dtype, so that saturation in an early layer does not mislead a later one.

    Args:
        fun: ``fun(variables, batch)``, such as ``model.apply``, or ``lambda v, batch: loss(v, *batch)`` for
            batches of several arguments; for an NNX model ``lambda model, batch: model(batch)``. Each layer
            must affect a result, because JAX drops what has no effect. Layers may run in
            ``lax.while_loop``, in ``jax.jvp`` and under ``lax.stop_gradient``.
        variables: collections with scaling state (see ``add_fp8_state``), or an NNX model.
        batches: an iterable of a few samples, similar to those that the model will see.
        backward: whether to fill the state of output gradients, too; ``fun`` is then a loss.
        has_aux: whether the loss comes in a pair ``(loss, aux)``.

    Returns:
        ``variables`` with new scaling state, a mapping of the same type. For an NNX model None: the state
        in the model changes, and nothing else in it. State that no batch reaches is kept.

    Raises:
        TypeError: scaling state is not float32; or ``fun`` is a model, or no loss with ``backward``.
        MissingStateError: an op needs scaling state, and there is none.
        ValueError: a batch produced a NaN or an Inf in a tensor of a layer; or no FP8 op was reached, for
            instance under ``autocast(enabled=False)``.

    Warns:
        UserWarning: some op did not run, and its state is kept; or no op needs state, and nothing changes.

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
    nnx = sys.modules.get("flax.nnx")  # imported only if the user has
    if nnx is not None and isinstance(variables, nnx.Module | nnx.State):
        from fp8flax._nnx.ops import OverwriteWithGradient

        graphdef, state, rest = nnx.split(variables, OverwriteWithGradient, ...)

        def of_variables(variables: PyTree, batch: PyTree) -> PyTree:
            # A copy has variables of this trace, to which fun may write.
            return fun(nnx.merge(graphdef, *variables.values(), copy=True), batch)

        # The rest is an argument, because a compiled function would hold a closure's weights as constants.
        whole = {OVERWRITE_WITH_GRADIENT: state, "rest": rest}
        filled = _filled(of_variables, whole, batches, backward, has_aux)
        return nnx.update(variables, filled.get(OVERWRITE_WITH_GRADIENT, state))
    check_variables(variables)
    return flax.core.copy(variables, _filled(fun, variables, batches, backward, has_aux))


def _filled(
    fun: Callable[..., PyTree], variables: PyTree, batches: Iterable[PyTree], backward: bool, has_aux: bool
) -> PyTree:
    """Returns a dict of the collection of scaling state after ``calibrate``; an empty dict without it."""
    collection = flax.core.unfreeze(variables.get(OVERWRITE_WITH_GRADIENT, {}))

    @jax.jit  # Returns the arrays of all results, because JAX drops the reports of all others.
    def run(state: PyTree, variables: PyTree, batch: PyTree) -> list[jax.Array]:
        def call(state: PyTree) -> PyTree:
            return fun(type(variables)({**variables, **state}), batch)

        results = jax.value_and_grad(call, has_aux=has_aux)(state) if backward else call(state)
        return [x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]

    state = {OVERWRITE_WITH_GRADIENT: collection} if collection else {}
    found = StateTree.of(state)
    states = found.states()
    # Each tensor has a number, in the place of its scale. An op reports the number with the amax.
    starts = np.cumsum([0, *(scale.size for scale, _ in states)])
    numbers = [i + np.arange(scale.size).reshape(scale.shape) for (scale, _), i in zip(states, starts)]
    numbered = found.replaced([s._replace(scale=_put(n, s.scale)) for s, n in zip(states, numbers)])
    observing = Observing(calibrates=True, backward=backward)
    reports = (collect(observing, run, numbered, variables, batch) for batch in batches)
    amaxes, quantizers = _amaxes(reports, dict(zip(found.histories(), numbers)), starts[-1], backward)
    if not collection:  # an op that needs state has raised MissingStateError
        warnings.warn(
            "There is no scaling state, so nothing was calibrated. Recipes without delayed scaling need no "
            "calibration. Convert a model without FP8 ops first. Calibrate a model before freeze.",
            stacklevel=3,
        )
    for k, (old, n) in enumerate(zip(states, numbers)):
        if quantizer := next((quantizers[m] for m in n.ravel().tolist() if m in quantizers), None):
            states[k] = calibrated_state(quantizer, old, _put(amaxes[n], old.scale))
    return found.replaced(states)


def _amaxes(
    reports: Iterable[list[Report]], numbers: dict[str, np.ndarray], count: int, backward: bool
) -> tuple[np.ndarray, dict[int, DelayedQuantizer]]:
    """Returns the amax of each tensor by its number, -inf if none was reported, and its quantizer."""
    backward_only = state_leaf_names("output_grad")
    to_fill = {path: n for path, n in numbers.items() if backward or not path.endswith(backward_only)}
    amaxes = np.full(count, -np.inf, np.float32)
    quantizers: dict[int, DelayedQuantizer] = {}
    for i, report in enumerate(reports):
        for quantizer, *_, (pairs,) in report:
            tensors = pairs[..., 0].astype(int).ravel()
            np.maximum.at(amaxes, tensors, pairs[..., 1].ravel())
            quantizers |= dict.fromkeys(tensors.tolist(), quantizer)
        if bad := [path for path, n in to_fill.items() if not np.all(amaxes[n] < np.inf)]:
            raise ValueError(
                f"Batch {i} puts a NaN or an Inf into {', '.join(bad)}, so no scale can be taken from it. "
                "Leave the batch out, or find the cause."
            )
    if missing := [path for path, n in to_fill.items() if np.any(amaxes[n] == -np.inf)]:
        message = (
            "These layers were not calibrated, because nothing that fun returns depends on them, or their "
            f"tensors or batches were empty: {', '.join(missing)}. fun must use the variables that it "
            "gets, and return the model's outputs or its loss. FP8 must be on, not switched off by "
            "autocast(enabled=False), and the recipe in use must be one with scaling state."
        )
        if len(missing) == len(to_fill):
            raise ValueError(f"No FP8 layer was reached. {message}")
        warnings.warn(message, stacklevel=4)
    return amaxes, quantizers


def _put(x: np.ndarray, like: jax.Array) -> jax.Array:
    """Returns ``x`` in float32, on the devices that ``like`` is committed to."""
    where = like.sharding if getattr(like, "committed", False) else None
    return jax.device_put(x.astype(np.float32), where)

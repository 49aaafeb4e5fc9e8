"""Calibrates an NNX model: fills its scaling state from sample batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from flax import nnx

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._train.calibrate import calibrate as calibrate_variables
from fp8flax.nnx.variables import set_state, state_of

_MODEL = "model"


def calibrate(
    f: Callable[[Any, Any], Any],
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    backward: bool = False,
    has_aux: bool = False,
) -> None:
    """Fills the scaling state of a model from sample batches, so that its first step has the right scales.

    It runs ``f`` on each batch with every FP8 op in its operands' own dtype, and records the largest
    magnitudes; see ``fp8flax.calibrate``. The model does not change otherwise: statistics and random number
    generators that ``f`` updates are restored.

    Args:
        f: ``f(model, batch)``, such as ``lambda model, x: model(x)``; it is compiled.
        model: an NNX module; its variables of ``OverwriteWithGradient`` change.
        batches: a few samples, similar to those that the model will see.
        backward: whether ``f`` is a loss (a scalar), whose gradients fill the state of output gradients
            too. Otherwise that state stays unchanged.
        has_aux: whether the loss comes in a pair ``(loss, aux)``.

    Raises:
        TypeError: scaling state is not float32.
        ValueError: there is no scaling state; there is no batch; a batch produced a NaN or an Inf in a
            tensor of a layer; or ``f`` reaches no FP8 op.

    Warns:
        UserWarning: some op did not run; its state stays unchanged.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 4, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> x = jnp.full((2, 4), 3584.0)
        >>> fp8nnx.calibrate(lambda layer, x: layer(x), layer, [x, x / 2])
        >>> layer.dot_general.input_scale.get_value()
        Array([8.], dtype=float32)

    Source: as for ``fp8flax.calibrate``.
    """
    state = state_of(model)
    if not state[OVERWRITE_WITH_GRADIENT]:
        raise ValueError(
            "The model has no scaling state, so there is nothing to calibrate. Give its layers ops, or "
            "convert it by fp8flax.nnx.quantize_model. (Recipes without delayed scaling have no state and "
            "need no calibration.)"
        )
    graphdef, whole = nnx.split(model)

    def of_variables(variables: Mapping[str, Any], batch: Any) -> Any:
        # A copy has variables of this trace, to which f may write.
        merged = nnx.merge(graphdef, jax.tree.map(lambda x: x, variables[_MODEL]))
        set_state(merged, variables)
        return f(merged, batch)

    # The model is an argument, because a compiled function would hold weights of its closure as constants.
    variables = {**state, _MODEL: whole}
    filled = calibrate_variables(of_variables, variables, batches, backward=backward, has_aux=has_aux)
    set_state(model, filled)

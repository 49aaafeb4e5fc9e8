"""Moves variables between a model without FP8 and the same model with it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, KeyPath

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, ROLES, state_leaf_names
from fp8flax._core.options import check_params, check_variables, wrong_model
from fp8flax._core.state.tree import check_state_dtype, path_str
from fp8flax._linen.eval_init import eval_init
from fp8flax._train.check import warn_if_damaged

_SCALE_OF = {history: scale for scale, history in map(state_leaf_names, ROLES)}


def add_fp8_state(
    variables: Mapping[str, Any], model: nn.Module, *args: Any, **kwargs: Any
) -> Mapping[str, Any]:
    """Returns ``variables`` with the scaling state that ``model`` needs; missing state is initialized.

    Use it to go from a checkpoint without FP8 to a run with FP8, or from one history length to another. No
    weight is changed and no layer runs: the shapes come from tracing ``model.init``. A model without FP8,
    or with recipes without delayed scaling, needs no state; the result is then ``variables``.

    Args:
        variables: collections of the model, with or without FP8; ``params`` at least.
        model: the model with FP8 layers.
        *args: inputs of the model, as arrays or ``jax.ShapeDtypeStruct``.
        **kwargs: keyword inputs of the model.

    Returns:
        A dict (a ``FrozenDict`` if ``variables`` is one) with all the collections of ``variables`` and
        ``_overwrite_with_gradient``. Existing state is kept. A history of another length becomes the one
        that a run with the new length would have now: its newest amaxes, and zeros for older ones that are
        not known. State of other layers, or under the name of another op, is left out.

    Raises:
        TypeError: ``model`` is not a Linen module, or existing state is not float32.
        ValueError: the parameters are not those of ``model``, or existing state has other shapes.

    Warns:
        UserWarning: state is left out; or a scale does not follow from its history, see ``check_state``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> x = jnp.ones((2, 4))
        >>> variables = nn.Dense(4).init(jax.random.key(0), x)
        >>> model8 = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> sorted(fp8.add_fp8_state(variables, model8, x))
        ['_overwrite_with_gradient', 'params']

    Source: ``flax.linen.fp8_ops``, for the layout of the history.
    """
    check_variables(variables)
    if not isinstance(model, nn.Module):
        raise wrong_model(model, "be a flax.linen.Module")
    wanted = eval_init(model, args, kwargs)
    if PARAMS in wanted:
        check_params(variables)
    _check_same_params(variables, wanted)
    if OVERWRITE_WITH_GRADIENT not in wanted:
        return variables
    advice = "It is kept. For new state call fp8flax.remove_fp8_state first, and then fp8flax.calibrate."
    warn_if_damaged(variables.get(OVERWRITE_WITH_GRADIENT, {}), advice, stacklevel=3)
    old = dict(jax.tree_util.tree_flatten_with_path(variables.get(OVERWRITE_WITH_GRADIENT, {}))[0])
    new = dict(jax.tree_util.tree_flatten_with_path(wanted[OVERWRITE_WITH_GRADIENT])[0])
    if left_out := sorted({path_str(path[:-1]) for path in old.keys() - new.keys()}):
        warnings.warn(
            f"The model has no FP8 op for the scaling state {', '.join(left_out)}, so it is left out. To "
            "keep it, give the op the name that it has in the variables.",
            stacklevel=2,
        )

    def fill(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> Any:
        if path in old:
            scale = new.get((*path[:-1], DictKey(_SCALE_OF.get(path[-1].key))))
            return _fit((DictKey(OVERWRITE_WITH_GRADIENT), *path), old[path], leaf, scale)
        fresh = np.ones if path[-1].key in _SCALE_OF.values() else np.zeros
        return jax.device_put(fresh(leaf.shape, leaf.dtype))

    state = jax.tree_util.tree_map_with_path(fill, wanted[OVERWRITE_WITH_GRADIENT])
    return flax.core.copy(variables, {OVERWRITE_WITH_GRADIENT: flax.core.unfreeze(state)})  # type: ignore[arg-type]


def _check_same_params(variables: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ``ValueError`` if the names or shapes of parameters differ from those of the model."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(nn.meta.unbox(flax.core.unfreeze(tree)))[0]
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    have, want = (shapes(tree.get(PARAMS, {})) for tree in (variables, wanted))
    for path in sorted({*have, *want}):
        if have.get(path) != want.get(path):
            raise ValueError(
                f"variables['params']{path} has the shape {have.get(path, 'none: it is missing')}, and in "
                f"the model {want.get(path, 'none: it has no such parameter')}. Pass the variables of the "
                "same model."
            )


def _fit(path: KeyPath, value: Any, leaf: jax.ShapeDtypeStruct, scale: Any) -> Any:
    """Returns the state ``value`` with the shape of ``leaf``; only the length of a history may change.

    ``scale`` has the shape of the scale beside ``leaf`` if this is a history, and is None otherwise.
    """
    check_state_dtype(path, value)
    if value.shape == leaf.shape:
        return value
    differing = []
    if scale is not None and len(value.shape) == len(leaf.shape):
        sizes = list(zip(scale.shape, leaf.shape, value.shape))
        differing = [axis for axis, of_axis in enumerate(sizes) if len(set(of_axis)) > 1]
    if len(differing) != 1 or scale.shape[differing[0]] != 1:
        raise ValueError(
            f"The scaling state at {path_str(path)} has shape {value.shape}, but the model needs "
            f"{leaf.shape}; only the length of a history may differ. Pass the state of the same model, or "
            "for new state call fp8flax.remove_fp8_state first."
        )
    return _change_length(value, differing[0], leaf.shape[differing[0]])


@partial(jax.jit, static_argnums=(1, 2))
def _change_length(history: Any, axis: int, length: int) -> jax.Array:
    """Returns a history of the newest ``length`` amaxes; zeros stand for amaxes that are not known."""
    # Index 0 holds the newest amax. The others follow, from the oldest to the second newest.
    history = jnp.moveaxis(history, axis, -1)
    newest, past = history[..., :1], history[..., max(1, history.shape[-1] - length + 1) :]
    zeros = jnp.zeros((*history.shape[:-1], length - newest.shape[-1] - past.shape[-1]))
    return jnp.moveaxis(jnp.concatenate([newest, zeros, past], -1), -1, axis)


def remove_fp8_state(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the other collections of ``variables``, for the model without FP8.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> list(fp8.remove_fp8_state(layer.init(jax.random.key(0), jnp.ones((2, 4)))))
        ['params']
    """
    check_variables(variables)
    return type(variables)({k: v for k, v in variables.items() if k != OVERWRITE_WITH_GRADIENT})  # type: ignore[call-arg]

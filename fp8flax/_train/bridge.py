"""Moves variables between a model without FP8 and the same model with it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import KeyPath

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import check_params, check_variables, wrong_model
from fp8flax._core.state.state import check_state_dtype, on_device
from fp8flax._core.state.tree import StateTree, path_str
from fp8flax._core.types import PyTree
from fp8flax._model.tracing import eval_init
from fp8flax._train.check import warn_if_damaged


def add_fp8_state(
    variables: Mapping[str, PyTree], model: nn.Module, *args: PyTree, **kwargs: PyTree
) -> Mapping[str, PyTree]:
    """Returns ``variables`` with the scaling state that ``model`` needs; missing state is initialized.

    Use it to go from a checkpoint without FP8 to a run with FP8, or from one history length to another. No
    weight is changed and no layer runs: the shapes come from tracing ``model.init``.

    Existing state is kept. A history of another length becomes the one that a run with the new length would
    have now: its newest amaxes, and zeros for older ones that are not known. State of other layers, or
    under the name of another op, is left out.

    Args:
        variables: collections of the model, with or without FP8; ``params`` at least.
        model: the Linen module with FP8 layers.
        *args, **kwargs: inputs of the model, as arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        A mapping of the type of ``variables``; ``variables`` itself if the model needs no state.

    Raises:
        TypeError: ``model`` is not a Linen module, or existing state is not float32.
        ValueError: ``variables`` has no parameters, or existing state has other shapes.

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
    if OVERWRITE_WITH_GRADIENT not in wanted:
        return variables
    old_state = variables.get(OVERWRITE_WITH_GRADIENT, {})
    advice = "It is kept. For new state call fp8flax.remove_fp8_state first, and then fp8flax.calibrate."
    warn_if_damaged(old_state, advice, stacklevel=3)
    old = dict(jax.tree_util.tree_leaves_with_path(flax.core.unfreeze(old_state)))
    found = StateTree.of(flax.core.unfreeze(wanted[OVERWRITE_WITH_GRADIENT]))
    paths, leaves = found.paths, list(found.leaves)
    if left_out := sorted({path_str(path[:-1]) for path in old.keys() - set(paths)}):
        warnings.warn(
            f"The model has no FP8 op for the scaling state {', '.join(left_out)}, so it is left out. To "
            "keep it, give the op the name that it has in the variables.",
            stacklevel=2,
        )
    scales, scale_of = {i for i, _ in found.pairs}, {j: leaves[i] for i, j in found.pairs}
    for i, (path, leaf) in enumerate(zip(paths, leaves)):
        fresh = np.full(leaf.shape, i in scales, leaf.dtype)
        leaves[i] = _fit(path, old[path], leaf, scale_of.get(i)) if path in old else jax.device_put(fresh)
    return flax.core.copy(variables, {OVERWRITE_WITH_GRADIENT: found.treedef.unflatten(leaves)})  # type: ignore[arg-type]


def _fit(
    path: KeyPath, value: jax.Array, leaf: jax.ShapeDtypeStruct, scale: jax.ShapeDtypeStruct | None
) -> jax.Array:
    """Returns the state ``value`` with the shape of ``leaf``; a history, which has a scale, may grow."""
    check_state_dtype(path_str(path), value)
    if value.shape == leaf.shape:
        return value
    changed = [i for i, sizes in enumerate(zip(value.shape, leaf.shape)) if len(set(sizes)) > 1]
    may_change = [] if scale is None else [[i] for i, size in enumerate(scale.shape) if size == 1]
    if len(value.shape) != len(leaf.shape) or changed not in may_change:
        raise ValueError(
            f"The scaling state at {path_str(path)} has shape {value.shape}, but the model needs "
            f"{leaf.shape}; only the length of a history may differ. Pass the state of the same model, or "
            "for new state call fp8flax.remove_fp8_state first."
        )
    # Index 0 holds the newest amax. The others follow, from the oldest to the second newest.
    (axis,) = changed
    old, new = value.shape[axis], leaf.shape[axis]
    kept = lax.slice_in_dim(jnp.roll(on_device(value), -1, axis), max(0, old - new), old, axis=axis)
    before = [(max(0, new - old) if i == axis else 0, 0) for i in range(kept.ndim)]
    return jnp.roll(jnp.pad(kept, before), 1, axis)


def remove_fp8_state(variables: Mapping[str, PyTree]) -> Mapping[str, PyTree]:
    """Returns the other collections of ``variables``, for the model without FP8.

    Raises:
        TypeError: ``variables`` is not a mapping.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> list(fp8.remove_fp8_state(layer.init(jax.random.key(0), jnp.ones((2, 4)))))
        ['params']

    Source: the collection of ``flax.linen.fp8_ops``.
    """
    check_variables(variables)
    return type(variables)({k: v for k, v in variables.items() if k != OVERWRITE_WITH_GRADIENT})  # type: ignore[call-arg]

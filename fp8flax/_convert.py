"""Moves variables between a model without FP8 and the same model with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp

from fp8flax._modules import Fp8Op
from fp8flax._state import (
    OVERWRITE_WITH_GRADIENT,
    ROLES,
    check_state_dtype,
    split_state,
    state_leaf_names,
)

_SCALE_NAMES = frozenset(state_leaf_names(role)[0] for role in ROLES)


def add_fp8_state(
    variables: Mapping[str, Any], model: nn.Module, *args: Any, **kwargs: Any
) -> Mapping[str, Any]:
    """Returns ``variables`` with the scaling state that ``model`` needs, fresh where it was missing.

    The way from a checkpoint of a model without FP8 to a run with it. No weight is touched and nothing is
    computed: the shapes come from tracing ``model.init``.

    Args:
        variables: collections of the model without FP8; ``params`` at least.
        model: the model with FP8 layers.
        *args: inputs of the model; in the place of arrays ``jax.ShapeDtypeStruct`` will do.
        **kwargs: keyword inputs of the model.

    Returns:
        A dict (a ``FrozenDict`` if ``variables`` is one) with all the collections of ``variables`` and
        ``_overwrite_with_gradient``. State that is there with the right shape is kept; a history of another
        length is replaced by an empty one.

    Raises:
        TypeError: state that is there is not float32.
        ValueError: ``model`` has no FP8 layer, or its parameters are not those of ``variables``.

    Recipes without delayed scaling need no state: the result is then ``variables`` with the state that was
    there.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> x = jnp.ones((2, 4))
        >>> variables = nn.Dense(4).init(jax.random.key(0), x)
        >>> model8 = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> sorted(fp8.add_fp8_state(variables, model8, x))
        ['_overwrite_with_gradient', 'params']

    Source: none; Flax leaves this to the user.
    """
    wanted, has_fp8 = _eval_init(model, args, kwargs)
    if not has_fp8:
        raise ValueError(
            f"{type(model).__name__} has no FP8 layer, so there is no scaling state to add. Give its "
            "layers dot_general_cls=fp8flax.Fp8DotGeneralOp."
        )
    _check_same_params(variables, wanted)
    old = dict(jax.tree_util.tree_flatten_with_path(variables.get(OVERWRITE_WITH_GRADIENT, {}))[0])

    def fresh(path: Any, leaf: jax.ShapeDtypeStruct) -> Any:
        value = old.get(path)
        if value is not None:
            check_state_dtype(path, value)
            if value.shape == leaf.shape:
                return value
        fill = jnp.ones if path[-1].key in _SCALE_NAMES else jnp.zeros
        return fill(leaf.shape, leaf.dtype)

    if OVERWRITE_WITH_GRADIENT not in wanted:
        return variables
    state = jax.tree_util.tree_map_with_path(fresh, wanted[OVERWRITE_WITH_GRADIENT])
    result = {**variables, OVERWRITE_WITH_GRADIENT: flax.core.unfreeze(state)}
    return flax.core.freeze(result) if isinstance(variables, flax.core.FrozenDict) else result


def _eval_init(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Returns shapes and dtypes of ``model.init``, and whether an FP8 op ran in it.

    Arguments that are not arrays stay concrete.
    """
    has_fp8 = False

    def look(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        nonlocal has_fp8
        has_fp8 = has_fp8 or isinstance(context.module, Fp8Op)
        return call(*args, **kwargs)

    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def init(arrays: list[Any]) -> Any:
        remaining = iter(arrays)
        filled = [next(remaining) if a else leaf for a, leaf in zip(is_array, leaves)]
        args, kwargs = treedef.unflatten(filled)
        return model.init(jax.random.key(0), *args, **kwargs)

    with nn.intercept_methods(look):
        shapes = jax.eval_shape(init, [leaf for a, leaf in zip(is_array, leaves) if a])
    return shapes, has_fp8


def _check_same_params(variables: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        tree = nn.meta.unbox(flax.core.unfreeze(tree))
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    have, want = shapes(variables.get("params", {})), shapes(wanted.get("params", {}))
    for path in sorted({*have, *want}):
        if have.get(path) != want.get(path):
            raise ValueError(
                f"variables['params']{path} has shape {have.get(path, 'missing')}, but the model's "
                f"parameter has {want.get(path, 'no such name')}. Pass the variables of the same model."
            )


def remove_fp8_state(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``variables`` without the scaling state, for the model without FP8.

    Args:
        variables: collections of a model with or without FP8 layers.

    Returns:
        The other collections, unchanged; a ``FrozenDict`` if ``variables`` is one.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> layer = nn.Dense(4, dot_general_cls=fp8.Fp8DotGeneralOp)
        >>> list(fp8.remove_fp8_state(layer.init(jax.random.key(0), jnp.ones((2, 4)))))
        ['params']

    Source: none.
    """
    others, _ = split_state(variables)
    return flax.core.freeze(others) if isinstance(variables, flax.core.FrozenDict) else others

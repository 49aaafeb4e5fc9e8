"""Where the scaling state of a converted model is while the model runs.

The author of a model wrote ``nn.scan(..., variable_axes={"params": 0})`` or ``nn.vmap`` without scaling
state in mind. Among the parameters, the state of layers in such loops is stacked and sliced as the kernels
are, and nothing in Flax is replaced. All other state is in a collection of this package, which Linen's
other transformations take along::

    the caller has                                a method of the model sees
    --------------                                --------------------------
    params/                                       params/
      Dense_0/kernel                                Dense_0/kernel
      layers/Dense_0/kernel                         layers/Dense_0/
                                                      kernel
    _overwrite_with_gradient/                         fP8dOTgENERALoP_0/INPUT_SCALE
      layers/Dense_0/                             _fp8_state/
        Fp8DotGeneralOp_0/input_scale               Dense_0/
      Dense_0/                                        fP8dOTgENERALoP_0/INPUT_SCALE
        Fp8DotGeneralOp_0/input_scale

Names are written in the other case there. So no parameter of the model has such a name, and the filter
``{"kernel"}`` of ``nn.WeightNorm`` does not match.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, STATE_LEAF_NAMES

CODES = "codes"
"""The leaf of an op of a frozen model that holds the codes of its kernel."""
KERNEL_AXES = "kernel_axes"
"""The leaf of an op that ``init`` makes for ``freeze``, to see along which axes loops stack its kernel.

It has no elements: each of its dimensions has the size 0, and each dimension of a stack has not."""
_LEAVES = frozenset(name.swapcase() for name in (*STATE_LEAF_NAMES, CODES, KERNEL_AXES))


STATE = "_fp8_state"
"""The collection of the state of ops outside of loops, while the model runs."""


def state_at(variables: Any, path: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns the arrays of the op at ``path``, by their names in the other case."""
    found: dict[str, Any] = {}
    for tree in (variables.get(PARAMS, {}), variables.get(STATE, {})):
        for name in (*path[:-1], path[-1].swapcase()):
            tree = tree.get(name, {}) if isinstance(tree, Mapping) else {}
        found |= tree
    return found


def placed(collection: str, path: tuple[str, ...], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables with the arrays of the op at ``path``."""
    tree: Any = {path[-1].swapcase(): {name.swapcase(): x for name, x in arrays.items()}}
    for module in (*reversed(path[:-1]), collection):
        tree = {module: tree}
    found: dict[str, Any] = tree
    return found


def merged(variables: Mapping[str, Any], collection: str = OVERWRITE_WITH_GRADIENT) -> dict[str, Any]:
    """Returns variables as the model sees them, with what a collection holds for the ops."""
    result = {name: value for name, value in variables.items() if name != collection}
    for path, arrays in _ops_in(variables.get(collection, {})):
        is_in_loop = min(np.ndim(x) for x in arrays.values()) > 1
        result = _union(result, placed(PARAMS if is_in_loop else STATE, path, arrays))
    return result


def _ops_in(state: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yields the path and the arrays of each op in a collection of state."""
    for name, value in state.items():
        if any(isinstance(child, Mapping) for child in value.values()):
            yield from _ops_in(value, (*path, name))
        elif value:
            yield (*path, name), value


def _union(tree: Any, other: Any) -> Any:
    if not isinstance(tree, Mapping):
        return other
    return {**tree, **{name: _union(tree.get(name), value) for name, value in other.items()}}


def split(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables as the caller sees them: with the state in its own collection."""
    result = {name: value for name, value in variables.items() if name != STATE}
    for collection in (PARAMS, STATE):
        params, state = _without_state(variables.get(collection, {}))
        if collection == PARAMS and PARAMS in variables:
            result[PARAMS] = params
        if state:
            result = _union(result, {OVERWRITE_WITH_GRADIENT: state})
    return result


def _without_state(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns parameters without the arrays of ops, and these arrays."""
    others, state = {}, {}
    for name, value in params.items():
        if not isinstance(value, Mapping):
            others[name] = value
        elif value and _LEAVES.issuperset(value):
            arrays = {leaf.swapcase(): x for leaf, x in value.items()}
            arrays.pop(KERNEL_AXES, None)
            state.update({name.swapcase(): arrays} if arrays else {})
        else:
            others[name], inner = _without_state(value)
            state.update({name: inner} if inner else {})
    return others, state

"""The scaling state of a converted model, which is among the parameters while the model runs.

The author of a model wrote ``nn.scan(..., variable_axes={"params": 0})`` or ``nn.vmap`` without scaling
state in mind. Among the parameters, the state is stacked, sliced and shared as the kernel is, and nothing
in Flax is replaced. The caller has the state in its own collection::

    the caller has                                a method of the model sees
    --------------                                --------------------------
    params/Dense_0/kernel                         params/Dense_0/kernel
    _overwrite_with_gradient/                     params/Dense_0/
      Dense_0/Fp8DotGeneralOp_0/input_scale         fP8dOTgENERALoP_0/INPUT_SCALE

Names are written in the other case among the parameters. So no parameter of the model has such a name, and
the filter ``{"kernel"}`` of ``nn.WeightNorm`` does not match. A module does not see the state in its
``variables``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, STATE_LEAF_NAMES

CODES = "codes"
"""The leaf of an op of a frozen model that holds the codes of its kernel."""
KERNEL_AXES, STATE_AXES = "kernel_axes", "state_axes"
"""The leaves of an op that ``init`` makes to see along which axes loops stack its kernel and its state.

They have no elements: each of their dimensions has the size 0, and each dimension of a stack has not."""
_LEAVES = frozenset(name.swapcase() for name in (*STATE_LEAF_NAMES, CODES, KERNEL_AXES, STATE_AXES))


def state_at(params: Any, path: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns the arrays of the op at ``path`` among the parameters, by their names in the other case."""
    *modules, op = path
    for name in (*modules, op.swapcase()):
        params = params.get(name, {}) if isinstance(params, Mapping) else {}
    found: Mapping[str, Any] = params
    return found


def merged(variables: Mapping[str, Any], collection: str = OVERWRITE_WITH_GRADIENT) -> dict[str, Any]:
    """Returns variables as the model sees them: with a collection of the ops among the parameters."""
    others = {name: value for name, value in variables.items() if name not in (PARAMS, collection)}
    params, state = variables.get(PARAMS, {}), variables.get(collection)
    if not state:
        return {**others, PARAMS: params}
    return {**others, PARAMS: _with_state(params, state)}


def _with_state(params: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(params)
    for name, value in state.items():
        if any(isinstance(child, Mapping) for child in value.values()):
            result[name] = _with_state(result.get(name, {}), value)
        else:
            arrays = {leaf.swapcase(): x for leaf, x in value.items()}
            result[name.swapcase()] = {**result.get(name.swapcase(), {}), **arrays}
    return result


def split(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns variables as the caller sees them: with the state in its own collection."""
    params, state = without_state(variables.get(PARAMS, {}))
    others = {name: value for name, value in variables.items() if name != PARAMS}
    return {**others, PARAMS: params, **({OVERWRITE_WITH_GRADIENT: state} if state else {})}


def without_state(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns parameters without the state of ops, and this state."""
    others, state = {}, {}
    for name, value in params.items():
        if not isinstance(value, Mapping):
            others[name] = value
        elif value and _LEAVES.issuperset(value):
            arrays = {leaf.swapcase(): x for leaf, x in value.items()}
            arrays = {leaf: x for leaf, x in arrays.items() if leaf not in (KERNEL_AXES, STATE_AXES)}
            state.update({name.swapcase(): arrays} if arrays else {})
        else:
            others[name], inner = without_state(value)
            if inner:
                state[name] = inner
    return others, state
